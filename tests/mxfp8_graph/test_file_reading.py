"""Files that a model or an index names are read inside their folder only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import models as b
import onnx
import pytest
from releases import release

import mxfp8_graph
from mxfp8_graph import file_reading
from mxfp8_ops.errors import Mxfp8Error


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(Mxfp8Error) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with external data."""
    return b.save(b.matmul_model(), tmp_path / "m.onnx", external=True)


@pytest.mark.parametrize("target", ["m.onnx.data", "/dev/zero"], ids=["itself", "a device"])
def test_external_data_that_are_a_link_to_no_file(path, target):
    data = path.with_name("m.onnx.data")
    data.unlink()
    data.symlink_to(target)
    assert message(mxfp8_graph.rewrite, path).startswith(f"{path}: tensor 'w': ")


def test_external_data_with_a_second_hard_link_are_refused_as_onnx_does(path, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.with_name("m.onnx.data").rename(secret)
    os.link(secret, path.with_name("m.onnx.data"))
    if release("onnx") >= (1, 21):
        with pytest.raises(onnx.checker.ValidationError, match="multiple hard links"):
            onnx.load(path)
    assert message(mxfp8_graph.rewrite, path).startswith(f"{path}: tensor 'w': external file 'm.onnx.data' has 2 hard")


@pytest.mark.parametrize("name", ["C:secret", r"\secret", r"\\host\secret"])
def test_windows_names_that_lead_out_of_the_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr(file_reading, "PurePath", PureWindowsPath)
    assert "expected a file inside" in message(file_reading.locate, tmp_path / "m.onnx", name, "m")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The path of an index, in a folder beside a checkpoint."""
    model, _ = mxfp8_graph.rewrite(b.matmul_model())
    (tmp_path / "in").mkdir()
    mxfp8_graph.export_safetensors(model, tmp_path / "secret.safetensors")
    return tmp_path / "in" / "model.safetensors.index.json"


@pytest.mark.parametrize("shard", ["../secret.safetensors", "{folder}/secret.safetensors", "link", "a/../../s"])
def test_shards_stay_in_the_folder_of_their_index(tmp_path, index, shard):
    (index.parent / "link").symlink_to(tmp_path / "secret.safetensors")
    shard = shard.format(folder=tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    expected = f"{index}: external file {shard!r}; expected a file inside {index.parent}; "
    assert message(mxfp8_graph.import_safetensors, index).startswith(expected)


def test_links_of_index_and_shards_into_one_folder_as_the_hugging_face_cache_has_them(tmp_path, index):
    (tmp_path / "index").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    index.symlink_to("../index")
    (index.parent / "a.safetensors").symlink_to("../secret.safetensors")
    assert list(mxfp8_graph.import_safetensors(index)) == ["w"]
