"""A row of the contract: what a node is called, its inputs, outputs and attributes, and its portable body.

`contract.py` is the registry of the rows, which are in nodes/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mxfp8_ops import formats

DOMAIN: Final = "mxfp8"
"""ONNX domain of the nodes, and torch namespace of the ops."""
VERSION: Final = 1
"""Version of this contract: the opset version of `DOMAIN`, recorded in every rewritten file."""
MIN_OPSET: Final = 21
"""Lowest opset of the default domain that a rewritten model has; older models are converted up."""

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
"""The values of `activation_dtype`: FLOAT leaves values as they are, of any dtype; BFLOAT16 rounds them to it."""
INDICES: Final = (INT32, INT64)
VALUE_NAMES: Final[Mapping[int, str]] = MappingProxyType({d.onnx_dtype: d.name for d in formats.VALUE_DTYPES.values()})
"""Name of each value dtype by its ONNX code."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, the dtypes it accepts, its shape in words."""

    name: str
    dtypes: tuple[int, ...]
    shape: str
    optional: bool = False
    """A node leaves absent inputs out, the last ones; it writes an absent output as an empty name, wherever it is."""
    like: str = ""
    """The input whose dtype it always has; "" if it has one of its own."""
    has_stand_in: bool = False
    """A node writes a constant that changes nothing where it is not there: [0] or True, or a vector of no values."""


@dataclass(frozen=True)
class Op:
    """One node type.

    An input called B has the elements of a packed weight [..., N, K], and B_scales after it their scales, of one layout
    for every node: a table of rows and an output projection may share theirs. A gemm's other inputs are A (or X),
    A_scales, and bias, factor or experts; it is weight-only if A has no scales. Passes and checks know a node by these
    names and by the properties below, never by a list of nodes.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, int | float | str]
    """Default of each; every attribute is always written out."""
    summary: str
    body: Callable[[Any], None]
    """Writes its portable body, to a `function_body.Body`."""
    is_gemm: bool = False
    """Whether it multiplies matrices."""
    fuses: tuple[str, str] = ("", "")
    """The node whose place it takes, and what it does besides, which was a node of its own."""

    def at(self, port: str) -> int | None:
        """Returns which input is called `port`, or None if there is none."""
        return next((index for index, row in enumerate(self.inputs) if row.name == port), None)

    @property
    def weight_only(self) -> bool:
        """Whether it is a gemm whose A is not quantized."""
        return self.is_gemm and self.at("A_scales") is None

    @property
    def quantizes(self) -> bool:
        """Whether it gives elements and scales: its first two outputs."""
        return self.outputs[0].name == "elements"

    @property
    def packed_at(self) -> int | None:
        """Which input holds the elements of a packed weight, if there is one; its scales are the next."""
        b = self.at("B")
        return self.at("elements") if b is None else b

    @property
    def indices_at(self) -> int | None:
        """Which input picks entries of the packed weight along its first axis, if there is one."""
        return next((index for index, row in enumerate(self.inputs) if {*row.dtypes} <= {*INDICES}), None)

    @property
    def factors_at(self) -> tuple[int, int] | None:
        """Which two inputs it multiplies first: A (or X) and B, or Q and K; None if it multiplies none."""
        second = self.packed_at if self.is_gemm else self.at("K")
        return None if second is None else (0, second)

    @property
    def is_plain(self) -> bool:
        """Whether it packs, or reads what is packed, and does nothing besides: others stand for several nodes."""
        return not self.fuses[0] and (self.quantizes or self.packed_at is not None)
