"""Inputs: sizes and values that models accept, and what is said about those that do not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import builders as b
import ml_dtypes
import numpy as np
import onnx
import pytest

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running.inputs import Inputs, Signature, check_inputs, make_inputs
from mxfp8_ops.errors import ShapeError


def synthesise(model: onnx.ModelProto, *, where: str = "model", **settings: Any) -> Inputs:
    """Returns inputs for a model."""
    return make_inputs(signature(model, where), **settings)


def signature(model: onnx.ModelProto, where: str = "model") -> Signature:
    loaded = load(model)
    loaded.meta["name"] = where
    return Signature.of(loaded)


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
        ([], ()),
        (["batch", "sequence_length", 64], (2, 16, 64)),
        (["batch", "num_channels", "height", "width"], (2, 3, 224, 224)),
        ([None, "s1", 5], (2, 16, 5)),
        (["2*batch", "sequence_length - 1"], (4, 15)),
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


@pytest.mark.parametrize("shapes", [{"batch": 0}, {"x.0": 0}], ids=str)
def test_a_size_of_the_user_enters_expressions(shapes: dict[str, int]) -> None:
    inputs = synthesise(model_with(x=(np.float32, ["batch", 8]), y=(np.float32, ["2*batch"])), shapes=shapes)
    assert inputs["x"].shape == (0, 8)
    assert inputs["y"].shape == ((0,) if "batch" in shapes else (4,))


@pytest.mark.parametrize("shapes", [{"bath": 4}, {"x.2": 4}, {"seq": -1}], ids=str)
def test_a_size_that_fits_nothing(shapes: dict[str, int]) -> None:
    with pytest.raises(ShapeError) as caught:
        synthesise(model_with(x=(np.float32, ["batch", "seq", 64])), shapes=shapes, where="m")
    ((name, size),) = shapes.items()
    assert str(caught.value) == (
        f"m: size {name} = {size}; expected 0 or more, for one of batch, seq (or INPUT.AXIS); correct or drop shapes"
    )


def test_more_dimensions_than_numpy_has() -> None:
    with pytest.raises(ShapeError, match="expected one that fits in memory"):
        synthesise(model_with(x=(np.float32, [1] * 65)))


# --- Values ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_inputs() -> None:
    model = b.language_model()
    first, second, other = (synthesise(model, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])
    assert (first["input_ids"] != other["input_ids"]).any()


def test_floats_are_normal() -> None:
    x = synthesise(model_with(x=(ml_dtypes.bfloat16, [100, 100])))["x"]
    assert x.dtype == ml_dtypes.bfloat16
    # 10,000 values: the mean is within 5 standard errors of 0, the deviation within 5 of 1.
    assert abs(x.astype(np.float64).mean()) < 0.05
    assert abs(x.astype(np.float64).std() - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("attention_mask", np.float32), ("flag", np.bool_), ("count", np.int32)],
)
def test_masks_flags_and_plain_integers_are_one(name: str, dtype: Any) -> None:
    x = synthesise(model_with(**{name: (dtype, [4, 4])}))[name]
    np.testing.assert_array_equal(x, np.ones((4, 4), dtype), strict=True)


def test_images_are_noise() -> None:
    x = synthesise(model_with(pixels=(np.uint8, [1, 3, 32, 32])))["pixels"]
    assert (x.min() < 5, x.max() > 250) == (True, True)


def test_position_ids_stay_inside_their_table() -> None:
    inputs = synthesise(b.language_model(positions=10))
    np.testing.assert_array_equal(inputs["position_ids"][0], [*range(10), 9, 9, 9, 9, 9, 9])


@pytest.mark.parametrize(
    "model",
    [
        indexing([b.node("Cast", "ids", "i", to=onnx.TensorProto.INT32)]),
        indexing([b.node("Reshape", "ids flat", "i")], flat=np.array([-1])),
        indexing([b.node("Concat", "flat ids", "i", axis=0)], flat=np.array([[1, 1, 1]])),
        indexing([b.node("Where", "c ids zero", "i")], c=np.array(True), zero=np.array(0)),
        indexing([b.node("Slice", "ids at end", "i")], at=np.array([0]), end=np.array([1])),
    ],
    ids=["Cast", "Reshape", "Concat", "Where", "Slice"],
)
def test_indices_are_followed_through(model: onnx.ModelProto) -> None:
    assert index_ranges(model) == {"ids": range(50)}


def test_the_smallest_table_counts() -> None:
    model = indexing([b.node("Identity", "ids", "i"), b.node("Gather", "small ids", "z")], small=b.weight(5, 2))
    assert index_ranges(model) == {"ids": range(5)}


def test_a_packed_table_counts() -> None:
    model, _ = mxfp8_graph.rewrite(
        indexing([b.node("Identity", "ids", "i")]), mxfp8_graph.Recipe(embeddings=True, min_dim=1)
    )
    assert [n.op_type for n in model.graph.node] == ["Identity", "MXFP8Embedding"]
    assert index_ranges(model) == {"ids": range(50)}


def test_a_table_that_is_computed_has_its_inferred_shape() -> None:
    nodes = [b.node("Transpose", "w", "table"), b.node("Gather", "table ids", "y", axis=1)]
    model = b.model(nodes, {"ids": (np.int64, [3])}, {"y": (np.float32, [None, None])}, {"w": b.weight(50, 4)})
    assert index_ranges(model) == {"ids": range(50)}


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


def test_a_table_that_a_caller_may_replace_counts_as_it_is() -> None:
    model = indexing([b.node("Identity", "ids", "i")])
    model.graph.input.append(b.value("table", np.float32, ["n", 4]))
    assert index_ranges(model) == {"ids": range(50)}
    assert [spec.name for spec in signature(model).specs] == ["ids"]


def test_what_is_gathered_from_is_not_an_index() -> None:
    nodes = [b.node("Gather", "ids first", "y")]
    model = b.model(nodes, {"ids": (np.int64, [3, 4])}, {"y": (np.int64, [None, None])}, {"first": np.array([0])})
    assert index_ranges(model) == {}


def test_a_mask_that_is_counted_is_not_an_index() -> None:
    nodes = [b.node("CumSum", "ids axis", "i")]
    assert index_ranges(indexing(nodes, axis=np.array(1))) == {}


# --- What a model takes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [1]),
        onnx.helper.make_tensor_sequence_value_info("x", onnx.TensorProto.FLOAT, [1]),
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None),
    ],
    ids=["strings", "sequence", "no shape"],
)
def test_an_input_that_cannot_be_made(value: onnx.ValueInfoProto) -> None:
    model = b.matmul_model()
    model.graph.input[0].CopyFrom(value)
    with pytest.raises(ShapeError, match=r"^m: input 'x' is no tensor of numbers with a shape; expected one; export"):
        synthesise(model, where="m")


TWO = {"ids": (np.int64, ["n", 3]), "x": (ml_dtypes.bfloat16, ["n", None])}
GOOD = {"x": np.zeros((4, 2), np.uint16), "ids": np.zeros((4, 3), np.int64)}


def test_bfloat16_may_be_stored_as_bits() -> None:
    loaded = check_inputs(GOOD, signature(model_with(**TWO)).specs, "d")
    assert {name: a.dtype for name, a in loaded.items()} == {"ids": np.int64, "x": ml_dtypes.bfloat16}


ALL = "expected ids int64 [n, 3], x bfloat16 [n, ?]; name the arrays after the inputs"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, f"d: no array for input 'x'; {ALL}"),
        ({"z": np.zeros(1)}, f"d: no input called 'z'; {ALL}"),
        (
            {"x": np.zeros((4, 2), np.float32)},
            "d: x float32 [4, 2]; expected x bfloat16 [n, ?]; convert or reshape it",
        ),
        ({"ids": np.zeros((4, 5), int)}, "d: ids int64 [4, 5]; expected ids int64 [n, 3]; convert or reshape it"),
        ({"ids": np.zeros(8, int)}, "d: ids int64 [8]; expected ids int64 [n, 3]; convert or reshape it"),
        (
            {"x": np.zeros((5, 2), np.uint16)},
            "d: 'x' has n = 5 and 'ids' has n = 4; expected one size for both; correct one of them",
        ),
    ],
    ids=["missing", "unknown", "dtype", "size", "rank", "inconsistent"],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **change}.items() if array is not None}
    with pytest.raises(ShapeError) as caught:
        check_inputs(arrays, signature(model_with(**TWO)).specs, "d")
    assert str(caught.value) == message
