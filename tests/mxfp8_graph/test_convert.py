"""Models of other dialects, read and written: same bytes, same outputs; losses are reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders as b
import dialect_models as d
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import oracle
import pytest
import trt_rules
from commands import refused, run
from grids import looped, pairwise
from onnx import TensorProto, helper, numpy_helper
from releases import release

import mxfp8_graph
from mxfp8_graph.onnx_pass import save
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.tools import dialects
from mxfp8_ops import numerics, numpy_nodes
from mxfp8_ops.errors import ContractError

LOSSES = {"qdq": ["activations"], "ort-cuda": ["activations", "half"], "nbits": ["activations"]}


def violations(proto: onnx.ModelProto) -> list[str]:
    return trt_rules.violations(ir.from_proto(proto))


def codes_of(model: Any) -> dict[str, tuple[bytes, bytes]]:
    """Returns the bytes of elements and scales by weight, both [..., N, K]."""
    weights = mxfp8_graph.unpack(model)
    return {name: (w.elements.tobytes(), w.scales.tobytes()) for name, w in weights.items()}


def x_of(*shape: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"x": oracle.normal(*shape, dtype=dtype)}


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


@pytest.mark.usefixtures("own_folder")
def test_a_result_that_no_one_could_load_is_a_defect_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = dialects.convert.__globals__
    write = inside["_to_other"]

    def lose_a_node(edit: Any, *rest: Any) -> dict[str, Any]:
        facts = write(edit, *rest)
        edit.model.graph.remove(edit.model.graph[0])
        return facts

    monkeypatch.setitem(inside, "_to_other", lose_a_node)
    b.save(mxfp8_graph.rewrite(b.matmul_model())[0], Path("m.onnx"))
    said = refused("convert", "m.onnx", "--to", "standard", code=70)
    assert said.startswith("internal error: RuntimeError: m.onnx: node ")
    assert "is not defined, in the result, which is not written" in said


# --- There and back ------------------------------------------------------------------------------------------------

MODELS = {
    "chain": (lambda: b.chain_model((64, 128, 64)), (5, 64)),
    "bias": (lambda: b.matmul_model(bias=True), (2, 5, 64)),
    "gemm": (b.gemm_model, (5, 64)),
    "attention": (b.attention_model, (2, 5, 64)),
    "float16": (lambda: b.matmul_model(dtype=np.float16, bias=True), (2, 5, 64)),
}
RECIPES, DIALECTS = ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only"), ("trt", "qdq", "standard", "ort-cuda")
INT8_RECIPES, INT8_DIALECTS = ("mxint8", "mxint8-weight-only"), ("qdq", "standard", "nbits")


@functools.cache
def rewritten(name: str, recipe: str = "mxfp8") -> onnx.ModelProto:
    return mxfp8_graph.rewrite(MODELS[name][0](), recipe)[0]


@looped(
    "name, recipe, to",
    [
        *pairwise(name=tuple(MODELS), recipe=RECIPES, to=DIALECTS),
        *pairwise(name=tuple(MODELS), recipe=INT8_RECIPES, to=INT8_DIALECTS),
    ],
)
def test_there_and_back(name: str, recipe: str, to: str) -> None:
    before = rewritten(name, recipe)
    there, report = mxfp8_graph.convert(before, to, allow=LOSSES.get(to, ()))
    assert not any(node.domain == "mxfp8" for node in there.graph.node)
    assert to != "trt" or violations(there) == []
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    assert codes_of(back) == codes_of(before)
    oracle.check_well_formed(back)
    feeds = x_of(*MODELS[name][1], dtype=numpy_dtype(before))
    if any(loss.startswith("activations are") and "quantized" in loss for loss in report.losses):
        before = rewritten(name, f"{recipe.partition('-')[0]}-weight-only")  # then it is the model of weights alone
        assert codes_of(back) == codes_of(before)
    # A float32 sum in another order, perhaps a bfloat16 the other way; operands of attention rounded to bfloat16.
    assert relative(oracle.run(back, feeds)[0], oracle.run(before, feeds)[0]) < 1e-2


@looped("recipe", ["mxfp8", "mxfp8-weight-only"])
def test_what_a_model_says_of_its_values_stays(recipe: str) -> None:
    """Of its output, and of one value in front of that, as long as there is one."""
    nodes = [b.node("MatMul", "x w", "g"), b.node("Relu", "g", "h")]
    nodes += [b.node("MatMul", "h w", "i"), b.node("Relu", "i", "y")]
    values = ({name: (np.float32, ["n", 64])} for name in "xy")
    original = b.model(nodes, *values, {"w": b.weight(64, 64)})
    graph = original.graph
    graph.output[0].doc_string = "about y"
    graph.output[0].metadata_props.add(key="about", value="y")
    for name in "y" if recipe == "mxfp8" else "hy":  # there h is only quantized, as an output of the gemm
        graph.quantization_annotation.add(tensor_name=name).quant_parameter_tensor_names.add(
            key="SCALE_TENSOR", value="w"
        )
    before, _ = mxfp8_graph.rewrite(original, recipe)
    assert before.graph.node[-1].op_type.startswith("MXFP8Fused")
    for said in (before, *(mxfp8_graph.convert(before, to)[0] for to in ("trt", "standard"))):
        assert said.graph.output == graph.output
        annotated = {entry.tensor_name: entry for entry in said.graph.quantization_annotation}
        assert annotated == {entry.tensor_name: entry for entry in graph.quantization_annotation}


def numpy_dtype(proto: onnx.ModelProto) -> Any:
    return helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)


def test_external_data_stays_external_and_is_the_same(tmp_path: Path) -> None:
    path = b.save(b.chain_model((64, 128, 64)), tmp_path / "m.onnx", external=True)
    before, _ = mxfp8_graph.rewrite(path)
    there, _ = mxfp8_graph.convert(before, "trt")
    assert there == tmp_path / "m.mxfp8.trt.onnx"
    assert there.with_name(f"{there.name}.data").is_file()
    assert codes_of(there) == codes_of(before)


def test_an_old_output_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = mxfp8_graph.rewrite(b.save(b.chain_model((64, 128, 64)), tmp_path / "m.onnx", external=True))
    mxfp8_graph.convert(before, "trt")
    opened: list[Path] = []
    monkeypatch.setattr(save, "load", lambda path: opened.append(path) or load(path))  # type: ignore[func-returns-value]
    there, _ = mxfp8_graph.convert(before, "trt", overwrite=True)
    assert opened == [there]


# --- What others wrote ---------------------------------------------------------------------------------------------

PACKED = d.packed(d.N, d.K)
BIAS = b.weight(d.N, seed=1)
ONE_LAYER = {"MXFP8Quantize": 1, "MXFP8Gemm": 1}


def product(x: np.ndarray, codes: Any = PACKED) -> np.ndarray:
    return x.astype(np.float64) @ numpy_nodes.dequantize(*codes).astype(np.float64).T


def gelu(x: np.ndarray) -> np.ndarray:
    shape = (x.dtype, x.shape)
    nodes = [b.node("Gelu", "x", "y", approximate="tanh")]
    return oracle.run(b.model(nodes, {"x": shape}, {"y": shape}), {"x": x})[0].astype(np.float32)


def quarks(x: np.ndarray) -> np.ndarray:
    codes = numpy_nodes.quantize(b.weight(d.K, d.N).T, scale_rounding="floor")
    return np.maximum(product(oracle.quantized(x, scale_rounding="floor"), codes), 0)


def of_modelopt(x: np.ndarray) -> np.ndarray:
    return product(oracle.quantized(gelu(x))) + BIAS.astype(x.dtype)


THEIRS: dict[str, tuple[Callable[[], onnx.ModelProto], str, dict[str, int], Callable[[np.ndarray], np.ndarray]]] = {
    "modelopt": (d.modelopt, "trt", {"Gelu": 1, **ONE_LAYER}, of_modelopt),
    "modelopt in float16": (
        lambda: d.modelopt(dtype=np.float16), "trt", {"Gelu": 1, "Cast": 1, **ONE_LAYER}, of_modelopt
    ),
    "TransformerEngine": (
        d.transformer_engine, "trt", {"MXFP8Quantize": 1, "MXFP8FusedGemm": 1},
        lambda x: np.maximum(product(oracle.quantized(x)), 0),
    ),
    "the CUDA op of ONNX Runtime": (
        d.ort_cuda, "ort-cuda", {"MXFP8WeightGemm": 1, "Cast": 1, "CastLike": 1},
        lambda x: product(x) + BIAS.astype(np.float16),
    ),
    "quark": (d.quark, "quark", {"MXFP8Quantize": 1, "MXFP8FusedGemm": 1}, quarks),
    **{
        f"qdq, scales {scales}, rows {'last' if last else 'first'}": (
            functools.partial(d.qdq, scales, rows_last=last), "qdq", {"MXFP8FusedWeightGemm": 1},
            lambda x: np.maximum(product(x), 0),
        )
        for scales, last in pairwise(scales=("e8m0", "cast", "float32", "float16"), last=(True, False))
    },
}  # fmt: skip


@looped("name", THEIRS)
def test_what_other_tools_wrote_is_read(name: str) -> None:
    build, dialect, kinds, expected = THEIRS[name]
    theirs = build()
    before = theirs.SerializeToString()
    ours, report = mxfp8_graph.convert(theirs, "mxfp8")
    assert theirs.SerializeToString() == before
    found = {"weights": 1, "activations": int(dialect in {"trt", "quark"})}
    assert report.to_dict()["found"] == {dialect: found}
    assert oracle.kinds(ours) == kinds
    assert (report.gemms, report.fusions) == (1, int(any("Fused" in kind for kind in kinds)))
    elements, codes = numpy_nodes.quantize(b.weight(d.K, d.N).T, scale_rounding="floor") if name == "quark" else PACKED
    assert list(codes_of(ours).values()) == [(elements.tobytes(), codes.tobytes())]
    assert dialect not in {"trt", "ort-cuda"} or [*codes_of(ours)] == ["up.weight" if "modelopt" in name else "w"]
    x = oracle.normal(2, 5, d.K, dtype=numpy_dtype(theirs))
    (actual,) = oracle.run(ours, {"x": x})
    assert actual.dtype == x.dtype
    assert relative(actual, expected(x)) < (1e-6 if x.dtype == np.float32 else 1e-2 if dialect == "trt" else 1e-3)
    assert any("modelopt" in note for note in report.notes) == (name == "modelopt")


def test_static_activations_keep_their_scales() -> None:
    theirs = d.static_activation()
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert oracle.kinds(ours)["QuantizeLinear"] == 1
    x = oracle.normal(3, d.K)
    scales = np.repeat(np.exp2(np.array([120, 121]) - 127.0), 32).astype(np.float32)
    seen = np.clip(x / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    assert relative(oracle.run(ours, {"x": x})[0], np.maximum(product(seen), 0)) < 1e-6
    node = next(n for n in ours.graph.node if n.op_type == "QuantizeLinear")
    node.attribute.append(helper.make_attribute("saturate", 0))  # which TensorRT's op cannot say
    there, _ = mxfp8_graph.convert(ours, "trt")
    assert oracle.kinds(there)["QuantizeLinear"] == 1


def dequantized(nodes: list[onnx.NodeProto], codes: Any, axis: int, tensors: Any = (), **settings: Any) -> Any:
    """Returns a model of nodes behind wd, which is dequantized from the codes."""
    first = b.node("DequantizeLinear", "w s", "wd", axis=axis, block_size=32)
    stored = [d.stored("w", d.E4M3, codes[0]), numpy_helper.from_array(numerics.decode_scale(codes[1]), "s"), *tensors]
    return d.made([first, *nodes], stored, opset=24, ir_version=12, **settings)


@looped("settings", [{}, {"alpha": 0.5}, {"beta": 2.0}, {"transA": 1}])
def test_a_gemm_with_factors_stays_one(settings: dict[str, Any]) -> None:
    nodes = [b.node("Gemm", "x wd b", "m", transB=1, **settings), b.node("Relu", "m", "y")]
    shape = [d.K, 5] if "transA" in settings else [5, d.K]
    theirs = dequantized(nodes, PACKED, -1, [numpy_helper.from_array(BIAS, "b")], x=shape)
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert ("Gemm" in oracle.kinds(ours)) == bool(settings)
    x = oracle.normal(*shape)
    y = settings.get("alpha", 1.0) * product(x.T if "transA" in settings else x)
    y = y + settings.get("beta", 1.0) * BIAS.astype(np.float64)
    assert relative(oracle.run(ours, {"x": x})[0], np.maximum(y, 0)) < 1e-6


@looped("turned", [True, False])
def test_a_weight_packed_along_n_is_no_operand_of_a_gemm(turned: bool) -> None:
    axis = 0 if turned else -1
    codes = d.packed(*((d.N, d.K) if turned else (d.K, d.N)), axis=axis)
    nodes = [b.node("Transpose", "wd", "wt", perm=[1, 0])] * turned
    nodes += [b.node("MatMul", "x wt" if turned else "x wd", "m"), b.node("Relu", "m", "y")]
    ours, report = mxfp8_graph.convert(dequantized(nodes, codes, axis), "mxfp8")
    assert (report.gemms, len(report.kept)) == (0, 1)
    feeds, values = x_of(2, 5, d.K), numpy_nodes.dequantize(*codes, axis=axis).astype(np.float64)
    y = np.maximum(feeds["x"].astype(np.float64) @ (values.T if turned else values), 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6


@looped("blocks, axis", [(-1, 0), (-1, 1), (0, 0)])
def test_a_lookup_of_rows_packed_along_them_is_an_embedding(blocks: int, axis: int) -> None:
    codes, ids = d.packed(d.N, d.K, axis=blocks), np.array([3, 0, 63])
    nodes = [b.node("Gather", "wd ids", "rows", axis=axis), b.node("Add", "rows x", "y")]
    x = oracle.normal(*([3, d.K] if axis == 0 else [d.N, 3]))
    theirs = dequantized(nodes, codes, blocks, [numpy_helper.from_array(ids, "ids")], x=x.shape)
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert ("MXFP8Embedding" in oracle.kinds(ours)) == ((blocks, axis) == (-1, 0))
    table = numpy_nodes.dequantize(*codes, axis=blocks)
    np.testing.assert_array_equal(oracle.run(ours, {"x": x})[0], np.take(table, ids, axis) + x)


@looped("dtype", [TensorProto.INT32, TensorProto.FLOAT16, TensorProto.DOUBLE, None])
def test_only_a_cast_that_changes_no_value_on_the_way_to_the_product_goes(dtype: int | None) -> None:
    dtypes = [TensorProto.FLOAT] if dtype is None else [dtype, TensorProto.FLOAT]
    nodes = [b.node("Cast", f"wd{i}" if i else "wd", f"wd{i + 1}", to=each) for i, each in enumerate(dtypes)]
    nodes += [b.node("Transpose", f"wd{len(dtypes)}", "wt", perm=[1, 0]), b.node("MatMul", "x wt", "y")]
    theirs = dequantized(nodes, PACKED, -1, x=[3, d.K])
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert ("Cast" in oracle.kinds(ours)) == (dtype is not None)
    actual, expected = (oracle.run(model, x_of(3, d.K))[0] for model in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@looped("to", ["trt", "qdq", "standard"])
def test_attributes_that_a_node_leaves_out_have_the_contracts_defaults(to: str) -> None:
    bare = copied(rewritten("chain"))
    for node in bare.graph.node:
        if node.op_type in {"MXFP8Quantize", "MXFP8Gemm"}:
            del node.attribute[:]
    one, other = (mxfp8_graph.convert(model, to, allow=LOSSES.get(to, ()))[0] for model in (rewritten("chain"), bare))
    feeds = x_of(5, 64)
    assert oracle.kinds(one) == oracle.kinds(other)
    if to != "trt":
        np.testing.assert_array_equal(oracle.run(one, feeds)[0], oracle.run(other, feeds)[0])


# --- What is refused -----------------------------------------------------------------------------------------------


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


def edited(model: onnx.ModelProto, edit: Callable[[onnx.GraphProto], object]) -> onnx.ModelProto:
    edit(model.graph)
    return model


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def with_attribute(model: onnx.ModelProto, at: int, name: str, value: Any) -> onnx.ModelProto:
    node = model.graph.node[at]
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
    return model


def flat_scales(graph: onnx.GraphProto) -> None:
    """Gives stored scales of rank 2 one axis."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            tensor.dims[:] = [int(np.prod(tensor.dims))]


def unfinished(graph: onnx.GraphProto) -> None:
    graph.initializer[0].CopyFrom(numpy_helper.from_array(b.weight(d.N, d.K), "up.weight"))


def too_many_inputs(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.domain)
    node.input.extend(["x"] * (6 - len(node.input)))


def zero_point(dialect: str, code: int = 0) -> onnx.ModelProto:
    if dialect == "qdq":
        return d.with_zero_point(d.qdq(), "w", d.stored("z", d.E4M3, np.full((96, 2), code, np.uint8)))
    return d.with_zero_point(d.modelopt(), "up.weight", d.stored("z", 2, np.full((), code, np.uint8)))


def computed_zero_point(graph: onnx.GraphProto) -> None:
    graph.node.insert(0, b.node("Abs", "z", "computed"))
    next(n for n in graph.node if n.op_type == "DequantizeLinear").input[2] = "computed"


REFUSED: dict[str, Callable[[], onnx.ModelProto]] = {
    "block_size 128": lambda: d.ort_cuda(block_size=128),
    "not stored powers of two": lambda: d.ort_cuda(wrong=1.5),
    "are not stored powers of two": lambda: d.qdq("float32", wrong=1.25),
    "float8 with block_size 16": lambda: d.qdq("float32", block_size=16),
    "int8 in blocks of 32": lambda: d.quark("int8"),
    r"scales \[192\] for elements \[96, 64\]": lambda: edited(d.ort_cuda(), flat_scales),
    r"DequantizeLinear\)": lambda: b.model(
        [
            b.node("QuantizeLinear", "x s", "q", axis=-1, block_size=32, output_dtype=TensorProto.UINT8),
            b.node("DequantizeLinear", "q s", "y", axis=-1, block_size=32),
        ],
        {"x": (np.float32, [3, 64])},
        {"y": (np.float32, [3, 64])},
        {"s": np.full((3, 2), 0.25, np.float32)},
    ),
    r"QuantizeLinear\)": lambda: b.model(
        [b.node("QuantizeLinear", "x s z", "q"), b.node("DequantizeLinear", "q s z", "y")],
        {"x": (np.float32, [4])},
        {"y": (np.float32, [4])},
        {"s": np.float32(0.1), "z": np.int8(0)},
    ),
    "it has nothing in MXFP8": b.chain_model,
    "'up.weight' is float; .* finish the export": lambda: edited(d.modelopt(), unfinished),
    r"\(TRT_MXFP8DequantizeLinear\): inputs \['up.weight'\]": lambda: edited(
        d.modelopt(), lambda graph: graph.node[3].input.pop()
    ),
    r"\(TRT_MXFP8DequantizeLinear\): axis 7": lambda: with_attribute(d.modelopt(), 3, "axis", 7),
    r"\(TRT_MXFP8DequantizeLinear\): block_size of another type": lambda: with_attribute(
        d.modelopt(), 3, "block_size", "32"
    ),
    "node 'DequantizeLinear_wd' .*: zero point 'z'; expected none, or stored": lambda: zero_point("qdq", 0x38),
    "node 'wd' .*: zero point 'z'; expected none, or stored zeros": lambda: zero_point("trt", 0x38),
    "zero point 'computed'; expected none, or stored zeros": lambda: edited(zero_point("qdq"), computed_zero_point),
    "attribute 'saturate'; expected axis, block_size": lambda: with_attribute(d.modelopt(), 3, "saturate", 0),
    "attribute 'accuracy_level'; expected block_size alone": lambda: with_attribute(
        d.ort_cuda(), 0, "accuracy_level", 1
    ),
    "attribute 'scale_bits'; expected axis": lambda: with_attribute(d.quark(), 1, "scale_bits", 4),
    r"rounding_mode 0, scales of e8m0; expected 2 \(ties to even\)": lambda: with_attribute(
        d.quark(), 1, "rounding_mode", 0
    ),
    "scales of e5m3; expected 2": lambda: with_attribute(d.quark(), 1, "scale_dtype", "e5m3"),
    r"inputs \[.*'x'\], outputs .*; expected 1": lambda: edited(d.modelopt(), too_many_inputs),
    r"inputs \[.*'x'\], outputs .*; expected 3": lambda: edited(d.ort_cuda(), too_many_inputs),
    r"\(MXQuantizeDequantize\): inputs \[.*'x'\], outputs .*; expected 1": lambda: edited(d.quark(), too_many_inputs),
}


@looped("message", REFUSED)
def test_what_is_not_mxfp8_is_refused(message: str) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.convert(REFUSED[message](), "mxfp8")


@looped("dialect", ["qdq", "trt"])
def test_a_zero_point_of_zeros_counts_for_nothing(dialect: str) -> None:
    plain, zeros = {"qdq": d.qdq, "trt": d.modelopt}[dialect](), zero_point(dialect)
    assert codes_of(mxfp8_graph.convert(zeros, "mxfp8")[0]) == codes_of(mxfp8_graph.convert(plain, "mxfp8")[0])


@looped("name", ["epilogue", "scale_rounding"])
def test_a_node_of_ours_with_an_unknown_value_is_refused(name: str) -> None:
    ours = copied(rewritten("chain"))
    node = next(n for n in ours.graph.node if any(a.name == name for a in n.attribute))
    attribute(node, name).s = b"nothing"
    with pytest.raises(ContractError, match=rf"node '{node.name}' .*'nothing'; expected one of"):
        mxfp8_graph.convert(ours, "standard")


def test_scales_of_another_size_are_refused() -> None:
    ours, _ = mxfp8_graph.rewrite(b.matmul_model(dtype=np.float16), "mxfp8-weight-only")
    scales = next(tensor for tensor in ours.graph.initializer if tensor.data_type == TensorProto.UINT8)
    scales.data_type, scales.raw_data = TensorProto.UINT4, scales.raw_data[::2]
    with pytest.raises(ContractError, match="tensor 'w_mxfp8_scales': is uint4; expected elements or scales of 8 bits"):
        mxfp8_graph.convert(ours, "ort-cuda")


@looped(
    "to, recipe, message",
    [
        ("qdq", "mxfp8", "quantizes at run time, which this dialect cannot express"),
        ("ort-cuda", "mxfp8-weight-only", "takes float16 and bfloat16"),
        ("ort-cuda", "mxfp8", "quantizes at run time"),
        ("nbits", "mxint8", "quantizes at run time"),
        ("trt", "ocp", "scale_rounding 'floor', and TensorRT rounds scales of activations up"),
    ],
)
def test_what_a_dialect_cannot_say_is_an_error(to: str, recipe: str, message: str) -> None:
    ours = rewritten("chain", recipe)
    with pytest.raises(ContractError, match=f'{message}.*allow="'):
        mxfp8_graph.convert(ours, to)
    _, report = mxfp8_graph.convert(ours, to, allow=["activations", "rounding", "half"])
    assert report.losses


def integers(weight: np.ndarray) -> onnx.ModelProto:
    """Returns y = relu(x @ w) with MXINT8 weights; x is [3, K] or [.., 3, K]."""
    *batch, k, n = weight.shape
    shapes = {"x": (np.float32, [*batch, 3, k])}, {"y": (np.float32, [*batch, 3, n])}
    model = b.model([b.node("MatMul", "x w", "h"), b.node("Relu", "h", "y")], *shapes, {"w": weight})
    return mxfp8_graph.rewrite(model, "mxint8-weight-only")[0]


def in_stock(model: onnx.ModelProto, feeds: dict[str, np.ndarray], level: int | None = None) -> np.ndarray:
    """Returns the first output of ONNX Runtime, whose fused Q/DQ has this accuracy_level."""
    options = onnxruntime.SessionOptions()
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    return np.asarray(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)[0])


@looped("to, k", [(to, k) for to in INT8_DIALECTS for k in (64, 70)])
def test_stock_onnx_runtime_runs_mxint8_weights(to: str, k: int) -> None:
    """Blocks of zeros too, whose scales are below what E8M0 can store for integers."""
    weight = b.weight(k, 33)
    weight[:32] = 0
    ours = integers(weight)
    there, _ = mxfp8_graph.convert(ours, to, **({"accuracy_level": 0} if to == "nbits" else {}))
    assert all(node.domain != "mxfp8" for node in there.graph.node)
    feeds = x_of(3, k)
    # A float32 sum in another order.
    assert relative(in_stock(there, feeds, level=0), oracle.run(ours, feeds)[0]) < 1e-6
    assert codes_of(mxfp8_graph.convert(there, "mxfp8")[0]) == codes_of(ours)


@looped("to, k", [(to, k) for to in ("qdq", "nbits") for k in (64, 70)])
def test_int8_activations_of_onnx_runtime_are_as_far_off_as_int8_is(to: str, k: int) -> None:
    """An activation is off by half a step at most, and a step is the largest of its block over 127."""
    ours = integers(b.weight(k, 33))
    there, report = mxfp8_graph.convert(ours, to)
    assert "rounds activations to int8 (accuracy_level 4), a relative L2 error of 0.0055" in report.notes[-1]
    feeds = x_of(3, k)
    blocks = np.abs(np.pad(feeds["x"], ((0, 0), (0, -k % 32))).reshape(3, -1, 32)).max(axis=-1)
    (weight,) = mxfp8_graph.unpack(ours).values()
    values = np.abs(weight.dequantize().astype(np.float64))
    sums = np.abs(feeds["x"]) @ values.T
    bound = np.repeat(blocks / 254, 32, axis=-1)[:, :k] @ values.T + k * 2.0**-23 * sums
    error = np.abs(in_stock(there, feeds) - oracle.run(ours, feeds)[0])
    assert np.all(error <= bound), (to, k, error, bound)


@pytest.mark.skipif(release("onnxruntime") < (1, 31), reason="before ONNX Runtime 1.31 no Q/DQ is fused at 8 bits")
@looped("name, recipe", pairwise(name=(*MODELS, "partial blocks"), recipe=INT8_RECIPES))
def test_onnx_runtime_fuses_every_weight_of_qdq(name: str, recipe: str, tmp_path: Path) -> None:
    build = MODELS[name][0] if name in MODELS else lambda: b.chain_model((70, 96, 64))
    there, _ = mxfp8_graph.convert(mxfp8_graph.rewrite(build(), recipe)[0], "qdq", allow=["activations"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(there.SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx").graph.node
    before, after = oracle.kinds(there)["DequantizeLinear"], [n for n in optimized if n.op_type == "MatMulNBits"]
    assert before > 0
    assert [len(after), sum(node.op_type == "DequantizeLinear" for node in optimized)] == [before, 0]
    assert {a.i for node in after for a in node.attribute if a.name == "accuracy_level"} == {4}


def test_gemms_of_one_weight_share_it_in_qdq() -> None:
    nodes = [b.node("MatMul", "x w", "h"), b.node("Relu", "h", "r"), b.node("MatMul", "r w", "s")]
    shapes = {"x": (np.float32, [3, 64])}, {"y": (np.float32, [3, 64])}
    model = b.model([*nodes, b.node("Relu", "s", "y")], *shapes, {"w": b.weight(64, 64)})
    ours, _ = mxfp8_graph.rewrite(model, "mxint8-weight-only")
    there, report = mxfp8_graph.convert(ours, "qdq")
    assert report.notes[-1].startswith("w_mxfp8: several gemms read it, so ONNX Runtime decodes it"), report.notes
    assert oracle.kinds(there)["DequantizeLinear"] == 1
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    assert {t.name for t in back.graph.initializer} == {"w_mxfp8", "w_mxfp8_scales"}
    assert codes_of(back) == codes_of(ours)


def test_a_batch_of_mxint8_weights_is_right_in_qdq() -> None:
    ours = integers(b.weight(2, 64, 33))
    assert oracle.kinds(ours)["MXFP8FusedWeightGemm"] == 1
    there, report = mxfp8_graph.convert(ours, "qdq")
    assert report.notes == ("converted opset 21 to 24",)
    feeds = x_of(2, 3, 64)
    assert relative(in_stock(there, feeds), oracle.run(ours, feeds)[0]) < 1e-6
    assert codes_of(mxfp8_graph.convert(there, "mxfp8")[0]) == codes_of(ours)


@looped("recipe, level", [(recipe, level) for recipe in INT8_RECIPES for level in (None, 4, 0)])
def test_nbits_has_the_accuracy_level_that_is_asked_for(recipe: str, level: int | None) -> None:
    settings: Any = {} if level is None else {"accuracy_level": level}
    there, report = mxfp8_graph.convert(rewritten("bias", recipe), "nbits", allow=["activations"], **settings)
    (node,) = (node for node in there.graph.node if node.op_type == "MatMulNBits")
    assert attribute(node, "accuracy_level").i == (4 if level is None else level)
    assert any("rounds activations to int8" in note for note in report.notes) == (level != 0)
    how = "are not quantized any more" if level == 0 else "are quantized as ONNX Runtime does (accuracy_level 4)"
    assert all(loss.startswith(f"activations {how}") for loss in report.losses), report.losses


def nbits(**changes: Any) -> onnx.ModelProto:
    """Returns a model with one MatMulNBits as others write it: scales [N * K / 32], zero points of 128."""
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.integers(0, 256, (96, 2, 32), np.uint8),
        "s": np.exp2(rng.integers(-12, -4, 192)).astype(np.float32),
        "z": np.full(192, 128, np.uint8),
    }
    settings = {"K": 64, "N": 96, "bits": 8, "block_size": 32, "accuracy_level": 4}
    for name in tensors.keys() & changes.keys():
        tensors[name][-1] = changes.pop(name)
    node = b.node("MatMulNBits", "x b s z", "y", domain="com.microsoft", **settings | changes)
    stored = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    return d.made([node], stored, x=[5, 64], domain="com.microsoft")


def test_matmulnbits_of_others_is_read() -> None:
    ours, _ = mxfp8_graph.convert(nbits(), "mxfp8")
    assert oracle.kinds(ours) == {"MXFP8WeightGemm": 1}
    feeds = x_of(5, 64)
    stock = onnxruntime.InferenceSession(nbits(accuracy_level=0).SerializeToString())
    assert relative(oracle.run(ours, feeds)[0], stock.run(None, feeds)[0]) < 1e-6


@looped(
    "changes, message",
    [
        ({"block_size": 64}, "quantized, but not in MXFP8 .*MatMulNBits"),
        ({"z": 127}, "zero points 'z'; expected none, or stored ones of 128"),
        ({"s": 0.3}, "its scales are not stored powers of two"),
        ({"N": 97}, r"B \[96, 2, 32\] and scales \[192\]; expected \[97, 2, 32\]"),
    ],
)
def test_matmulnbits_of_another_format_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.convert(nbits(**changes), "mxfp8")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ContractError, match="expected one of mxfp8, qdq, trt"):
        mxfp8_graph.convert(rewritten("chain"), "onnx")
    with pytest.raises(ContractError, match="expected one of activations, rounding, half"):
        mxfp8_graph.convert(rewritten("chain"), "qdq", allow=["everything"])
    with pytest.raises(ContractError, match="expected one of 0, 4"):
        mxfp8_graph.convert(rewritten("chain"), "nbits", accuracy_level=2)  # type: ignore[arg-type]


def test_a_broken_rule_of_tensorrts_parser_is_found() -> None:
    assert violations(d.modelopt()) == []
    assert any("axis 1 has the blocks" in line for line in violations(with_attribute(d.modelopt(), 3, "axis", 0)))


# --- The command line, and what files say of themselves ------------------------------------------------------------


@pytest.mark.usefixtures("own_folder")
def test_the_command() -> None:
    b.save(d.modelopt(), Path("theirs.onnx"))
    result = run("convert", "theirs.onnx", "--to", "mxfp8", "-o", "ours.onnx")
    assert result.exit_code == 0, result.output
    assert "found trt  1 weight, 1 activation" in result.stdout
    assert "ours.onnx" in result.stdout
    assert "exists already" in refused("convert", "theirs.onnx", "--to", "mxfp8", "-o", "ours.onnx")
    assert "--allow activations" in refused("convert", "ours.onnx", "--to", "qdq")
    result = run("convert", "ours.onnx", "--to", "qdq", "--allow", "activations")
    assert result.exit_code == 0, result.output
    assert "activations are not quantized any more (1)" in result.stdout


@pytest.mark.usefixtures("own_folder")
@looped("dialect, build", [("trt", d.modelopt), ("qdq", d.qdq), ("ort-cuda", d.ort_cuda), ("quark", d.quark)])
def test_rewrite_says_to_convert(dialect: str, build: Callable[[], onnx.ModelProto]) -> None:
    b.save(build(), Path("theirs.onnx"))
    message = refused("rewrite", "theirs.onnx")
    assert f"MXFP8 already, as {dialect}" in message
    assert "mxfp8-graph convert theirs.onnx --to mxfp8" in message


@pytest.mark.usefixtures("own_folder")
def test_the_accuracy_level_of_the_command() -> None:
    b.save(rewritten("bias", "mxint8-weight-only"), Path("m.onnx"))
    result = run("convert", "m.onnx", "--to", "nbits", "--accuracy-level", "0")
    assert result.exit_code == 0, result.output
    (node,) = (node for node in onnx.load("m.nbits.onnx").graph.node if node.op_type == "MatMulNBits")
    assert attribute(node, "accuracy_level").i == 0
    said = refused("convert", "m.onnx", "--to", "qdq", "--accuracy-level", "0")
    assert "qdq has no accuracy level; expected nbits, whose op has one; leave --accuracy-level 0 out" in said


def metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.usefixtures("own_folder")
def test_files_say_what_conversions_have_lost() -> None:
    ours, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), Path("m.onnx")))
    assert "mxfp8_graph.lost" not in metadata(ours)
    there, _ = mxfp8_graph.convert(ours, "qdq", allow=["activations"])
    back, report = mxfp8_graph.convert(there, "mxfp8")
    lost = "activations are not quantized any more"
    assert metadata(there)["mxfp8_graph.lost"] == metadata(back)["mxfp8_graph.lost"] == lost
    assert f"lost in a conversion before: {lost}" in report.notes
    lossless, _ = mxfp8_graph.convert(ours, "standard")
    assert "mxfp8_graph.lost" not in metadata(lossless)
