"""A budget, such as "cosine>=0.999": a metric, its mean or worst sample, and the bound that a plan must meet."""

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
    """Whether the worst sample must meet the bound; else the mean of all samples must."""
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
        """Returns the budget as a user writes it."""
        sign = ">=" if self.metric.higher_is_better else "<="
        return f"{'worst_' if self.of_worst else ''}{self.metric.name}{sign}{self.bound:.12g}"


def parse(text: str) -> Budget:
    """Returns the budget that a user wrote: cosine>=0.999, worst_cosine>=0.99, relative_l2<=0.02, mine:accuracy>=97.

    Raises:
        ContractError: `text` is no budget, the metric is unknown, or no plan can meet the direction or the number.
    """
    match = _WORDS.fullmatch(text)
    if match is None or math.isinf(bound := float(match[4])):  # a number such as 1e999 is infinite
        expected = "METRIC>=NUMBER or METRIC<=NUMBER, as in cosine>=0.999 or worst_relative_l2<=0.02"
        raise ContractError("budget", repr(text), expected=expected, advice="correct it")
    metric = metric_called(match[2])
    name, sign = f"{match[1] or ''}{match[2]}", ">=" if metric.higher_is_better else "<="
    if match[3] != sign:
        what = f"{text!r}, and {'more' if metric.higher_is_better else 'less'} {metric.title} is better"
        raise ContractError("budget", what, expected=f"{name}{sign}NUMBER", advice="reverse the sign")
    # Only metrics of ours have a best number; a user's own may have any range.
    if metric.best is not None and metric.badness(bound) < metric.badness(metric.best):
        most = "at most" if metric.higher_is_better else "at least"
        expected = f"{name}{sign}NUMBER with a number of {most} {metric.best:g}"
        raise ContractError("budget", f"{text!r}, which no plan can meet", expected=expected, advice="correct it")
    return Budget(metric=metric, of_worst=match[1] is not None, bound=bound)
