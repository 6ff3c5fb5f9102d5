"""Metrics: one number per sample that says how far a model's outputs are from the original's.

`running/compare.py` defines what is computed; here it gets a name, a direction, and its worst output. A user's own is
`module:function(original, rewritten) -> float`; both arguments map the names of the outputs to arrays.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mxfp8_graph.naming import first_line
from mxfp8_graph.report.base import Data
from mxfp8_graph.running.compare import Difference, difference, sqnr
from mxfp8_graph.running.inputs import Array
from mxfp8_ops.errors import ContractError, ShapeError

Outputs = Mapping[str, Array]
_Number = Callable[[Difference, Array, Array], float]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that compares two results."""

    name: str
    """What a user asks for."""
    title: str
    """What tables call it, with its unit."""
    higher_is_better: bool
    best: float | None = None
    """What a result that is the original has, beyond which no budget can ask; None for a user's own."""
    of: Callable[[Outputs, Outputs], float]
    """(the original's outputs, the rewritten model's) -> the number; NaN where nothing is measured: see `_checked`."""

    def worst(self, values: Sequence[float]) -> int:
        """Returns the index of the worst value; a NaN is worse than any number."""
        sign = 1.0 if self.higher_is_better else -1.0
        return min(range(len(values)), key=lambda i: -math.inf if math.isnan(values[i]) else sign * values[i])

    @property
    def shown_title(self) -> str:
        """What a table of single sites calls it: a cosine is shown as its distance from 1, as .9998 is all alike."""
        return "1-cosine" if self.name == "cosine" else self.title

    def shown(self, value: float) -> float:
        """Returns what such a table has for a value."""
        return 1 - value if self.name == "cosine" else value


@dataclass(frozen=True, kw_only=True)
class Score(Data):
    """What a metric says of several samples."""

    KEYS = "metric=metric.name mean worst worst_sample samples"

    metric: Metric
    values: tuple[float, ...]
    """One number per sample, at least one."""

    @property
    def mean(self) -> float:
        """The mean of all samples; NaN if that of any sample is."""
        return sum(self.values) / len(self.values)  # statistics.fmean raises an error for infinities of both signs

    @property
    def worst(self) -> float:
        """The worst sample's."""
        return self.values[self.worst_sample]

    @property
    def worst_sample(self) -> int:
        """Which sample is the worst, from 0."""
        return self.metric.worst(self.values)

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.values)


def score(metric: Metric, originals: Sequence[Outputs], results: Sequence[Outputs]) -> Score:
    """Returns what `metric` says of the outputs of at least one sample; errors as `Metric.of`."""
    values = tuple(metric.of(*pair) for pair in zip(originals, results, strict=True))
    return Score(metric=metric, values=values)


def metric_called(name: str) -> Metric:
    """Returns the metric a user asked for: one of `METRICS`, or their own by module:function.

    Of their own a smaller number is better, unless the function has an attribute `higher_is_better` that is true.

    Raises:
        ContractError: there is no such metric or function.
    """
    if name in METRICS:
        return METRICS[name]
    if ":" not in name:
        raise ContractError.unknown("metric", name, (*METRICS, "module:function"))
    function = _load_function(name)

    def of(original: Outputs, rewritten: Outputs) -> float:
        try:
            return float(function(original, rewritten))
        except Exception as error:  # whatever the user's function raises
            raise _failed(name, error) from error

    return Metric(name=name, title=name, higher_is_better=bool(getattr(function, "higher_is_better", False)), of=of)


def _load_function(reference: str) -> Callable[..., Any]:
    """Returns the function that module:function names, of a module that may be in the current folder."""
    module, _, name = reference.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does: an installed command has no current folder
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise _failed(reference, error) from error
    finally:
        del sys.path[0]
    return function


def _failed(reference: str, error: Exception) -> ContractError:
    what = f"raised {type(error).__name__}: {first_line(error)}"
    return ContractError(reference, what, expected="a function that runs", advice="correct it; --debug shows where")


def _of_the_worst(name: str, title: str, number: _Number, *, best: float, rows: bool) -> Metric:
    """Returns the metric that is `number` of the worst output; with `rows`, of outputs with at least two columns."""

    def of(original: Outputs, rewritten: Outputs) -> float:
        chosen = [n for n, array in original.items() if not rows or (array.ndim and array.shape[-1] > 1)]
        if not chosen:
            found = ", ".join(f"{n} {list(array.shape)}" for n, array in original.items()) or "none"
            advice = f"choose another metric than {name}"
            raise ShapeError("outputs", found, expected="one with two columns or more", advice=advice)
        values = [_checked(number, original[n], rewritten[n]) for n in chosen if original[n].size]
        return values[metric.worst(values)] if values else math.nan

    metric = Metric(name=name, title=title, higher_is_better=best > 0, of=of, best=best)
    return metric


def _checked(number: _Number, original: Array, rewritten: Array) -> float:
    """Returns NaN, which is worse than any number, for another shape, no finite position, or NaN or Inf in only one."""
    if original.shape != rewritten.shape:
        return math.nan
    found = difference(original, rewritten)
    return number(found, original, rewritten) if found.compared and not found.nonfinite else math.nan


def check_measurable(sample: str, original: Outputs) -> None:
    """Raises ShapeError if no result can be compared with what the original model makes of a sample."""
    sizes = {name: array.size for name, array in original.items()}
    finite = {name: np.isfinite(array.astype(np.float64)).any() for name, array in original.items()}
    what = [f"output {name!r} has no finite value" for name, size in sizes.items() if size and not finite[name]]
    what = what if any(sizes.values()) else ["no output has a value"]
    if what:
        expected = "outputs of the original model that have finite values"
        raise ShapeError(sample, what[0], expected=expected, advice="leave it out, or correct it")


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        _of_the_worst("relative_l2", "relative L2", lambda d, *_: d.relative_l2, best=0.0, rows=False),
        _of_the_worst("sqnr", "SQNR, dB", lambda d, *_: sqnr(d.relative_l2), best=math.inf, rows=False),
        _of_the_worst("cosine", "cosine", lambda d, *_: d.cosine, best=1.0, rows=False),
        _of_the_worst("max_error", "max error", lambda d, *_: d.max_abs, best=0.0, rows=False),
        _of_the_worst("top1", "top-1 agreement", lambda _, a, b: _top1_agreement(a, b), best=1.0, rows=True),
        _of_the_worst("kl", "KL divergence, nats", lambda _, a, b: _softmax_kl(a, b), best=0.0, rows=True),
    )
}
"""Each is that of the worst output. An output without values (a batch of 0) is left out; NaN if there is no other."""


def _top1_agreement(reference: Array, result: Array) -> float:
    """Returns the share of rows along the last axis that have their largest value at the same place.

    Rows with a NaN have no largest value and are left out; NaN if no row is left.
    """
    # argmax of a row with NaN is the index of the NaN.
    rows = ~(np.isnan(reference.astype(np.float64)) | np.isnan(result.astype(np.float64))).any(-1)
    same = reference[rows].argmax(-1) == result[rows].argmax(-1)
    return float(np.mean(same)) if same.size else math.nan


def _softmax_kl(reference: Array, result: Array) -> float:
    """Returns the Kullback-Leibler divergence in nats of softmax(result) from softmax(reference), a mean over rows.

    Softmax is over the last axis, in float64: sum of p * (log p - log q); 0 of no rows.
    """
    if not reference.size:
        return 0.0
    log_p, log_q = _log_softmax(reference), _log_softmax(result)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), -1)))


def _log_softmax(values: Array) -> Array:
    shifted = values.astype(np.float64)
    # So that no exponential overflows.
    shifted = shifted - shifted.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
