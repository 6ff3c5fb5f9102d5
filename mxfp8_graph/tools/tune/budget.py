"""A budget: a metric, its mean or worst sample, and the bound that a plan must meet. "cosine>=0.999"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from mxfp8_graph.tools.metrics import Metric, Score, metric_called
from mxfp8_ops.errors import ContractError

_WORDS: Final = re.compile(r"\s*(worst_)?([^\s<>=]+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.I)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bound of a metric."""

    metric: Metric
    of_worst: bool
    """Whether the worst sample must meet it, or the mean of all samples."""
    bound: float

    def value(self, score: Score) -> float:
        """Returns the number that is compared with the bound."""
        return score.worst if self.of_worst else score.mean

    def met(self, score: Score) -> bool:
        """Whether a score meets the budget; NaN never does."""
        return self.metric.badness(self.value(score)) <= self.metric.badness(self.bound)

    @property
    def title(self) -> str:
        """The number in words: mean cosine."""
        return f"{'worst' if self.of_worst else 'mean'} {self.metric.title}"

    def __str__(self) -> str:
        """Returns it as a user writes it."""
        sign = ">=" if self.metric.higher_is_better else "<="
        return f"{'worst_' if self.of_worst else ''}{self.metric.name}{sign}{self.bound:.12g}"


def parse(text: str) -> Budget:
    """Returns the budget that a user wrote: cosine>=0.999, worst_cosine>=0.99, relative_l2<=0.02, mine:accuracy>=97.

    Raises:
        ContractError: it is no budget, there is no such metric, or its direction or number cannot be met.
    """
    found = _WORDS.fullmatch(text)
    if found is None or math.isinf(bound := float(found[4])):
        expected = "METRIC>=NUMBER or METRIC<=NUMBER, as in cosine>=0.999 or worst_relative_l2<=0.02"
        raise ContractError("budget", repr(text), expected=expected, advice="correct it")
    metric = metric_called(found[2])
    name, sign = f"{found[1] or ''}{found[2]}", ">=" if metric.higher_is_better else "<="
    if found[3] != sign:
        what = f"{text!r}, and {'more' if metric.higher_is_better else 'less'} {metric.title} is better"
        raise ContractError("budget", what, expected=f"{name}{sign}NUMBER", advice="reverse the sign")
    if metric.best is not None and metric.badness(bound) < metric.badness(metric.best):
        most = "at most" if metric.higher_is_better else "at least"
        expected = f"{name}{sign}NUMBER with a number of {most} {metric.best:g}"
        raise ContractError("budget", f"{text!r}, which no plan can meet", expected=expected, advice="correct it")
    return Budget(metric=metric, of_worst=found[1] is not None, bound=bound)
