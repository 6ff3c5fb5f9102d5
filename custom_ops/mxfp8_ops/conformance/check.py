"""Checks of any quantizer, dequantizer or gemm against the vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from mxfp8_ops.conformance.agreement import same_blocks, whose
from mxfp8_ops.conformance.result import Outcome, Result
from mxfp8_ops.conformance.vectors import Array, Case, cases
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_FORMATS, SCALE_ROUNDINGS

Answer = tuple[Array, ...] | str
"""Arrays, or why there are none."""

SHOWN: Final = 3
"""Differences that an outcome names."""


def check_quantizer(
    quantizer: Callable[..., Any],
    *,
    element_formats: Collection[str] = tuple(ELEMENT_FORMATS),
    scale_roundings: Collection[str] = SCALE_ROUNDINGS,
    axes: Collection[int] = (-1, 0),
    partial_blocks: bool = True,
) -> Result:
    """Returns how often `quantizer` gives the bytes of `numpy_nodes.quantize`.

    Args:
        quantizer: called as quantizer(x, axis=, element_format=, scale_rounding=) with x float32 [rows, K]; gives
            elements and scales of one byte each, as NumPy sees them, of the shapes that `numpy_nodes.quantize` has.
        element_formats: those it knows, of "e4m3", "e5m2" and "int8".
        scale_roundings: those it knows, of "ceil", "floor" and "even".
        axes: those it quantizes along, of -1 and 0.
        partial_blocks: False pads x with zeros to whole blocks of 32, and cuts the elements.

    Raises:
        ContractError: no case is left.
    """
    chosen = [
        case
        for case in cases("quantize")
        if case.options["element_format"] in element_formats
        and case.options["scale_rounding"] in scale_roundings
        and case.options["axis"] in axes
    ]
    call = quantizer if partial_blocks else _of_whole_blocks(quantizer)
    return judge([(case, _answer(call, case)) for case in chosen])


def check_dequantizer(
    dequantizer: Callable[..., Any], *, element_formats: Collection[str] = tuple(ELEMENT_FORMATS)
) -> Result:
    """Returns how often `dequantizer` gives the values that `numpy_nodes.dequantize` does; any NaN will do for NaN.

    Args:
        dequantizer: called as dequantizer(elements, scales, element_format=) with uint8 [rows, K] and
            [rows, ceil(K / 32)]; gives float32 values of the shape of the elements.
        element_formats: those it knows.

    Raises:
        ContractError: no case is left.
    """
    chosen = [case for case in cases("dequantize") if case.options["element_format"] in element_formats]
    return judge([(case, _answer(dequantizer, case)) for case in chosen])


def check_gemm(gemm: Callable[..., Any], *, formats: Collection[str] = tuple(ELEMENT_FORMATS)) -> Result:
    """Returns how often `gemm` is right: exact where every order of the sum is, else within the bound of float32 sums.

    Args:
        gemm: called as gemm(a, a_scales, b, b_scales[, bias], a_format=, b_format=) with uint8 operands [M, K] and
            [N, K], scales [., ceil(K / 32)] and a float32 bias [N]; gives float32 [M, N].
        formats: element formats that it multiplies, each with each.

    Raises:
        ContractError: no case is left.
    """
    chosen = [case for case in cases("gemm") if set(case.options.values()) <= set(formats)]
    return judge([(case, _answer(gemm, case)) for case in chosen])


def judge(answers: Sequence[tuple[Case, Answer]]) -> Result:
    """Returns which answers are right, each with its case.

    Raises:
        ContractError: there is no case.
    """
    if not answers:
        raise ContractError("conformance", "no case has these options", expected="options that the vectors have")
    outcomes = tuple(
        _quantized(case, answer) if case.kind == "quantize" else _compared(case, answer) for case, answer in answers
    )
    of_quantizers = [pair for pair in answers if pair[0].kind == "quantize"]
    failed = {each.settings for each in outcomes if each.passed < each.total}
    agrees = {
        settings: whose([pair for pair in of_quantizers if pair[0].settings == settings])
        for settings in dict.fromkeys(case.settings for case, _ in of_quantizers)
        if settings in failed
    }
    return Result(outcomes, {settings: rule for settings, rule in agrees.items() if rule})


def _answer(call: Callable[..., Any], case: Case) -> Answer:
    """Returns the arrays that `call` gives, or why they cannot be compared."""
    try:
        returned = call(*(array.copy() for array in case.inputs), **case.options)
        arrays = tuple(map(np.asarray, returned)) if case.kind == "quantize" else (np.asarray(returned),)
    except Exception as error:  # foreign code may raise anything; the other cases still run
        return f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    wanted = case.expected[:2] if case.kind == "quantize" else case.expected[:1]
    if len(arrays) != len(wanted):
        return f"gave {len(arrays)} arrays instead of {len(wanted)}"
    for array, right in zip(arrays, wanted, strict=True):
        if array.shape != right.shape:
            return f"gave shape {array.shape} instead of {right.shape}"
        if case.kind == "quantize" and array.dtype.itemsize != 1:
            return f"gave {array.dtype} instead of bytes"
    return tuple(a.view(np.uint8) for a in arrays) if case.kind == "quantize" else arrays


def _of_whole_blocks(quantizer: Callable[..., Any]) -> Callable[..., Any]:
    def padded(x: Array, *, axis: int, **options: Any) -> tuple[Array, Array]:
        size = x.shape[axis]
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, -size % BLOCK_SIZE)
        elements, scales = quantizer(np.pad(x, widths), axis=axis, **options)
        return np.asarray(elements).take(range(size), axis), np.asarray(scales)

    return padded


def _quantized(case: Case, answer: Answer) -> Outcome:
    total = case.expected[1].size
    if isinstance(answer, str):
        return Outcome(case.group, case.settings, "blocks", total, 0, error=answer)
    wrong = np.argwhere(~same_blocks(case.expected, answer, case.options["axis"]))
    shown = tuple(_difference(case, answer, *map(int, at)) for at in wrong[:SHOWN])
    return Outcome(case.group, case.settings, "blocks", total, total - len(wrong), shown)


def _difference(case: Case, answer: tuple[Array, ...], row: int, column: int) -> str:
    """Returns one block in a line: where it is, its amax or a value, and both answers."""
    axis = case.options["axis"]
    at = (row, column) if axis else (column, row)

    def of_block(array: Array) -> Array:
        line: Array = np.moveaxis(array, axis, -1)[at[0], BLOCK_SIZE * at[1] : BLOCK_SIZE * (at[1] + 1)]
        return line

    x, right, other = (of_block(array) for array in (case.inputs[0], case.expected[0], answer[0]))
    scales = int(case.expected[1][row, column]), int(answer[1][row, column])
    # NaN wins, as its bits do: it decides about the block.
    which = int(np.argmax(x.view(np.uint32) & 0x7FFFFFFF)) if scales[0] != scales[1] else int(np.argmax(right != other))
    return (
        f"block {[row, column]}: {_float(x[which])} (value {which}): scale {scales[1]:02x}, expected {scales[0]:02x}; "
        f"element {other[which]:02x}, expected {right[which]:02x}"
    )


def _float(value: Any) -> str:
    return f"{value:.9g} = {np.float32(value).view(np.uint32):08x}"


def _compared(case: Case, answer: Answer) -> Outcome:
    expected = case.expected[0]
    if isinstance(answer, str):
        return Outcome(case.group, case.settings, "values", expected.size, 0, error=answer)
    actual = answer[0].astype(expected.dtype)
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected) if case.kind == "dequantize" else True)
    # The sign and the bits of a NaN are free; those of a zero are not, where values are dequantized.
    same |= np.isnan(actual) & np.isnan(expected)
    if case.kind == "gemm":
        with np.errstate(invalid="ignore"):
            same |= np.abs(actual - expected) <= case.expected[1]
    wrong = [tuple(map(int, at)) for at in np.argwhere(~same)]
    shown = tuple(f"at {list(at)}: {_float(actual[at])}, expected {_float(expected[at])}" for at in wrong[:SHOWN])
    return Outcome(case.group, case.settings, "values", expected.size, expected.size - len(wrong), shown)
