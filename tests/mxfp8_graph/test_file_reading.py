"""Files that a model or an index names are read inside their folder only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import builders
import onnx
import pytest
from releases import release

import mxfp8_graph
from mxfp8_graph import file_reading
from mxfp8_ops.errors import ContractError, Mxfp8Error

LOOKS_AT_LINKS = release("onnx") >= (1, 21)
"""onnx refuses links to external data."""


def message(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(Mxfp8Error) as caught:
        call(*arguments, **options)
    return str(caught.value)


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

    @pytest.mark.parametrize("target", ["m.onnx.data", "/dev/zero"], ids=["itself", "a device"])
    def test_links_that_lead_nowhere_good(self, path, target):
        data = path.with_name("m.onnx.data")
        data.unlink()
        data.symlink_to(target)
        assert message(mxfp8_graph.rewrite, path).startswith(f"{path}: tensor 'w': ")

    def test_a_name_with_a_nul(self, path):
        self.rename(path, "m.onnx.data\0.txt")
        assert message(mxfp8_graph.rewrite, path) == (
            f"{path}: tensor 'w': external file 'm.onnx.data\\x00.txt'; expected a file inside {path.parent}; "
            "move the data next to the model"
        )

    @pytest.mark.parametrize("name", ["C:secret", r"\secret", r"\\host\secret"])
    def test_windows_names_that_lead_out_of_the_folder(self, name, path, monkeypatch):
        monkeypatch.setattr(file_reading, "PurePath", PureWindowsPath)
        with pytest.raises(ContractError, match="expected a file inside"):
            file_reading.locate(path, name, "m")

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

    def test_links_of_index_and_shards_into_one_folder_as_the_hugging_face_cache_has_them(self, tmp_path, index):
        (tmp_path / "index").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
        index.symlink_to("../index")
        (index.parent / "a.safetensors").symlink_to("../secret.safetensors")
        assert list(mxfp8_graph.import_safetensors(index)) == ["w"]
