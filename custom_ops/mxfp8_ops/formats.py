"""The number formats as data: one row per element format, one per scale rounding. Behaviour derives from the rows.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 (MXFP8), 5.3 (FP8 elements), 5.4 (E8M0 scales).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mxfp8_ops.errors import ContractError

BLOCK_SIZE: Final = 32
"""Values that share one scale (OCP MX v1.0, table 1: 32 for every MX format)."""

SCALE_BIAS: Final = 127
"""E8M0: code s stands for 2^(s - 127)."""

SCALE_NAN: Final = 255
"""E8M0: the one code that is NaN; it poisons its block."""

ELEMENT_NAN: Final = 0x7F
"""The NaN we write: all exponent and mantissa bits set, sign clear, in both element formats."""


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """An 8-bit floating-point element: one sign bit, `exponent_bits`, `mantissa_bits`."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    """Code of the largest finite magnitude; quantization saturates to it."""
    emax: int
    """Exponent of the largest finite magnitude, max = 1.75 * 2^emax in both formats."""
    onnx_dtype: int
    """onnx.TensorProto.DataType of the stored elements."""
    numpy_name: str
    """Name of the dtype in ml_dtypes."""

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return 1.75 * 2.0**self.emax

    @property
    def min_subnormal(self) -> float:
        """Smallest positive magnitude."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


E4M3: Final = ElementFormat(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max_code=0x7E,  # 448; 0x7f is NaN and there is no infinity
    emax=8,
    onnx_dtype=17,
    numpy_name="float8_e4m3fn",
)
E5M2: Final = ElementFormat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max_code=0x7B,  # 57344; 0x7c is infinity, 0x7d..0x7f are NaN
    emax=15,
    onnx_dtype=19,
    numpy_name="float8_e5m2",
)

ELEMENT_FORMATS: Final[Mapping[str, ElementFormat]] = MappingProxyType({f.name: f for f in (E4M3, E5M2)})

SCALE_ROUNDINGS: Final = ("ceil", "floor", "even")
"""How amax becomes a scale.

ceil   the smallest s with amax <= max * 2^(s - 127): nothing saturates. TransformerEngine, cuBLAS ("RCEIL"),
       NVIDIA's "Recipes for Pre-training LLMs with MXFP8".
floor  floor(log2(amax)) - emax: OCP MX v1.0 section 6.3. Values above max saturate.
even   floor after amax is rounded half up to the element's mantissa: torchao's EVEN.
"""


def scale_increment(fmt: ElementFormat, scale_rounding: str) -> int:
    """Returns what to add to the bits of a float32 amax so that its exponent field, less emax, is the scale code.

    All three roundings are this one integer addition: it carries into the exponent exactly where the rounding
    says the next power of two is needed. No logarithm, so nothing is off by one near a boundary.
    """
    if scale_rounding == "ceil":
        return 0x1FFFFF  # carries when the mantissa exceeds 0x600000, that is when amax > 1.75 * 2^e
    if scale_rounding == "floor":
        return 0
    if scale_rounding == "even":
        return 1 << (22 - fmt.mantissa_bits)  # half a unit in the last place of the element's mantissa
    raise ContractError(
        "scale_rounding",
        f"{scale_rounding!r}",
        expected=f"one of {', '.join(SCALE_ROUNDINGS)}",
        advice="correct the name",
    )


def element_format(name: str) -> ElementFormat:
    """Returns the row of `ELEMENT_FORMATS` called `name`.

    Raises:
        ContractError: there is no such format.
    """
    try:
        return ELEMENT_FORMATS[name]
    except KeyError:
        raise ContractError(
            "element_format", f"{name!r}", expected=f"one of {', '.join(ELEMENT_FORMATS)}", advice="correct the name"
        ) from None
