"""How the function body of a node is written: a `Body` collects its nodes and names their values.

Every body works on a tensor [..., K, ...] reshaped to blocks [P, ceil(K / 32), 32, Q]: P is the product of the
dimensions before the blocked axis, Q of those after it (1 when the axis is the last). No transpose is needed, and no
op touches float8 except Cast: ONNX Runtime has no float8 Slice, Concat, Gather or Pad.

A body is that of a function, which refers to the function's attributes; or that of one node, whose attributes are known
(`given`) and whose absent inputs are: standard ops to put in the node's place, for programs that do not know functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, GraphProto, NodeProto, helper, numpy_helper

from mxfp8_ops import numerics
from mxfp8_ops.formats import BLOCK_SIZE, INT8
from mxfp8_ops.node import DOMAIN, FLOAT, INT64, Op

Value = tuple[str, int, Sequence[int | None] | None]
"""Name, dtype and shape of an input or output of a subgraph."""

_END: Final = np.iinfo(np.int64).max

_KINDS: Final = {int: AttributeProto.INT, float: AttributeProto.FLOAT, str: AttributeProto.STRING}

_MOST_STRINGS: Final = 2
"""In one constant, which becomes one more when folded: ONNX Runtime 1.25 keeps those of more than 127 bytes, 32 for
each, where it cannot read them."""


@dataclass(frozen=True)
class Attribute:
    """A reference to an attribute of the function, to be the value of an attribute of a node in its body."""

    name: str
    type: AttributeProto.AttributeType


@dataclass
class Body:
    """The nodes of one function body. Calling it appends a node and returns the name of its output."""

    op: Op
    opset: int
    nodes: list[NodeProto] = field(default_factory=list)
    given: Mapping[str, Any] | None = None
    """The attributes, if this is the body of one node."""
    absent: frozenset[str] = frozenset()
    """Optional inputs that the node leaves out, if this is the body of one."""
    called: list[Op] = field(default_factory=list)
    """Nodes of the contract that are in it."""
    _names: dict[str, int] = field(default_factory=dict)
    _constants: dict[bytes, str] = field(default_factory=dict)

    def __call__(self, op_type: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Appends the node `out` = op_type(*inputs, **attributes) and returns the name of its output."""
        out = self.unique(out or op_type.lower())
        self._add(op_type, inputs, [out], "", attributes)
        return out

    def several(self, op_type: str, *inputs: str, out: Sequence[str], **attributes: Any) -> list[str]:
        """Appends a node op_type(*inputs, **attributes) of several outputs and returns their names."""
        outputs = [self.unique(name) for name in out]
        self._add(op_type, inputs, outputs, "", attributes)
        return outputs

    def call(self, op: Op, *inputs: str, out: Sequence[str], **attributes: Any) -> list[str]:
        """Appends a node of the contract, with defaults for attributes that are not given; returns its outputs."""
        outputs = [self.unique(name) for name in out]
        self._add(op.name, inputs, outputs, DOMAIN, {**op.attributes, **attributes})
        self.called.append(op)
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

    def inner(self) -> Body:
        """Returns the body of a Loop or an If inside this one, whose values it sees; no two share a name."""
        return Body(self.op, self.opset, given=self.given, absent=self.absent, called=self.called, _names=self._names)

    def attribute(self, name: str) -> Any:
        """Returns attribute `name`: its value if that is known, or a reference to that of the function."""
        if self.given is not None:
            return self.given[name]
        return Attribute(name, _KINDS[type(self.op.attributes[name])])

    def number(self, name: str) -> str:
        """Returns the value of the number attribute `name` as a scalar tensor: int64 or float32."""
        value = self.attribute(name)
        if isinstance(value, Attribute):
            if value.type == AttributeProto.INT:
                return self("Constant", value_int=value)
            return self("Constant", value_float=value)
        return self.constant(np.float32(value) if isinstance(value, float) else value)

    def vector(self, name: str) -> str:
        """Returns the value of the integer attribute `name` as a 1-D tensor."""
        if self.given is not None:
            return self.constant([self.given[name]])
        return self("Reshape", self.number(name), self.constant([1]), out=name)

    def constant(self, value: Any) -> str:
        """Returns a constant tensor; Python integers become int64. Equal constants share one node."""
        tensor = numpy_helper.from_array(np.asarray(value))
        key = tensor.SerializeToString()
        if key not in self._constants:
            self._constants[key] = self("Constant", value=tensor)
        return self._constants[key]

    def or_zeros(self, name: str, n: str) -> str:
        """Returns the optional float32 input `name` [N], or zeros if it is absent; `n` holds N as a 1-D tensor."""
        # A function has no If for that: its branches would name the absent value. Gemm's C is optional too, and
        # 0 * 0 + C is "C or zero".
        if self.given is not None:
            return self("ConstantOfShape", n) if name in self.absent else name
        zero = self("ConstantOfShape", self("Concat", self.constant([1]), n, axis=0))
        given = self("Gemm", self.constant(np.zeros((1, 1), np.float32)), zero, name)
        return self("Reshape", given, n, allowzero=1)

    def shaped(self, x: str, shape: str) -> str:
        """Returns `x`, whose shape must be what `shape` holds; with another, a Reshape fails at run time.

        Without it, the ops behind would broadcast an operand or take its values in another order. A node whose
        attributes are known goes without: its place in a graph is known too.
        """
        if self.given is not None:
            return x
        sizes = self("Reshape", self("Shape", x), self("Shape", shape))  # fails for another rank
        same = self("Equal", sizes, shape)
        return self("Reshape", x, self("Where", same, shape, self.constant(-2)), allowzero=1)  # no size can be -2

    def graph(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> GraphProto:
        """Returns the nodes as the body of a Loop or a branch of an If."""
        ports, results = ([helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs))
        return helper.make_graph(self.nodes, name, ports, results)

    def blocks(self, x: str, axis: int | Attribute, block: str) -> Blocks:
        """Returns the blocks of `x` along `axis`; `block` is their size, as a 1-D tensor."""
        lead = self("Shape", x, end=axis, out="lead")
        rest = self("Shape", x, start=axis)
        k = self("Slice", rest, self.constant([0]), self.constant([1]), out="k")
        trail = self("Slice", rest, self.constant([1]), self.constant([_END]), out="trail")
        one = self.constant([1])
        # A reduction over [1, ...] rather than a -1 in Reshape: with an empty dimension the -1 would be ambiguous.
        p = self("ReduceProd", self("Concat", one, lead, axis=0), out="p")
        q = self("ReduceProd", self("Concat", one, trail, axis=0), out="q")
        count = self("Div", self("Add", k, self("Sub", block, one)), block, out="count")
        padded = self("Mul", count, block, out="padded")
        return Blocks(self, self("Shape", x, out="shape"), lead, trail, p, k, q, block, count, padded)

    def values(self, elements: str, scales: str, axis: int | Attribute = -1, block: str = "") -> str:
        """Returns the float32 values of (elements, scales) in the shape of the elements; blocks of 32 by default."""
        block = block or self.constant([BLOCK_SIZE])
        x = self("Cast", elements, to=FLOAT)
        blocks = self.blocks(x, axis, block)
        codes = self.shaped(scales, self("Concat", blocks.lead, blocks.count, blocks.trail, axis=0))
        # 1.5 stays 1.5 in a floating-point format, and is 1 in INT8, whose values are codes times 2^-6: the second half
        # of the table has the scales for those. A body does not know the dtype of an input in another way.
        of_format = self("Cast", self("CastLike", self.constant(np.float32(1.5)), elements), to=FLOAT)
        half = self(
            "Cast",
            self("Mul", self("Sub", self.constant(np.float32(1.5)), of_format), self.constant(np.float32(512))),
            to=INT64,
        )
        codes = self("Add", self("Cast", codes, to=INT64), half)
        one = self.constant([1])
        codes = self("Reshape", codes, self("Concat", blocks.p, blocks.count, one, blocks.q, axis=0), allowzero=1)
        return blocks.join(self("Mul", blocks.split(x), self("Gather", self.powers((0, INT8.mantissa_bits)), codes)))

    def powers(self, shifts: tuple[int, ...] = (0,)) -> str:
        """Returns the table code -> float32 value of all E8M0 scales: [0] is 2^-127, [254] 2^127, [255] NaN.

        Times 2^-shift; a table of 256 for each of `shifts`.
        """
        scales = numerics.decode_scale(np.arange(256, dtype=np.uint8))
        return self.constant(np.concatenate([np.ldexp(scales, -shift) for shift in shifts]))

    def index_of(self, name: str, values: Sequence[int | str]) -> str:
        """Returns where in `values` the attribute `name` stands, as an int64 scalar.

        A value that is not among them fails at run time, in the Reshape: no default is assumed.

        Raises:
            ValueError: it is known, and not among them.
        """
        reference = self.attribute(name)
        if not isinstance(reference, Attribute):
            return self.constant(list(values).index(reference))
        if reference.type == AttributeProto.STRING:
            parts = [values[i : i + _MOST_STRINGS] for i in range(0, len(values), _MOST_STRINGS)]
            equal = [self._equal_strings([str(value) for value in part], reference) for part in parts]
        else:
            equal = [self("Equal", self.constant(list(values)), self.number(name))]
        hits = self("NonZero", self("Concat", *equal, axis=0))
        return self("Reshape", hits, self.constant(np.zeros(0, np.int64)), out=f"{name}_index")

    def _equal_strings(self, values: Sequence[str], reference: Attribute) -> str:
        """Returns which of `values` the string attribute is, as bool [len(values)]."""
        # One tensor of all, then apart: onnx's ReferenceEvaluator takes strings of two lengths for two dtypes.
        given = self("Reshape", self("Constant", value_string=reference), self.constant([1]))
        both = self("Concat", self("Constant", value_strings=[*values]), given, axis=0)
        start, count, end = self.constant([0]), self.constant([len(values)]), self.constant([len(values) + 1])
        return self("Equal", self("Slice", both, start, count), self("Slice", both, count, end))

    def lookup(self, table: npt.NDArray[Any], row: tuple[str, str]) -> str:
        """Returns table[row] as a scalar."""
        return self("Gather", self("Gather", self.constant(table), row[0]), row[1])

    def unique(self, name: str) -> str:
        """Returns `name`, numbered from its second use on; inputs of the function are never shadowed."""
        taken = name in {port.name for port in self.op.inputs}
        count = self._names.get(name, int(taken))
        self._names[name] = count + 1
        return name if count == 0 else f"{name}_{count}"


@dataclass(frozen=True)
class Blocks:
    """How a tensor [..., K, ...] maps to blocks [P, ceil(K / 32), 32, Q]. Fields name 1-D int64 tensors."""

    body: Body
    shape: str
    """[..., K, ...]"""
    lead: str
    """The dimensions before K; P is their product."""
    trail: str
    """The dimensions after K; Q is their product."""
    p: str
    k: str
    q: str
    block: str
    """[32], or the size of other blocks."""
    count: str
    """[ceil(K / 32)]"""
    padded: str
    """[ceil(K / 32) * 32]"""

    def split(self, x: str) -> str:
        """Returns `x` as [P, ceil(K / 32), 32, Q], the last block zero-padded."""
        g = self.body
        flat = g("Reshape", x, g("Concat", self.p, self.k, self.q, axis=0), allowzero=1)
        pads = g("Concat", g.constant([0, 0, 0, 0]), g("Sub", self.padded, self.k), g.constant([0]), axis=0)
        shape = g("Concat", self.p, self.count, self.block, self.q, axis=0)
        return g("Reshape", g("Pad", flat, pads), shape, allowzero=1, out="blocks")

    def join(self, blocks: str) -> str:
        """Returns [P, ceil(K / 32), 32, Q] in the shape that `split` took apart; the padding is dropped."""
        g = self.body
        flat = g("Reshape", blocks, g("Concat", self.p, self.padded, self.q, axis=0), allowzero=1)
        return g("Reshape", g("Slice", flat, g.constant([0]), self.k, g.constant([1])), self.shape, allowzero=1)
