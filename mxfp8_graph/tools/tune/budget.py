"""A budget: a metric, which statistic of it over the samples, and the bound it must keep. "cosine>=0.999"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mxfp8_graph.tools.metrics import METRICS, Metric, Score, metric_called
from mxfp8_ops.errors import ContractError

_WORDS: Final = re.compile(r"\s*(?P<name>[^\s<>=]+)\s*(?P<sign>>=|<=)\s*(?P<bound>[^\s<>=]+)\s*")
_WORST: Final = "worst_"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan must keep."""

    metric: Metric
    of_worst: bool
    """Whether the worst sample must keep it, or the mean of all samples."""
    bound: float

    def value(self, score: Score) -> float:
        """Returns the number that is compared with the bound."""
        return score.worst if self.of_worst else score.mean

    def met(self, score: Score) -> bool:
        """Whether a score keeps the budget; NaN never does."""
        value = self.value(score)
        return value >= self.bound if self.metric.higher_is_better else value <= self.bound

    def loss(self, score: Score) -> float:
        """Returns how bad a score is: the less, the better."""
        value = self.value(score)
        return math.inf if math.isnan(value) else -value if self.metric.higher_is_better else value

    def score_text(self, score: Score) -> str:
        """Returns the value of a score in words: mean cosine 0.9981."""
        return f"{'worst' if self.of_worst else 'mean'} {self.metric.title} {self.value(score):.6g}"

    def __str__(self) -> str:
        """Returns it as a user writes it."""
        sign = ">=" if self.metric.higher_is_better else "<="
        return f"{_WORST if self.of_worst else ''}{self.metric.name}{sign}{self.bound:.12g}"


def parse(text: str) -> Budget:
    """Returns the budget that a user wrote: cosine>=0.999, worst_cosine>=0.99, relative_l2<=0.02, mine:accuracy>=97.

    The mean over all samples must keep it; with "worst_" the worst sample.

    Raises:
        ContractError: it is no budget, there is no such metric, or the metric gets better in the other direction.
    """
    expected = "METRIC>=NUMBER or METRIC<=NUMBER, as in cosine>=0.999 or worst_relative_l2<=0.02"
    found = _WORDS.fullmatch(text)
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        raise ContractError("budget", repr(text), expected=expected, advice="correct it")
    name = found["name"]
    of_worst = name.startswith(_WORST)
    metric = metric_called(name.removeprefix(_WORST) if of_worst else name)
    sign = ">=" if metric.higher_is_better else "<="
    if found["sign"] != sign:
        better = "more" if metric.higher_is_better else "less"
        what = f"{text!r}, and {better} {metric.title} is better"
        raise ContractError("budget", what, expected=f"{name}{sign}NUMBER", advice="reverse the sign")
    if metric.best is not None and (bound > metric.best if metric.higher_is_better else bound < metric.best):
        what, most = f"{text!r}, which no plan can keep", "at most" if metric.higher_is_better else "at least"
        expected = f"{name}{sign}NUMBER with a number of {most} {metric.best:g}"
        raise ContractError("budget", what, expected=expected, advice="correct the number")
    return Budget(metric=metric, of_worst=of_worst, bound=bound)


def all_met(budgets: Sequence[Budget], scores: Mapping[str, Score]) -> bool:
    """Whether all budgets are kept by the scores, which go by the names of their metrics."""
    return all(budget.met(scores[budget.metric.name]) for budget in budgets)


def metrics_of(budgets: Sequence[Budget]) -> list[Metric]:
    """Returns what has to be measured, each once; with the relative L2 error, which every page has."""
    return list({metric.name: metric for metric in (*(b.metric for b in budgets), METRICS["relative_l2"])}.values())
