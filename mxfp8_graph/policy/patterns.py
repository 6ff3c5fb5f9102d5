"""Regular expressions in names, with a limit on the time they take: recipes come from people nobody knows.

The syntax is that of `re`, which has no limit. `google-re2` never backtracks and needs none, but it has no look-around
and no back references, which recipes may use; so the engine is `regex`, whose searches take a timeout.
"""

from __future__ import annotations

import functools
import re
import time
from typing import Any, Final

import regex

from mxfp8_ops.errors import RecipeError

_LONGEST: Final = 10_000
"""Characters of a pattern."""
_BUDGET: Final = 2.0
"""Seconds of processor time that the slow searches of one plan may take together."""
_SLOW: Final = 0.001
"""Seconds; the others are not counted, so that no model has too many names."""


def check(pattern: str) -> str:
    """Returns `pattern` if it is a regular expression.

    Raises:
        ValueError: it is none; the message says why.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"a pattern of {len(pattern)} characters; expected at most {_LONGEST}; shorten it")
    try:
        re.compile(pattern)
        _compiled(pattern)
    except (re.error, regex.error, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}); expected one; correct it") from None
    except RecursionError:
        raise ValueError(f"{pattern[:80]!r}... is nested too deeply; expected a few levels; simplify it") from None
    return pattern


class Search:
    """Looks for patterns anywhere in names, as `re.search` does, until the time is used up."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._left = _BUDGET

    def __call__(self, pattern: str, name: str) -> bool:
        """Whether `pattern` is found in `name`.

        Raises:
            RecipeError: the search takes for ever.
        """
        start = time.perf_counter()
        try:
            found = _compiled(pattern).search(name, timeout=self._left) is not None
        except TimeoutError:
            found = False
        seconds = time.perf_counter() - start
        self._left -= seconds if seconds > _SLOW else 0
        if self._left <= 0:
            what = f"the pattern {pattern!r} takes more than {_BUDGET:g} s to look for"
            advice = "avoid repeats inside repeats"
            raise RecipeError(f"recipe {self._recipe!r}", what, expected="one that fails soon", advice=advice)
        return found


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    """Returns the pattern as `regex` has it; what only `regex` gives a meaning to stays literal, as in `re`."""
    out, index, in_set = [], 0, False
    while index < len(pattern):
        piece = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        if in_set:
            in_set = piece != "]"
            out.append("\\[" if piece == "[" else piece)  # no [:alpha:]
        elif piece == "[":
            in_set = True
            opening = re.compile(r"\[\^?\]?").match(pattern, index)
            piece = opening[0] if opening else piece
            out.append(piece)
        elif piece == "{" and not re.compile(r"\{\d*,?\d*\}").match(pattern, index):
            out.append("\\{")  # no {e<=1}
        else:
            out.append(piece)
        index += len(piece)
    return regex.compile("".join(out), regex.VERSION0)
