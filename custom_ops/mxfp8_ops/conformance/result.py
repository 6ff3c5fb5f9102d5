"""What a check found: per case how much passed, and the first differences; per settings whose rule the answers are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    group: str
    settings: str
    unit: str
    """What is counted: "blocks" or "values"."""
    total: int
    passed: int
    differences: tuple[str, ...] = ()
    """The first that differ, a line each: where, what it is and what it has to be, in hex."""
    error: str = ""
    """Why there is no answer to compare."""

    @property
    def text(self) -> str:
        """The outcome in a line, and each difference in another."""
        verdict = "ok" if self.passed == self.total else "FAILED"
        line = f"{self.settings:12}{self.group:14}{self.passed:7} of {self.total:6} {self.unit}  {verdict}"
        return "\n".join([line, *(f"    {told}" for told in (self.error, *self.differences) if told)])


@dataclass(frozen=True)
class Result:
    """What a check found."""

    outcomes: tuple[Outcome, ...]
    agrees: Mapping[str, str] = field(default_factory=dict)
    """Of quantizers, for settings that failed: the known rule whose answers these are, or the nearest one."""

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
