"""The gemms with an epilogue or a factor: compositions of the gemms and standard ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mxfp8_ops import numerics, op_options
from mxfp8_ops.case import Input
from mxfp8_ops.checks import Shape, check_value_dtype
from mxfp8_ops.errors import ContractError, ShapeError
from mxfp8_ops.node import FLOAT, VALUES, Op, Port
from mxfp8_ops.nodes import gemm
from mxfp8_ops.nodes.gemm import GEMM, WEIGHT_GEMM
from mxfp8_ops.nodes.quantize import dequantize
from mxfp8_ops.numerics import Array, Codes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mxfp8_ops.function_body import Body

Float64s = npt.NDArray[np.float64]
UNIT: Final = 2.0**-24
"""Half a unit in the last place of 1 in float32."""


def fused_gemm(
    a: Codes,
    a_scales: Codes,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    **options: Unpack[op_options.FusedGemm],
) -> Array:
    """Returns epilogue(A @ B.T + bias) * factor; the product, its operands and its errors are as in `gemm.gemm`.

    Raises:
        ContractError: also for an unknown epilogue.
    """
    epilogue, factor, rest = op_options.epilogue(**options)
    a_format, b_format, dtype = op_options.gemm(**rest)
    values = dequantize(a, a_scales, element_format=a_format)
    return fused_weight_gemm(
        values, b, b_scales, bias, factor=factor, epilogue=epilogue, b_format=b_format, dtype=dtype
    )


def fused_weight_gemm(
    x: Array, b: Codes, b_scales: Codes, bias: Array | None = None, **options: Unpack[op_options.FusedWeightGemm]
) -> Array:
    """Returns epilogue(x @ dequantize(b).T + bias) * factor; the product is as in `gemm.weight_gemm`.

    The rest is as in `fused_gemm`, but x [..., M, K] (or [K]) is float32, float16 or bfloat16;
    see `op_options.FusedWeightGemm`.
    """
    epilogue, factor, rest = op_options.epilogue(**options)
    b_format, dtype, activation_dtype = op_options.weight_gemm(**rest)
    row = epilogue_function(epilogue)
    sums = gemm.weight_gemm(x, b, b_scales, bias, b_format=b_format, activation_dtype=activation_dtype)
    if factor is not None:
        check_factor("gemm", factor, sums.shape)
    # As in the kernels, the sums are rounded to float32 before the epilogue and after it; the epilogue is in float64.
    with np.errstate(over="ignore", invalid="ignore"):
        y = row.function(sums.astype(np.float64))
        if factor is not None:
            y = y * factor.astype(np.float64)
        return np.asarray(y, np.float32).astype(numerics.value_dtype(dtype))


def check_factor(where: str, factor: Any, y: Shape) -> None:
    """Raises ShapeError unless `factor` is an array of values with the shape `y` of the result."""
    # No broadcasting: the kernels read the factor at the place of each result.
    check_value_dtype(where, factor.dtype)
    if factor.shape != y:
        raise ShapeError(
            where, f"factor has shape {factor.shape}", expected=f"{y}, that of the result", advice="broadcast it first"
        )


# --- Epilogues, and the bound


EPILOGUES: Final = ("none", "relu", "gelu", "gelu_tanh", "silu")
"""The functions that a fused gemm applies to its float32 sums: gelu is exact, by erf; silu is x * sigmoid(x)."""


@dataclass(frozen=True)
class Epilogue:
    """The function that a gemm applies to its sums, and the error of float32 in it."""

    function: Callable[[Float64s], Float64s]
    steepest: float
    """The greatest magnitude of its derivative, which is the largest factor on an error of the sum."""
    error: float
    """The greatest error of the function in float32, in units of 2^-24 |x|: no epilogue exceeds |x|."""


def _relu(x: Float64s) -> Float64s:
    # A comparison, as in the kernels: -0 and NaN pass through.
    return np.where(x < 0, 0.0, x)


def _gelu(x: Float64s) -> Float64s:
    # erfc(-z) and not 1 + erf(z), which cancels for negative x: there gelu is small but not 0.
    return np.asarray(x * 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2)))


def _gelu_tanh(x: Float64s) -> Float64s:
    # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)), which does not cancel.
    return np.asarray(x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _silu(x: Float64s) -> Float64s:
    return np.asarray(x / (1 + np.exp(-x)))


# The derivatives of gelu and gelu_tanh reach 1.129, the derivative of silu 1.0998. An exponential or an erf in
# float32, with the operations around it, may have an error of 8 roundings of |x|; none and relu do not round.
FUNCTIONS: Final[Mapping[str, Epilogue]] = MappingProxyType(
    {
        "none": Epilogue(lambda x: x, 1.0, 0.0),
        "relu": Epilogue(_relu, 1.0, 0.0),
        "gelu": Epilogue(_gelu, 1.13, 8.0),
        "gelu_tanh": Epilogue(_gelu_tanh, 1.13, 8.0),
        "silu": Epilogue(_silu, 1.1, 8.0),
    }
)
"""The function of each of `EPILOGUES`."""


def epilogue_function(name: str) -> Epilogue:
    """Returns the row of `FUNCTIONS` called `name`; ContractError if there is none."""
    try:
        return FUNCTIONS[name]
    except KeyError:
        raise ContractError.unknown("epilogue", name, EPILOGUES) from None


def fused_gemm_error_bound(
    x: Array,
    weight: Array,
    dtype: str = "float32",
    bias: Array | None = None,
    *,
    epilogue: str = "none",
    factor: Array | None = None,
) -> Float64s:
    """Returns the largest error of each output of a fused gemm, against its reference with dtype="float32".

    The rest is as in `gemm.gemm_error_bound`, with the epilogue and the factor of the call.
    """
    bound, row = numerics.error_bound(dtype), epilogue_function(epilogue)
    # The derivative bounds the growth of an error of the sum. Then come the epilogue's own error and two roundings, of
    # its result and of the product with a factor. No epilogue exceeds the magnitude of the gemm.
    bound = replace(
        bound,
        per_term=bound.per_term * row.steepest,
        store=bound.store + (row.error + 2) * UNIT * (1 + bound.store),
        underflow=bound.underflow * row.steepest,
    )
    magnitude = np.abs(x.astype(np.float64)) @ np.swapaxes(np.abs(weight.astype(np.float64)), -1, -2)
    if bias is not None:
        magnitude = magnitude + np.abs(bias.astype(np.float64))
    # `tiny` twice: inside the bound it is scaled by the factor, and the store after the factor has one of its own.
    times = np.ones(1) if factor is None else np.abs(factor.astype(np.float64))
    return np.asarray(times * bound.at(magnitude, x.shape[-1]) + bound.tiny)


# --- The portable bodies, which call the nodes that they fuse


def _fused_gemm_body(g: Body, gemm: Op) -> None:
    """The inputs of `gemm`, perhaps a factor, bias -> Y."""
    y = _product(g, gemm)
    if g.op.at("factor") is not None:
        y = g("Mul", y, g.floats("factor"))
    g.result(g.cast(y, "output_dtype"), "Y")


def _product(g: Body, gemm: Op) -> str:
    """Returns the epilogue of the result of `gemm`, in float32."""
    inputs = {p.name: (p.name, g.known(p.name)) for p in gemm.inputs if p.name != "bias"}
    if g.style.in_function:
        # ONNX Runtime derives the dtypes that an input may have from the standard ops that read it.
        inputs = {name: (g("Identity", value), known) for name, (value, known) in inputs.items()}
    if g.known("bias").present is not False:
        # Never an empty name: ONNX Runtime before 1.27 crashes on one.
        inputs["bias"] = (g.or_zeros("bias", "B_scales"), Input(FLOAT))
    settings = {name: g.attribute(name) for name in gemm.attributes if name != "output_dtype"}
    (y,) = g.call(gemm, inputs, out=["sums"], **settings)
    return g.choose("epilogue", lambda g, epilogue: activated(g, y, epilogue))


def activated(g: Body, x: str, name: str) -> str:
    """Returns the activation `name` of x, one of `EPILOGUES`."""
    match name:
        case "none":
            return x
        case "relu":  # ONNX Runtime's Relu may drop a NaN
            zero = g.constant(np.float32(0))
            return g("Where", g("Less", x, zero), zero, x)
        case "gelu":
            return g("Gelu", x)
        case "gelu_tanh":
            return g("Gelu", x, approximate="tanh")
        case "silu":
            return g("Mul", x, g("Sigmoid", x))
    raise ContractError.unknown("epilogue", name, EPILOGUES)


# --- The contract


def _fused(gemm: Op, a: str, *, gated: bool) -> Op:
    """Returns the contract row of a gemm with an epilogue and, if it is gated, a factor.

    Gemms with a factor are nodes of their own: a body cannot find out that an input of any shape is absent.
    """
    *operands, bias = gemm.inputs
    factor = (Port("factor", VALUES, "shape of Y"),) if gated else ()
    kind = gemm.name.removeprefix("MXFP8")
    settings = {**gemm.attributes, "epilogue": "none"}
    settings["output_dtype"] = settings.pop("output_dtype")  # the last one of every gemm
    return Op(
        f"MXFP8{'Gated' if gated else 'Fused'}{kind}",
        (*operands, *factor, bias),
        gemm.outputs,
        MappingProxyType(settings),
        f"Y = epilogue({a} @ transpose(B) + bias){' * factor' if gated else ''}.",
        partial(_fused_gemm_body, gemm=gemm),
        is_gemm=True,
        fuses=(f"MXFP8Fused{kind}", "gate") if gated else (gemm.name, "activation"),
    )


_GEMMS: Final = ((GEMM, "A"), (WEIGHT_GEMM, "X"))
FUSED_GEMM, FUSED_WEIGHT_GEMM = (_fused(*row, gated=False) for row in _GEMMS)
GATED_GEMM, GATED_WEIGHT_GEMM = (_fused(*row, gated=True) for row in _GEMMS)


OPS: Final = (FUSED_GEMM, FUSED_WEIGHT_GEMM, GATED_GEMM, GATED_WEIGHT_GEMM)
