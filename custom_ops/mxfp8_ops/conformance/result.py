"""The result of a check: how much of each case passed, the first differences, and the rule that the answers follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    group: str
    settings: str
    unit: str
    """The unit of `total` and `passed`: "blocks" or "values"."""
    total: int
    passed: int
    differences: tuple[str, ...] = ()
    """The first differences, a line each: place, actual and expected value, in hex."""
    error: str = ""
    """Why there is no answer to compare."""

    @property
    def text(self) -> str:
        """The outcome in a line, and each difference in another."""
        verdict = "ok" if self.passed == self.total else "FAILED"
        line = f"{self.settings:12}{self.group:14}{self.passed:7} of {self.total:6} {self.unit}  {verdict}"
        return "\n".join([line, *(f"    {detail}" for detail in (self.error, *self.differences) if detail)])


@dataclass(frozen=True)
class Result:
    """The results of a check."""

    outcomes: tuple[Outcome, ...]
    agrees: Mapping[str, str] = field(default_factory=dict)
    """For settings of quantizers that failed: the rule of `rules.py` that gives these answers, or the nearest one."""

    @property
    def passed(self) -> bool:
        """Whether every case did."""
        return all(outcome.passed == outcome.total for outcome in self.outcomes)

    def __str__(self) -> str:
        """Returns the table."""
        lines = [outcome.text for outcome in self.outcomes]
        lines += [f"{settings}: {whose}" for settings, whose in self.agrees.items()]
        failed = sum(outcome.passed < outcome.total for outcome in self.outcomes)
        return "\n".join([*lines, f"{len(self.outcomes) - failed} of {len(self.outcomes)} cases passed"])
