"""What is read: regular files, inside their folder, the same from beginning to end."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import builders
import numpy as np
import onnx
import pytest
from releases import release

import mxfp8_graph
from mxfp8_graph.running.inputs import load_inputs
from mxfp8_ops.errors import ContractError, Mxfp8Error

LOOKS_AT_LINKS = release("onnx") >= (1, 21)
"""onnx refuses links to external data."""


@pytest.fixture(autouse=True)
def _nothing_hangs() -> Iterator[None]:
    """A reader that waits for a FIFO's other end fails instead."""

    def late(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(Mxfp8Error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def make(kind: str, path: Path) -> str:
    """Puts something there that is no regular file, and returns what errors call it."""
    if kind == "fifo":
        os.mkfifo(path)
        return "a FIFO, not a regular file"
    if kind == "device":
        path.symlink_to("/dev/zero")
        return "a device, not a regular file"
    if kind == "socket":
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        return "a socket, not a regular file"
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


READERS: dict[str, Callable[[Path], Any]] = {
    "m.onnx": mxfp8_graph.rewrite,
    "recipe.yaml": lambda path: mxfp8_graph.rewrite(builders.matmul_model(), path),
    "x.npz": lambda path: load_inputs(path, []),
    "w.safetensors": mxfp8_graph.import_safetensors,
    "w.safetensors.index.json": mxfp8_graph.import_safetensors,
    "p.pt2": mxfp8_graph.load,
}


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "link to itself"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(tmp_path, monkeypatch, name, kind):
    if name == "p.pt2":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    what = make(kind, tmp_path / name)
    assert message(READERS[name], tmp_path / name).startswith(f"{tmp_path / name}: {what}; expected ")


class TestExternalData:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return builders.save(builders.matmul_model(), tmp_path / "m.onnx", external=True)

    def rename(self, path: Path, location: str) -> None:
        """Lets the model call its data `location`."""
        proto = onnx.load(path, load_external_data=False)
        for entry in proto.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = location
        path.write_bytes(proto.SerializeToString())

    @pytest.mark.parametrize("kind", ["fifo", "socket"])
    def test_only_regular_files_are_read(self, path, monkeypatch, kind):
        monkeypatch.chdir(path.parent)
        data = path.with_name("m.onnx.data")
        data.unlink()
        what = make(kind, data)
        assert message(mxfp8_graph.rewrite, path) == (
            f"{path}: tensor 'w': cannot read external file {data}: {what}; expected the file next to the model; copy "
            "it there"
        )

    @pytest.mark.parametrize("kind", ["link to itself", "device"])
    def test_links_that_lead_nowhere_good(self, path, kind):
        data = path.with_name("m.onnx.data")
        data.unlink()
        make(kind, data)
        assert message(mxfp8_graph.rewrite, path).startswith(f"{path}: tensor 'w': ")

    def test_a_name_with_a_nul(self, path):
        self.rename(path, "m.onnx.data\0.txt")
        assert message(mxfp8_graph.rewrite, path) == (
            f"{path}: tensor 'w': external 'location' is 'm.onnx.data\\x00.txt'; expected text; export the model again"
        )

    def test_a_second_hard_link_is_refused_as_onnx_does(self, path, tmp_path_factory):
        secret = tmp_path_factory.mktemp("elsewhere") / "secret"
        path.with_name("m.onnx.data").rename(secret)
        os.link(secret, path.with_name("m.onnx.data"))
        if LOOKS_AT_LINKS:
            with pytest.raises(onnx.checker.ValidationError, match="multiple hard links"):
                onnx.load(path)
        assert message(mxfp8_graph.rewrite, path) == (
            f"{path}: tensor 'w': external file 'm.onnx.data' has 2 hard links; expected a file with one name, as onnx "
            "does; put a copy there"
        )

    @pytest.mark.parametrize("target", ["real.data", "inner/real.data"])
    def test_a_link_inside_the_folder_is_refused_as_onnx_does(self, path, target):
        data = path.with_name("m.onnx.data")
        (path.parent / "inner").mkdir()
        data.rename(path.parent / target)
        data.symlink_to(target)
        if LOOKS_AT_LINKS:
            with pytest.raises(onnx.checker.ValidationError, match="symbolic link"):
                onnx.load(path)
        assert message(mxfp8_graph.rewrite, path) == (
            f"{path}: tensor 'w': external file 'm.onnx.data' is a symbolic link; expected a file, as onnx does; put "
            "the file itself there"
        )


class TestIndex:
    @pytest.fixture
    def index(self, tmp_path: Path) -> Path:
        model, _ = mxfp8_graph.rewrite(builders.matmul_model())
        (tmp_path / "in").mkdir()
        mxfp8_graph.export_safetensors(model, tmp_path / "secret.safetensors")
        return tmp_path / "in" / "model.safetensors.index.json"

    @pytest.mark.parametrize("shard", ["../secret.safetensors", "{folder}/secret.safetensors", "link", "a/../../s"])
    def test_shards_stay_in_the_folder_of_their_index(self, tmp_path, index, shard):
        (index.parent / "link").symlink_to(tmp_path / "secret.safetensors")
        shard = shard.format(folder=tmp_path)
        index.write_text(json.dumps({"weight_map": {"w": shard}}))
        assert message(mxfp8_graph.import_safetensors, index) == (
            f"{index}: external file {shard!r}; expected a file inside {index.parent}; move the data next to the model"
        )

    def test_a_shard_that_is_a_hard_link(self, tmp_path, index):
        os.link(tmp_path / "secret.safetensors", index.parent / "a.safetensors")
        index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        assert "'a.safetensors' has 2 hard links" in message(mxfp8_graph.import_safetensors, index)

    def test_links_of_index_and_shards_into_one_folder_as_the_hugging_face_cache_has_them(self, tmp_path, index):
        (tmp_path / "index").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        index.symlink_to("../index")
        (index.parent / "a.safetensors").symlink_to("../secret.safetensors")
        assert list(mxfp8_graph.import_safetensors(index)) == ["w"]


CHANGED = "changed while it was read; expected the same file from beginning to end; run again once nothing writes to it"


def touch(path: Path) -> None:
    """Changes a byte in place."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # not every file system's clock has ticked since


def exchange(path: Path) -> None:
    """Puts another file with the same content in its place."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


class TestChanges:
    @pytest.mark.parametrize("change", [touch, exchange, Path.unlink])
    @pytest.mark.parametrize("changed", ["m.onnx", "m.onnx.data"])
    @pytest.mark.parametrize("at", [0, 1], ids=["after the first weight", "after the last weight"])
    def test_an_input_that_changes_on_the_way(self, tmp_path, change, changed, at):
        path = builders.save(builders.chain_model((64, 64, 64)), tmp_path / "m.onnx", external=True)
        calls = iter(range(2))

        def progress(*_: Any) -> None:
            if next(calls) == at:
                change(tmp_path / changed)

        found = message(mxfp8_graph.rewrite, path, progress=progress)
        missing = change is Path.unlink and changed == "m.onnx.data" and at == 0
        assert ("No such file" if missing else f"{tmp_path / changed}: {CHANGED}") in found
        assert not list(tmp_path.glob("*mxfp8*"))

    def test_a_model_in_one_file_that_changes(self, tmp_path):
        path = builders.save(builders.matmul_model(), tmp_path / "m.onnx")
        found = message(mxfp8_graph.rewrite, path, progress=lambda *_: touch(path))
        assert found == f"{path}: {CHANGED}"
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]

    def test_a_weight_that_is_read_after_its_file_changed(self, tmp_path):
        path, _ = mxfp8_graph.rewrite(builders.matmul_model(), output=tmp_path / "m.onnx", external_data="always")
        weights = mxfp8_graph.unpack(path)
        mxfp8_graph.rewrite(builders.matmul_model(128), output=path, external_data="always", overwrite=True)
        with pytest.raises(ContractError, match="changed while it was read"):
            _ = weights["w"].elements

    def test_a_shard_that_is_read_after_it_changed(self, tmp_path):
        model, _ = mxfp8_graph.rewrite(builders.matmul_model())
        path = mxfp8_graph.export_safetensors(model, tmp_path / "w.safetensors")
        weights = mxfp8_graph.import_safetensors(path)
        touch(path)
        with pytest.raises(ContractError, match="changed while it was read"):
            _ = weights["w"].elements

    def test_a_file_that_only_others_read_is_no_change(self, tmp_path):
        path = builders.save(builders.chain_model(), tmp_path / "m.onnx", external=True)
        out, _ = mxfp8_graph.rewrite(path, progress=lambda *_: np.fromfile(tmp_path / "m.onnx.data", np.uint8))
        onnx.checker.check_model(out)
