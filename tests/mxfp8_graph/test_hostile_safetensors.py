"""Damaged and crafted safetensors files: a clear error each, and nothing read outside the checkpoint's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mxfp8_graph import import_safetensors
from mxfp8_ops.errors import ContractError


def checkpoint(path: Path, header: Any, data: bytes = bytes(4 * 64 + 4 * 2)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entries(**changes: Any) -> dict[str, Any]:
    """Returns the header of a weight [4, 64] and its scales; `changes` are to the weight's entry."""
    return {
        "up.weight": {"dtype": "F8_E4M3", "shape": [4, 64], "data_offsets": [0, 256], **changes},
        "up.weight_scale": {"dtype": "U8", "shape": [4, 2], "data_offsets": [256, 264]},
    }


def test_a_good_one(tmp_path: Path) -> None:
    assert import_safetensors(checkpoint(tmp_path / "m.safetensors", entries()))["up.weight"].elements.shape == (4, 64)


TWICE = json.dumps(entries()).replace("up.weight_scale", "up.weight").encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entries(shape=[4.0, 64]), "floating point `4.0`, expected usize"),
        (entries(shape=[True, 256]), "boolean `true`, expected usize"),
        (entries(shape=[-4, -64]), "integer `-4`, expected usize"),
        (entries(shape="ab"), 'string "ab", expected a sequence'),
        (entries(data_offsets=[0, 128, 256]), "invalid length 3"),
        (entries(data_offsets=[0.0, 256.0]), "floating point `0.0`, expected usize"),
        (entries(dtype=["F8_E4M3"]), "invalid type: sequence"),
        (entries(dtype="F7"), "unknown variant `F7`"),
        (entries(shape=[2**62, 4]), "overflow computing buffer size"),
        (entries(shape=[4, 63]), "invalid shape, data type, or offset"),
        (entries(data_offsets=[256, 0]), "invalid offset for tensor `up.weight`"),
        (entries(data_offsets=[8, 264]), "invalid offset for tensor `up.weight`"),
        (entries(data_offsets=[1000, 1256]), "invalid offset for tensor"),
        (entries(shape=[4, 2**40], data_offsets=[0, 2**42]), "invalid offset for tensor"),
        (entries(data_offsets=[0, 2**63]), "invalid shape, data type, or offset for tensor"),
        ({"up.weight": entries()["up.weight"]}, "incomplete metadata, file not fully covered"),
        ({"up.weight": None}, "invalid type: null"),
        ({"__metadata__": [], **entries()}, "invalid type: sequence, expected a map"),
        ({"__metadata__": {"a": 1}, **entries()}, "integer `1`, expected a string"),
        ([entries()], "invalid JSON in header: invalid type: sequence"),
        (TWICE, "is refused: .*invalid offset for tensor `up.weight`"),
        (json.dumps(entries()).encode("utf-16"), "invalid UTF-8 in header"),
        (b"[" * 100_000, "invalid JSON in header"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON in header: number out of range"),
        (b'{"a": ' + b'{"x": ' * 3000 + b"1" + b"}" * 3001, "invalid JSON in header: .*recursion limit"),
    ],
)
def test_headers(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        import_safetensors(checkpoint(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize("length", [0, 1, 10**7, 2**63, 2**64 - 1])
def test_lengths(length: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(
        ContractError,
        match=r"is refused: Error while deserializing header: (invalid JSON|header too large|invalid header length)",
    ):
        import_safetensors(path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{outside}", "link.safetensors", "a/../../outside.safetensors"]
)
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    outside = checkpoint(tmp_path / "outside.safetensors", entries())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"up.weight": name.format(outside=outside)}}))
    with pytest.raises(ContractError, match=r"expected a file inside .*; move the data next to the model"):
        import_safetensors(index)


def test_links_as_the_hub_cache_makes_them(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (folder / "m.safetensors").symlink_to(os.path.relpath(checkpoint(blobs / "0123", entries()), folder))
    (blobs / "4567").write_text(json.dumps({"weight_map": {"up.weight": "m.safetensors"}}))
    (folder / "m.safetensors.index.json").symlink_to("../../blobs/4567")
    assert list(import_safetensors(folder / "m.safetensors.index.json")) == ["up.weight"]


@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, '{"weight_map": {"a": "x\\u0000"}}']
)
def test_indexes_of_the_wrong_kind(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=r"not the index of a checkpoint|expected a file inside"):
        import_safetensors(path)
