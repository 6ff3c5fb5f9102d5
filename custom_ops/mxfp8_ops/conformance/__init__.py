"""Compares your quantizer, dequantizer or gemm of MXFP8 with this project's reference, on the vectors of vectors.npz.

    from mxfp8_ops import conformance
    print(conformance.check("quantize", my_quantize))

`python -m mxfp8_ops.conformance` does the same for programs in any language, which read and write files. vectors.npz is
a zip archive of .npy arrays named KIND/GROUP/SETTINGS/ARRAY; docs/numerics.md describes it.
custom_ops/conformance_vectors.py writes it from `numpy_nodes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import BLOCK_SIZE

PATH: Final = Path(__file__).with_name("vectors.npz")

KINDS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "quantize": (("x",), ("elements", "scales"), ("element_format", "scale_rounding")),
    "dequantize": (("elements", "scales"), ("values",), ("element_format",)),
    "gemm": (("a", "a_scales", "b", "b_scales", "bias"), ("y",), ("a_format", "b_format")),
}
"""For each kind: the names of its inputs, of its results, and of the options in the SETTINGS of a case."""

Array = npt.NDArray[Any]
Answer = tuple[Array, ...] | str
"""The arrays of the tested function, or the reason why there are none."""


class Case(NamedTuple):
    """One call of the tested operation."""

    name: str
    """KIND/GROUP/SETTINGS, such as "quantize/boundaries/e4m3-ceil"."""
    options: Mapping[str, Any]
    """Keyword arguments of the call, as the function in `numpy_nodes` takes them."""
    inputs: tuple[Array, ...]
    """Positional arguments."""
    expected: Mapping[str, Array]
    """quantize: elements and scales, uint8; dequantize: values, float32; gemm: y, float64."""
    bound: Array | None
    """The largest allowed error of each value of a gemm; None for other kinds."""


class Outcome(NamedTuple):
    """The result of one case."""

    case: str
    total: int
    """Number of values; for a quantizer, of bytes."""
    passed: int
    """Number of values that are right."""
    told: tuple[str, ...]
    """The first three differences, with bytes in hex; or the reason why there is no answer."""


class Result(NamedTuple):
    """The results of a check. Its text has a line per case and the first differences."""

    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether all cases passed."""
        return all(each.passed == each.total for each in self.outcomes)

    def __str__(self) -> str:
        lines = []
        for case, total, passed, told in self.outcomes:
            lines.append(f"{case:32}{passed:8} of {total:7}  {'ok' if passed == total else 'FAILED'}")
            lines += [f"    {line}" for line in told]
        right = sum(each.passed == each.total for each in self.outcomes)
        return "\n".join([*lines, f"{right} of {len(self.outcomes)} cases passed"])


@functools.cache
def cases(kind: str) -> tuple[Case, ...]:
    """Returns the cases of one kind: "quantize", "dequantize" or "gemm"."""
    (inputs, results, options), all_cases = KINDS[kind], []
    with np.load(PATH) as file:
        arrays = {name: file[name] for name in file.files if name.startswith(f"{kind}/")}
    # The inputs of a quantizer have no SETTINGS in their names, so they do not name a case.
    for name in dict.fromkeys(path.rpartition("/")[0] for path in arrays if path.count("/") == 3):
        _, group, settings = name.split("/")
        chosen: dict[str, Any] = dict(zip(options, settings.split("-"), strict=True))
        if kind == "quantize":
            chosen["axis"] = 0 if group == "columnwise" else -1
        folder = f"{kind}/{group}" if kind == "quantize" else name  # x is one array for all settings
        operands = tuple(arrays[path] for each in inputs if (path := f"{folder}/{each}") in arrays)
        expected = {each: arrays[f"{name}/{each}"] for each in results}
        all_cases.append(Case(name, chosen, operands, expected, arrays.get(f"{name}/bound")))
    return tuple(all_cases)


def check(kind: str, function: Callable[..., Any], *, whole_blocks: bool = False, **known: Collection[Any]) -> Result:
    """Returns the number of values of `function` that equal the reference in `numpy_nodes`, case by case.

    Any NaN equals any other. A value of a gemm is right within the error bound of float32 sums, which is 0 in cases
    where every order of the sum is exact.

    Args:
        kind: "quantize", "dequantize" or "gemm".
        function: a function of NumPy arrays with the arguments of the reference: `quantize(x, axis=, element_format=,
            scale_rounding=)`, `dequantize(elements, scales, element_format=)` or `gemm(a, a_scales, b, b_scales[,
            bias], a_format=, b_format=)`. It returns arrays of the reference's shapes, elements and scales in bytes.
        whole_blocks: pads the values to quantize with zeros to full blocks of 32, and drops the padding of the result.
        **known: the option values that the function supports: element_format=["e4m3"], axis=[-1].

    Raises:
        ContractError: no case has these option values.
    """

    def padded(x: Array, *, axis: int, **options: Any) -> tuple[Array, Array]:
        size, widths = x.shape[axis], [(0, 0), (0, 0)]
        widths[axis] = (0, -size % BLOCK_SIZE)
        elements, scales = function(np.pad(x, widths), axis=axis, **options)
        return np.asarray(elements).take(range(size), axis), np.asarray(scales)

    chosen = [case for case in cases(kind) if all(case.options.get(name) in some for name, some in known.items())]
    if not chosen:
        raise ContractError("conformance", "no such case", expected="options that the vectors have", advice="see cases")
    call = padded if whole_blocks else function
    return Result(tuple(outcome(case, _answer(call, case)) for case in chosen))


def _answer(call: Callable[..., Any], case: Case) -> Answer:
    right = [array.shape for array in case.expected.values()]
    try:
        returned = call(*(array.copy() for array in case.inputs), **case.options)
        arrays = tuple(map(np.asarray, returned if len(right) > 1 else (returned,)))
        if (shapes := [array.shape for array in arrays]) != right:
            return f"gave shapes {shapes} instead of {right}"
        return tuple(array.view(np.uint8) for array in arrays) if len(right) > 1 else arrays
    except Exception as error:  # foreign code may raise anything; the other cases still run
        return f"raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def outcome(case: Case, answer: Answer) -> Outcome:
    """Returns the number of right values in an answer, and its first differences."""
    total = sum(array.size for array in case.expected.values())
    if isinstance(answer, str):
        return Outcome(case.name, total, 0, (answer,))
    told = []
    for (name, right), actual in zip(case.expected.items(), answer, strict=True):
        # The sign and the bits of a NaN are free. The sign of a zero is free in sums, but not in dequantized values.
        same = (actual == right) & (np.signbit(actual) == np.signbit(right) if name == "values" else True)
        same |= np.isnan(actual) & np.isnan(right)
        if case.bound is not None:
            with np.errstate(invalid="ignore"):
                same |= np.abs(actual - right) <= case.bound
        for at in map(tuple, np.argwhere(~same)):
            told.append(f"{name}{list(map(int, at))}: {_text(actual[at])}, expected {_text(right[at])}")
    return Outcome(case.name, total, total - len(told), tuple(told[:3]))


def _text(value: Any) -> str:
    return f"{value:02x}" if value.dtype == np.uint8 else f"{value:.9g} = {np.float32(value).view(np.uint32):08x}"
