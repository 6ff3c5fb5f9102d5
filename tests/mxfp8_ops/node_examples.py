"""Nodes of every op with inputs and what they must give, one or several in a model, and models of standard ops."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import one_node
import onnx
from attention_cases import Case as AttentionCase
from attention_cases import attributes as attention_attributes
from attention_cases import feeds as attention_feeds
from attention_cases import widened
from compare import assert_same, assert_within, random_values
from one_node import NUMPY, Feed
from onnx import TensorProto, helper

from mxfp8_ops import contract, numpy_nodes, standard_ops
from mxfp8_ops.case import Input
from mxfp8_ops.contract import FLOAT, UINT8
from mxfp8_ops.formats import ELEMENT_FORMATS, ElementFormat
from mxfp8_ops.function_body import STYLE, Style
from mxfp8_ops.nodes.conv import Settings, Window, conv_error_bound
from mxfp8_ops.onnx_functions import case_of, functions

SMALL = np.float32(1 / 64)
"""Keeps sums of products inside the range of float16."""
E, V = 3, 9
"""Experts of a grouped gemm, and rows of a table."""
PLAIN = AttentionCase("plain")

Check = Callable[[list[np.ndarray]], None]


@dataclass(frozen=True)
class Example:
    """A node, its inputs, and what fails unless it gives what it must."""

    op: str
    inputs: Mapping[str, Feed]
    outputs: Mapping[str, int]
    attributes: Mapping[str, Any]
    check: Check

    @property
    def weights(self) -> tuple[str, ...]:
        """The inputs that are initializers in a rewritten file."""
        return tuple(name for name in self.inputs if name in ("B", "B_scales", "bias"))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an example differs from the usual one. An op ignores what it does not have.

    `fmt` is the format of what it reads and writes, `b_fmt` the format of B if it is another; `dtype` is the dtype of
    values it reads, `output` of values it writes; `x` is the shape of what it reads, `lead` the dimensions of B before
    N and K.
    """

    fmt: str = "e4m3"
    b_fmt: str = ""
    rounding: str = "ceil"
    dtype: int = FLOAT
    output: int = FLOAT
    x: tuple[int, ...] = (3, 5, 70)
    n: int = 40
    lead: tuple[int, ...] = ()
    axis: int = -1
    biased: bool = True
    epilogue: str = "none"
    activation: int = FLOAT
    attention: AttentionCase = PLAIN
    nan_guard: bool = False
    seed: int = 0

    @property
    def element(self) -> ElementFormat:
        """The format."""
        return ELEMENT_FORMATS[self.fmt]

    @property
    def of_b(self) -> ElementFormat:
        """The format of B."""
        return ELEMENT_FORMATS[self.b_fmt or self.fmt]


def example(op: str, **changes: Any) -> Example:
    """Returns a node of `op`; see `Setting`."""
    make = _gemm if contract.OPS[op].is_gemm else _OTHERS[op]
    return make(op, Setting(**changes))


def _values(s: Setting, shape: Sequence[int], dtype: int, seed: int) -> np.ndarray:
    return (SMALL * random_values(10 * s.seed + seed, *shape)).astype(NUMPY[dtype])


def _packed(s: Setting, shape: Sequence[int], seed: int, fmt: ElementFormat) -> tuple[np.ndarray, np.ndarray]:
    return numpy_nodes.quantize(_values(s, shape, FLOAT, seed), element_format=fmt.name, scale_rounding=s.rounding)


def _exactly(*expected: np.ndarray) -> Check:
    def check(got: list[np.ndarray]) -> None:
        for one, other in zip(got, expected, strict=True):
            assert_same(one, np.ascontiguousarray(other))

    return check


def _quantize(op: str, s: Setting) -> Example:
    x = _values(s, s.x, s.dtype, 0)
    x.flat[::101] = 0
    x.flat[7:8] = np.nan
    codes = numpy_nodes.quantize(x, axis=s.axis, element_format=s.fmt, scale_rounding=s.rounding)
    attributes = {"axis": s.axis, "output_dtype": s.element.onnx_dtype, "scale_rounding": s.rounding}
    outputs = {"elements": s.element.onnx_dtype, "scales": UINT8}
    return Example(op, {"X": (x, s.dtype)}, outputs, attributes, _exactly(*codes))


def _dequantize(op: str, s: Setting) -> Example:
    codes = numpy_nodes.quantize(_values(s, s.x, FLOAT, 0), axis=s.axis, element_format=s.fmt)
    codes[1].flat[:1] = 255
    dtype = contract.VALUE_NAMES[s.output]
    expected = numpy_nodes.dequantize(*codes, axis=s.axis, element_format=s.fmt, dtype=dtype)
    inputs = {"elements": (codes[0], s.element.onnx_dtype), "scales": (codes[1], UINT8)}
    attributes = {"axis": s.axis, "output_dtype": s.output}
    return Example(op, inputs, {"Y": s.output}, attributes, _exactly(expected))


def _embedding(op: str, s: Setting) -> Example:
    b = _packed(s, (V, s.x[-1]), 1, s.of_b)
    ids = np.random.default_rng(s.seed).integers(-V, V, s.x[:-1])
    dtype = contract.VALUE_NAMES[s.output]
    expected = numpy_nodes.embedding(ids, *b, b_format=s.of_b.name, dtype=dtype)
    inputs = {"indices": (ids, TensorProto.INT64), "B": (b[0], s.of_b.onnx_dtype), "B_scales": (b[1], UINT8)}
    return Example(op, inputs, {"Y": s.output}, {"output_dtype": s.output}, _exactly(expected))


def _gemm(op: str, s: Setting) -> Example:
    row = contract.OPS[op]
    lead = (E,) if row.at("experts") is not None else s.lead
    b = _packed(s, (*lead, s.n, s.x[-1]), 1, s.of_b)
    if row.weight_only:
        x = _values(s, s.x, s.dtype, 0)
        inputs: dict[str, Feed] = {"X": (x, s.dtype)}
        x = x.astype(NUMPY[s.activation]) if s.activation != FLOAT else x
    else:
        a = _packed(s, s.x, 0, s.element)
        inputs = {"A": (a[0], s.element.onnx_dtype), "A_scales": (a[1], UINT8)}
        x = numpy_nodes.dequantize(*a, element_format=s.fmt)
    inputs |= {"B": (b[0], s.of_b.onnx_dtype), "B_scales": (b[1], UINT8)}
    optional: dict[str, Any] = {}
    weight = numpy_nodes.dequantize(*b, element_format=s.of_b.name)
    dtype = contract.VALUE_NAMES[s.output]
    if row.at("experts") is not None:
        experts = np.arange(s.x[0], dtype=np.int64) % (E + 1)
        inputs["experts"] = experts, TensorProto.INT64
        expected = numpy_nodes.grouped_weight_gemm(x, *b, experts, b_format=s.of_b.name)
        bound = numpy_nodes.gemm_error_bound(x, weight[experts % E], dtype)
    else:
        expected = numpy_nodes.weight_gemm(x, *b, b_format=s.of_b.name)
        if row.at("factor") is not None:
            inputs["factor"] = _values(s, expected.shape, s.dtype, 2), s.dtype
            optional["factor"] = inputs["factor"][0]
        if s.biased:
            inputs["bias"] = _values(s, (s.n,), FLOAT, 3), FLOAT
            optional["bias"] = inputs["bias"][0]
        optional["epilogue"] = s.epilogue if row.fuses[0] else "none"
        expected = numpy_nodes.fused_weight_gemm(x, *b, b_format=s.of_b.name, **optional)
        bound = numpy_nodes.fused_gemm_error_bound(x, weight, dtype, **optional)
        if not row.fuses[0]:
            bound = numpy_nodes.gemm_error_bound(x, weight, dtype, optional.get("bias"))
    attributes = {"output_dtype": s.output, "epilogue": s.epilogue, "activation_dtype": s.activation}
    attributes = {name: value for name, value in attributes.items() if name in row.attributes}
    return Example(op, inputs, {"Y": s.output}, attributes, lambda got: assert_within(got[0], expected, bound))


def _attention(op: str, s: Setting) -> Example:
    operands = s.attention.operands(contract.VALUE_NAMES[s.dtype])
    activation = "bfloat16" if s.activation != FLOAT else None
    settings = {**s.attention.settings, "nan_guard": s.nan_guard, "activation_dtype": activation}
    y, *presents = numpy_nodes.attention(*widened(operands), **settings)
    bound = numpy_nodes.attention_error_bound(*operands, **settings)

    def check(got: list[np.ndarray]) -> None:
        assert_within(got[0].astype(np.float32), y, bound)
        _exactly(*presents)([present.astype(np.float32) for present in got[1:]])

    outputs = {port.name: s.dtype for port in contract.OPS[op].outputs}
    attributes = attention_attributes(s.attention, activation_dtype=activation, nan_guard=s.nan_guard)
    return Example(op, attention_feeds(operands), outputs, attributes, check)


def _conv(op: str, s: Setting) -> Example:
    axes = 2 - s.n % 2
    x = _values(s, (2, s.x[-1], *(7, 6)[:axes]), s.dtype, 0)
    b = _packed(s, (s.n, *(3, 2)[:axes], s.x[-1]), 1, s.of_b)
    lists = {"strides": (2, 1)[:axes], "pads": (1, 0, 2, 1) if axes == 2 else (2, 1), "dilations": (1, 2)[:axes]}
    settings = Settings(
        **lists, x_format=s.fmt, b_format=s.of_b.name, scale_rounding=s.rounding, epilogue=s.epilogue
    )  # fmt: skip
    residual = _values(s, Window.from_shapes(op, x.shape, b[0].shape, settings).result, s.dtype, 2)
    optional = {"bias": _values(s, (s.n,), FLOAT, 3), "residual": residual} if s.biased else {}
    expected = numpy_nodes.conv(x, *b, **optional, settings=settings)
    codes = numpy_nodes.quantize(x, axis=1, element_format=s.fmt, scale_rounding=s.rounding)
    values = numpy_nodes.dequantize(*codes, axis=1, element_format=s.fmt)
    weight = numpy_nodes.dequantize(*b, element_format=s.of_b.name)
    bound = conv_error_bound(
        values, weight, **optional, settings=replace(settings, dtype=contract.VALUE_NAMES[s.output])
    )
    inputs = {"X": (x, s.dtype), "B": (b[0], s.of_b.onnx_dtype), "B_scales": (b[1], UINT8)}
    inputs |= {"bias": (optional["bias"], FLOAT), "residual": (residual, s.dtype)} if s.biased else {}
    attributes = {**lists, "x_dtype": s.element.onnx_dtype, "scale_rounding": s.rounding, "epilogue": s.epilogue}
    attributes["output_dtype"] = s.output
    return Example(op, inputs, {"Y": s.output}, attributes, lambda got: assert_within(got[0], expected, bound))


_OTHERS = {
    "MXFP8Conv": _conv,
    "MXFP8Quantize": _quantize,
    "MXFP8Dequantize": _dequantize,
    "MXFP8Embedding": _embedding,
    "MXFP8Attention": _attention,
}


# --- Models


def absent(example: Example) -> tuple[str, ...]:
    """Returns the inputs that stand for something that is not there; they must be initializers."""
    ports = [port.name for port in contract.OPS[example.op].inputs if port.has_stand_in]
    return tuple(name for name in ports if name in example.inputs and example.inputs[name][0].shape in ((0,), (1,)))


def model_of(
    examples: Sequence[Example],
    opset: int = 21,
    *,
    style: Style = STYLE,
    shapes: str = "ranks",
    constants: Sequence[str] = (),
) -> tuple[onnx.ModelProto, dict[str, Feed]]:
    """Returns a model of a node for each example, and its inputs; value `name` of example i is name_i.

    Args:
        examples: the nodes.
        opset: that of the default domain.
        style: how bodies are written.
        shapes: what is known of those of the inputs: "all", "ranks" or "nothing".
        constants: the inputs that are initializers, beside those for what is absent.
    """
    nodes, ports, results, stored, fed = [], [], [], [], {}
    for i, one in enumerate(examples):
        inputs, outputs = ([f"{name}_{i}" for name in side] for side in (one.inputs, one.outputs))
        nodes.append(helper.make_node(one.op, inputs, outputs, f"n{i}", domain=contract.DOMAIN, **one.attributes))
        results += [helper.make_tensor_value_info(f"{n}_{i}", dtype, None) for n, dtype in one.outputs.items()]
        for name, (array, dtype) in one.inputs.items():
            own = f"{name}_{i}"
            fed[own] = array, dtype
            if name in (*constants, *absent(one)):
                stored.append(helper.make_tensor(own, dtype, array.shape, array.tobytes(), raw=True))
                continue
            dims = [size if shapes == "all" else f"{own}_{at}" for at, size in enumerate(array.shape)]
            ports.append(helper.make_tensor_value_info(own, dtype, None if shapes == "nothing" else dims))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    graph = helper.make_graph(nodes, "examples", ports, results, stored)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model, style))
    return model, fed


def in_standard_ops(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with standard ops in place of the nodes."""
    known: dict[str, Input] = {}
    for info in model.graph.input:
        kind = info.type.tensor_type
        sizes = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        known[info.name] = Input.from_shape(kind.elem_type, sizes if kind.HasField("shape") else None)
    for tensor in model.graph.initializer:
        neutral = tensor.name.startswith(("attn_mask", "past"))
        known[tensor.name] = Input.from_shape(tensor.data_type, tensor.dims, constant=True, neutral=neutral)
    names: dict[str, int] = {}

    def fresh(name: str) -> str:
        names[name] = names.get(name, 0) + 1
        return f"{name}.{names[name]}"

    nodes = [*model.graph.node]
    while any(node.domain == contract.DOMAIN for node in nodes):
        nodes = [
            other
            for node in nodes
            for other in (
                standard_ops.in_place_of(node, case_of(node, known), fresh)
                if node.domain == contract.DOMAIN
                else [node]
            )
        ]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:], result.functions[:]
    result.graph.node.extend(nodes)
    return result


def check_all(examples: Sequence[Example], model: onnx.ModelProto, fed: Mapping[str, Feed], **session: Any) -> None:
    """Runs a model of `model_of` and fails unless each node gives what it must."""
    got = one_node.run(model, fed, **session)
    for one in examples:
        one.check([got.pop(0) for _ in one.outputs])


def generator() -> Any:
    """Returns custom_ops/generate.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("generate", Path(contract.__file__).parents[1] / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
