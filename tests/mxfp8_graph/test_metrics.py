"""Metrics: what they are, by their definitions, and torch's where it has them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import looped

from mxfp8_graph.tools.metrics import METRICS, metric_called, score
from mxfp8_ops.errors import ContractError, ShapeError


def pair(seed: int = 0, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((5, 7), np.float32)
    return values, values + rng.standard_normal((5, 7), np.float32) * np.float32(noise)


def value(name: str, original: Any, rewritten: Any) -> float:
    return metric_called(name).compute({"y": np.asarray(original)}, {"y": np.asarray(rewritten)})


def test_each_metric_by_its_definition() -> None:
    a, b = pair()
    error = np.linalg.norm(b.astype(float) - a) / np.linalg.norm(a.astype(float))
    assert value("relative_l2", a, b) == pytest.approx(error, rel=1e-12)
    assert value("sqnr", a, b) == pytest.approx(20 * math.log10(1 / error), rel=1e-12)
    assert value("max_error", a, b) == np.abs(b.astype(float) - a).max()
    assert value("top1", [[1, 3, 2], [9, 0, 0]], [[1, 3, 2], [0, 9, 0]]) == 0.5
    rows = np.array([[1.0, 3, 2], [np.nan, 0, 0], [9, 0, 0]])  # a row with a NaN does not count
    assert value("top1", rows, np.where(rows == 9, -9, rows)) == 0.5
    with pytest.raises(ShapeError, match=r"outputs: y \[3, 1\]; expected one with two columns or more"):
        value("top1", np.ones((3, 1)), np.ones((3, 1)))


def test_cosine_and_kl_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    a, b = pair()
    x, y = torch.from_numpy(a).double(), torch.from_numpy(b).double()
    cosine = torch.cosine_similarity(x.ravel(), y.ravel(), dim=0)
    assert value("cosine", a, b) == pytest.approx(float(cosine), abs=1e-12)
    log_p, log_q = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    assert value("kl", a, b) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_a_result_that_is_the_original_is_perfect(name: str) -> None:
    a, b = pair()
    metric, perfect = METRICS[name], value(name, a, a)
    assert perfect == {"sqnr": math.inf, "cosine": pytest.approx(1), "top1": 1}.get(name, 0)
    assert metric.badness(perfect) < metric.badness(metric.compute({"y": a}, {"y": b + 2 * b[::-1]}))


@pytest.mark.parametrize("name", METRICS)
def test_a_nan_in_only_one_is_the_worst_there_is(name: str) -> None:
    a, b = pair()
    broken = b.copy()
    broken[0, 0] = np.nan
    found = score(METRICS[name], [{"y": a}] * 3, [{"y": b}, {"y": broken}, {"y": -b}])
    assert (math.isnan(found.mean), math.isnan(found.worst), found.worst_sample) == (True, True, 1)
    assert found.to_dict()["mean"] is None


NAN, INF = np.full((2, 3), np.nan), np.full((2, 3), np.inf)


@looped("original, rewritten", [(NAN, NAN), (np.zeros((0, 3)),) * 2, (np.ones((2, 3)), np.ones((1, 3))), (INF, -INF)])
def test_where_nothing_is_measured_there_is_no_number(original: np.ndarray, rewritten: np.ndarray) -> None:
    a, b = pair()
    for metric in METRICS.values():
        found = score(metric, [{"y": a}, {"y": original}], [{"y": b}, {"y": rewritten}])
        assert (math.isnan(found.mean), found.worst_sample) == (True, 1), metric


def test_the_worst_output_counts_and_not_one_without_values() -> None:
    a, b = pair()
    empty = np.zeros((0, 3))
    for name in METRICS:
        assert METRICS[name].compute({"y": a, "z": empty}, {"y": b, "z": empty}) == value(name, a, b)
    for name in ("relative_l2", "cosine"):
        assert METRICS[name].compute({"y": a, "z": a}, {"y": a, "z": b}) == value(name, a, b)


def test_a_score_has_the_mean_and_the_worst_sample() -> None:
    a, b = pair()
    found = score(METRICS["cosine"], [{"y": a}] * 3, [{"y": a}, {"y": b}, {"y": a}])
    assert (found.worst, found.worst_sample) == (found.values[1], 1)
    assert found.mean == pytest.approx((2 + found.values[1]) / 3)


@pytest.mark.usefixtures("own_folder")
def test_a_metric_of_the_users_own() -> None:
    code = "def mine(original, rewritten):\n    return abs(original['y'] - rewritten['y']).sum()\n"
    Path("own_metric.py").write_text(f"{code}\n{code.replace('mine', 'better')}\nbetter.higher_is_better = True\n")
    assert value("own_metric:mine", [1.0, 2.0], [1.5, 1.0]) == 1.5
    assert [metric_called(f"own_metric:{n}").higher_is_better for n in ("mine", "better")] == [False, True]
    with pytest.raises(ContractError, match="own_metric:mine: raised KeyError: 'y'"):
        metric_called("own_metric:mine").compute({}, {})
    with pytest.raises(ContractError, match=r"metric: 'mse'; expected one of relative_l2, sqnr, .*, module:function"):
        metric_called("mse")
