"""What a user can get wrong, and the whole message that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from builders import chain_model, gemm_model, matmul_model, model, node, save, weight
from onnx import numpy_helper
from oracle import initializers, kinds, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError

F32 = np.float32


def message(source: Any, error: type[Mxfp8Error] = ContractError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        mxfp8_graph.rewrite(source, **options)
    return str(caught.value)


class TestNotAModel:
    def test_a_missing_file(self, tmp_path):
        path = tmp_path / "no.onnx"
        assert message(path) == f"{path}: No such file or directory; expected a readable ONNX file; check the path"

    def test_a_path_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("x")
        path = tmp_path / "file" / "m.onnx"
        assert message(path) == f"{path}: Not a directory; expected a readable ONNX file; check the path"

    def test_a_directory(self, tmp_path):
        assert message(tmp_path) == (f"{tmp_path}: a directory; expected an ONNX file; name the .onnx file inside it")

    def test_an_empty_file(self, tmp_path):
        path = tmp_path / "m.onnx"
        path.write_bytes(b"")
        assert message(path) == f"{path}: the file is empty; expected an ONNX model; export it again"

    CONTENTS: ClassVar = {
        "text": b"hello world, this is no model\n",
        "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08\6\0\0\0",
        "zip": b"PK\3\4\x14\0\0\0\x08\0" + bytes(40),
        "JSON": b'{"irVersion": "10", "graph": {}}',
        "noise": np.random.default_rng(0).bytes(1000),
        "zeros": bytes(1000),
        "another protobuf": onnx.TensorProto(name="w", data_type=1, dims=[1], raw_data=bytes(4)).SerializeToString(),
    }

    @pytest.mark.parametrize("name", CONTENTS)
    def test_a_file_of_another_kind(self, tmp_path, name):
        path = tmp_path / "m.onnx"
        path.write_bytes(self.CONTENTS[name])
        assert message(path) in {
            f"{path}: not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
            "check that the file is one and was copied whole",
            f"{path}: not an ONNX model (no IR version or no graph); expected an ONNX model; export it again",
        }

    @pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999])
    def test_a_truncated_file(self, tmp_path, share):
        content = chain_model().SerializeToString()
        path = tmp_path / "m.onnx"
        path.write_bytes(content[: int(len(content) * share)])
        assert message(path).startswith(f"{path}: not a")

    def test_every_truncation_is_an_error_of_ours(self, tmp_path):
        content = matmul_model(32, 32).SerializeToString()
        path = tmp_path / "m.onnx"
        step = max(1, len(content) // 97)
        for length in [*range(0, len(content), step), *range(len(content) - 24, len(content))]:
            path.write_bytes(content[:length])
            with pytest.raises(ContractError):
                mxfp8_graph.rewrite(path, dry_run=True)

    def test_a_proto_without_a_graph(self):
        assert message(onnx.ModelProto()) == (
            "model: not an ONNX model (no IR version or no graph); expected an ONNX model; export it again"
        )

    def test_a_graph_without_outputs(self):
        proto = chain_model()
        del proto.graph.output[:]
        assert message(proto) == ("model: the graph has no outputs; expected at least one; export the model again")

    @pytest.mark.parametrize("thing", [None, 3, b"bytes", np.zeros(3)])
    def test_something_else_altogether(self, thing):
        assert message(thing) == (
            f"rewrite: model is a {type(thing).__name__}; expected a path, an onnx.ModelProto, an "
            "onnx_graphsurgeon.Graph or a torch.export.ExportedProgram; load the model first"
        )


class TestExternalData:
    @pytest.fixture
    def path(self, tmp_path) -> Path:
        return save(matmul_model(64, 96), tmp_path / "m.onnx", external=True)

    @staticmethod
    def edit(path: Path, change: Callable[[onnx.TensorProto], Any]) -> None:
        proto = onnx.load(path, load_external_data=False)
        change(proto.graph.initializer[0])
        path.write_bytes(proto.SerializeToString())

    @staticmethod
    def set(key: str, value: str) -> Callable[[onnx.TensorProto], Any]:
        def change(tensor: onnx.TensorProto) -> None:
            for entry in tensor.external_data:
                if entry.key == key:
                    entry.value = value

        return change

    def test_a_missing_file(self, path):
        data = path.with_name("m.onnx.data")
        data.unlink()
        assert message(path) == (
            f"{path}: tensor 'w': cannot read external file {data}: No such file or directory; expected the file next "
            "to the model; copy it there"
        )

    def test_a_directory_in_its_place(self, path):
        data = path.with_name("m.onnx.data")
        data.unlink()
        data.mkdir()
        found = message(path)
        assert found.startswith(f"{path}: tensor 'w': ")
        assert "m.onnx.data" in found

    def test_a_short_file(self, path):
        data = path.with_name("m.onnx.data")
        data.write_bytes(data.read_bytes()[:1000])
        assert message(path) == (
            f"{path}: tensor 'w': needs bytes 0 to 24576 of {data}, which has 1000; expected the whole file; copy the "
            "external data again"
        )

    @pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "", "a/../../b"])
    def test_a_file_outside_the_models_folder(self, path, location):
        self.edit(path, self.set("location", location))
        assert message(path) == (
            f"{path}: tensor 'w': external file {location!r}; expected a file inside {path.parent}; move the data next "
            "to the model"
        )

    def test_a_link_out_of_the_folder(self, path, tmp_path_factory):
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "data"
        data = path.with_name("m.onnx.data")
        data.rename(elsewhere)
        data.symlink_to(elsewhere)
        assert "expected a file inside" in message(path)

    def test_links_of_model_and_data_into_one_folder_as_the_hugging_face_cache_has_them(self, path, tmp_path):
        snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for name, blob in (("m.onnx", "aaa"), ("m.onnx.data", "bbb")):
            (tmp_path / name).rename(blobs / blob)
            (snapshot / name).symlink_to(f"../../blobs/{blob}")
        out, report = mxfp8_graph.rewrite(snapshot / "m.onnx")
        assert out == snapshot / "m.mxfp8.onnx"
        assert len(report.rewritten) == 1
        assert len(run(str(out), {"x": np.zeros((1, 1, 64), F32)})) == 1

    def test_a_length_that_does_not_fit_the_shape(self, path):
        self.edit(path, self.set("length", "100"))
        assert message(path) == (
            f"{path}: tensor 'w': external data of 100 bytes; expected 24576 for its shape and dtype; export the model "
            "again"
        )

    @pytest.mark.parametrize("key", ["offset", "length"])
    def test_an_offset_or_length_that_is_no_number(self, path, key):
        self.edit(path, self.set(key, "many"))
        assert message(path) == (
            f"{path}: tensor 'w': external offset or length is not a number; expected integers; export the model again"
        )

    def test_a_negative_offset(self, path):
        self.edit(path, self.set("offset", "-4096"))
        assert message(path).startswith(f"{path}: tensor 'w': needs bytes -4096 to 20480 of ")

    def test_a_model_in_memory_has_no_folder(self, path):
        assert message(onnx.load(path, load_external_data=False)) == (
            "model: tensor 'w': lies in external file 'm.onnx.data', and a model in memory has no folder to look in; "
            "expected a path; pass the model's path instead"
        )

    def test_no_file_is_left_behind(self, path):
        path.with_name("m.onnx.data").write_bytes(bytes(100))
        message(path)
        assert sorted(p.name for p in path.parent.iterdir()) == ["m.onnx", "m.onnx.data"]


class TestNothingEligible:
    def test_no_matmul(self):
        proto = model([node("Neg", "x", "y")], {"x": (F32, [3])}, {"y": (F32, [3])})
        assert message(proto, NothingEligibleError) == (
            "model: no MatMul or Gemm in the model; expected at least one; nothing to rewrite"
        )

    def test_one_site_that_is_skipped(self):
        with pytest.raises(NothingEligibleError) as caught:
            mxfp8_graph.rewrite(matmul_model(8, 96))
        assert str(caught.value) == (
            "model: none of its 1 matmul is eligible; expected at least one; see the reasons and adapt the recipe"
        )
        assert [d.reason for d in caught.value.decisions] == [
            "tiny: K = 8 is below min_dim = 32; lower min_dim to quantize it"
        ]

    def test_all_sites_skipped(self, tmp_path):
        path = save(chain_model((64, 64, 64)), tmp_path / "m.onnx")
        recipe = Recipe(name="none", exclude=("layers",))
        assert message(path, NothingEligibleError, recipe=recipe) == (
            f"{path}: none of its 2 matmuls is eligible; expected at least one; see the reasons and adapt the recipe"
        )
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


class TestNonFinite:
    """A NaN or Inf in a weight: refused with the tensor's name and the index in the tensor as it is stored."""

    @staticmethod
    def expected(name: str, value: str, index: list[int]) -> str:
        return (
            f"weight {name!r}: {value} at index {index}; expected finite values; repair the checkpoint, or pass "
            "allow_nonfinite=True to let its block become NaN"
        )

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    @pytest.mark.parametrize("left", [False, True])
    def test_name_and_index(self, value, left):
        proto = matmul_model(64, 96, left=left)
        w = numpy_helper.to_array(proto.graph.initializer[0]).copy()
        w[5, 40] = w[60, 3] = float(value)
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
        assert message(proto) == self.expected("w", value, [5, 40])

    @pytest.mark.parametrize("dtype", [np.float16, F32])
    def test_a_transposed_view_is_named_by_its_stored_index(self, dtype):
        w = weight(96, 64, dtype=dtype)
        w[90, 7] = np.nan
        nodes = [node("Transpose", "w", "wt"), node("MatMul", "x wt", "h"), node("Neg", "h", "y")]
        proto = model(nodes, {"x": (dtype, [3, 64])}, {"y": (dtype, [3, 96])}, {"w": w})
        assert message(proto) == self.expected("w", "nan", [90, 7])

    def test_a_reshaped_stack_is_named_by_its_stored_index(self):
        w = weight(2, 64, 96)
        w[1, 63, 95] = np.inf
        nodes = [node("Reshape", "w shape", "ws"), node("MatMul", "x ws", "h"), node("Neg", "h", "y")]
        weights = {"w": w, "shape": np.array([128, 96])}
        proto = model(nodes, {"x": (F32, [3, 128])}, {"y": (F32, [3, 96])}, weights)
        assert message(proto) == self.expected("w", "inf", [1, 63, 95])

    @pytest.mark.parametrize("external", [False, True])
    def test_a_batched_weight(self, tmp_path, external):
        w = weight(3, 64, 96)
        w[2, 0, 95] = np.nan
        nodes = [node("MatMul", "x w", "h"), node("Neg", "h", "y")]
        proto = model(nodes, {"x": (F32, [3, 5, 64])}, {"y": (F32, [3, 5, 96])}, {"w": w})
        path = save(proto, tmp_path / "m.onnx", external=external)
        assert message(path) == self.expected("w", "nan", [2, 0, 95])
        assert "m.mxfp8.onnx" not in {p.name for p in tmp_path.iterdir()}

    def test_a_value_that_only_a_cast_made_infinite(self):
        w = weight(64, 96)
        w[3, 4] = 1e30
        nodes = [node("Cast", "w", "wh", to=10), node("MatMul", "x wh", "h"), node("Neg", "h", "y")]
        proto = model(nodes, {"x": (np.float16, [3, 64])}, {"y": (np.float16, [3, 96])}, {"w": w})
        assert message(proto) == self.expected("w", "inf", [3, 4])

    def test_a_weight_that_is_kept_may_hold_anything(self):
        proto = chain_model((64, 64, 64))
        w = weight(64, 64)
        w[0, 0] = np.nan
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "layers.0.weight"))
        _, report = mxfp8_graph.rewrite(proto, Recipe(name="some", exclude=(r"layers\.0",)))
        assert len(report.rewritten) == 1

    def test_allowed_it_poisons_its_block_and_no_other(self):
        proto = matmul_model(64, 96)
        w = weight(64, 96)
        w[5, 40] = np.inf
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
        rewritten, report = mxfp8_graph.rewrite(proto, allow_nonfinite=True)
        elements, scales = (numpy_helper.to_array(t).view(np.uint8) for t in rewritten.graph.initializer)
        assert (elements[40, :32] == 0x7F).all()
        assert np.argwhere(scales == 255).tolist() == [[40, 0]]
        assert np.count_nonzero(elements == 0x7F) == 32
        assert 0 < report.sites[0].relative_l2 < 0.05
        y = run(rewritten, {"x": np.ones((1, 1, 64), F32)})[0]
        assert np.isnan(y[0, 0]).nonzero()[0].tolist() == [40]


class TestAlreadyRewritten:
    def test_by_the_same_recipe_the_file_is_returned_and_nothing_is_written(self, tmp_path):
        path = save(matmul_model(), tmp_path / "m.onnx")
        first, _ = mxfp8_graph.rewrite(path)
        assert first == tmp_path / "m.mxfp8.onnx"
        again, report = mxfp8_graph.rewrite(first)
        assert again == first
        assert report.already_rewritten
        assert (report.output, report.sites) == (None, ())
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m.mxfp8.onnx", "m.onnx"]

    def test_a_proto_comes_back_as_it_is(self):
        rewritten, _ = mxfp8_graph.rewrite(matmul_model())
        again, report = mxfp8_graph.rewrite(rewritten)
        assert again is rewritten
        assert report.already_rewritten

    def test_another_recipe_is_a_mismatch(self, tmp_path):
        first, _ = mxfp8_graph.rewrite(save(matmul_model(), tmp_path / "m.onnx"))
        assert message(first, RecipeError, recipe="ocp") == (
            f"{first}: Recipe mismatch for 'x_mxfp8_quantize': packed with scale_rounding ceil, asked for floor; "
            "expected the original model, since packed weights cannot be packed again; rewrite that one"
        )

    def test_a_recipe_of_the_same_name_and_other_fields_is_a_mismatch(self):
        rewritten, _ = mxfp8_graph.rewrite(chain_model())
        other = Recipe(name="mxfp8", exclude=(r"\.0",))
        assert r"packed with exclude [], asked for ['\\.0']" in message(rewritten, RecipeError, recipe=other)

    def test_a_recipe_of_a_later_version_is_a_mismatch_too(self):
        rewritten, _ = mxfp8_graph.rewrite(matmul_model())
        for entry in rewritten.metadata_props:
            if entry.key == "mxfp8_graph.recipe":
                entry.value = '{"name": "future", "unheard_of": 1}'
        assert "packed with 'future', asked for 'mxfp8'" in message(rewritten, RecipeError)

    @pytest.mark.parametrize("value", ["not JSON", "[]", ""])
    def test_a_record_that_cannot_be_read_is_a_mismatch_too(self, value):
        rewritten, _ = mxfp8_graph.rewrite(matmul_model())
        for entry in rewritten.metadata_props:
            if entry.key == "mxfp8_graph.recipe":
                entry.value = value
        assert "packed with 'an unrecorded recipe', asked for 'mxfp8'" in message(rewritten, RecipeError)

    def test_nodes_without_a_record(self):
        rewritten, _ = mxfp8_graph.rewrite(matmul_model())
        del rewritten.metadata_props[:]
        assert "packed with 'an unrecorded recipe', asked for 'mxfp8'" in message(rewritten, RecipeError)

    def test_a_loop_body_that_was_rewritten_counts(self):
        rewritten, _ = mxfp8_graph.rewrite(gemm_model())
        assert kinds(rewritten)["MXFP8FusedGemm"] == 1
        assert initializers(mxfp8_graph.rewrite(rewritten)[0]) == initializers(rewritten)
