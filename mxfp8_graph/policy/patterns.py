"""Searches names for regular expressions, with a limit on the time: recipes may be untrusted.

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
        # By both: `re` defines which patterns are legal (regex accepts more), and `regex` is what runs them.
        re.compile(pattern)
        _compiled(pattern)
    except (re.error, regex.error, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}); expected one; correct it") from None
    # Python's own parser of patterns is recursive: some thousand brackets exhaust the stack.
    except RecursionError:
        raise ValueError(f"{pattern[:80]!r}... is nested too deeply; expected a few levels; simplify it") from None
    return pattern


class Search:
    """Looks for patterns anywhere in names, as `re.search` does, until the time is used up."""

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._left = _BUDGET

    def __call__(self, pattern: str, name: str) -> bool:
        """Whether `pattern` matches anywhere in `name`.

        Raises:
            RecipeError: the searches of this plan took longer than `_BUDGET`.
        """
        start = time.perf_counter()
        try:
            # The timeout is what is left for all patterns together: a thousand slow searches must not take a thousand
            # budgets.
            matches = _compiled(pattern).search(name, timeout=self._left) is not None
        except TimeoutError:
            matches = False
        seconds = time.perf_counter() - start
        self._left -= seconds if seconds > _SLOW else 0
        if self._left <= 0:
            what = f"the pattern {pattern!r} takes more than {_BUDGET:g} s to search for"
            advice = "avoid repeats inside repeats"
            raise RecipeError(
                f"recipe {self._recipe!r}", what, expected="one that is searched for quickly", advice=advice
            )
        return matches


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    """Returns `pattern` compiled by `regex`, with the meaning it has in `re`: syntax of `regex` alone is escaped."""
    # A scan by hand, since an escape such as \[ and a set such as [[] change what a bracket means.
    out, index, in_set = [], 0, False
    while index < len(pattern):
        piece = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        if in_set:
            in_set = piece != "]"
            out.append("\\[" if piece == "[" else piece)  # no [:alpha:]
        elif piece == "[":
            in_set = True
            # A ] that comes first in a set is a member of it and does not end it.
            opening = re.compile(r"\[\^?\]?").match(pattern, index)
            piece = opening[0] if opening else piece
            out.append(piece)
        elif piece == "{" and not re.compile(r"\{\d*,?\d*\}").match(pattern, index):
            out.append("\\{")  # no {e<=1}
        else:
            out.append(piece)
        index += len(piece)
    return regex.compile("".join(out), regex.VERSION0)
