"""Models of other dialects, read and written: same bytes, same outputs; losses are reported."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dialect_models as d
import ml_dtypes
import models as b
import numpy as np
import onnx
import oracle
import pytest
from commands import refused, run
from dialect_models import INT8_DIALECTS, INT8_RECIPES, codes_of, relative
from fuzz.onnx_models import mutate
from google.protobuf.message import DecodeError
from grids import looped, pairwise
from onnx import TensorProto, helper, numpy_helper
from trt_rules import violations

import mxfp8_graph
from mxfp8_graph.onnx_pass import single_file
from mxfp8_ops import numerics, numpy_nodes
from mxfp8_ops.errors import ContractError

LOSSES = {"qdq": ["activations"], "nbits": ["activations"]}


def numpy_dtype(proto: onnx.ModelProto) -> Any:
    return helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)


@pytest.mark.usefixtures("own_folder")
def test_a_result_that_no_tool_could_load_is_a_defect_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mxfp8_graph.tools.dialects.convert")  # the package has a function of that name
    write = module._to_other

    def lose_a_node(edit: Any, *rest: Any) -> dict[str, Any]:
        facts = write(edit, *rest)
        edit.model.graph.remove(edit.model.graph[0])
        return facts

    monkeypatch.setattr(module, "_to_other", lose_a_node)
    b.save(rewritten("chain"), Path("m.onnx"))
    said = refused("convert", "m.onnx", "--to", "standard", code=70)
    assert said.startswith("internal error: RuntimeError: m.onnx: node ")
    assert "is not defined, in the result, which is not written" in said


# --- There and back ------------------------------------------------------------------------------------------------

HALF = np.float16
MODELS = {
    "chain": (lambda: b.chain_model((64, 128, 64)), (5, 64)),
    "bias": (lambda: b.matmul_model(bias=True), (2, 5, 64)),
    "gemm": (b.gemm_model, (5, 64)),
    "attention": (b.attention_model, (2, 5, 64)),
    "float16, not fused": (
        lambda: b.neg_model("MatMul", ["n", 64], ["n", 96], {"w": b.weight(64, 96, dtype=HALF)}, dtype=HALF), (5, 64)
    ),
}  # fmt: skip
RECIPES, DIALECTS = ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only"), ("trt", "qdq", "standard")


@functools.cache
def rewritten(name: str, recipe: str = "mxfp8") -> onnx.ModelProto:
    return mxfp8_graph.rewrite(MODELS[name][0](), recipe)[0]


@looped(
    "name, recipe, to",
    [
        *pairwise(name=tuple(MODELS), recipe=RECIPES, to=DIALECTS),
        *pairwise(name=("bias", "attention"), recipe=INT8_RECIPES, to=INT8_DIALECTS),
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
    if any(loss.startswith("activations are") and "quantized" in loss for loss in report.losses):
        before = rewritten(name, f"{recipe.partition('-')[0]}-weight-only")  # then it is the model of weights alone
        assert codes_of(back) == codes_of(before)
    feeds = {"x": oracle.normal(*MODELS[name][1], dtype=numpy_dtype(before))}
    # A float32 sum in another order, perhaps a bfloat16 the other way; operands of attention rounded to bfloat16.
    assert relative(oracle.run(back, feeds)[0], oracle.run(before, feeds)[0]) < 1e-2


@looped("recipe", ["mxfp8", "mxfp8-weight-only"])
def test_what_a_model_says_of_its_values_stays(recipe: str) -> None:
    """Of its output, and of one value in front of that, as long as there is one."""
    values = ({name: (np.float32, ["n", 64])} for name in "xy")
    original = b.model(b.steps("MatMul x w>g; Relu g>h; MatMul h w>i; Relu i>y"), *values, {"w": b.weight(64, 64)})
    graph = original.graph
    graph.output[0].doc_string = "about y"
    graph.output[0].metadata_props.add(key="about", value="y")
    for name in "y" if recipe == "mxfp8" else "hy":  # there h is only quantized, as an output of the gemm
        names = graph.quantization_annotation.add(tensor_name=name).quant_parameter_tensor_names
        names.add(key="SCALE_TENSOR", value="w")
    before, _ = mxfp8_graph.rewrite(original, recipe)
    assert before.graph.node[-1].op_type.startswith("MXFP8Fused")
    for said in (before, *(mxfp8_graph.convert(before, to)[0] for to in ("trt", "standard"))):
        assert said.graph.output == graph.output
        annotated = {entry.tensor_name: entry for entry in said.graph.quantization_annotation}
        assert annotated == {entry.tensor_name: entry for entry in graph.quantization_annotation}


def test_external_data_stay_external_and_an_old_output_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), tmp_path / "m.onnx", external=True))
    there, _ = mxfp8_graph.convert(before, "trt")
    assert there == tmp_path / "m.mxfp8.trt.onnx"
    assert there.with_name(f"{there.name}.data").is_file()
    assert codes_of(there) == codes_of(before)
    opened: list[Path] = []
    read = single_file.skeleton
    monkeypatch.setattr(single_file, "skeleton", lambda path: opened.append(path) or read(path))  # type: ignore[func-returns-value]
    mxfp8_graph.convert(before, "trt", overwrite=True)
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
    assert dialect != "trt" or [*codes_of(ours)] == ["up.weight" if "modelopt" in name else "w"]
    x = oracle.normal(2, 5, d.K, dtype=numpy_dtype(theirs))
    (actual,) = oracle.run(ours, {"x": x})
    assert actual.dtype == x.dtype
    assert relative(actual, expected(x)) < (1e-6 if x.dtype == np.float32 else 1e-2 if dialect == "trt" else 1e-3)
    assert any("modelopt" in note for note in report.notes) == (name == "modelopt")


def test_static_activations_keep_their_scales() -> None:
    ours, _ = mxfp8_graph.convert(d.static_activation(), "mxfp8")
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


@looped("axis, text", [(0, "Transpose wd>wt|perm=[1,0]; MatMul x wt>m"), (-1, "MatMul x wd>m")])
def test_a_weight_packed_along_n_is_no_operand_of_a_gemm(axis: int, text: str) -> None:
    codes = d.packed(*((d.N, d.K) if axis == 0 else (d.K, d.N)), axis=axis)
    ours, report = mxfp8_graph.convert(dequantized(b.steps(f"{text}; Relu m>y"), codes, axis), "mxfp8")
    assert (report.gemms, len(report.kept)) == (0, 1)
    x, values = oracle.normal(2, 5, d.K), numpy_nodes.dequantize(*codes, axis=axis).astype(np.float64)
    y = np.maximum(x.astype(np.float64) @ (values.T if axis == 0 else values), 0)
    assert relative(oracle.run(ours, {"x": x})[0], y) < 1e-6


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
    nodes += b.steps(f"Transpose wd{len(dtypes)}>wt|perm=[1,0]; MatMul x wt>y")
    theirs = dequantized(nodes, PACKED, -1, x=[3, d.K])
    ours, _ = mxfp8_graph.convert(theirs, "mxfp8")
    assert ("Cast" in oracle.kinds(ours)) == (dtype is not None)
    actual, expected = (oracle.run(model, {"x": oracle.normal(3, d.K)})[0] for model in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


# --- What is refused -----------------------------------------------------------------------------------------------


def changed(model: onnx.ModelProto, at: int = 0, **attributes: Any) -> onnx.ModelProto:
    """Returns the model with other attributes of one node."""
    node = model.graph.node[at]
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(*pair) for pair in attributes.items())])
    return model


def with_inputs(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """Returns the model whose last node of another domain has so many inputs, x for those it had not."""
    node = [node for node in model.graph.node if node.domain][-1]
    node.input[:] = [*node.input, *["x"] * 6][:count]
    return model


def with_tensor(model: onnx.ModelProto, at: int, array: np.ndarray) -> onnx.ModelProto:
    tensor = model.graph.initializer[at]
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def with_dims(model: onnx.ModelProto, *dims: int) -> onnx.ModelProto:
    model.graph.initializer[0].dims[:] = dims
    return model


def zero_point(dialect: str, code: int = 0, *, computed: bool = False) -> onnx.ModelProto:
    if dialect == "trt":
        return d.with_zero_point(d.modelopt(), "up.weight", d.stored("z", 2, np.full((), code, np.uint8)))
    model = d.with_zero_point(d.qdq(), "w", d.stored("z", d.E4M3, np.full((96, 2), code, np.uint8)))
    if computed:
        model.graph.node[0].input[2] = "computed"
        model.graph.node.insert(0, b.node("Abs", "z", "computed"))
    return model


def only(text: str, shape: Any, **constants: np.ndarray) -> onnx.ModelProto:
    return b.model(b.steps(text), {"x": (np.float32, shape)}, {"y": (np.float32, shape)}, constants)


DQ = r"\(TRT_MXFP8DequantizeLinear\)"
UINT8 = "QuantizeLinear x s>q|axis=-1 block_size=32 output_dtype=2; DequantizeLinear q s>y|axis=-1 block_size=32"


REFUSED: dict[str, Callable[[], onnx.ModelProto]] = {
    "are not stored powers of two": lambda: d.qdq("float32", wrong=1.25),
    "float8 with block_size 16": lambda: d.qdq("float32", block_size=16),
    "int8 in blocks of 32": lambda: d.quark("int8"),
    r"DequantizeLinear\)": lambda: only(UINT8, [3, 64], s=np.full((3, 2), 0.25, np.float32)),
    r"QuantizeLinear\)": lambda: only(
        "QuantizeLinear x s z>q; DequantizeLinear q s z>y", [4], s=np.array(0.1, np.float32), z=np.array(0, np.int8)
    ),
    "it has nothing in MXFP8": b.chain_model,
    "'up.weight' is float; .* finish the export": lambda: with_tensor(d.modelopt(), 0, b.weight(d.N, d.K)),
    "'/up/weight_quantizer/scale' is float": lambda: with_tensor(d.modelopt(), 1, np.ones((d.N, 2), np.float32)),
    r"tensor 'up.weight': dims \[-1, 64\]; expected dims from 0 on": lambda: with_dims(d.modelopt(), -1, d.K),
    rf"{DQ}: inputs \['up.weight'\]": lambda: with_inputs(d.modelopt(), 1),
    rf"{DQ}: axis 7": lambda: changed(d.modelopt(), 3, axis=7),
    rf"{DQ}: block_size of another type": lambda: changed(d.modelopt(), 3, block_size="32"),
    "node 'DequantizeLinear_wd' .*: zero point 'z'; expected none, or stored": lambda: zero_point("qdq", 0x38),
    "node 'wd' .*: zero point 'z'; expected none, or stored zeros": lambda: zero_point("trt", 0x38),
    "zero point 'computed'; expected none, or stored zeros": lambda: zero_point("qdq", computed=True),
    "attribute 'saturate'; expected axis, block_size": lambda: changed(d.modelopt(), 3, saturate=0),
    "attribute 'scale_bits'; expected axis": lambda: changed(d.quark(), 1, scale_bits=4),
    r"rounding_mode 0, scales of e8m0; expected 2 \(ties to even\)": lambda: changed(d.quark(), 1, rounding_mode=0),
    "scales of e5m3; expected 2": lambda: changed(d.quark(), 1, scale_dtype="e5m3"),
    r"inputs \[.*'x'\], outputs .*; expected 2 to 3": lambda: with_inputs(d.modelopt(), 6),
    r"\(MXQuantizeDequantize\): inputs \[.*'x'\], outputs .*; expected 1": lambda: with_inputs(d.quark(), 6),
}


@looped("message", REFUSED)
def test_what_is_not_mxfp8_is_refused(message: str) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.convert(REFUSED[message](), "mxfp8")


@looped("dialect", ["qdq", "trt"])
def test_a_zero_point_of_zeros_counts_for_nothing(dialect: str) -> None:
    plain, zeros = {"qdq": d.qdq, "trt": d.modelopt}[dialect](), zero_point(dialect)
    assert codes_of(mxfp8_graph.convert(zeros, "mxfp8")[0]) == codes_of(mxfp8_graph.convert(plain, "mxfp8")[0])


@looped("build", [d.modelopt, d.transformer_engine, d.static_activation, d.qdq, d.quark])
def test_a_damaged_file_is_converted_or_refused(build: Callable[[], onnx.ModelProto]) -> None:
    """The message names what cannot be read; any other exception is a defect."""
    whole, refusals = build().SerializeToString(), []
    for seed in range(16):
        rng = random.Random(seed)
        with contextlib.suppress(DecodeError):
            model = onnx.ModelProto.FromString(mutate(whole, rng))
            try:
                mxfp8_graph.convert(model, rng.choice(["mxfp8", *DIALECTS]), allow=["activations", "rounding"])
            except ContractError as error:
                refusals.append(str(error.where))
    assert refusals
    assert all(where.startswith(("model", "node")) for where in refusals), refusals


def test_a_node_of_ours_that_is_not_as_the_contract_has_it_is_refused() -> None:
    for at, name in ((0, "scale_rounding"), (1, "epilogue")):
        ours = changed(mxfp8_graph.rewrite(b.chain_model())[0], at, **{name: "nothing"})
        with pytest.raises(ContractError, match=rf"node '{ours.graph.node[at].name}' .*'nothing'; expected one of"):
            mxfp8_graph.convert(ours, "standard")
    ours, _ = mxfp8_graph.rewrite(b.matmul_model(), "mxint8-weight-only")
    scales = next(tensor for tensor in ours.graph.initializer if tensor.data_type == TensorProto.UINT8)
    scales.data_type, scales.raw_data = TensorProto.UINT4, scales.raw_data[::2]
    with pytest.raises(ContractError, match="tensor 'w_mxfp8_scales': is uint4; expected elements or scales of 8 bits"):
        mxfp8_graph.convert(ours, "qdq")
    ours, _ = mxfp8_graph.rewrite(b.matmul_model(), "mxfp8-weight-only")
    ours.graph.node[0].input[2] = "computed"
    ours.graph.node.insert(0, b.node("Identity", "w_mxfp8_scales", "computed"))
    with pytest.raises(ContractError, match="its scales are computed while the model runs; expected stored scales"):
        mxfp8_graph.convert(ours, "qdq")


@looped(
    "to, recipe, message",
    [
        ("qdq", "mxfp8", "quantizes at run time, which this dialect cannot express"),
        ("nbits", "mxint8", "quantizes at run time"),
        ("trt", "ocp", "scale_rounding 'floor', and TensorRT rounds scales of activations up"),
    ],
)
def test_what_a_dialect_cannot_say_is_an_error(to: str, recipe: str, message: str) -> None:
    ours = rewritten("chain", recipe)
    with pytest.raises(ContractError, match=f'{message}.*allow="'):
        mxfp8_graph.convert(ours, to)
    _, report = mxfp8_graph.convert(ours, to, allow=["activations", "rounding"])
    assert report.losses


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ContractError, match="expected one of mxfp8, qdq, trt"):
        mxfp8_graph.convert(rewritten("chain"), "onnx")
    with pytest.raises(ContractError, match="expected one of activations, rounding"):
        mxfp8_graph.convert(rewritten("chain"), "qdq", allow=["everything"])
    with pytest.raises(ContractError, match="expected one of 0, 4"):
        mxfp8_graph.convert(rewritten("chain"), "nbits", accuracy_level=2)  # type: ignore[arg-type]


# --- The command line, and what files say of themselves ------------------------------------------------------------


@pytest.mark.usefixtures("own_folder")
def test_the_command() -> None:
    b.save(d.modelopt(), Path("theirs.onnx"))
    message = refused("rewrite", "theirs.onnx")
    assert "MXFP8 already, as trt" in message
    assert "mxfp8-graph convert theirs.onnx --to mxfp8" in message
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
def test_files_say_what_conversions_have_lost() -> None:
    def lost_in(path: Path) -> str | None:
        return {entry.key: entry.value for entry in onnx.load(path).metadata_props}.get("mxfp8_graph.lost")

    ours, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), Path("m.onnx")))
    there, _ = mxfp8_graph.convert(ours, "qdq", allow=["activations"])
    back, report = mxfp8_graph.convert(there, "mxfp8")
    lossless, _ = mxfp8_graph.convert(ours, "standard")
    lost = "activations are not quantized any more"
    assert [lost_in(path) for path in (ours, there, back, lossless)] == [None, lost, lost, None]
    assert f"lost in a conversion before: {lost}" in report.notes
