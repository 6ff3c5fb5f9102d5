"""Every MXFP8 node's kernel against its own function body, on the same inputs, inside one ONNX Runtime session.

Comparing the two at the model's outputs proves little: a difference in the last bit of a float32 sum may round the
next layer's element the other way, and that is a whole step of the element format, so two correct executions drift
apart by as much as the quantization error itself. Node by node there is no drift, and a bound holds:

- MXFP8Quantize, MXFP8Dequantize, MXFP8Embedding: no difference at all.
- The gemms: both sums are float32 sums of the same exact products, in any order. Each is within
  `numerics.gemm_error_bound` of the exact result, so they are within twice that of each other.

The model is instrumented: each node gets a twin in another domain that only has the function body, and a few standard
ops that reduce the two results to one number. Nothing large leaves the session.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mxfp8_graph.checking.sessions import Session
from mxfp8_graph.onnx_model.walk import STANDARD, iter_graphs
from mxfp8_ops import contract, numerics, onnx_functions
from mxfp8_ops.contract import DEQUANTIZE, GROUPED_WEIGHT_GEMM, QUANTIZE

BODY_DOMAIN: Final = f"{contract.DOMAIN}.body"
"""Domain of the twins: no kernel is registered for it, so ONNX Runtime must run the body."""


@dataclass(frozen=True)
class NodeCheck:
    """What one node's kernel did against its body."""

    name: str
    op: str
    excess: float
    """Gemms: the largest difference, in units of the bound. The others: values that differ."""

    @property
    def is_gemm(self) -> bool:
        """Whether the node sums products, so that the order of the sum shows in its last bits."""
        return contract.OPS[self.op].is_gemm

    @property
    def passed(self) -> bool:
        """Whether kernel and body agree: no value differs, or no difference is beyond the bound."""
        return self.excess <= (1 if self.is_gemm else 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the check with JSON types only: infinity is None."""
        excess = self.excess if math.isfinite(self.excess) else None
        return {"name": self.name, "op": self.op, "excess": excess, "passed": self.passed}

    def __str__(self) -> str:
        """Returns what is wrong, for a list of failures."""
        if self.is_gemm:
            return f"{self.op} {self.name!r}: kernel and function body differ by {self.excess:.3g} times the bound"
        return f"{self.op} {self.name!r}: kernel and function body differ in {self.excess:.0f} values; expected none"


def check_nodes(model: ModelProto, inputs: Mapping[str, Any], folder: Path | None, where: str) -> list[NodeCheck]:
    """Returns one check per MXFP8 node of the main graph; nodes in subgraphs are not reached.

    The model, whose external data is in `folder`, is not modified. Errors call it `where`.

    Raises:
        BackendError: the model cannot be instrumented or run.
    """
    nodes = [node for node in model.graph.node if node.domain == contract.DOMAIN]
    if not nodes:
        return []
    session = Session(_instrumented(model, nodes), kernels=True, where=where, folder=folder, optimize=False)
    values = session.run(inputs)
    return [
        NodeCheck(node.name or node.output[0], node.op_type, float(values[_result(i)])) for i, node in enumerate(nodes)
    ]


def nodes_in_subgraphs(model: ModelProto) -> int:
    """Returns how many MXFP8 nodes are inside If, Loop and Scan bodies."""
    _, *inner = iter_graphs(model.graph)
    return sum(node.domain == contract.DOMAIN for graph in inner for node in graph.node)


def _result(index: int) -> str:
    return f"mxfp8.check/{index}"


def _instrumented(model: ModelProto, nodes: list[NodeProto]) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    opset = next(entry.version for entry in copy.opset_import if entry.domain in STANDARD)
    carried = {function.name: function for function in model.functions if function.domain == contract.DOMAIN}
    for name in sorted({node.op_type for node in nodes} | {DEQUANTIZE.name, GROUPED_WEIGHT_GEMM.name}):
        body = copy.functions.add()
        body.CopyFrom(carried[name] if name in carried else onnx_functions.functions(opset, [name])[0])
        body.domain = BODY_DOMAIN
    copy.opset_import.append(helper.make_opsetid(BODY_DOMAIN, contract.VERSION))
    del copy.graph.output[:]
    for index, node in enumerate(nodes):
        check = _Check(node, index)
        check.build()
        copy.graph.node.extend(check.nodes)
        copy.graph.initializer.extend(check.constants)
        copy.graph.output.append(helper.make_tensor_value_info(_result(index), TensorProto.FLOAT, []))
    return copy


class _Check:
    """The nodes that compare one node with its twin; all values are named after the node's index."""

    def __init__(self, node: NodeProto, index: int) -> None:
        self.node = node
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._op = contract.OPS[node.op_type]
        self._index = index
        self._count = 0
        self._x = node.input[0]
        self._inputs = {port.name: name for port, name in zip(self._op.inputs, node.input, strict=False)}
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.attributes: dict[str, Any] = {**self._op.attributes, **given}

    def build(self) -> None:
        """Adds the twin and the comparison; the result is called `_result(index)`."""
        twin = NodeProto()
        twin.CopyFrom(self.node)
        twin.domain = BODY_DOMAIN
        twin.name = f"{_result(self._index)}/twin"
        if self._op.inputs[0].dtypes == contract.VALUES:
            # ONNX Runtime drops the rounding to float16 between an op it has in float32 only and a Cast, and the bodies
            # start with one. Behind an Identity they get what the graph says.
            twin.input[0] = self._x = self("Identity", self.node.input[0])
        del twin.output[:]
        twin.output.extend(f"{_result(self._index)}/twin/{i}" for i in range(len(self.node.output)))
        self.nodes.append(twin)
        pairs = [pair for pair in zip(self.node.output, twin.output, strict=True) if pair[0]]
        result = self._beyond(*pairs[0]) if self._op.is_gemm else self("Sum", *self._differing(pairs))
        self.nodes.append(helper.make_node("Identity", [result], [_result(self._index)]))

    def _differing(self, pairs: list[tuple[str, str]]) -> Iterator[str]:
        """Yields how many values differ, per output."""
        for position, (ours, body) in enumerate(pairs):
            a, b = (self("Cast", name, to=TensorProto.FLOAT) for name in (ours, body))
            if self.node.op_type == QUANTIZE.name and position == 0:
                one = self.constant(1)  # the reciprocals of distinct elements are distinct, those of -0 and 0 too
                same = self("Equal", self("Div", one, a), self("Div", one, b))
            else:
                same = self("Equal", a, b)
            same = self("Or", same, self("And", self("IsNaN", a), self("IsNaN", b)))
            yield self("ReduceSum", self("Cast", self("Not", same), to=TensorProto.FLOAT), keepdims=0)

    def _beyond(self, ours: str, body: str) -> str:
        """Returns the largest |ours - body| / (2 * bound); infinite where only one is finite."""
        left = self._left()
        magnitude = self._magnitude(self("Abs", left))
        k = self("Cast", self("Shape", left, start=-1), to=TensorProto.FLOAT)
        terms = self("Add", k, self.constant(2))
        bound = numerics.error_bound(contract.VALUE_NAMES[int(self.attributes["output_dtype"])])
        # 1.01: the magnitude is itself a float32 sum. 2^-149: the least float32.
        relative = self("Add", self("Mul", terms, self.constant(1.01 * bound.per_term)), self.constant(bound.store))
        least = self.constant(max(bound.underflow, 2.0**-149))
        absolute = self("Add", self("Mul", terms, least), self.constant(bound.tiny))
        per_side = self("Add", self("Mul", magnitude, relative), absolute)
        a, b = (self("Cast", name, to=TensorProto.FLOAT) for name in (ours, body))
        same = self("Or", self("Equal", a, b), self("And", self("IsNaN", a), self("IsNaN", b)))
        ratio = self("Div", self("Abs", self("Sub", a, b)), self("Mul", per_side, self.constant(2)))
        ratio = self("Where", same, self.constant(0), self("Where", self("IsNaN", ratio), self.constant(np.inf), ratio))
        flat = self(
            "Concat", self("Reshape", ratio, self.constant([-1], np.int64)), self.constant([0.0]), axis=0
        )  # never empty
        return self("ReduceMax", flat, keepdims=0)

    def _left(self) -> str:
        """Returns the float32 values of A."""
        if not self._op.weight_only:
            return self._dequantized(self._inputs["A"], self._inputs["A_scales"])
        rounded = self("Cast", self._x, to=self.attributes["activation_dtype"])
        return self("Cast", rounded, to=TensorProto.FLOAT)

    def _magnitude(self, left: str) -> str:
        """Returns the sums of |a||b|, and |bias|; `left` holds the |a|."""
        elements, scales = self._inputs["B"], self._inputs["B_scales"]
        if (experts := self._inputs.get("experts")) is not None:
            positive = self("CastLike", self("Abs", self("Cast", elements, to=TensorProto.FLOAT16)), elements)
            settings = {**GROUPED_WEIGHT_GEMM.attributes, "output_dtype": contract.FLOAT}
            operands = (left, positive, scales, experts)
            return self(GROUPED_WEIGHT_GEMM.name, *operands, domain=BODY_DOMAIN, **settings)
        right = self("Abs", self._dequantized(elements, scales))
        magnitude = self("MatMul", left, self("Einsum", right, equation="...nk->...kn"))
        bias = self._inputs.get("bias", "")
        return self("Add", magnitude, self("Abs", bias)) if bias else magnitude

    def _dequantized(self, elements: str, scales: str) -> str:
        settings = {**DEQUANTIZE.attributes, "axis": -1, "output_dtype": contract.FLOAT}
        return self(DEQUANTIZE.name, elements, scales, domain=BODY_DOMAIN, **settings)

    def constant(self, value: float | list[float], dtype: type[np.generic] = np.float32) -> str:
        """Returns the name of a constant."""
        name = self._unique("constant")
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def __call__(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds op(*inputs) and returns the name of its output."""
        name = self._unique(op)
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def _unique(self, what: str) -> str:
        self._count += 1
        return f"{_result(self._index)}/{self._count}/{what}"
