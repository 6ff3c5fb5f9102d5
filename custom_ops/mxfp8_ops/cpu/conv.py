"""`numpy_nodes.conv` in the native library, on NumPy arrays."""

from __future__ import annotations

import numpy as np

from mxfp8_ops import checks, formats, native, numerics
from mxfp8_ops.cpu.operands import array, call, contiguous, empty, floats
from mxfp8_ops.nodes.conv import EPILOGUES, Settings, Window, check_operands, check_residual_at, epilogue_function
from mxfp8_ops.numerics import Array, Codes


def conv(  # noqa: PLR0913 - the operands and two settings
    x: Array,
    b: Codes,
    b_scales: Codes,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    settings: Settings | None = None,
    threads: int = 0,
    weight: native.ConstantWeight | None = None,
) -> Array:
    """Returns epilogue(conv(x, dequantize(b)) + bias + residual), as `numpy_nodes.conv` does."""
    settings = settings or Settings()
    epilogue_function(settings.epilogue), check_residual_at(settings.residual_at)  # check the names
    formats.scale_increment(formats.element_format(settings.x_format), settings.scale_rounding)
    operands = {"x": x, "b": b, "b_scales": b_scales, "bias": bias, "residual": residual}
    for name, operand in operands.items():
        if operand is not None:
            array("conv", name, operand)
    window = Window.from_shapes("conv", x.shape, b.shape, settings)
    checks.check_codes("conv", b, b_scales, -1)
    check_operands("conv", x, bias, residual, window.result)
    x, b, b_scales = (contiguous("conv", t) for t in (x, b, b_scales))
    bias = None if bias is None else floats("conv", "bias", bias)
    residual = None if residual is None else contiguous("conv", residual)
    axes = np.array(window.rows(x.shape[2:]), np.int64)
    y = empty("conv", window.result, numerics.value_dtype(settings.dtype))
    call(
        "conv", "mxfp8_conv", x.dtype, x, *x.shape[:2], b.shape[0], window.group, axes,
        settings.x_format, settings.scale_rounding, settings.b_format, b, b_scales, bias,
        "float32" if residual is None else residual.dtype, residual, settings.residual_at == "after",
        EPILOGUES.index(settings.epilogue), settings.alpha, settings.beta, settings.dtype, y,
        0 if weight is None else weight.number, threads=threads,
    )  # fmt: skip
    return y
