"""What a user can get wrong, and the whole message that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builders import chain_model, gemm_model, matmul_model, model, neg_model, node, save, weight
from grids import looped
from onnx import numpy_helper
from oracle import initializers, kinds, run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError

F32, F16 = np.float32, np.float16


def message(source: Any, error: type[Mxfp8Error] = ContractError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        mxfp8_graph.rewrite(source, **options)
    return str(caught.value)


NOT_COMPLETE = (
    "not a complete ONNX file (protobuf cannot be decoded); expected an ONNX model; "
    "check that the file is one and was copied whole"
)
NOT_A_MODEL = "not an ONNX model (no IR version or no graph); expected an ONNX model; export the model again"
CONTENTS = {
    "empty": b"",
    "text": b"hello world, this is no model\n",
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08\6\0\0\0",
    "zip": b"PK\3\4\x14\0\0\0\x08\0" + bytes(40),
    "JSON": b'{"irVersion": "10", "graph": {}}',
    "noise": np.random.default_rng(0).bytes(1000),
    "zeros": bytes(1000),
    "another protobuf": onnx.TensorProto(name="w", data_type=1, dims=[1], raw_data=bytes(4)).SerializeToString(),
}


@looped("name", CONTENTS)
def test_a_file_of_another_kind(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(CONTENTS[name])
    empty = "the file is empty; expected an ONNX model; export it again"
    assert message(path) in {
        f"{path}: {said}" for said in ([empty] if name == "empty" else [NOT_COMPLETE, NOT_A_MODEL])
    }


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, said in (("no.onnx", "No such file or directory"), ("file/m.onnx", "Not a directory")):
        path = tmp_path / name
        assert message(path) == f"{path}: {said}; expected a readable ONNX file; check the path"
    assert message(tmp_path) == f"{tmp_path}: a directory; expected an ONNX file; name the .onnx file inside it"


def test_every_truncation_is_an_error_of_ours(tmp_path: Path) -> None:
    content = matmul_model(32, 32).SerializeToString()
    path = tmp_path / "m.onnx"
    step = max(1, len(content) // 97)
    for length in [*range(0, len(content), step), *range(len(content) - 24, len(content))]:
        path.write_bytes(content[:length])
        with pytest.raises(ContractError):
            mxfp8_graph.rewrite(path, dry_run=True)
    content = chain_model().SerializeToString()
    for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999):
        path.write_bytes(content[: int(len(content) * share)])
        assert message(path).startswith(f"{path}: not a"), share


@looped("thing", [None, 3, b"bytes", np.zeros(3)])
def test_something_else_altogether(thing: Any) -> None:
    assert message(thing) == (
        f"rewrite: model is a {type(thing).__name__}; expected a path, an onnx.ModelProto, an "
        "onnx_graphsurgeon.Graph or a torch.export.ExportedProgram; load the model first"
    )


def test_a_proto_without_a_graph_or_outputs() -> None:
    assert message(onnx.ModelProto()) == f"model: {NOT_A_MODEL}"
    proto = chain_model()
    del proto.graph.output[:]
    assert message(proto) == "model: the graph has no outputs; expected at least one; export the model again"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(matmul_model(64, 96), tmp_path / "m.onnx", external=True)


NO_NUMBER = "external offset or length is not a number; expected integers from 0 on; export the model again"
OUTSIDE = "expected a file inside {folder}; move the data next to the model"
ENTRIES = {
    ("location", "../secret"): "external file '../secret'; " + OUTSIDE,
    ("location", "/etc/passwd"): "external file '/etc/passwd'; " + OUTSIDE,
    ("location", ""): "external file ''; " + OUTSIDE,
    ("location", "a/../../b"): "external file 'a/../../b'; " + OUTSIDE,
    ("length", "100"): "external data of 100 bytes; expected 24576 for its shape and dtype; export the model again",
    ("offset", "many"): NO_NUMBER,
    ("length", "many"): NO_NUMBER,
    ("offset", "-4096"): NO_NUMBER,
    ("offset", "4096"): (
        "needs bytes 4096 to 28672 of {folder}/m.onnx.data, which has 24576; expected the whole file; "
        "copy the external data again"
    ),
}


@looped("entry", ENTRIES)
def test_external_data_that_lies_elsewhere_than_it_can(path: Path, entry: tuple[str, str]) -> None:
    proto = onnx.load(path, load_external_data=False)
    changed = onnx.ModelProto.FromString(proto.SerializeToString())
    (found,) = (each for each in changed.graph.initializer[0].external_data if each.key == entry[0])
    found.value = entry[1]
    other = path.with_name("changed.onnx")
    other.write_bytes(changed.SerializeToString())
    assert message(other) == f"{other}: tensor 'w': {ENTRIES[entry].format(folder=path.parent)}"


def test_external_data_that_is_not_there(path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = path.with_name("m.onnx.data")
    content = data.read_bytes()
    data.write_bytes(content[:1000])
    assert message(path) == (
        f"{path}: tensor 'w': needs bytes 0 to 24576 of {data}, which has 1000; expected the whole file; copy the "
        "external data again"
    )
    assert sorted(p.name for p in path.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    data.unlink()
    assert message(path) == (
        f"{path}: tensor 'w': cannot read external file {data}: there is none; expected the file next "
        "to the model; copy it there"
    )
    data.mkdir()
    found = message(path)
    assert found.startswith(f"{path}: tensor 'w': ")
    assert "m.onnx.data" in found
    data.rmdir()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "data"
    elsewhere.write_bytes(content)
    data.symlink_to(elsewhere)
    assert "expected a file inside" in message(path)


def test_a_model_in_memory_has_no_folder(path: Path) -> None:
    assert message(onnx.load(path, load_external_data=False)) == (
        "model: tensor 'w': lies in external file 'm.onnx.data', and a model in memory has no folder to look in; "
        "expected a path; pass the model's path instead"
    )


class TestExternalData:
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


def test_nothing_is_eligible(tmp_path: Path) -> None:
    proto = model([node("Neg", "x", "y")], {"x": (F32, [3])}, {"y": (F32, [3])})
    assert message(proto, NothingEligibleError) == (
        "model: no MatMul or Gemm in the model; expected at least one; nothing to rewrite"
    )
    with pytest.raises(NothingEligibleError) as caught:
        mxfp8_graph.rewrite(matmul_model(8, 96))
    adapt = "is eligible; expected at least one; see the reasons and adapt the recipe"
    assert str(caught.value) == f"model: none of its 1 matmul {adapt}"
    assert [d.reason for d in caught.value.decisions] == [
        "tiny: K = 8 is below min_dim = 32; lower min_dim to quantize it"
    ]
    path = save(chain_model((64, 64, 64)), tmp_path / "m.onnx")
    recipe = Recipe(name="none", exclude=("layers",))
    assert message(path, NothingEligibleError, recipe=recipe) == f"{path}: none of its 2 matmuls {adapt}"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def with_value(proto: onnx.ModelProto, value: float, *at: tuple[int, ...]) -> onnx.ModelProto:
    """Returns the model with that value at those places of its first weight."""
    tensor = proto.graph.initializer[0]
    array = numpy_helper.to_array(tensor).copy()
    for index in at:
        array[index] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return proto


def behind(op: str, w: np.ndarray, x: Any, dtype: Any = F32, more: Any = (), **attributes: Any) -> onnx.ModelProto:
    before = [node(op, " ".join(["w", *dict(more)]), "seen", **attributes)]
    return neg_model("MatMul", x, [*x[:-1], 96], {"w": w, **dict(more)}, "x seen", dtype=dtype, before=before)


NAN, INF = float("nan"), float("inf")
BATCHED = neg_model("MatMul", [3, 5, 64], [3, 5, 96], {"w": weight(3, 64, 96)})
NON_FINITE = {
    "nan": (with_value(matmul_model(64, 96), NAN, (5, 40), (60, 3)), [5, 40]),
    "inf": (with_value(matmul_model(64, 96), INF, (5, 40), (60, 3)), [5, 40]),
    "-inf, on the left": (with_value(matmul_model(64, 96, left=True), -INF, (5, 40), (60, 3)), [5, 40]),
    "nan behind a Transpose": (with_value(behind("Transpose", weight(96, 64), [3, 64]), NAN, (90, 7)), [90, 7]),
    "nan behind a Transpose, float16": (
        with_value(behind("Transpose", weight(96, 64, dtype=F16), [3, 64], F16), NAN, (90, 7)), [90, 7],
    ),
    "inf behind a Reshape": (
        with_value(behind("Reshape", weight(2, 64, 96), [3, 128], more={"to": np.array([128, 96])}), INF, (1, 63, 95)),
        [1, 63, 95],
    ),
    "inf that only a Cast makes": (
        with_value(behind("Cast", weight(64, 96), [3, 64], F16, to=onnx.TensorProto.FLOAT16), 1e30, (3, 4)), [3, 4],
    ),
    "nan of a batch": (with_value(BATCHED, NAN, (2, 0, 95)), [2, 0, 95]),
}  # fmt: skip


def nonfinite(value: str, index: list[int]) -> str:
    return (
        f"weight 'w': {value} at index {index}; expected finite values; repair the checkpoint, or pass "
        "allow_nonfinite=True to let its block become NaN"
    )


@looped("name", NON_FINITE)
def test_a_weight_that_is_not_finite_is_refused_by_its_name_and_stored_index(name: str) -> None:
    proto, index = NON_FINITE[name]
    assert message(proto) == nonfinite(name.partition(",")[0].partition(" ")[0], index)


@pytest.mark.parametrize("external", [False, True])
def test_a_file_with_a_weight_that_is_not_finite(tmp_path: Path, external: bool) -> None:
    path = save(BATCHED, tmp_path / "m.onnx", external=external)
    assert message(path) == nonfinite("nan", [2, 0, 95])
    assert "m.mxfp8.onnx" not in {p.name for p in tmp_path.iterdir()}


class TestNonFinite:
    def test_a_weight_that_is_kept_may_hold_anything(self):
        proto = with_value(chain_model((64, 64, 64)), NAN, (0, 0))
        _, report = mxfp8_graph.rewrite(proto, Recipe(name="some", exclude=(r"layers\.0",)))
        assert len(report.rewritten) == 1

    def test_allowed_it_poisons_its_block_and_no_other(self):
        proto = with_value(matmul_model(64, 96), INF, (5, 40))
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

    def test_a_record_that_cannot_be_read_or_is_missing_is_a_mismatch_too(self):
        rewritten, _ = mxfp8_graph.rewrite(matmul_model())
        (record,) = (entry for entry in rewritten.metadata_props if entry.key == "mxfp8_graph.recipe")
        for value in ('{"name": "future", "unheard_of": 1}', "not JSON", "[]", ""):
            record.value = value
            name = "'future'" if "future" in value else "'an unrecorded recipe'"
            assert f"packed with {name}, asked for 'mxfp8'" in message(rewritten, RecipeError), value
        del rewritten.metadata_props[:]
        assert "packed with 'an unrecorded recipe', asked for 'mxfp8'" in message(rewritten, RecipeError)

    def test_a_fused_gemm_that_was_rewritten_counts(self):
        rewritten, _ = mxfp8_graph.rewrite(gemm_model())
        assert kinds(rewritten)["MXFP8FusedGemm"] == 1
        assert initializers(mxfp8_graph.rewrite(rewritten)[0]) == initializers(rewritten)
