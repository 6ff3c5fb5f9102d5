"""Inputs: sizes and values that models accept, and what is said about those that do not fit."""

from typing import Any

import ml_dtypes
import models as b
import numpy as np
import onnx
import pytest
from grids import looped

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running.inputs import Inputs, Signature, check_inputs, make_inputs
from mxfp8_ops.errors import ShapeError


def synthesise(model: onnx.ModelProto, **settings: Any) -> Inputs:
    return make_inputs(signature(model), **settings)


def signature(model: onnx.ModelProto) -> Signature:
    loaded = load(model)
    loaded.meta["name"] = "m"
    return Signature.from_model(loaded)


def model_with(**inputs: tuple[Any, b.Shape]) -> onnx.ModelProto:
    """Returns a model with these inputs and an unrelated output."""
    nodes = [b.node("Shape", next(iter(inputs)), "size")]
    return b.model(nodes, inputs, {"size": (np.int64, [None])})


def indexing(text: str, *, rows: int = 50, **constants: np.ndarray) -> onnx.ModelProto:
    """Returns a model that makes "i" of the int64 input "ids", then y = table[i] with `rows` rows."""
    initializers = {"table": b.weight(rows, 4), **constants}
    nodes = b.steps(f"{text}; Gather table i>y")
    return b.model(nodes, {"ids": (np.int64, ["n", 3])}, {"y": (np.float32, [None, None])}, initializers)


def gathering(text: str, dtype: Any = np.float32, inputs: Any = None, **constants: np.ndarray) -> onnx.ModelProto:
    """Returns a model that makes "y" of the int64 input "ids" and others."""
    inputs = {"ids": (np.int64, [3]), **(inputs or {})}
    return b.model(b.steps(text), inputs, {"y": (dtype, [None, None])}, constants)


@looped(
    "inputs, shapes",
    [
        ({"x": []}, {"x": ()}),
        ({"x": ["batch", "sequence_length", 64]}, {"x": (2, 16, 64)}),
        ({"x": ["batch", "num_channels", "height", "width"]}, {"x": (2, 3, 224, 224)}),
        ({"x": [None, "s1", 5]}, {"x": (2, 16, 5)}),
        ({"x": ["2*batch", "sequence_length - 1"]}, {"x": (4, 15)}),
        ({"x": ["n", 4], "y": [7, "n"]}, {"x": (2, 4), "y": (7, 2)}),
    ],
)
def test_a_free_size_has_a_default_for_its_name(inputs: dict[str, b.Shape], shapes: dict[str, Any]) -> None:
    made = synthesise(model_with(**{name: (np.float32, dims) for name, dims in inputs.items()}))
    assert {name: array.shape for name, array in made.items()} == shapes


@looped("mask", ["past_sequence_length + sequence_length", "total_sequence_length", "attention_mask_length"])
def test_an_attention_mask_covers_past_and_present_and_positions_start_after_the_past(mask: str) -> None:
    tokens = (np.int64, ["batch", "sequence_length"])
    past = {"past_key_values.0.key": (np.float32, ["batch", 4, "past_sequence_length", 8])}
    inputs = synthesise(model_with(position_ids=tokens, attention_mask=(np.int64, ["batch", mask]), **past))
    assert inputs["past_key_values.0.key"].shape == (2, 4, 8, 8)
    assert inputs["attention_mask"].shape == (2, 8 + 16)
    np.testing.assert_array_equal(inputs["position_ids"], [list(range(8, 24))] * 2)


@looped("shapes, y", [({"batch": 0}, (0,)), ({"x.0": 0}, (4,))])
def test_a_size_of_the_user_enters_expressions(shapes: dict[str, int], y: tuple[int, ...]) -> None:
    inputs = synthesise(model_with(x=(np.float32, ["batch", 8]), y=(np.float32, ["2*batch"])), shapes=shapes)
    assert (inputs["x"].shape, inputs["y"].shape) == ((0, 8), y)


@looped("name, size", [("bath", 4), ("x.2", 4), ("seq", -1)])
def test_a_size_that_fits_nothing_is_refused(name: str, size: int) -> None:
    with pytest.raises(ShapeError) as caught:
        synthesise(model_with(x=(np.float32, ["batch", "seq", 64])), shapes={name: size})
    assert str(caught.value) == (
        f"m: size {name} = {size}; expected 0 or more, for one of batch, seq (or INPUT.AXIS); correct or drop shapes"
    )


def test_an_input_with_more_dimensions_than_numpy_has_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected one that fits in memory"):
        synthesise(model_with(x=(np.float32, [1] * 65)))


def test_the_same_seed_gives_the_same_inputs() -> None:
    model = b.language_model()
    first, second, other = (synthesise(model, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])
    assert (first["input_ids"] != other["input_ids"]).any()


def test_floats_are_normal_and_images_are_noise() -> None:
    x = synthesise(model_with(x=(ml_dtypes.bfloat16, [100, 100])))["x"]
    assert x.dtype == ml_dtypes.bfloat16
    # 10,000 values: the mean is within 5 standard errors of 0, the deviation within 5 of 1.
    assert abs(x.astype(np.float64).mean()) < 0.05
    assert abs(x.astype(np.float64).std() - 1) < 0.05
    pixels = synthesise(model_with(pixels=(np.uint8, [1, 3, 32, 32])))["pixels"]
    assert (pixels.min() < 5, pixels.max() > 250) == (True, True)


@looped("name, dtype", [("attention_mask", np.float32), ("flag", np.bool_), ("count", np.int32)])
def test_masks_flags_and_plain_integers_are_one(name: str, dtype: Any) -> None:
    x = synthesise(model_with(**{name: (dtype, [4, 4])}))[name]
    np.testing.assert_array_equal(x, np.ones((4, 4), dtype), strict=True)


def test_position_ids_stay_inside_their_table() -> None:
    inputs = synthesise(b.language_model(positions=10))
    np.testing.assert_array_equal(inputs["position_ids"][0], [*range(10), 9, 9, 9, 9, 9, 9])


def in_a_branch() -> onnx.ModelProto:
    y = b.value("y0", np.float32, [3, 4])
    branches = {
        f"{branch}_branch": onnx.helper.make_graph([b.node("Gather", f"{table} ids", "y0")], branch, [], [y])
        for branch, table in (("then", "table"), ("else", "tiny"))
    }
    tables = {"table": b.weight(50, 4), "tiny": b.weight(6, 4), "c": np.array(True)}
    nodes = [b.node("If", "c", "y", **branches)]
    return b.model(nodes, {"ids": (np.int64, [3])}, {"y": (np.float32, [None, None])}, tables)


def in_a_function() -> onnx.ModelProto:
    imports = [onnx.helper.make_opsetid("", 21)]
    lookup = onnx.helper.make_function("local", "Lookup", ["t", "i"], ["o"], [b.node("Gather", "t i", "o")], imports)
    graph = onnx.helper.make_graph(
        [b.node("Lookup", "table ids", "y", domain="local")],
        "g",
        [b.value("ids", np.int64, [3])],
        [b.value("y", np.float32, [3, 4])],
        [onnx.numpy_helper.from_array(b.weight(50, 4), "table")],
    )
    imports = [*imports, onnx.helper.make_opsetid("local", 1)]
    return onnx.helper.make_model(graph, functions=[lookup], opset_imports=imports, ir_version=b.IR_VERSION)


def packed_table() -> onnx.ModelProto:
    recipe = mxfp8_graph.Recipe(embeddings=True, min_dim=1)
    model, _ = mxfp8_graph.rewrite(indexing("Identity ids>i"), recipe)
    assert [n.op_type for n in model.graph.node] == ["Identity", "MXFP8Embedding"]
    return model


INDEXED: dict[str, tuple[onnx.ModelProto, dict[str, range]]] = {
    "through Cast": (indexing("Cast ids>i|to=6"), {"ids": range(50)}),
    "through Reshape": (indexing("Reshape ids flat>i", flat=np.array([-1])), {"ids": range(50)}),
    "through Concat": (indexing("Concat flat ids>i|axis=0", flat=np.array([[1, 1, 1]])), {"ids": range(50)}),
    "through Where": (indexing("Where c ids zero>i", c=np.array(True), zero=np.array(0)), {"ids": range(50)}),
    "through Slice": (indexing("Slice ids at end>i", at=np.array([0]), end=np.array([1])), {"ids": range(50)}),
    "into the smallest of two tables": (
        indexing("Identity ids>i; Gather small ids>z", small=b.weight(5, 2)), {"ids": range(5)}
    ),
    "into a packed table": (packed_table(), {"ids": range(50)}),
    "into a table that is computed": (
        gathering("Transpose w>table; Gather table ids>y|axis=1", w=b.weight(50, 4)), {"ids": range(50)}
    ),
    "into a table of unknown length": (
        gathering("Gather x ids>y", inputs={"x": (np.float32, ["n", 4])}), {"ids": range(1)}
    ),
    "in a branch": (in_a_branch(), {"ids": range(6)}),
    "in a local function": (in_a_function(), {"ids": range(50)}),
    "not where it is gathered from": (gathering("Gather ids first>y", np.int64, first=np.array([[0]])), {}),
    "not where it is a mask that is counted": (indexing("CumSum ids axis>i", axis=np.array(1)), {}),
}  # fmt: skip


@looped("where", INDEXED)
def test_indices_stay_inside_their_table(where: str) -> None:
    model, ranges = INDEXED[where]
    assert signature(model).ranges == ranges


def test_a_table_that_a_caller_may_replace_counts_as_it_is() -> None:
    model = indexing("Identity ids>i")
    model.graph.input.append(b.value("table", np.float32, ["n", 4]))
    found = signature(model)
    assert (found.ranges, [spec.name for spec in found.specs]) == ({"ids": range(50)}, ["ids"])


@looped(
    "value",
    [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [1]),
        onnx.helper.make_tensor_sequence_value_info("x", onnx.TensorProto.FLOAT, [1]),
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None),
    ],
)
def test_an_input_that_cannot_be_made_is_an_error(value: onnx.ValueInfoProto) -> None:
    model = b.matmul_model()
    model.graph.input[0].CopyFrom(value)
    with pytest.raises(ShapeError, match=r"^m: input 'x' is no tensor of numbers with a shape; expected one; export"):
        synthesise(model)


TWO = {"ids": (np.int64, ["n", 3]), "x": (ml_dtypes.bfloat16, ["n", None])}
GOOD = {"x": np.zeros((4, 2), np.uint16), "ids": np.zeros((4, 3), np.int64)}


def test_bfloat16_may_be_stored_as_bits() -> None:
    loaded = check_inputs(GOOD, signature(model_with(**TWO)).specs, "d")
    assert {name: a.dtype for name, a in loaded.items()} == {"ids": np.int64, "x": ml_dtypes.bfloat16}


ALL = "expected ids int64 [n, 3], x bfloat16 [n, ?]; name the arrays after the inputs"


@looped(
    "change, message",
    [
        ({"x": None}, f"no array for input 'x'; {ALL}"),
        ({"z": np.zeros(1)}, f"no input called 'z'; {ALL}"),
        ({"x": np.zeros((4, 2), np.float32)}, "x float32 [4, 2]; expected x bfloat16 [n, ?]; convert or reshape it"),
        ({"ids": np.zeros((4, 5), int)}, "ids int64 [4, 5]; expected ids int64 [n, 3]; convert or reshape it"),
        ({"ids": np.zeros(8, int)}, "ids int64 [8]; expected ids int64 [n, 3]; convert or reshape it"),
        (
            {"x": np.zeros((5, 2), np.uint16)},
            "'x' has n = 5 and 'ids' has n = 4; expected one size for both; correct one of them",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **change}.items() if array is not None}
    with pytest.raises(ShapeError) as caught:
        check_inputs(arrays, signature(model_with(**TWO)).specs, "d")
    assert str(caught.value) == f"d: {message}"
