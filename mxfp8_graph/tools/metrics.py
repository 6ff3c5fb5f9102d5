"""Metrics: one number per sample for the difference of a model's outputs from the original's.

`running/compare.py` defines the numbers; a metric adds a name, a direction, and the choice of the worst output. Users
write their own as `module:function(original, rewritten) -> float`; both arguments map names of outputs to arrays.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mxfp8_graph.report.base import Data
from mxfp8_graph.running.compare import Difference, difference, sqnr
from mxfp8_graph.running.inputs import Array
from mxfp8_ops.errors import ContractError, ShapeError

Outputs = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that compares two results."""

    name: str
    """Its name in options."""
    title: str
    """Its name in tables, with its unit."""
    compute: Callable[[Outputs, Outputs], float]
    """(the original's outputs, the rewritten model's) -> the number; NaN if nothing can be compared."""
    higher_is_better: bool = False
    best: float | None = None
    """The number of equal results, which bounds a budget; None for a user's own."""

    def badness(self, value: float) -> float:
        """Returns a number that grows as a value gets worse; a NaN is worse than any number."""
        return math.inf if math.isnan(value) else -value if self.higher_is_better else value

    @property
    def shown_title(self) -> str:
        """The title in tables of single sites, which show a cosine as 1-cosine, since .9998 and .9997 look alike."""
        return "1-cosine" if self.name == "cosine" else self.title

    def shown(self, value: float) -> float:
        """Returns the number that such a table shows for a value."""
        return 1 - value if self.name == "cosine" else value


@dataclass(frozen=True, kw_only=True)
class Score(Data):
    """A metric on several samples."""

    KEYS = "metric=metric.name mean worst worst_sample samples"

    metric: Metric
    values: tuple[float, ...]
    """One number per sample, at least one."""

    @property
    def mean(self) -> float:
        """The mean of all samples; NaN if a sample has NaN."""
        return sum(self.values) / len(self.values)  # statistics.fmean raises an error for infinities of both signs

    @property
    def worst(self) -> float:
        """The number of the worst sample."""
        return self.values[self.worst_sample]

    @property
    def worst_sample(self) -> int:
        """The index of the worst sample."""
        return max(range(len(self.values)), key=lambda i: self.metric.badness(self.values[i]))

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(self.values)

    def __str__(self) -> str:
        """Returns the score in words: 1-cosine 0.0004 (worst 0.0011, sample 3)."""
        shown = self.metric.shown
        worst = f" (worst {shown(self.worst):.4g}, sample {self.worst_sample + 1})" * (len(self.values) > 1)
        return f"{self.metric.shown_title} {shown(self.mean):.4g}{worst}"


def score(metric: Metric, originals: Sequence[Outputs], results: Sequence[Outputs]) -> Score:
    """Returns the score of the outputs of at least one sample; raises as `Metric.of`."""
    return Score(metric=metric, values=tuple(metric.compute(*pair) for pair in zip(originals, results, strict=True)))


def metric_called(name: str) -> Metric:
    """Returns one of `METRICS` by name, or a metric of the user's function, written as module:function.

    A smaller number is better, unless the user's function has a true attribute `higher_is_better`.

    Raises:
        ContractError: there is no such metric or function, or its module fails.
    """
    if name in METRICS:
        return METRICS[name]
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier():
        raise ContractError.unknown("metric", name, (*METRICS, "module:function"))
    # An installed command lacks the current folder in its path, unlike `python -m`.
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise any class
        raise _failed(name, error) from error
    finally:
        sys.path.remove(here)

    def compute(original: Outputs, rewritten: Outputs) -> float:
        try:
            return float(function(original, rewritten))
        except Exception as error:  # the user's function may raise any class
            raise _failed(name, error) from error

    return Metric(
        name=name, title=name, higher_is_better=bool(getattr(function, "higher_is_better", False)), compute=compute
    )


def _failed(name: str, error: Exception) -> ContractError:
    what = f"raised {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    advice = "correct it; --debug shows where"
    return ContractError(name, what, expected="module:function, a function that runs", advice=advice)


def _of_the_worst(
    name: str, title: str, number: Callable[[Difference, Array, Array], float], best: float, *, rows: bool = False
) -> Metric:
    """Returns the metric that is `number` of the worst output; with `rows`, of outputs with at least two columns."""

    def one(a: Array, b: Array) -> float:
        if a.shape != b.shape:
            return math.nan
        # NaN also for NaN or Inf in only one of the two, which the error of the finite values would hide.
        errors = difference(a, b)
        return number(errors, a, b) if errors.compared and not errors.nonfinite else math.nan

    def compute(original: Outputs, rewritten: Outputs) -> float:
        chosen = [n for n, array in original.items() if not rows or (array.ndim and array.shape[-1] > 1)]
        if not chosen:
            shapes = ", ".join(f"{n} {list(array.shape)}" for n, array in original.items()) or "none"
            advice = f"choose another metric than {name}"
            raise ShapeError("outputs", shapes, expected="one with two columns or more", advice=advice)
        values = [one(original[n], rewritten[n]) for n in chosen if original[n].size]
        return max(values, key=metric.badness, default=math.nan)

    metric = Metric(name=name, title=title, compute=compute, higher_is_better=best > 0, best=best)
    return metric


def check_measurable(samples: Sequence[str], originals: Sequence[Outputs]) -> None:
    """Raises ShapeError if an output of the original has no finite value for a sample, which allows no comparison."""
    for sample, outputs in zip(samples, originals, strict=True):
        sized = {name: array for name, array in outputs.items() if array.size}
        bad = [name for name, array in sized.items() if not np.isfinite(array.astype(np.float64)).any()]
        if bad or not sized:
            what = f"output {bad[0]!r} has no finite value" if bad else "no output has a value"
            expected = "outputs of the original model that have finite values"
            raise ShapeError(sample, what, expected=expected, advice="leave it out, or correct it")


def _top1_agreement(_: Difference, reference: Array, result: Array) -> float:
    """Returns the share of rows along the last axis whose largest values have the same index; NaN without rows."""
    # A row with a NaN has no largest value: argmax would return the index of the NaN.
    rows = ~(np.isnan(reference.astype(np.float64)) | np.isnan(result.astype(np.float64))).any(-1)
    same = reference[rows].argmax(-1) == result[rows].argmax(-1)
    return float(np.mean(same)) if same.size else math.nan


def _softmax_kl(_: Difference, reference: Array, result: Array) -> float:
    """Returns the Kullback-Leibler divergence in nats of softmax(result) from softmax(reference), a mean over rows."""
    log_p, log_q = _log_softmax(reference), _log_softmax(result)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), -1)))


def _log_softmax(values: Array) -> Array:
    shifted = values.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)  # no exponential overflows
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


RELATIVE_L2: Final = _of_the_worst("relative_l2", "relative L2", lambda d, *_: d.relative_l2, 0.0)
METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        RELATIVE_L2,
        _of_the_worst("sqnr", "SQNR, dB", lambda d, *_: sqnr(d.relative_l2), math.inf),
        _of_the_worst("cosine", "cosine", lambda d, *_: d.cosine, 1.0),
        _of_the_worst("max_error", "max error", lambda d, *_: d.max_abs, 0.0),
        _of_the_worst("top1", "top-1 agreement", _top1_agreement, 1.0, rows=True),
        _of_the_worst("kl", "KL divergence, nats", _softmax_kl, 0.0, rows=True),
    )
}
"""The worst output counts. An output without values (a batch of 0) is left out; NaN if all are."""
