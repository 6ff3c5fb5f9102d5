"""Models of other dialects, read and written: same bytes, same outputs, and no loss without a word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import builders as b
import dialect_models as d
import numpy as np
import onnx
import oracle
import pytest
from commands import refused, run
from onnx import TensorProto, helper, numpy_helper

import mxfp8_graph
from mxfp8_graph.dialects import trt_rules
from mxfp8_ops import numerics
from mxfp8_ops.errors import ContractError

LOSSES = {"qdq": ["activations"], "ort-cuda": ["activations", "half"]}


def codes_of(model: Any) -> dict[str, tuple[bytes, bytes]]:
    """Returns the bytes of elements and scales by weight, both [..., N, K]."""
    weights = mxfp8_graph.unpack(model)
    return {name: (w.elements.tobytes(), w.scales.tobytes()) for name, w in weights.items()}


def x_of(*shape: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"x": oracle.normal(*shape, dtype=dtype)}


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


# --- There and back ------------------------------------------------------------------------------------------------

MODELS = {
    "chain": (lambda: b.chain_model((64, 128, 64)), (5, 64)),
    "bias": (lambda: b.matmul_model(bias=True), (2, 5, 64)),
    "gemm": (b.gemm_model, (5, 64)),
    "attention": (b.attention_model, (2, 5, 64)),
    "float16": (lambda: b.matmul_model(dtype=np.float16, bias=True), (2, 5, 64)),
}


@pytest.mark.parametrize("to", ["trt", "qdq", "standard", "ort-cuda"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-bf16", "mxfp8-weight-only"])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, recipe: str, to: str) -> None:
    build, shape = MODELS[name]
    proto = build()
    rewritten, _ = mxfp8_graph.rewrite(proto, recipe)
    there, report = mxfp8_graph.convert(rewritten, to, allow=LOSSES.get(to, ()))
    assert not any(node.domain == "mxfp8" for node in there.graph.node)
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    assert codes_of(back) == codes_of(rewritten)
    oracle.check_well_formed(back)
    feeds = x_of(*shape, dtype=numpy_dtype(proto))
    if "activations are not quantized any more" in report.losses:  # then it is the model of weights alone
        rewritten, _ = mxfp8_graph.rewrite(proto, "mxfp8-weight-only")
        assert codes_of(back) == codes_of(rewritten)
    # A float32 sum in another order, perhaps a bfloat16 the other way; operands of attention rounded to bfloat16.
    assert relative(oracle.run(back, feeds)[0], oracle.run(rewritten, feeds)[0]) < 1e-2


def numpy_dtype(proto: onnx.ModelProto) -> Any:
    return helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)


def test_twice_there_gives_the_same_file() -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.attention_model())
    once, _ = mxfp8_graph.convert(rewritten, "trt")
    back, _ = mxfp8_graph.convert(once, "mxfp8")
    twice, _ = mxfp8_graph.convert(back, "trt")
    assert oracle.kinds(once)["TRT_MXFP8DequantizeLinear"] == oracle.kinds(twice)["TRT_MXFP8DequantizeLinear"]
    assert {t.name: t.raw_data for t in once.graph.initializer if t.data_type == d.E4M3} == {
        t.name: t.raw_data for t in twice.graph.initializer if t.data_type == d.E4M3
    }


def test_weights_of_branches_are_converted_where_they_are() -> None:
    branch = helper.make_graph(
        [b.node("MatMul", "x w", "h"), b.node("Relu", "h", "r")], "then", [], [b.value("r", np.float32, ["m", 96])]
    )
    other = helper.make_graph(
        [b.node("MatMul", "x v", "g"), b.node("Neg", "g", "s")], "else", [], [b.value("s", np.float32, ["m", 96])]
    )
    nodes = [b.node("If", "c", "y", then_branch=branch, else_branch=other)]
    inputs = {"x": (np.float32, ["m", 64]), "c": (np.bool_, [])}
    proto = b.model(
        nodes, inputs, {"y": (np.float32, ["m", 96])}, {"w": b.weight(64, 96), "v": b.weight(64, 96, seed=1)}
    )
    rewritten, _ = mxfp8_graph.rewrite(proto)
    for to in ("trt", "standard"):
        there, _ = mxfp8_graph.convert(rewritten, to)
        back, _ = mxfp8_graph.convert(there, "mxfp8")
        assert codes_of(back) == codes_of(rewritten)
        for condition in (True, False):
            feeds = {**x_of(5, 64), "c": np.array(condition)}
            assert relative(oracle.run(back, feeds)[0], oracle.run(rewritten, feeds)[0]) < 1e-5


def test_external_data_stays_external_and_is_the_same(tmp_path: Path) -> None:
    path = b.save(b.chain_model((64, 128, 64)), tmp_path / "m.onnx", external=True)
    rewritten, _ = mxfp8_graph.rewrite(path)
    there, _ = mxfp8_graph.convert(rewritten, "trt")
    assert there == tmp_path / "m.mxfp8.trt.onnx"
    assert there.with_name(f"{there.name}.data").is_file()
    assert codes_of(there) == codes_of(rewritten)


# --- What others wrote ---------------------------------------------------------------------------------------------


def expected_linear(elements: np.ndarray, codes: np.ndarray, x: np.ndarray, *, quantized: bool = True) -> np.ndarray:
    values = oracle.quantized(x) if quantized else x.astype(np.float64)
    return values @ numerics.dequantize(elements, codes).astype(np.float64).T


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_modelopt(dtype: Any) -> None:
    theirs = d.modelopt(dtype=dtype)
    ours, report = mxfp8_graph.convert(theirs, "mxfp8")
    assert report.to_dict()["found"] == {"trt": {"weights": 1, "activations": 1}}
    kinds = {"Gelu": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
    assert oracle.kinds(ours) == (kinds if dtype == np.float32 else {**kinds, "Cast": 1})
    elements, codes = d.packed(d.N, d.K)
    assert codes_of(ours) == {"up.weight": (elements.tobytes(), codes.tobytes())}
    feeds = x_of(2, 5, d.K, dtype=dtype)
    shape = (dtype, [2, 5, d.K])
    gelu = b.model([b.node("Gelu", "x", "y", approximate="tanh")], {"x": shape}, {"y": shape})
    bias = b.weight(d.N, seed=1, dtype=dtype).astype(np.float64)
    y = expected_linear(elements, codes, oracle.run(gelu, feeds)[0].astype(np.float32)) + bias
    assert relative(oracle.run(ours, feeds)[0], y) < (1e-6 if dtype == np.float32 else 1e-2)
    assert any("modelopt" in note for note in report.notes) == (dtype == np.float32)


def test_modelopts_quantized_normalization_stays_what_it_is() -> None:
    theirs = d.modelopt(norm=True)
    ours, report = mxfp8_graph.convert(theirs, "mxfp8")
    assert oracle.kinds(ours)["MXFP8Dequantize"] == 1
    assert len(report.kept) == 1
    again, _ = mxfp8_graph.convert(ours, "trt")
    assert oracle.kinds(again) == {**oracle.kinds(theirs)}


def test_transformer_engine() -> None:
    ours, report = mxfp8_graph.convert(d.transformer_engine(), "mxfp8")
    elements, codes = d.packed(d.N, d.K)
    assert codes_of(ours) == {"w": (elements.tobytes(), codes.tobytes())}
    assert oracle.kinds(ours) == {"MXFP8Quantize": 1, "MXFP8FusedGemm": 1}
    feeds = x_of(2, 5, d.K)
    y = np.maximum(expected_linear(elements, codes, feeds["x"]), 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6
    assert report.fusions == 1


def test_static_activations_keep_their_scales() -> None:
    ours, _ = mxfp8_graph.convert(d.static_activation(), "mxfp8")
    assert oracle.kinds(ours)["QuantizeLinear"] == 1
    elements, codes = d.packed(d.N, d.K)
    feeds = x_of(3, d.K)
    scales = np.repeat(np.exp2(np.array([120, 121]) - 127.0), 32).astype(np.float32)
    import ml_dtypes

    x = np.clip(feeds["x"] / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    y = np.maximum(x @ numerics.dequantize(elements, codes).astype(np.float64).T, 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6


@pytest.mark.parametrize("rows_last", [True, False], ids=["[N, K]", "[K, N]"])
@pytest.mark.parametrize("scales", ["e8m0", "cast", "float32", "float16"])
def test_standard_qdq(scales: str, rows_last: bool) -> None:
    ours, report = mxfp8_graph.convert(d.qdq(scales, rows_last=rows_last), "mxfp8")
    elements, codes = d.packed(d.N, d.K)
    assert list(codes_of(ours).values()) == [(elements.tobytes(), codes.tobytes())]
    assert report.to_dict()["found"] == {"qdq": {"weights": 1, "activations": 0}}
    assert report.gemms == 1
    feeds = x_of(2, 5, d.K)
    y = np.maximum(expected_linear(elements, codes, feeds["x"], quantized=False), 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5}, {"beta": 2.0}, {"transA": 1}], ids=str)
def test_a_gemm_with_factors_stays_one(settings: dict[str, Any]) -> None:
    theirs = d.qdq("float32")
    nodes = [theirs.graph.node[0], b.node("Gemm", "x wd b", "m", transB=1, **settings), b.node("Relu", "m", "y")]
    shape = [d.K, 5] if "transA" in settings else [5, d.K]
    tensors = [*theirs.graph.initializer, numpy_helper.from_array(b.weight(d.N, seed=1), "b")]
    ours, _ = mxfp8_graph.convert(d.made(nodes, tensors, opset=24, ir_version=12, x=shape), "mxfp8")
    assert ("Gemm" in oracle.kinds(ours)) == bool(settings)
    x = oracle.normal(*shape)
    y = expected_linear(*d.packed(d.N, d.K), x.T if "transA" in settings else x, quantized=False)
    y = settings.get("alpha", 1.0) * y + settings.get("beta", 1.0) * b.weight(d.N, seed=1).astype(np.float64)
    assert relative(oracle.run(ours, {"x": x})[0], np.maximum(y, 0)) < 1e-6


@pytest.mark.parametrize("shape", [(d.N, d.K), (d.K, d.N)], ids=["transposed", "as it is"])
def test_a_weight_packed_along_n_is_no_operand_of_a_gemm(shape: tuple[int, int]) -> None:
    turned = shape == (d.N, d.K)
    axis = 0 if turned else -1
    elements, codes = d.packed(*shape, axis=axis)
    nodes = [b.node("DequantizeLinear", "w s", "wd", axis=axis, block_size=32)]
    nodes += [b.node("Transpose", "wd", "wt", perm=[1, 0])] * turned
    nodes += [b.node("MatMul", "x wt" if turned else "x wd", "m"), b.node("Relu", "m", "y")]
    tensors = [d.stored("w", d.E4M3, elements), numpy_helper.from_array(numerics.decode_scale(codes), "s")]
    ours, report = mxfp8_graph.convert(d.made(nodes, tensors, opset=24, ir_version=12), "mxfp8")
    assert (report.gemms, len(report.kept)) == (0, 1)
    feeds, values = x_of(2, 5, d.K), numerics.dequantize(elements, codes, axis=axis).astype(np.float64)
    y = np.maximum(feeds["x"].astype(np.float64) @ (values.T if turned else values), 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6


@pytest.mark.parametrize(("blocks", "axis"), [(-1, 0), (-1, 1), (0, 0)])
def test_a_lookup_of_rows_packed_along_them_is_an_embedding(blocks: int, axis: int) -> None:
    elements, codes = d.packed(d.N, d.K, axis=blocks)
    ids = np.array([3, 0, 63])
    nodes = [
        b.node("DequantizeLinear", "w s", "wd", axis=blocks, block_size=32),
        b.node("Gather", "wd ids", "rows", axis=axis),
        b.node("Add", "rows x", "y"),
    ]
    tensors = [d.stored("w", d.E4M3, elements), numpy_helper.from_array(numerics.decode_scale(codes), "s")]
    x = oracle.normal(*([3, d.K] if axis == 0 else [d.N, 3]))
    tensors.append(numpy_helper.from_array(ids, "ids"))
    ours, _ = mxfp8_graph.convert(d.made(nodes, tensors, opset=24, ir_version=12, x=x.shape), "mxfp8")
    assert ("MXFP8Embedding" in oracle.kinds(ours)) == ((blocks, axis) == (-1, 0))
    table = numerics.dequantize(elements, codes, axis=blocks)
    np.testing.assert_array_equal(oracle.run(ours, {"x": x})[0], np.take(table, ids, axis) + x)


def test_the_cuda_op_of_onnx_runtime() -> None:
    ours, _ = mxfp8_graph.convert(d.ort_cuda(), "mxfp8")
    elements, codes = d.packed(d.N, d.K)
    assert codes_of(ours) == {"w": (elements.tobytes(), codes.tobytes())}
    feeds = x_of(2, 5, d.K, dtype=np.float16)
    y = expected_linear(elements, codes, feeds["x"], quantized=False) + b.weight(d.N, seed=1, dtype=np.float16)
    (actual,) = oracle.run(ours, feeds)
    assert actual.dtype == np.float16
    assert relative(actual, y) < 1e-3


def test_quarks_weights_are_packed() -> None:
    ours, report = mxfp8_graph.convert(d.quark(), "mxfp8")
    assert report.to_dict()["found"] == {"quark": {"weights": 1, "activations": 1}}
    elements, codes = numerics.quantize(b.weight(d.K, d.N).T, scale_rounding="floor")
    assert list(codes_of(ours).values()) == [(elements.tobytes(), codes.tobytes())]
    feeds = x_of(2, 5, d.K)
    x = oracle.quantized(feeds["x"], scale_rounding="floor")
    y = np.maximum(x @ numerics.dequantize(elements, codes).astype(np.float64).T, 0)
    assert relative(oracle.run(ours, feeds)[0], y) < 1e-6


def cast_between(*dtypes: int) -> onnx.ModelProto:
    """A dequantized weight that is cast to each of the dtypes, and multiplied."""
    elements, codes = d.packed(d.N, d.K)
    stored = [d.stored("w", d.E4M3, elements), numpy_helper.from_array(numerics.decode_scale(codes), "s")]
    nodes = [b.node("DequantizeLinear", "w s", "c0", axis=-1, block_size=32)]
    nodes += [b.node("Cast", f"c{i}", f"c{i + 1}", to=dtype) for i, dtype in enumerate(dtypes)]
    nodes += [b.node("Transpose", f"c{len(dtypes)}", "wt", perm=[1, 0]), b.node("MatMul", "x wt", "y")]
    return d.made(nodes, stored, x=[3, d.K])


@pytest.mark.parametrize("dtype", [TensorProto.INT32, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_a_cast_that_changes_values_on_the_way_to_the_product_stays(dtype: int) -> None:
    theirs = cast_between(dtype, TensorProto.FLOAT)
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert "Cast" in oracle.kinds(ours)
    actual, expected = (oracle.run(model, x_of(3, d.K))[0] for model in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_cast_that_changes_nothing_goes() -> None:
    ours, _ = mxfp8_graph.convert(cast_between(TensorProto.FLOAT), "mxfp8")
    assert "Cast" not in oracle.kinds(ours)


def test_static_activations_stay_tensorrts_op() -> None:
    theirs = d.static_activation()
    there, _ = mxfp8_graph.convert(theirs, "trt")
    assert oracle.kinds(there) == oracle.kinds(theirs)
    codes = {t.name: t.raw_data for t in theirs.graph.initializer}
    assert {t.name: t.raw_data for t in there.graph.initializer} == codes
    quantize = next(n for n in there.graph.node if n.op_type == "TRT_MXFP8QuantizeLinear")
    assert [*quantize.input] == ["x", "x_scale"]
    assert trt_rules.violations(there) == []


@pytest.mark.parametrize("scales", ["e8m0", "cast", "float32"])
def test_two_that_read_one_weight_share_its_scales(scales: str) -> None:
    theirs = d.qdq(scales)
    nodes = theirs.graph.node
    again = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes if n.op_type != "Cast"]
    for each in again:
        each.name = f"{each.name}2"
        each.input[:] = [f"{name}2" if name in {"wd", "wt", "m"} else name for name in each.input]
        each.output[:] = [f"{name}2" for name in each.output]
    theirs.graph.output.append(b.value("y2", np.float32, ["batch", "seq", None]))
    nodes.extend(again)
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert [t.name for t in ours.graph.initializer if t.data_type == TensorProto.UINT8] == ["w_scales"]
    one, other = oracle.run(ours, x_of(2, 5, d.K))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("to", ["trt", "qdq", "standard"])
def test_attributes_that_a_node_leaves_out_have_the_contracts_defaults(to: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model())
    bare = onnx.ModelProto.FromString(rewritten.SerializeToString())
    for node in bare.graph.node:
        if node.op_type in {"MXFP8Quantize", "MXFP8Gemm"}:
            del node.attribute[:]
    one, other = (mxfp8_graph.convert(model, to, allow=LOSSES.get(to, ()))[0] for model in (rewritten, bare))
    feeds = x_of(5, 64)
    assert oracle.kinds(one) == oracle.kinds(other)
    if to != "trt":
        np.testing.assert_array_equal(oracle.run(one, feeds)[0], oracle.run(other, feeds)[0])


# --- What is refused -----------------------------------------------------------------------------------------------


def flat_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose stored scales of rank 2 have one axis."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            tensor.dims[:] = [int(np.prod(tensor.dims))]
    return model


REFUSED = {
    "block_size 128": lambda: d.ort_cuda(block_size=128),
    "not stored powers of two": lambda: d.ort_cuda(wrong=1.5),
    "are not stored powers of two": lambda: d.qdq("float32", wrong=1.25),
    "float8 with block_size 16": lambda: d.qdq("float32", block_size=16),
    "int8 in blocks of 32": lambda: d.quark("int8"),
    "scales [192] for elements [96, 64]": lambda: flat_scales(d.ort_cuda()),
    "DequantizeLinear)": lambda: b.model(
        [
            b.node("QuantizeLinear", "x s", "q", axis=-1, block_size=32, output_dtype=TensorProto.INT8),
            b.node("DequantizeLinear", "q s", "y", axis=-1, block_size=32),
        ],
        {"x": (np.float32, [3, 64])},
        {"y": (np.float32, [3, 64])},
        {"s": np.full((3, 2), 0.25, np.float32)},
    ),
    "QuantizeLinear)": lambda: b.model(
        [b.node("QuantizeLinear", "x s z", "q"), b.node("DequantizeLinear", "q s z", "y")],
        {"x": (np.float32, [4])},
        {"y": (np.float32, [4])},
        {"s": np.float32(0.1), "z": np.int8(0)},
    ),
    "it has nothing in MXFP8": b.chain_model,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_mxfp8_is_refused(what: str) -> None:
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.convert(REFUSED[what](), "mxfp8")
    assert what in str(caught.value)


def test_an_export_of_modelopt_that_is_not_finished() -> None:
    theirs = d.modelopt()
    theirs.graph.initializer[0].CopyFrom(numpy_helper.from_array(b.weight(d.N, d.K), "up.weight"))
    with pytest.raises(ContractError, match=r"'up.weight' is float; .* finish the export"):
        mxfp8_graph.convert(theirs, "mxfp8")


def no_scales(model: onnx.ModelProto) -> None:
    model.graph.node[3].input.pop()


def axis_of_none(model: onnx.ModelProto) -> None:
    next(a for a in model.graph.node[3].attribute if a.name == "axis").i = 7


def text_for_a_size(model: onnx.ModelProto) -> None:
    size = next(a for a in model.graph.node[3].attribute if a.name == "block_size")
    size.CopyFrom(helper.make_attribute("block_size", "32"))


DAMAGE = {"inputs ['up.weight']": no_scales, "axis 7": axis_of_none, "block_size of another type": text_for_a_size}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_node_is_refused(what: str) -> None:
    theirs = d.modelopt()
    DAMAGE[what](theirs)
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.convert(theirs, "mxfp8")
    assert f"(TRT_MXFP8DequantizeLinear): {what}" in str(caught.value)


ZERO_POINTS = {
    "qdq": lambda code: d.with_zero_point(d.qdq(), "w", d.stored("z", d.E4M3, np.full((96, 2), code, np.uint8))),
    "trt": lambda code: d.with_zero_point(d.modelopt(), "up.weight", d.stored("z", 2, np.full((), code, np.uint8))),
}


@pytest.mark.parametrize("dialect", ZERO_POINTS)
def test_a_zero_point_that_is_not_zero_is_refused(dialect: str) -> None:
    with pytest.raises(
        ContractError, match=r"node '(wd|DequantizeLinear_wd)' .*: zero point 'z'; expected none, or stored"
    ):
        mxfp8_graph.convert(ZERO_POINTS[dialect](0x38), "mxfp8")
    plain = {"qdq": d.qdq, "trt": d.modelopt}[dialect]()
    with_zeros, _ = mxfp8_graph.convert(ZERO_POINTS[dialect](0), "mxfp8")
    assert codes_of(with_zeros) == codes_of(mxfp8_graph.convert(plain, "mxfp8")[0])


def test_a_zero_point_that_is_computed_is_refused() -> None:
    theirs = d.with_zero_point(d.qdq(), "w", d.stored("z0", d.E4M3, np.zeros((96, 2), np.uint8)))
    theirs.graph.node.insert(0, b.node("Abs", "z0", "z"))
    next(n for n in theirs.graph.node if n.op_type == "DequantizeLinear").input[2] = "z"
    with pytest.raises(ContractError, match="zero point 'z'; expected none, or stored zeros"):
        mxfp8_graph.convert(theirs, "mxfp8")


@pytest.mark.parametrize("dims", [[2**61, 0], [0, 2**40, 2**40]])
def test_an_empty_tensor_of_dims_that_no_array_has_is_refused(dims: list[int], tmp_path: Path) -> None:
    theirs = d.qdq("float32")
    empty = TensorProto(name="s", data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    empty.external_data.add(key="location", value="data")
    theirs.graph.initializer[1].CopyFrom(empty)
    (tmp_path / "data").touch()
    (tmp_path / "m.onnx").write_bytes(theirs.SerializeToString())
    with pytest.raises(ContractError, match=r"tensor 's': dims .*; expected a size that a file can have"):
        mxfp8_graph.convert(tmp_path / "m.onnx", "mxfp8")


@pytest.mark.parametrize("attribute", ["epilogue", "scale_rounding"])
def test_a_node_of_ours_with_a_value_that_there_is_not_is_refused(attribute: str) -> None:
    ours, _ = mxfp8_graph.rewrite(b.chain_model())
    node = next(n for n in ours.graph.node if any(a.name == attribute for a in n.attribute))
    next(a for a in node.attribute if a.name == attribute).s = b"nothing"
    with pytest.raises(ContractError, match=rf"node '{node.name}' .*: an attribute is .*nothing"):
        mxfp8_graph.convert(ours, "standard")


def test_scales_of_another_size_are_refused() -> None:
    ours, _ = mxfp8_graph.rewrite(b.matmul_model(dtype=np.float16), "mxfp8-weight-only")
    scales = next(tensor for tensor in ours.graph.initializer if tensor.data_type == TensorProto.UINT8)
    scales.data_type, scales.raw_data = TensorProto.UINT4, scales.raw_data[::2]
    with pytest.raises(ContractError, match="tensor 'w_mxfp8_scales': is uint4; expected elements or scales of 8 bits"):
        mxfp8_graph.convert(ours, "ort-cuda")


UNKNOWN = {
    "attribute 'saturate'; expected axis, block_size": (d.modelopt, 3, {"saturate": 0}),
    "attribute 'accuracy_level'; expected block_size alone": (d.ort_cuda, 0, {"accuracy_level": 1}),
    "attribute 'scale_bits'; expected axis": (d.quark, 1, {"scale_bits": 4}),
    "rounding_mode 0, scales of e8m0; expected 2 (ties to even)": (d.quark, 1, {"rounding_mode": 0}),
    "scales of e5m3; expected 2": (d.quark, 1, {"scale_dtype": "e5m3"}),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_attribute_that_changes_values_is_refused(what: str) -> None:
    build, at, settings = UNKNOWN[what]
    theirs = build()
    kept = [a for a in theirs.graph.node[at].attribute if a.name not in settings]
    del theirs.graph.node[at].attribute[:]
    theirs.graph.node[at].attribute.extend([*kept, *(helper.make_attribute(*each) for each in settings.items())])
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.convert(theirs, "mxfp8")
    assert what in str(caught.value)


@pytest.mark.parametrize("build", [d.modelopt, d.ort_cuda, d.quark], ids=["trt", "ort-cuda", "quark"])
def test_an_input_too_many_is_refused(build: Any) -> None:
    theirs = build()
    node = next(n for n in theirs.graph.node if n.domain)
    node.input.extend(["x"] * (6 - len(node.input)))
    with pytest.raises(ContractError, match=r"inputs \[.*'x'\], outputs .*; expected [13]"):
        mxfp8_graph.convert(theirs, "mxfp8")


def test_a_static_activation_that_does_not_saturate_stays_onnxs_op() -> None:
    ours, _ = mxfp8_graph.convert(d.static_activation(), "mxfp8")
    next(n for n in ours.graph.node if n.op_type == "QuantizeLinear").attribute.append(
        helper.make_attribute("saturate", 0)
    )
    there, _ = mxfp8_graph.convert(ours, "trt")
    assert oracle.kinds(there)["QuantizeLinear"] == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations_rounded_to_bfloat16_are_so_in_the_cuda_op(dtype: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.matmul_model(dtype=np.dtype(dtype)), "mxfp8-bf16")
    with pytest.raises(ContractError, match="allow that activations and results are rounded to bfloat16"):
        mxfp8_graph.convert(rewritten, "ort-cuda")
    there, report = mxfp8_graph.convert(rewritten, "ort-cuda", allow=["half"])
    assert report.losses == {"activations and results are rounded to bfloat16": 1}
    gemm = next(node for node in there.graph.node if node.op_type == "MatMulBlockQuantizedFp8Weight")
    cast = next(node for node in there.graph.node if node.output[0] == gemm.input[0])
    assert (cast.op_type, cast.input[0], cast.attribute[0].i) == ("Cast", "x", TensorProto.BFLOAT16)


SAID = {
    ("qdq", "mxfp8"): "quantizes at run time, which this dialect cannot express",
    ("ort-cuda", "mxfp8-weight-only"): "takes float16 and bfloat16",
    ("ort-cuda", "mxfp8"): "quantizes at run time",
    ("trt", "ocp"): "scale_rounding 'floor', and TensorRT rounds scales of activations up",
}


@pytest.mark.parametrize(("to", "recipe"), SAID)
def test_what_a_dialect_cannot_say_is_an_error(to: str, recipe: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model(), recipe)
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.convert(rewritten, to)
    assert SAID[to, recipe] in str(caught.value)
    assert 'allow="' in str(caught.value)
    _, report = mxfp8_graph.convert(rewritten, to, allow=["activations", "rounding", "half"])
    assert report.losses


def test_partial_blocks_are_not_for_tensorrt() -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model((70, 64, 64)), "mxfp8-weight-only")
    with pytest.raises(ContractError, match=r"has 70 elements along the blocks; expected a multiple of 32"):
        mxfp8_graph.convert(rewritten, "trt")


def test_names_that_nobody_knows() -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model())
    with pytest.raises(ContractError, match="expected one of mxfp8, qdq, trt"):
        mxfp8_graph.convert(rewritten, "onnx")
    with pytest.raises(ContractError, match="expected one of activations, rounding, half"):
        mxfp8_graph.convert(rewritten, "qdq", allow=["everything"])


def test_a_callers_model_is_not_modified() -> None:
    theirs = d.transformer_engine()
    before = theirs.SerializeToString()
    mxfp8_graph.convert(theirs, "mxfp8")
    assert theirs.SerializeToString() == before


# --- The rules of TensorRT's parser --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_for_tensorrt_keeps_its_rules(name: str) -> None:
    rewritten, _ = mxfp8_graph.rewrite(MODELS[name][0]())
    there, _ = mxfp8_graph.convert(rewritten, "trt")
    assert trt_rules.violations(there) == []


def test_modelopts_own_files_keep_them() -> None:
    assert trt_rules.violations(d.modelopt(norm=True)) == []


def break_axis(model: onnx.ModelProto) -> None:
    next(a for n in model.graph.node[3:4] for a in n.attribute if a.name == "axis").i = 0


def break_block(model: onnx.ModelProto) -> None:
    next(a for n in model.graph.node[1:2] for a in n.attribute if a.name == "block_size").i = 16


def break_scales(model: onnx.ModelProto) -> None:
    floats = numpy_helper.from_array(np.ones((96, 2), np.float32), "/up/weight_quantizer/scale")
    model.graph.initializer[1].CopyFrom(floats)


def break_import(model: onnx.ModelProto) -> None:
    del model.opset_import[1]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (break_axis, "axis is 0, and axis 1 has the blocks"),
        (break_block, "block_size is 16, and only 32 is supported"),
        (break_scales, "its scales are not stored uint8 E8M0 codes"),
        (break_import, "the model does not import domain 'trt' at version 1"),
    ],
)
def test_a_broken_rule_is_named(damage: Any, rule: str) -> None:
    model = d.modelopt()
    damage(model)
    assert any(rule in line for line in trt_rules.violations(model)), trt_rules.violations(model)


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


THEIRS = {"trt": d.modelopt, "qdq": d.qdq, "ort-cuda": d.ort_cuda, "quark": d.quark}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("dialect", THEIRS)
def test_rewrite_says_to_convert(dialect: str) -> None:
    b.save(THEIRS[dialect](), Path("theirs.onnx"))
    message = refused("rewrite", "theirs.onnx")
    assert f"MXFP8 already, as {dialect}" in message
    assert "mxfp8-graph convert theirs.onnx --to mxfp8" in message


def metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.usefixtures("own_folder")
def test_doctor_tells_what_became_of_a_file() -> None:
    path = b.save(b.chain_model(), Path("m.onnx"))
    ours, _ = mxfp8_graph.rewrite(path)
    assert metadata(ours)["mxfp8_graph.dialect"] == "mxfp8"
    assert "with function bodies" in one_line(run("doctor", str(ours)).stdout)
    shutil.copy(ours, "lost.onnx")
    lost = onnx.load("lost.onnx")
    del lost.functions[:]
    onnx.save(lost, "lost.onnx")
    said = one_line(run("doctor", "lost.onnx").stdout)
    assert "without the function bodies of MXFP8FusedGemm, MXFP8GemmQuantize, MXFP8Quantize" in said
    assert "put them back: mxfp8-graph convert lost.onnx --to mxfp8" in said
    repaired, _ = mxfp8_graph.convert("lost.onnx", "mxfp8")
    assert {f.name for f in onnx.load(repaired).functions} >= {"MXFP8FusedGemm", "MXFP8Quantize"}
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(ours)), "inlined.onnx")
    said = one_line(run("doctor", "inlined.onnx").stdout)
    assert "has no node of domain 'mxfp8' any more: a tool has inlined them" in said
    there, _ = mxfp8_graph.convert(ours, "trt")
    assert metadata(there)["mxfp8_graph.dialect"] == "trt"
    assert "MXFP8 as trt; written by mxfp8-graph" in one_line(run("doctor", str(there)).stdout)


@pytest.mark.usefixtures("own_folder")
def test_files_say_what_conversions_have_lost() -> None:
    ours, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), Path("m.onnx")))
    assert "mxfp8_graph.lost" not in metadata(ours)
    there, _ = mxfp8_graph.convert(ours, "qdq", allow=["activations"])
    back, report = mxfp8_graph.convert(there, "mxfp8")
    lost = "activations are not quantized any more"
    assert metadata(there)["mxfp8_graph.lost"] == metadata(back)["mxfp8_graph.lost"] == lost
    assert f"lost in a conversion before: {lost}" in report.notes
    assert f"lost in conversion: {lost}" in one_line(run("doctor", str(back)).stdout)
    lossless, _ = mxfp8_graph.convert(ours, "standard")
    assert "mxfp8_graph.lost" not in metadata(lossless)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("own_folder")
def test_doctor_and_a_file_that_is_no_model() -> None:
    result = run("doctor", "nothing.onnx")
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "model broken nothing.onnx: " in one_line(result.stdout)
