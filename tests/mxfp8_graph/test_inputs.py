"""Inputs: sizes and values that models accept, .npz files, and what is said about those that do not fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import builders as b
import ml_dtypes
import numpy as np
import onnx
import pytest

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running.inputs import Inputs, InputSpec, Signature, check_inputs, load_arrays, make_inputs
from mxfp8_ops.errors import ShapeError


def synthesise(model: onnx.ModelProto, *, where: str = "model", **settings: Any) -> Inputs:
    """Returns inputs for a model."""
    return make_inputs(signature(model, where), **settings)


def signature(model: onnx.ModelProto, where: str = "model") -> Signature:
    loaded = load(model)
    loaded.meta["name"] = where
    return Signature.of(loaded)


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    return signature(model).specs


def index_ranges(model: onnx.ModelProto) -> Mapping[str, range]:
    return signature(model).ranges


def model_with(**inputs: tuple[Any, b.Shape]) -> onnx.ModelProto:
    """Returns a model with these inputs and an unrelated output."""
    nodes = [b.node("Shape", next(iter(inputs)), "size")]
    return b.model(nodes, inputs, {"size": (np.int64, [None])})


def indexing(nodes: Sequence[onnx.NodeProto], *, rows: int = 50, **constants: np.ndarray) -> onnx.ModelProto:
    """Returns a model that makes "i" of the int64 input "ids", then y = table[i] with `rows` rows."""
    initializers = {"table": b.weight(rows, 4), **constants}
    nodes = [*nodes, b.node("Gather", "table i", "y")]
    return b.model(nodes, {"ids": (np.int64, ["n", 3])}, {"y": (np.float32, [None, None])}, initializers)


# --- Sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ([3, 5], (3, 5)),
        ([], ()),
        (["batch", "sequence_length", 64], (2, 16, 64)),
        (["batch", "num_channels", "height", "width"], (2, 3, 224, 224)),
        ([None, None], (2, 16)),
        (["s0", "s1"], (2, 16)),
        (["2*batch", "sequence_length - 1"], (4, 15)),
        (["batch", "batch"], (2, 2)),
    ],
    ids=str,
)
def test_default_sizes(dims: b.Shape, shape: tuple[int, ...]) -> None:
    assert synthesise(model_with(x=(np.float32, dims)))["x"].shape == shape


def test_a_dim_param_has_one_size_throughout() -> None:
    inputs = synthesise(model_with(x=(np.float32, ["n", 4]), y=(np.float32, [7, "n"])))
    assert (inputs["x"].shape, inputs["y"].shape) == ((2, 4), (7, 2))


@pytest.mark.parametrize(
    "mask", ["past_sequence_length + sequence_length", "total_sequence_length", "attention_mask_length"]
)
def test_an_attention_mask_covers_past_and_present(mask: str) -> None:
    inputs = synthesise(
        model_with(
            input_ids=(np.int64, ["batch", "sequence_length"]),
            attention_mask=(np.int64, ["batch", mask]),
            **{"past_key_values.0.key": (np.float32, ["batch", 4, "past_sequence_length", 8])},
        )
    )
    assert inputs["past_key_values.0.key"].shape == (2, 4, 8, 8)
    assert inputs["attention_mask"].shape == (2, 8 + 16)


def test_position_ids_start_after_the_past() -> None:
    inputs = synthesise(
        model_with(
            position_ids=(np.int64, ["batch", "sequence_length"]),
            **{"past.0.key": (np.float32, ["batch", 4, "past_length", 8])},
        )
    )
    np.testing.assert_array_equal(inputs["position_ids"], [list(range(8, 24))] * 2)


@pytest.mark.parametrize("shapes", [{"batch": 4}, {"x.0": 4}], ids=str)
def test_a_size_can_be_given(shapes: dict[str, int]) -> None:
    assert synthesise(model_with(x=(np.float32, ["batch", 8])), shapes=shapes)["x"].shape == (4, 8)


def test_a_given_size_enters_expressions() -> None:
    model = model_with(x=(np.float32, ["2*batch"]))
    assert synthesise(model, shapes={"batch": 5})["x"].shape == (10,)


def test_a_size_of_zero_is_a_size() -> None:
    assert synthesise(model_with(x=(np.float32, ["batch", 8])), shapes={"batch": 0})["x"].shape == (0, 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"bath": 4}, "m: no dimension 'bath'; expected one of batch, seq (or INPUT.AXIS); correct the name"),
        ({"x.2": 4}, "m: no dimension 'x.2'; expected one of batch, seq (or INPUT.AXIS); correct the name"),
        ({"seq": -1}, "m: dimension seq = -1; expected 0 or more; correct it"),
    ],
    ids=str,
)
def test_a_given_size_that_fits_nothing(shapes: dict[str, int], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        synthesise(model_with(x=(np.float32, ["batch", "seq", 64])), shapes=shapes, where="m")
    assert str(caught.value) == message


def test_more_dimensions_than_numpy_has() -> None:
    with pytest.raises(ShapeError, match="expected one that fits in memory"):
        synthesise(model_with(x=(np.float32, [1] * 65)))


# --- Values ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_inputs() -> None:
    model = b.language_model()
    first, second, other = (synthesise(model, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])
    assert (first["input_ids"] != other["input_ids"]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_floats_are_normal(dtype: Any) -> None:
    x = synthesise(model_with(x=(dtype, [100, 100])))["x"]
    assert x.dtype == dtype
    # 10,000 values: the mean is within 5 standard errors of 0, the deviation within 5 of 1.
    assert abs(x.astype(np.float64).mean()) < 0.05
    assert abs(x.astype(np.float64).std() - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("attention_mask", np.int64), ("attention_mask", np.float32), ("flag", np.bool_), ("count", np.int32)],
)
def test_masks_flags_and_plain_integers_are_one(name: str, dtype: Any) -> None:
    x = synthesise(model_with(**{name: (dtype, [4, 4])}))[name]
    np.testing.assert_array_equal(x, np.ones((4, 4), dtype))


def test_images_are_noise() -> None:
    x = synthesise(model_with(pixels=(np.uint8, [1, 3, 32, 32])))["pixels"]
    assert (x.min() < 5, x.max() > 250) == (True, True)


def test_token_ids_stay_inside_the_vocabulary() -> None:
    inputs = synthesise(b.language_model(vocab=7), shapes={"batch_size": 100})
    assert sorted(np.unique(inputs["input_ids"])) == list(range(7))


def test_position_ids_stay_inside_their_table() -> None:
    inputs = synthesise(b.language_model(positions=10))
    np.testing.assert_array_equal(inputs["position_ids"][0], [*range(10), 9, 9, 9, 9, 9, 9])


@pytest.mark.parametrize(
    "model",
    [
        indexing([b.node("Identity", "ids", "i")]),
        indexing([b.node("Cast", "ids", "i", to=onnx.TensorProto.INT32)]),
        indexing([b.node("Reshape", "ids flat", "i")], flat=np.array([-1])),
        indexing([b.node("Unsqueeze", "ids axes", "i")], axes=np.array([0])),
        indexing([b.node("Concat", "ids ids", "i", axis=0)]),
        indexing([b.node("Where", "c ids zero", "i")], c=np.array(True), zero=np.array(0)),
        indexing([b.node("Slice", "ids at end", "i")], at=np.array([0]), end=np.array([1])),
    ],
    ids=["Identity", "Cast", "Reshape", "Unsqueeze", "Concat", "Where", "Slice"],
)
def test_indices_are_followed_through(model: onnx.ModelProto) -> None:
    assert index_ranges(model) == {"ids": range(50)}


@pytest.mark.parametrize(
    ("op", "constant", "expected"),
    [
        ("Add", 2, range(48)),
        ("Sub", 2, range(2, 52)),
        ("Add", -1, range(1, 51)),
    ],
)
def test_a_constant_shift_moves_the_range(op: str, constant: int, expected: range) -> None:
    model = indexing([b.node(op, "ids c", "i")], c=np.array(constant))
    assert index_ranges(model) == {"ids": expected}


def test_the_smallest_table_counts() -> None:
    model = indexing([b.node("Identity", "ids", "i"), b.node("Gather", "small ids", "z")], small=b.weight(5, 2))
    assert index_ranges(model) == {"ids": range(5)}


def test_a_packed_table_counts() -> None:
    model, _ = mxfp8_graph.rewrite(
        indexing([b.node("Identity", "ids", "i")]), mxfp8_graph.Recipe(embeddings=True, min_dim=1)
    )
    assert [n.op_type for n in model.graph.node] == ["Identity", "MXFP8Embedding"]
    assert index_ranges(model) == {"ids": range(50)}


def test_the_axis_of_the_table_counts() -> None:
    nodes = [b.node("Gather", "table ids", "y", axis=1)]
    model = b.model(nodes, {"ids": (np.int64, [3])}, {"y": (np.float32, [None, None])}, {"table": b.weight(50, 4)})
    assert index_ranges(model) == {"ids": range(4)}


def test_a_table_that_is_computed_has_its_inferred_shape() -> None:
    nodes = [b.node("Transpose", "w", "table"), b.node("Gather", "table ids", "y")]
    model = b.model(nodes, {"ids": (np.int64, [3])}, {"y": (np.float32, [None, None])}, {"w": b.weight(50, 4)})
    assert index_ranges(model) == {"ids": range(4)}


def test_a_table_of_unknown_length_takes_index_zero() -> None:
    inputs = {"x": (np.float32, ["n", 4]), "ids": (np.int64, [3])}
    model = b.model([b.node("Gather", "x ids", "y")], inputs, {"y": (np.float32, [None, None])})
    assert index_ranges(model) == {"ids": range(1)}


def test_indices_are_followed_into_subgraphs() -> None:
    y = b.value("y0", np.float32, [3, 4])
    body = onnx.helper.make_graph([b.node("Gather", "table ids", "y0")], "then", [], [y])
    other = onnx.helper.make_graph([b.node("Gather", "tiny ids", "y0")], "else", [], [y])
    nodes = [b.node("If", "c", "y", then_branch=body, else_branch=other)]
    tables = {"table": b.weight(50, 4), "tiny": b.weight(6, 4), "c": np.array(True)}
    model = b.model(nodes, {"ids": (np.int64, [3])}, {"y": (np.float32, [None, None])}, tables)
    assert index_ranges(model) == {"ids": range(6)}


def test_indices_are_followed_into_local_functions() -> None:
    imports = [onnx.helper.make_opsetid("", 21)]
    lookup = onnx.helper.make_function("local", "Lookup", ["t", "i"], ["o"], [b.node("Gather", "t i", "o")], imports)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Lookup", ["table", "ids"], ["y"], domain="local")],
        "g",
        [b.value("ids", np.int64, [3])],
        [b.value("y", np.float32, [3, 4])],
        [onnx.numpy_helper.from_array(b.weight(50, 4), "table")],
    )
    imports = [*imports, onnx.helper.make_opsetid("local", 1)]
    model = onnx.helper.make_model(graph, functions=[lookup], opset_imports=imports, ir_version=b.IR_VERSION)
    assert index_ranges(model) == {"ids": range(50)}


@pytest.mark.parametrize("ir_version", [3, b.IR_VERSION])
def test_initializers_that_a_caller_may_replace_count_as_they_are(ir_version: int) -> None:
    model = indexing([b.node("Add", "ids c", "i")], c=np.array(2))
    model.ir_version = ir_version
    model.graph.input.extend([b.value("c", np.int64, []), b.value("table", np.float32, ["n", 4])])
    assert index_ranges(model) == {"ids": range(48)}


def test_what_is_gathered_from_is_not_an_index() -> None:
    nodes = [b.node("Gather", "ids first", "y")]
    model = b.model(nodes, {"ids": (np.int64, [3, 4])}, {"y": (np.int64, [None, None])}, {"first": np.array([0])})
    assert index_ranges(model) == {}


def test_a_mask_that_is_counted_is_not_an_index() -> None:
    nodes = [b.node("CumSum", "ids axis", "i")]
    assert index_ranges(indexing(nodes, axis=np.array(1))) == {}


@pytest.mark.parametrize(("op", "domain"), [("OneHot", ""), ("Add", "other"), ("Sub", "other")])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_op_that_the_opset_lacks_may_have_any_inputs(op: str, domain: str, count: int) -> None:
    model = indexing([b.node("Identity", "ids", "i"), b.node("Cast", "ids", "z", to=onnx.TensorProto.INT32)])
    model.graph.node[1].CopyFrom(onnx.helper.make_node(op, ["ids"] * count, ["z"]))
    # OneHot is from opset 9; without an import of the standard domain, onnx knows none of its ops.
    model.opset_import[0].CopyFrom(onnx.helper.make_opsetid(domain, 1))
    assert index_ranges(model) == {"ids": range(50)}


# --- What a model takes ------------------------------------------------------------------------------------------


def test_specs_read_as_a_user_writes_them() -> None:
    model = model_with(input_ids=(np.int64, ["batch", None]), x=(np.float16, [3]))
    assert list(map(str, input_specs(model))) == ["input_ids int64 [batch, ?]", "x float16 [3]"]


def test_an_initializer_that_is_listed_as_input_is_none() -> None:
    model = b.matmul_model()
    model.graph.input.append(b.value("w", np.float32, [64, 96]))
    assert [spec.name for spec in input_specs(model)] == ["x"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [1]),
            "m: input 'x' is no tensor of numbers; expected one; "
            "run this model from Python, with mxfp8_ops.ort.session",
        ),
        (
            onnx.helper.make_tensor_sequence_value_info("x", onnx.TensorProto.FLOAT, [1]),
            "m: input 'x' is no tensor of numbers; expected one; "
            "run this model from Python, with mxfp8_ops.ort.session",
        ),
        (
            onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None),
            "m: input 'x' has no shape; expected one; export the model with shapes",
        ),
    ],
    ids=["strings", "sequence", "no shape"],
)
def test_an_input_that_cannot_be_made(value: onnx.ValueInfoProto, message: str) -> None:
    model = b.matmul_model()
    model.graph.input[0].CopyFrom(value)
    with pytest.raises(ShapeError) as caught:
        synthesise(model, where="m")
    assert str(caught.value) == message


# --- Given inputs ------------------------------------------------------------------------------------------------

TWO = {"ids": (np.int64, ["n", 3]), "x": (np.float32, ["n", 2])}
GOOD = {"ids": np.zeros((4, 3), np.int64), "x": np.zeros((4, 2), np.float32)}


def test_an_npz_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **GOOD)
    loaded = check_inputs(load_arrays(tmp_path / "data.npz"), input_specs(model_with(**TWO)), "d")
    assert {name: (a.shape, a.dtype) for name, a in loaded.items()} == {n: (a.shape, a.dtype) for n, a in GOOD.items()}


def test_bfloat16_may_be_stored_as_bits(tmp_path: Path) -> None:
    values = np.array([1.5, -2], ml_dtypes.bfloat16)
    np.savez(tmp_path / "data.npz", x=values.view(np.uint16))
    arrays = load_arrays(tmp_path / "data.npz")
    loaded = check_inputs(arrays, input_specs(model_with(x=(ml_dtypes.bfloat16, [2]))), "d")
    np.testing.assert_array_equal(loaded["x"], values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": None},
            "d: no array for input 'x'; expected ids int64 [n, 3], x float32 [n, 2]; name the arrays after the inputs",
        ),
        (
            {"z": np.zeros(1)},
            "d: no input called 'z'; expected ids int64 [n, 3], x float32 [n, 2]; name the arrays after the inputs",
        ),
        (
            {"x": np.zeros((4, 2))},
            "d: 'x' has dtype float64; expected float32; convert it first",
        ),
        (
            {"x": np.zeros((4, 5), np.float32)},
            "d: 'x' has shape [4, 5]; expected x float32 [n, 2]; reshape it",
        ),
        (
            {"x": np.zeros(8, np.float32)},
            "d: 'x' has shape [8]; expected x float32 [n, 2]; reshape it",
        ),
        (
            {"x": np.zeros((5, 2), np.float32)},
            "d: 'x' has n = 5 and 'ids' has n = 4; expected one size for both; correct one of them",
        ),
    ],
    ids=["missing", "unknown", "dtype", "size", "rank", "inconsistent"],
)
def test_given_inputs_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **change}.items() if array is not None}
    with pytest.raises(ShapeError) as caught:
        check_inputs(arrays, input_specs(model_with(**TWO)), "d")
    assert str(caught.value) == message


def write_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def write_pickle(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, ids=np.array([{"a": 1}], object))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "No such file or directory; expected a readable .npz file; check the path"),
        (
            lambda path: path.touch(),
            "No data left in file; expected an .npz file of plain arrays",
        ),
        (write_npy, "a single array; expected an .npz file of plain arrays, one per input; save it with numpy.savez"),
        (write_pickle, "Object arrays cannot be loaded when allow_pickle=False; expected an .npz file of plain arrays"),
        (
            lambda path: path.write_bytes(b"PK\x03\x04broken"),
            "File is not a zip file; expected an .npz file of plain arrays",
        ),
    ],
    ids=["missing", "empty", "npy", "pickle", "broken zip"],
)
def test_a_file_that_is_no_npz(tmp_path: Path, write: Any, message: str) -> None:
    path = tmp_path / "data.npz"
    write(path)
    with pytest.raises(ShapeError) as caught:
        load_arrays(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
