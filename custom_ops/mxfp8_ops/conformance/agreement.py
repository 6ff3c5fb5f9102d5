"""Finds the rule that a quantizer follows: counts its blocks that each rule of `rules.py` gives too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mxfp8_ops.conformance.rules import RULES, Rule
from mxfp8_ops.conformance.vectors import Array, Case
from mxfp8_ops.formats import BLOCK_SIZE, ELEMENT_FORMATS, ELEMENT_NAN
from mxfp8_ops.numerics import decode


def same_blocks(expected: tuple[Array, ...], actual: tuple[Array, ...], axis: int) -> npt.NDArray[np.bool_]:
    """Returns of every block, in the shape of the scales, whether its scale and all its elements are the same."""
    elements = np.moveaxis(expected[0] == actual[0], axis, -1)
    padded = np.pad(elements, ((0, 0), (0, -elements.shape[-1] % BLOCK_SIZE)), constant_values=True)
    whole = padded.reshape(len(padded), -1, BLOCK_SIZE).all(-1)
    same: npt.NDArray[np.bool_] = expected[1] == actual[1]
    return same & np.moveaxis(np.asarray(whole), -1, axis)


def whose(answers: Sequence[tuple[Case, tuple[Array, ...] | str]]) -> str:
    """Returns which of `RULES` give these answers, of one format and rounding, or which comes nearest.

    NaN is NaN here, whatever its sign. Nothing is returned if there are no answers, or no rule has the format.
    """
    pairs = [(case, answer) for case, answer in answers if not isinstance(answer, str)]
    total = sum(case.expected[1].size for case, _ in pairs)
    same = {
        rule.name: sum(_agreeing(rule, case, answer) for case, answer in pairs)
        for rule in RULES
        if pairs and pairs[0][0].options["element_format"] in rule.element_formats
    }
    if not same:
        return ""
    most = max(same.values())
    names = ", ".join(name for name, count in same.items() if count == most)
    return f"the rule of {names}" if most == total else f"nearest to that of {names}: {most} of {total} blocks"


def _agreeing(rule: Rule, case: Case, answer: tuple[Array, ...]) -> int:
    axis, element_format = case.options["axis"], case.options["element_format"]
    fmt = ELEMENT_FORMATS[element_format]
    # A format has several codes of NaN, at least one of each sign: all of them become the one that rules give.
    elements = np.where(np.isnan(decode(answer[0], fmt)), ELEMENT_NAN, answer[0])
    expected = rule.quantize(case.inputs[0], element_format=element_format, axis=axis)
    return int(same_blocks(expected, (elements, answer[1]), axis).sum())
