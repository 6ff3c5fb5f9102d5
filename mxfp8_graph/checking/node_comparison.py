"""The nodes that compare one MXFP8 node's kernel with its function body, and reduce the difference to one number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mxfp8_graph.checking.attention_bound import attention_bound
from mxfp8_ops import contract, fused, numerics
from mxfp8_ops.contract import ATTENTION, DEQUANTIZE, GROUPED_WEIGHT_GEMM, QUANTIZE, Op

BODY_DOMAIN: Final = f"{contract.DOMAIN}.body"
"""Domain of the twins: no kernel is registered for it, so ONNX Runtime must run the body."""

USED_BY_CHECKS: Final = (DEQUANTIZE.name, GROUPED_WEIGHT_GEMM.name, QUANTIZE.name)
"""Ops of that domain that every comparison may need."""

LEAST: Final = 2.0**-149
"""The least float32."""


def quantizes_results(op: Op) -> bool:
    """Whether a node quantizes the result of a computation (its third output), and not its input."""
    return op.quantizes and op is not QUANTIZE


def is_inexact(op: Op) -> bool:
    """Whether a kernel of the node may give other values than its body, within a bound."""
    return op.is_gemm or quantizes_results(op) or op is ATTENTION


class Comparison:
    """The nodes that compare one node with its twin."""

    def __init__(self, node: NodeProto, result: str) -> None:
        """`result`: name of the number that the comparison computes, and prefix of the names of all other values."""
        self.node = node
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._op = contract.OPS[node.op_type]
        self._result = result
        self._count = 0
        self._inputs = {port.name: name for port, name in zip(self._op.inputs, node.input, strict=False)}
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        texts = {name: value.decode() for name, value in attributes.items() if isinstance(value, bytes)}
        self.attributes: dict[str, Any] = {**self._op.attributes, **attributes, **texts}

    def build(self) -> None:
        """Adds the twin and the comparison, and names outputs of the node that the graph omits and they need."""
        twin = NodeProto()
        twin.CopyFrom(self.node)
        twin.domain = BODY_DOMAIN
        twin.name = f"{self._result}/twin"
        for index, port in enumerate(self._op.inputs[: len(twin.input)]):
            if port.dtypes == contract.VALUES:
                # ONNX Runtime drops the rounding to float16 between an op it has in float32 only and a Cast, and the
                # bodies start with one. Behind an Identity they get what the graph says.
                self._inputs[port.name] = twin.input[index] = self("Identity", twin.input[index])
        if quantizes_results(self._op) or self._op is ATTENTION:
            for index, output in enumerate(self.node.output):
                self.node.output[index] = output or f"{self._result}/output/{index}"
        del twin.output[:]
        twin.output.extend(f"{self._result}/twin/{i}" for i in range(len(self.node.output)))
        self.nodes.append(twin)
        pairs = [pair for pair in zip(self.node.output, twin.output, strict=True) if pair[0]]
        if quantizes_results(self._op):
            result = self._quantized(pairs)
        elif self._op.is_gemm:
            dtype = contract.VALUE_NAMES[int(self.attributes["output_dtype"])]
            result = self._ratio(*pairs[0], self._gemm_bound(dtype))
        elif self._op is ATTENTION:
            result = self._attention(*pairs)
        else:
            result = self("Sum", *self._differing(pairs))
        self.nodes.append(helper.make_node("Identity", [result], [self._result]))

    def _differing(self, pairs: Sequence[tuple[str, str]], elements: str = QUANTIZE.name) -> Iterator[str]:
        """Yields how many values differ, per output; the first is one of elements if the node is of type `elements`."""
        for position, (ours, body) in enumerate(pairs):
            a, b = (self("Cast", name, to=TensorProto.FLOAT) for name in (ours, body))
            if self.node.op_type == elements and position == 0:
                one = self.constant(1)  # the reciprocals of distinct elements are distinct, those of -0 and 0 too
                same = self("Equal", self("Div", one, a), self("Div", one, b))
            else:
                same = self("Equal", a, b)
            same = self("Or", same, self("And", self("IsNaN", a), self("IsNaN", b)))
            yield self("ReduceSum", self("Cast", self("Not", same), to=TensorProto.FLOAT), keepdims=0)

    def _ratio(self, ours: str, body: str, bound: str) -> str:
        """Returns the largest |ours - body| / (2 * bound); infinite where only one is finite."""
        a, b = (self("Cast", name, to=TensorProto.FLOAT) for name in (ours, body))
        same = self("Or", self("Equal", a, b), self("And", self("IsNaN", a), self("IsNaN", b)))
        ratio = self("Div", self("Abs", self("Sub", a, b)), self("Mul", bound, self.constant(2)))
        # Equal first: 0 / 0 where the bound is 0, and Inf - Inf, are NaN and no difference.
        ratio = self("Where", same, self.constant(0), self("Where", self("IsNaN", ratio), self.constant(np.inf), ratio))
        flat = self(
            "Concat", self("Reshape", ratio, self.constant([-1], np.int64)), self.constant([0.0]), axis=0
        )  # never empty
        return self("ReduceMax", flat, keepdims=0)

    def _gemm_bound(self, dtype: str) -> str:
        """Returns the error bound of a gemm: `numerics.gemm_error_bound`, or that of `fused`."""
        left = self._left()
        magnitude = self._magnitude(self("Abs", left))
        k = self("Cast", self("Shape", left, start=-1), to=TensorProto.FLOAT)
        terms = self("Add", k, self.constant(2))
        epilogue = self.attributes.get("epilogue")
        bound = numerics.error_bound(dtype) if epilogue is None else fused.error_bound(dtype, epilogue)
        # 1.01: the magnitude is itself a float32 sum. 2^-149: the least float32.
        relative = self("Add", self("Mul", terms, self.constant(1.01 * bound.per_term)), self.constant(bound.store))
        per_side = self("Mul", magnitude, relative)
        per_side = self("Add", per_side, self("Mul", terms, self.constant(max(bound.underflow, LEAST))))
        if (factor := self._inputs.get("factor")) is not None:
            per_side = self("Mul", per_side, self("Abs", self("Cast", factor, to=TensorProto.FLOAT)))
        return self("Add", per_side, self.constant(bound.tiny))

    def _quantized(self, pairs: Sequence[tuple[str, str]]) -> str:
        """Returns how far apart the values that are quantized are, in units of their bound; infinite if codes differ.

        The kernel's codes are compared with those of its own values. The sum before a norm has to be equal too.
        """
        elements, scales, values, *total = pairs
        settings = {name: value for name, value in self.attributes.items() if name in QUANTIZE.attributes}
        # The kernel's own values are quantized again by the reference body: its codes have to be those, to the bit.
        quantized = [self._unique("quantized") for _ in QUANTIZE.outputs]
        kernel_values = self("Identity", values[0])
        attributes = {**QUANTIZE.attributes, **settings}
        self.nodes.append(helper.make_node(QUANTIZE.name, [kernel_values], quantized, domain=BODY_DOMAIN, **attributes))
        exact = [(elements[0], quantized[0]), (scales[0], quantized[1]), *total]
        if self._op.is_gemm:
            bound = self._gemm_bound("float32")
        else:
            x = total[0][0] if total else self._inputs["X"]
            bound = self._norm_bound(self("Cast", x, to=TensorProto.FLOAT))
        return self._unless_differing(exact, self._ratio(*values, bound))

    def _attention(self, y: tuple[str, str], *presents: tuple[str, str]) -> str:
        """Returns how far apart the values of Y are, in units of their bound; infinite if a present differs."""
        bound = attention_bound(self, self._inputs, (presents[0][0], presents[1][0]), self.attributes)
        store, tiny = self._rounding("Q")
        size = self("Abs", self("Cast", y[1], to=TensorProto.FLOAT))
        stored = self("Add", self("Mul", self("Add", size, bound), store), self("Add", tiny, self.constant(LEAST)))
        return self._unless_differing(presents, self._ratio(*y, self("Sum", bound, stored, stored)))

    def _unless_differing(self, exact: Sequence[tuple[str, str]], ratio: str) -> str:
        """Returns `ratio`, or infinity if a value of these pairs differs."""
        differing = self("Sum", *self._differing(exact, elements=self._op.name))
        return self("Where", self("Greater", differing, self.constant(0)), self.constant(np.inf), ratio)

    def _norm_bound(self, x: str) -> str:
        """Returns the error bound of the normalized rows of x: `fused.norm_error_bound`."""
        last, unit = self.constant([-1], np.int64), fused.UNIT
        k = self("Cast", self("Shape", x, start=-1), to=TensorProto.FLOAT)
        d, mean = x, self.constant(0)
        if self.attributes["norm"] == "layer":
            d = self("Sub", x, self("ReduceMean", x, last))
            terms = self("Mul", self("Add", k, self.constant(1)), self.constant(unit))
            mean = self("Mul", terms, self("ReduceMean", self("Abs", x), last))
        v = self("Add", self("ReduceMean", self("Mul", d, d), last), self.constant(self.attributes["epsilon"]))
        deviation, d = self("Sqrt", v), self("Abs", d)
        p = self("Mul", self("Add", k, self.constant(4)), self.constant(unit))
        lost = self("Div", mean, deviation)
        p = self("Add", p, self("Mul", lost, lost))
        gain = self("Div", self("Abs", self._inputs["scale"]), deviation)
        bias = self._inputs.get("bias")
        shift = self.constant(0) if bias is None else self("Abs", bias)
        rounded = self("Add", self("Mul", gain, d), shift)
        inexact = self("Mul", d, self("Add", p, self.constant(8 * unit)))
        inexact = self("Mul", gain, self("Add", inexact, self("Add", mean, mean)))
        inexact = self("Add", inexact, self("Mul", shift, self.constant(2 * unit)))
        store, tiny = self._rounding("X")
        stored = self("Add", self("Mul", rounded, store), self("Add", tiny, self.constant(LEAST)))
        # 1.02: these are float32 sums themselves, and the dtype of the result has steps of 2^-7 at most.
        return self("Add", self("Mul", inexact, self.constant(1.02)), self("Add", stored, stored))

    def _rounding(self, port: str) -> tuple[str, str]:
        """Returns half a unit in the last place of an input's dtype, relative, and that of its subnormal numbers."""
        bounds = {name: numerics.error_bound(name) for name in ("bfloat16", "float16", "float32")}
        chosen: tuple[str, ...] = tuple(self.constant(number) for number in _stores(bounds["float32"]))
        for name, digits in (("float16", 12), ("bfloat16", 10)):  # only a narrower dtype takes 1 + 2^-digits for 1
            near_one = self("Identity", self("CastLike", self.constant(1 + 2.0**-digits), self._inputs[port]))
            narrow = self("Equal", self("Cast", near_one, to=TensorProto.FLOAT), self.constant(1))
            pairs = zip(_stores(bounds[name]), chosen, strict=True)
            chosen = tuple(self("Where", narrow, self.constant(number), wider) for number, wider in pairs)
        return chosen[0], chosen[1]

    def _left(self) -> str:
        """Returns the float32 values of A."""
        if not self._op.weight_only:
            return self._dequantized(self._inputs["A"], self._inputs["A_scales"])
        rounded = self("Cast", self._inputs["X"], to=self.attributes["activation_dtype"])
        return self("Cast", rounded, to=TensorProto.FLOAT)

    def _magnitude(self, left: str) -> str:
        """Returns the sums of |a||b|, and |bias|; `left` holds the |a|."""
        elements, scales = self._inputs["B"], self._inputs["B_scales"]
        if (experts := self._inputs.get("experts")) is not None:
            # Abs has no float8; float16 holds every element exactly.
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
        return f"{self._result}/{self._count}/{what}"


def _stores(bound: numerics.ErrorBound) -> tuple[float, float]:
    return bound.store, bound.tiny
