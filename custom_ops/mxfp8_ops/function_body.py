"""The writer of function bodies: a `Body` collects the nodes of one body and names their values.

A body is written for a `Case`, the facts that the nodes of one op share. An attribute with one value is a constant in
the body. An attribute with several is read from the node, or chooses a branch of an If, which ONNX Runtime folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, helper, numpy_helper

from mxfp8_ops import numerics
from mxfp8_ops.case import ABSENT, Case, Input
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.node import DOMAIN, ELEMENTS, FLOAT, INT32, Op

Value = tuple[str, int, Sequence[int | None] | None]
"""Name, dtype and shape of an input or output of a subgraph."""


@dataclass(frozen=True)
class Attribute:
    """A reference to an attribute of the function, for use as an attribute of a node in its body."""

    name: str
    type: str
    """Name in onnx.AttributeProto.AttributeType."""


@dataclass(frozen=True)
class Style:
    """The choices that a writer of bodies has."""

    folds_weights: bool = True
    """True: ONNX Runtime decodes constant weights once, when a session opens, and holds float32. False: at each run."""
    in_function: bool = True
    """True: the body is a function, for ONNX Runtime. False: it is nodes of a graph, which other programs run too."""


STYLE: Final = Style()
"""The style of function bodies."""


@dataclass
class Body:
    """The nodes of one function body. Calling it appends a node and returns the name of its output."""

    case: Case
    opset: int
    style: Style = STYLE
    nodes: list[NodeProto] = field(default_factory=list)
    called: list[Case] = field(default_factory=list)
    """The nodes of the contract that the body contains."""
    _names: dict[str, int] = field(default_factory=dict)
    _constants: dict[bytes, str] = field(default_factory=dict)

    @property
    def op(self) -> Op:
        """The node type that the body computes."""
        return self.case.op

    def __call__(self, op_type: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Appends the node `out` = op_type(*inputs, **attributes) and returns the name of its output."""
        out = self.unique(out or op_type.lower())
        self._add(op_type, inputs, [out], "", attributes)
        return out

    def call(self, op: Op, inputs: Mapping[str, tuple[str, Input]], out: Sequence[str], **attributes: Any) -> list[str]:
        """Appends a node of the contract and returns the names of its outputs, after `out`.

        `inputs` has each port's value and the known facts about it. An attribute that is left out has its default.
        """
        outputs = [self.unique(name) for name in out]
        settings = {**op.attributes, **attributes}
        self._add(op.name, [value for value, _ in inputs.values()], outputs, DOMAIN, settings)
        values = {
            name: self.case.attributes[value.name] if isinstance(value, Attribute) else (value,)
            for name, value in settings.items()
        }
        facts = {port.name: inputs[port.name][1] if port.name in inputs else ABSENT for port in op.inputs}
        self.called.append(Case(op, values, facts, self.case.whole))
        return outputs

    def _add(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], domain: str, attributes: Mapping[str, Any]
    ) -> None:
        references = {key: value for key, value in attributes.items() if isinstance(value, Attribute)}
        plain = {key: value for key, value in attributes.items() if key not in references}
        node = helper.make_node(op_type, inputs, outputs, domain=domain or None, **plain)
        for key, value in references.items():
            node.attribute.append(AttributeProto(name=key, ref_attr_name=value.name, type=value.type))
        self.nodes.append(node)

    def result(self, value: str, port: str) -> None:
        """Makes `value` the output `port` of the function."""
        # By renaming: an Identity would be one more node. An input keeps its name, so it needs one.
        for node in self.nodes:
            if value in node.output:
                break
        else:  # an input of the function
            self("Identity", value, out=port)
            return
        self.unique(port)
        _rename(self.nodes, value, port)

    def inner(self) -> Body:
        """Returns an empty body for a Loop or an If inside this one, which may use the values of this body."""
        # All bodies share `_names`, so that no value hides another. Constants are not visible outside their subgraph.
        return replace(self, nodes=[], _constants={})

    # --- Attributes

    def attribute(self, name: str) -> Any:
        """Returns the value of attribute `name`; a reference to the function's attribute if it has several values."""
        value, *others = self.case.attributes[name]
        return Attribute(name, self.op.kind(name).onnx) if others else value

    def number(self, name: str) -> str:
        """Returns the value of the number attribute `name` as a scalar tensor: int64 or float32."""
        value = self.attribute(name)
        if isinstance(value, Attribute):
            if value.type == "INT":
                return self("Constant", value_int=value)
            return self("Constant", value_float=value)
        return self.constant(np.float32(value) if isinstance(value, float) else value)

    def vector(self, name: str) -> str:
        """Returns the value of the attribute `name`, an integer or a list of them, as a 1-D tensor."""
        value = self.attribute(name)
        if not isinstance(value, Attribute):
            return self.constant(value if isinstance(value, tuple) else [value])
        if value.type == "INTS":
            return self("Constant", value_ints=value)
        return self("Reshape", self.number(name), self.constant([1]), out=name)

    def choose(self, name: str, write: Callable[[Body, Any], str], dtype: int = FLOAT) -> str:
        """Returns the result of `write` for the value that attribute `name` has when the model runs.

        `write` appends nodes for one value to the body that it gets, and returns the name of a result of `dtype`. Each
        value except the last adds an If.
        """
        return self._choice(name, self.case.attributes[name], write, dtype)

    def _choice(self, name: str, values: Sequence[Any], write: Callable[[Body, Any], str], dtype: int) -> str:
        first, *others = values
        if not others:
            return write(self, first)
        here, beyond = self.inner(), self.inner()
        results = (here, write(here, first)), (beyond, beyond._choice(name, others, write, dtype))
        branches = [body.graph("branch", [], [(body("Identity", value), dtype, None)]) for body, value in results]
        condition = self._equals(name, first)
        return self("If", condition, out=f"of_{name}", then_branch=branches[0], else_branch=branches[1])

    def _equals(self, name: str, value: Any) -> str:
        """Returns the name of a bool tensor: whether attribute `name`, which has several values, equals `value`."""
        if not isinstance(value, str):
            return self("Equal", self.number(name), self.constant(type(value)(value)))
        # Both strings go through one tensor: in onnx's ReferenceEvaluator strings of two lengths have two dtypes.
        actual = self("Constant", value_string=Attribute(name, "STRING"))
        actual = self("Reshape", actual, self.constant([1]))
        both = self("Concat", self("Constant", value_strings=[value]), actual, axis=0)
        return self("Equal", self("Gather", both, self.constant(0)), self("Gather", both, self.constant(1)))

    # --- Inputs

    def known(self, port: str) -> Input:
        """Returns the known facts about an input."""
        return self.case.inputs[port]

    def floats(self, port: str) -> str:
        """Returns an input in float32, which holds every value of the value dtypes."""
        return port if self.known(port).dtype == FLOAT else self("Cast", port, to=FLOAT)

    def cast(self, value: str, name: str) -> str:
        """Returns a float32 value cast to the dtype in attribute `name`."""
        dtype = self.attribute(name)
        return value if dtype == FLOAT else self("Cast", value, to=dtype)

    def like(self, value: str, port: str) -> str:
        """Returns float32 values cast to the dtype of an input."""
        dtype = self.known(port).dtype
        if dtype == FLOAT:
            return value
        return self("Cast", value, to=dtype) if dtype else self("CastLike", value, port)

    def or_zeros(self, name: str, like: str, axis: int = -2) -> str:
        """Returns the optional float32 input `name` [N], or zeros where it is absent; N is the `axis` of `like`."""
        # An If cannot choose here, because a branch would name the absent value. Gemm's C is optional too: the result
        # of 0 * 0 + C is C, or 0 without C.
        if self.known(name).present:
            return name
        n = self("Shape", like, start=axis, end=axis + 1)
        zero = self("ConstantOfShape", self("Concat", self.constant([1]), n, axis=0))
        there = self("Gemm", self.constant(np.zeros((1, 1), np.float32)), zero, name)
        return self("Reshape", there, n, allowzero=1)

    # --- Blocks

    def blocks(self, x: str, *, whole: bool) -> tuple[str, Callable[[str], str]]:
        """Returns x [..., K] as blocks [n, 32], zero-padded at the end of each row, and the function that undoes it."""
        # The shape of blocks is [-1, 32], without other sizes: with a size of 0 beside it, -1 is ambiguous.
        shape = padded = self("Shape", x)
        k = ""
        if not whole:
            k = self("Shape", x, start=-1)
            more = self("Mod", self("Neg", k), self.constant([BLOCK_SIZE]))
            x = self("Pad", x, self("Concat", self.constant([0]), more, axis=0), "", self.constant([-1]))
            padded = self("Shape", x)

        def back(blocks: str) -> str:
            if not whole:
                rows = self("Reshape", blocks, padded, allowzero=1)
                blocks = self("Slice", rows, self.constant([0]), k, self.constant([-1]))
            return self("Reshape", blocks, shape, allowzero=1)  # shape inference knows this shape

        return self("Reshape", x, self.constant([-1, BLOCK_SIZE])), back

    def values(self, elements: str, scales: str, known: Input, *, whole: bool = False) -> str:
        """Returns the float32 values of (elements [..., K], scales [..., ceil(K / 32)]) of any element format.

        `known` has the facts about the elements. `whole` adds the fact that all blocks are full.
        """
        factors, whole = self.factors(scales, elements, known), known.whole or whole
        if known.constant and not self.style.folds_weights and (known.rank or 0) > 1 and (whole or known.last):
            # ONNX Runtime folds all ops with constant inputs except this one. It needs two axes and values: it reads a
            # scale [1] as the scale of the whole tensor, and divides by zero if there are no values.
            return self("DequantizeLinear", elements, factors, axis=-1, block_size=BLOCK_SIZE)
        blocks, back = self.blocks(self("Cast", elements, to=FLOAT), whole=whole)
        return back(self("Mul", blocks, self("Reshape", factors, self.constant([-1, 1]))))

    def factors(self, scales: str, elements: str, known: Input) -> str:
        """Returns the float32 factors of cast elements: 2^(s - 127); for INT8, whose unit is 2^-6, 2^(s - 133)."""
        codes = self("Cast", scales, to=INT32)
        if known.dtype in ELEMENTS:
            return self("Gather", self.powers(INT8.mantissa_bits * (known.dtype == INT8.onnx_dtype)), codes)
        # The format is unknown, or nodes have several. A cast tells INT8: it makes 1 of 1.5, a float format keeps 1.5.
        of_format = self("Cast", self("CastLike", self.constant(np.float32(1.5)), elements), to=FLOAT)
        is_int8 = self("Less", of_format, self.constant(np.float32(1.5)))
        factors = self("Gather", self.powers(), codes)
        step = self("Where", is_int8, self.constant(np.float32(2.0**-INT8.mantissa_bits)), self.constant(np.float32(1)))
        return self("Mul", factors, step)

    def powers(self, shift: int = 0) -> str:
        """Returns the table code -> float32 value of all E8M0 scales, times 2^-shift: [0] is 2^-127, [255] NaN."""
        if not self.style.in_function:
            return self.constant(np.ldexp(numerics.decode_scale(np.arange(256, dtype=np.uint8)), -shift))
        # Computed, because ONNX Runtime shares only small constants between functions, and then the values computed
        # from them. So several gemms decode their common activation once. With a table in each function they would not.
        first, end, step = (self.constant(np.float32(x)) for x in (-127 - shift, 128 - shift, 1))
        finite = self("Pow", self.constant(np.float32(2)), self("Range", first, end, step))
        return self("Concat", finite, self.constant(np.full(1, np.nan, np.float32)), axis=0)

    # --- Values and names

    def constant(self, value: Any) -> str:
        """Returns a constant tensor; Python integers become int64. Equal constants share one node."""
        tensor = numpy_helper.from_array(np.asarray(value))
        key = tensor.SerializeToString()
        if key not in self._constants:
            self._constants[key] = self("Constant", value=tensor)
        return self._constants[key]

    def graph(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> GraphProto:
        """Returns the nodes as the body of a Loop or a branch of an If."""
        ports, results = ([helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs))
        return helper.make_graph(self.nodes, name, ports, results)

    def unique(self, name: str) -> str:
        """Returns `name`, numbered from its second use on; ports of the function are never shadowed."""
        count = self._names.get(name, int(name in {port.name for port in self.op.inputs}))
        numbered = name if count == 0 else f"{name}_{count}"
        while numbered != name and numbered in self._names:  # "x_1" may be a name of its own
            count += 1
            numbered = f"{name}_{count}"
        self._names[name] = count + 1
        self._names.setdefault(numbered, 1)
        return numbered


def _rename(nodes: Iterable[NodeProto], old: str, new: str) -> None:
    """Renames a value in nodes and in their subgraphs, which may read it too."""
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _rename(graph.node, old, new)
