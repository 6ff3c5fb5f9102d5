"""The type of a row of the contract: the name of a node, its inputs, outputs, attributes and portable body.

The rows are in nodes/; `contract.py` is their registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mxfp8_ops import formats

DOMAIN: Final = "mxfp8"
"""ONNX domain of the nodes, and torch namespace of the ops."""
VERSION: Final = 1
"""Version of this contract: the opset version of `DOMAIN`, which every rewritten file records."""
MIN_OPSET: Final = 21
"""Lowest opset of the default domain in a rewritten model; a rewrite converts older models up to it."""

# onnx.DataType.
FLOAT: Final = formats.FLOAT32.onnx_dtype
UINT8: Final = 2
INT32: Final = 6
INT64: Final = 7
DOUBLE: Final = 11
BOOL: Final = 9
FLOAT16: Final = formats.FLOAT16.onnx_dtype
BFLOAT16: Final = formats.BFLOAT16.onnx_dtype
FLOAT8E4M3FN: Final = formats.E4M3.onnx_dtype
FLOAT8E5M2: Final = formats.E5M2.onnx_dtype

VALUES: Final = tuple(dtype.onnx_dtype for dtype in formats.VALUE_DTYPES.values())
ELEMENTS: Final = tuple(fmt.onnx_dtype for fmt in formats.ELEMENT_FORMATS.values())
SCALES: Final = (UINT8,)
ACTIVATIONS: Final = (FLOAT, BFLOAT16)
"""The values of `activation_dtype`: FLOAT leaves values of any dtype as they are; BFLOAT16 rounds them to bfloat16."""
INDICES: Final = (INT32, INT64)
VALUE_NAMES: Final[Mapping[int, str]] = MappingProxyType({d.onnx_dtype: d.name for d in formats.VALUE_DTYPES.values()})
"""Names of the value dtypes by ONNX code."""


class Kind(NamedTuple):
    """How a kind of attributes is written."""

    onnx: str
    """Name in onnx.AttributeProto.AttributeType."""
    torch: str
    """In the schema of a torch op."""
    cpp: str
    """In src/contract.h."""


KINDS: Final[Mapping[type, Kind]] = MappingProxyType(
    {
        int: Kind("INT", "int", "int64_t"),
        float: Kind("FLOAT", "float", "float"),
        str: Kind("STRING", "str", "std::string"),
        tuple: Kind("INTS", "int[]", "std::vector<int64_t>"),
    }
)
"""The kinds of attributes, by the type of their values in Python; a tuple is a list of integers, at least one."""

Setting = int | float | str | tuple[int, ...]
"""A value of an attribute."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, its possible dtypes, its shape in words."""

    name: str
    dtypes: tuple[int, ...]
    shape: str
    optional: bool = False
    """Whether a node may lack it. Absent inputs at the end are left out; an absent output has an empty name."""
    like: str = ""
    """The input whose dtype it always has; "" if its dtype is its own."""
    has_stand_in: bool = False
    """Whether nodes without this input have a constant there that changes nothing: [0], True, or an empty vector."""


@dataclass(frozen=True)
class Op:
    """One node type.

    The input B holds the elements of a packed weight [..., N, K], and the next input, B_scales, their scales. All nodes
    use one layout, so that an embedding and an output projection may share a weight. The other inputs of a gemm are A
    (or X), A_scales, and bias, factor or experts; a gemm is weight-only if A has no scales. Passes and checks recognize
    a node by these names and by the properties below, so that a new node needs no entry in a list.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, Setting]
    """Default values by name, of the kinds in `KINDS`; a rewrite writes all attributes to each node."""
    summary: str
    body: Callable[[Any], None]
    """The function that writes the portable body to a `function_body.Body`."""
    is_gemm: bool = False
    """Whether it multiplies matrices."""
    fuses: tuple[str, str] = ("", "")
    """The node that this one replaces, and the op that it absorbs; empty for a node that fuses nothing."""

    def kind(self, name: str) -> Kind:
        """Returns the kind of the attribute `name`."""
        return KINDS[type(self.attributes[name])]

    def at(self, port: str) -> int | None:
        """Returns the index of the input `port`, or None if the node has no such input."""
        return next((index for index, row in enumerate(self.inputs) if row.name == port), None)

    @property
    def weight_only(self) -> bool:
        """Whether the node is a gemm with an A that is not quantized."""
        return self.is_gemm and self.at("A_scales") is None

    @property
    def quantizes(self) -> bool:
        """Whether the first two outputs are elements and scales."""
        return self.outputs[0].name == "elements"

    @property
    def packed_at(self) -> int | None:
        """Index of the input with the elements of a packed weight, or None; the next input has their scales."""
        b = self.at("B")
        return self.at("elements") if b is None else b

    @property
    def indices_at(self) -> int | None:
        """Index of the input that selects entries of the packed weight along its first axis, or None."""
        return next((index for index, row in enumerate(self.inputs) if {*row.dtypes} <= {*INDICES}), None)

    @property
    def factors_at(self) -> tuple[int, int] | None:
        """Indices of the inputs that the node multiplies first: A (or X) and B, or Q and K; None without a product."""
        multiplies = self.is_gemm or self.at("X") is not None
        second = self.packed_at if multiplies else self.at("K")
        return None if second is None else (0, second)

    @property
    def is_plain(self) -> bool:
        """Whether the node only packs values or uses a packed weight; other nodes replace several nodes of a model."""
        return not self.fuses[0] and (self.quantizes or self.packed_at is not None)
