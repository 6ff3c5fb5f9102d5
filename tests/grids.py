"""Grids of values that tests run over: pairs instead of products, loops instead of cases, and instruction sets."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def pairwise(**values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns rows with one value of each parameter, in order; each pair of values of two parameters is in a row."""
    lists = [list(options) for options in values.values()]
    sizes = [len(options) for options in lists]
    columns = range(len(sizes))
    missing = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(columns, 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
    }
    if len(sizes) < 2:
        return list(itertools.product(*lists))
    rows = []
    while missing:
        row = dict(min(missing))
        for i in columns:
            if i not in row:
                pairs = [[tuple(sorted([(i, a), other])) for other in row.items()] for a in range(sizes[i])]
                gains = [sum(pair in missing for pair in of_one) for of_one in pairs]
                row[i] = gains.index(max(gains))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(options[row[i]] for i, options in enumerate(lists)))
    return rows


def looped(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test runs all cases and then fails with each case that failed.

    The cases share the test's fixtures. A loop of 500 cases is collected in no time.
    """
    own = [name.strip() for name in names.split(",")]
    rows = [case if len(own) > 1 else (case,) for case in cases]
    assert rows, "no cases"
    assert all(len(row) == len(own) for row in rows), own

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for row in rows:
                case = dict(zip(own, row, strict=True))
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as error:
                    described = ", ".join(f"{name}={value!r}" for name, value in case.items())
                    failed.append((f"{described}: {type(error).__name__}: {error}", error))
            if failed:
                lines = "\n".join(text for text, _ in failed)
                raise AssertionError(f"{len(failed)} of {len(rows)} cases failed:\n{lines}") from failed[0][1]

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in own]
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return loop

    return decorate


def instruction_sets() -> tuple[str, ...]:
    """Returns the best set of this machine and the portable one; all of them where MXFP8_TEST_ISAS is `all`."""
    from mxfp8_ops import cpu  # here, because tests of the rewriting use the grids without the kernels

    available = cpu.available_isas()
    return available if os.environ.get("MXFP8_TEST_ISAS") == "all" else tuple(dict.fromkeys([available[0], "portable"]))
