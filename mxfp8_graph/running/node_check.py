"""Compares the kernel of every MXFP8 node with its function body, on the same inputs, in one ONNX Runtime session.

A comparison at the model's outputs proves little. A difference in the last bit of a float32 sum may round an element of
the next layer the other way, by a whole step of the element format. So the outputs of two correct executions may differ
by as much as the quantization error itself. For one node on the same inputs a bound holds:

- MXFP8Quantize, MXFP8Dequantize, MXFP8Embedding: no difference at all.
- The gemms: both sums are float32 sums of the same exact products, in any order. Each is within `gemm_error_bound` or
  `fused_gemm_error_bound` of the exact result, so the two differ by at most twice that bound.
- The convolution: likewise, by `conv.conv_error_bound`; it rounds its values alike in both.
- The attention: its values by `attention.attention_error_bound`; keys and values with the past before them are equal.

The model is changed for the check: each node gets a twin in another domain that only has the function body, and the
inputs and outputs of both become outputs of the model. One session checks a few nodes, because their tensors are in
memory together, and because the time that ONNX Runtime takes to insert function bodies grows with the square of their
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto, helper

from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import external_files, path_of
from mxfp8_graph.onnx_pass.protos import iter_graphs, to_proto
from mxfp8_graph.report.base import Data
from mxfp8_graph.running.inputs import Array
from mxfp8_graph.running.profile import by_node, kernels_of
from mxfp8_graph.running.sessions import Execution, Session
from mxfp8_ops import contract, cpu, formats, numerics, numpy_nodes, onnx_functions
from mxfp8_ops.contract import ATTENTION, CONV
from mxfp8_ops.nodes.attention import attention_error_bound
from mxfp8_ops.nodes.attention_sizes import attention_sizes
from mxfp8_ops.nodes.conv import Settings, conv_error_bound
from mxfp8_ops.nodes.grouped import check_experts

BODY_DOMAIN: Final = f"{contract.DOMAIN}.body"
"""Domain of the twins: no kernel is registered for it, so ONNX Runtime must run the body."""

_AT_ONCE: Final = 16
"""Nodes that are checked in one session: of MiniLM's 68, 8 at a time take 6 s in all, 16 take 5 s, all at once 14 s."""

_WEIGHT_VALUES: Final = 1 << 20
"""Values of a weight whose bound is computed at once, about 28 bytes of memory for each."""

_FORMATS: Final = {row.numpy_name: name for name, row in formats.ELEMENT_FORMATS.items()}
"""NumPy's name of the dtype -> name of the element format."""


@dataclass(frozen=True)
class NodeCheck(Data):
    """The comparison of one node's kernel with its function body."""

    KEYS = "name op kernel excess passed"

    name: str
    op: str
    excess: float
    """The largest difference, in units of the bound; for an op without one, the number of values that differ."""
    kernel: str = ""
    """The instruction set its kernel ran on, and the gemm kernels: "avx512 gemm_f32"."""

    @property
    def has_bound(self) -> bool:
        """Whether the node sums values, so that the order of the sum changes its last bits."""
        return contract.OPS[self.op].factors_at is not None

    @property
    def passed(self) -> bool:
        """Whether kernel and body agree: no value differs, or no difference is beyond the bound."""
        return self.excess <= (1 if self.has_bound else 0)

    def __str__(self) -> str:
        """Returns the failure in words."""
        if self.has_bound:
            return f"{self.op} {self.name!r}: kernel and function body differ by {self.excess:.3g} times the bound"
        where = "shape" if math.isinf(self.excess) else f"{self.excess:.0f} values"
        return f"{self.op} {self.name!r}: kernel and function body differ in {where}; expected none"


def check_nodes(model: ir.Model, inputs: Mapping[str, Any]) -> list[NodeCheck]:
    """Returns one check per MXFP8 node of the main graph; nodes in subgraphs are not checked.

    Raises:
        BackendError: ONNX Runtime cannot run the model with twins.
    """
    count = sum(node.domain == contract.DOMAIN for node in model.graph)
    return [
        check for start in range(0, count, _AT_ONCE) for check in _checks(model, slice(start, start + _AT_ONCE), inputs)
    ]


def _checks(model: ir.Model, chosen: slice, inputs: Mapping[str, Any]) -> list[NodeCheck]:
    """Returns the checks of some of the MXFP8 nodes, which are counted from 0."""
    stored, path = model.graph.initializers, path_of(model)
    folder = path and path.resolve().parent  # ONNX Runtime reads no data behind a link
    if path and folder and not all(file.resolve().is_relative_to(folder) for file in external_files(model)):
        folder = path.parent  # the model is a link, and its data is not
    instrumented = to_proto(model)  # large weights stay in their files, also in the model's own file
    pairs = _instrument(instrumented, chosen, {*inputs, *stored})
    as_it_is = Execution(optimize=False)  # every node runs as the file has it
    session = Session(instrumented, kernels=True, where=name_of(model), folder=folder, execution=as_it_is)
    with cpu.profiled() as written:
        values = {**session.run(inputs), **inputs}
        calls = by_node(written.calls())
    kernels = {name: " ".join(reversed(kernels_of(own))).strip() for name, own in calls.items()}

    def read(name: str) -> Array:
        # A weight is read for its own node only: the weights of all nodes together may be large.
        tensor = stored[name].const_value if name not in values else None
        return values[name] if tensor is None else tensor.numpy()

    return [
        NodeCheck(
            node.name or node.output[0],
            node.op_type,
            _Comparison(node, twin, read).excess(),
            kernels.get(node.name, ""),
        )
        for node, twin in pairs
    ]


def _instrument(model: ModelProto, chosen: slice, known: set[str]) -> list[tuple[NodeProto, NodeProto]]:
    """Adds a twin of each chosen node, and returns (node, twin) pairs.

    The inputs and outputs of both become the only outputs of the model, except names in `known`.
    """
    nodes = [node for node in model.graph.node if node.domain == contract.DOMAIN][chosen]
    # Other runtimes execute the model's own bodies, so these are checked; ours replace only missing ones.
    carried = {function.name: function for function in model.functions if function.domain == contract.DOMAIN}
    if not {node.op_type for node in nodes} <= carried.keys():
        carried = {function.name: function for function in onnx_functions.functions(model)} | carried
    model.functions.extend(map(_twin_of, carried.values()))
    model.opset_import.append(helper.make_opsetid(BODY_DOMAIN, contract.VERSION))
    pairs = [(node, _add_twin(model, node, f"{BODY_DOMAIN}/{index}")) for index, node in enumerate(nodes)]
    names = dict.fromkeys(n for node, twin in pairs for n in (*node.input, *node.output, *twin.output) if n)
    # Without a type: ONNX Runtime infers it.
    outputs = [ValueInfoProto(name=name) for name in names if name not in known]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    return pairs


def _add_twin(model: ModelProto, node: NodeProto, prefix: str) -> NodeProto:
    """Adds the twin of a node to the model and returns it; outputs of the node without a name get one."""
    for index, output in enumerate(node.output):
        node.output[index] = output or f"{prefix}/output/{index}"
    twin = NodeProto()
    twin.CopyFrom(node)
    twin.domain, twin.name = BODY_DOMAIN, f"{prefix}/twin"
    twin.output[:] = [f"{prefix}/twin/{index}" for index in range(len(node.output))]
    sources = {each.output[0]: each.input[0] for each in model.graph.node if _declares_elements(each)}
    for index, port in enumerate(contract.OPS[node.op_type].inputs[: len(twin.input)]):
        if (values := sources.get(node.input[index])) is not None:
            name, shape = f"{prefix}/input/{index}", f"{prefix}/shape/{index}"
            model.graph.node.append(helper.make_node("Shape", [values], [shape], name=shape))
            model.graph.node.append(helper.make_node("Reshape", [node.input[index], shape], [name], name=name))
            twin.input[index] = name
        elif port.dtypes == contract.VALUES:
            # A body starts with a Cast. After an op that it has in float32 only, ONNX Runtime drops the rounding to
            # float16 before a Cast; an Identity between the two keeps it.
            name = f"{prefix}/input/{index}"
            model.graph.node.append(helper.make_node("Identity", [node.input[index]], [name], name=name))
            twin.input[index] = name
    model.graph.node.append(twin)
    return twin


def _declares_elements(node: NodeProto) -> bool:
    """Whether a node tells ONNX Runtime a rank of its elements, which is wrong where the rank is unknown.

    The library cannot declare INT8 or E5M2 without a rank (`shapes.cpp`), and ops of a function body infer from it. A
    Reshape to the shape of the values restores the rank.
    """
    dtype = next((a.i for a in node.attribute if a.name == "output_dtype"), contract.FLOAT8E4M3FN)
    return node.op_type == contract.QUANTIZE.name and dtype != contract.FLOAT8E4M3FN


def _twin_of(function: FunctionProto) -> FunctionProto:
    """Returns a function body, and the MXFP8 nodes in it, in the domain of the twins."""
    twin = FunctionProto()
    twin.CopyFrom(function)
    twin.domain = BODY_DOMAIN
    body: Any = twin  # a FunctionProto has nodes like a GraphProto
    named: list[Any] = [*twin.opset_import, *(node for graph in iter_graphs(body) for node in graph.node)]
    for item in named:
        if item.domain == contract.DOMAIN:
            item.domain = BODY_DOMAIN
    return twin


class _Comparison:
    """The inputs of one node, the outputs of its kernel, and the outputs of its function body."""

    def __init__(self, node: NodeProto, twin: NodeProto, read: Callable[[str], Array]) -> None:
        self._op = contract.OPS[node.op_type]
        ports = zip(self._op.inputs, node.input, strict=False)
        self._inputs = {port.name: read(name) for port, name in ports if name}
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        texts = {name: value.decode() for name, value in attributes.items() if isinstance(value, bytes)}
        self._attributes: dict[str, Any] = {**self._op.attributes, **attributes, **texts}
        self._ours, self._body = ([read(name) for name in one.output] for one in (node, twin))

    def excess(self) -> float:
        """Returns `NodeCheck.excess`."""
        exact = [*zip(self._ours, self._body, strict=True)]
        if any(ours.shape != body.shape for ours, body in exact):
            return math.inf
        with np.errstate(all="ignore"):  # NaN and Inf are compared, too
            if self._op.is_gemm:
                values, exact = exact[0], []
                bound = self._gemm_bound(contract.VALUE_NAMES[self._attributes["output_dtype"]])
            elif self._op is CONV:
                values, exact = exact[0], []
                bound = self._conv_bound()
            elif self._op is ATTENTION:
                values, *exact = exact
                bound = self._attention_bound()
            else:
                return float(sum(map(_differing, *zip(*exact, strict=True))))
            return math.inf if any(_differing(*pair) for pair in exact) else _largest_ratio(*values, 2 * bound)

    def _gemm_bound(self, dtype: str) -> Array:
        """Returns the bound of each value of a gemm whose result has that dtype."""
        b, scales = self._inputs["B"], self._inputs["B_scales"]
        if self._op.weight_only:
            rounds = self._attributes["activation_dtype"] == contract.BFLOAT16
            x = self._inputs["X"].astype(numerics.VALUE_DTYPES["bfloat16" if rounds else "float32"])
        else:
            x = _dequantized(self._inputs["A"], self._inputs["A_scales"])
        if (experts := self._inputs.get("experts")) is not None:
            return _grouped_bound(x, b, scales, experts, dtype)
        bound: Callable[..., Array] = numpy_nodes.gemm_error_bound
        if "epilogue" in self._attributes:
            bound = partial(numpy_nodes.fused_gemm_error_bound, epilogue=self._attributes["epilogue"])
        bias, factor = self._inputs.get("bias"), self._inputs.get("factor")
        rows, parts = max(_WEIGHT_VALUES // max(b.shape[-1], 1), 1), []
        for start in range(0, max(b.shape[-2], 1), rows):
            part = slice(start, start + rows)
            factors = {} if factor is None else {"factor": factor[..., part]}
            weight = _dequantized(b[..., part, :], scales[..., part, :])
            parts.append(bound(x, weight, dtype, None if bias is None else bias[part], **factors))
        return np.concatenate(parts, -1)

    def _conv_bound(self) -> Array:
        """Returns the bound of each value of a convolution."""
        x, b, scales = (self._inputs[name] for name in ("X", "B", "B_scales"))
        residual = self._inputs.get("residual")
        if residual is not None and residual.shape == (1,):  # stands for none
            residual = None
        names = ("strides", "pads", "dilations", "group", "scale_rounding", "epilogue", "alpha", "beta", "residual_at")
        settings = Settings(
            **{name: self._attributes[name] for name in names},
            x_format=formats.ELEMENT_NAMES[self._attributes["x_dtype"]],
            b_format=_FORMATS[b.dtype.name],
            dtype=contract.VALUE_NAMES[self._attributes["output_dtype"]],
        )
        x_format, rounding = settings.x_format, settings.scale_rounding
        codes = numpy_nodes.quantize(x, axis=1, element_format=x_format, scale_rounding=rounding)
        values = numpy_nodes.dequantize(*codes, axis=1, element_format=x_format)
        bias = self._inputs.get("bias")
        return conv_error_bound(values, _dequantized(b, scales), bias, residual, settings=settings)

    def _attention_bound(self) -> Array:
        """Returns the bound of each value of Y, a key-value head at a time: it needs all scores in float64."""
        q, k, v, mask, *pasts = (self._inputs[port.name] for port in ATTENTION.inputs)
        heads = self._attributes["q_num_heads"], self._attributes["kv_num_heads"]
        shapes = (q.shape, k.shape, v.shape), mask.shape, (pasts[0].shape, pasts[1].shape)
        sizes = attention_sizes(ATTENTION.name, *shapes, heads)
        each, mask = sizes.q_heads // sizes.kv_heads, np.broadcast_to(mask, sizes.scores)
        # The columns of a key-value head are side by side, and so are the columns of the query heads that read it.
        q, k, v = (x.reshape(*x.shape[:2], sizes.kv_heads, x.shape[2] // sizes.kv_heads) for x in (q, k, v))
        bound = np.empty((*q.shape[:3], each * sizes.dv))
        for batch, head in np.ndindex(sizes.batch, sizes.kv_heads):
            one, own = slice(batch, batch + 1), slice(head * each, (head + 1) * each)
            past = (pasts[0][one, head : head + 1], pasts[1][one, head : head + 1]) if sizes.past else None
            bound[one, :, head] = attention_error_bound(
                q[one, :, head],
                k[one, :, head],
                v[one, :, head],
                mask[one, own],
                past,
                q_num_heads=each,
                kv_num_heads=1,
                is_causal=bool(self._attributes["is_causal"]),
                scale=self._attributes["scale"],
                activation_dtype="bfloat16" if self._attributes["activation_dtype"] == contract.BFLOAT16 else None,
            )
        return bound.reshape(sizes.y)


def _grouped_bound(x: Array, b: Array, scales: Array, experts: Array, dtype: str) -> Array:
    """Returns the bound of each value of a grouped gemm; 0 where rows have no expert, whose result is 0."""
    lead = np.broadcast_shapes(x.shape[:-2], experts.shape)
    picked = np.broadcast_to(check_experts("grouped_gemm", experts, len(b)), lead)
    x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    bound = np.zeros((*lead, x.shape[-2], b.shape[-2]))
    # An expert at a time: its matrix would otherwise be repeated for each row that picks it.
    for expert in set(picked.flat) - {len(b)}:
        weight = _dequantized(b[expert], scales[expert])
        bound[picked == expert] = numpy_nodes.gemm_error_bound(x[picked == expert], weight, dtype)
    return bound


def _dequantized(elements: Array, scales: Array) -> Array:
    return numpy_nodes.dequantize(elements.view(np.uint8), scales, element_format=_FORMATS[elements.dtype.name])


def _differing(a: Array, b: Array) -> int:
    """Returns the number of values that differ: codes by their bytes, numbers by their value, NaN equal to NaN."""
    if a.dtype.itemsize == 1:
        return int(np.count_nonzero(a.view(np.uint8) != b.view(np.uint8)))
    a, b = a.astype(np.float32), b.astype(np.float32)
    return int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))


def _largest_ratio(ours: Array, body: Array, bound: Array) -> float:
    """Returns the largest |ours - body| / bound; infinite where only one is finite."""
    a, b = ours.astype(np.float64), body.astype(np.float64)
    ratio = np.abs(a - b) / bound
    # Equal values first: their ratio is NaN where the bound is 0 or both are Inf.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio)).max(initial=0.0))
