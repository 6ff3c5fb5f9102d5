"""onnx's own test models, opsets 6 to 26, with a linear beside them that is rewritten: all else computes what it did.

What they must compute is what ONNX Runtime makes of the original; where it cannot run that (it has few kernels below
opset 7), what onnx ships as expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from upgraded_models import X, differences, run, upgraded, with_linear

import mxfp8_graph
from mxfp8_graph.onnx_pass.graph import STANDARD
from mxfp8_ops.errors import ContractError

DATA = Path(onnx.__file__).parent / "backend/test/data"
Case = tuple[str, onnx.ModelProto, dict[str, Any], list[Any] | None]
"""Name, model, inputs, and expected outputs if there are any."""


def outcome_of(model: onnx.ModelProto, inputs: dict[str, Any], expected: list[Any] | None) -> tuple[str, Any]:
    """Returns whether a rewrite leaves results the "same", is "refused", or gives "different" ones, with the details.

    It is "unknown" where neither ONNX Runtime runs the original, nor can the result be compared with what is expected.
    """
    feeds = {**inputs, "beside.x": X}
    try:
        wanted = run(with_linear(model), feeds)
    except Exception:  # ONNX Runtime's have no common class
        wanted = expected
    try:
        result = run(upgraded(model)[0], feeds)
    except ContractError as error:
        return "refused", str(error)
    except Exception as error:
        return "unknown" if wanted is expected else "different", error
    if wanted is None:
        return "unknown", None
    wrong = differences([output.name for output in model.graph.output], wanted, result)
    return "different" if wrong else "same", wrong


def outcomes(cases: Iterator[Case]) -> dict[str, dict[str, Any]]:
    """Returns the details of each model, by outcome and name."""
    by_outcome: dict[str, dict[str, Any]] = {outcome: {} for outcome in ("same", "refused", "different", "unknown")}
    for name, *case in cases:
        outcome, details = outcome_of(*case)
        by_outcome[outcome][name] = details
    return by_outcome


def shipped(folder: str) -> Iterator[Case]:
    """Yields the models of a folder, with the data beside them or else with random inputs."""
    files = sorted((DATA / folder).glob("*/model.onnx")) or sorted((DATA / folder).glob("*.onnx"))
    if not files:
        pytest.skip(f"onnx {onnx.__version__} ships no models in {DATA / folder}")
    rng = np.random.default_rng(0)
    for path in files:
        model = onnx.load(path)
        stored = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in stored]
        data = path.parent / "test_data_set_0"
        if data.is_dir():
            feeds = {value.name: read(data / f"input_{i}.pb", value) for i, value in enumerate(inputs)}
            expected = [read(data / f"output_{i}.pb", value) for i, value in enumerate(model.graph.output)]
        else:
            shapes = {v.name: [dim.dim_value or 1 for dim in v.type.tensor_type.shape.dim] for v in inputs}
            feeds, expected = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}, None
        yield path.parent.name if data.is_dir() else path.stem, model, feeds, expected


def read(path: Path, value: onnx.ValueInfoProto) -> Any:
    if value.type.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))


def generated() -> Iterator[Case]:
    """Yields onnx's cases of every op, as old as the newest version of the op is."""
    for case in collect_testcases(None):
        if case.data_sets and any(entry.domain in STANDARD for entry in case.model.opset_import):
            inputs, outputs = case.data_sets[0]
            names = [value.name for value in case.model.graph.input]
            yield case.name, case.model, dict(zip(names, inputs, strict=True)), list(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "least"), [("pytorch-operator", 35), ("simple", 17), ("pytorch-converted", 79), ("light", 9)]
)
def test_models_that_onnx_ships_compute_what_they_did(folder: str, least: int) -> None:
    by_outcome = outcomes(shipped(folder))
    assert by_outcome["different"] == {}
    assert all(name.endswith("_multiparam") for name in by_outcome["refused"])
    assert all("its slopes were per channel; expected opset 7" in message for message in by_outcome["refused"].values())
    assert len(by_outcome["same"]) >= least, by_outcome


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # onnx makes the cases when they are collected
def test_a_model_of_every_op_computes_what_it_did() -> None:
    by_outcome = outcomes(generated())
    assert by_outcome["different"] == {}
    assert set(by_outcome["refused"]) == {"test_scan_sum"}
    assert len(by_outcome["same"]) > 2 * len(by_outcome["unknown"]), by_outcome


@pytest.mark.parametrize("name", ["pytorch-converted/test_Linear", "pytorch-operator/test_operator_addmm"])
def test_the_gemm_of_opset_6_is_rewritten(name: str) -> None:
    """Its C is broadcast only if an attribute says so. ONNX Runtime cannot run the original."""
    folder, _, model = name.partition("/")
    proto, feeds, expected = next(case[1:] for case in shipped(folder) if case[0] == model)
    weights = [node.input[1] for node in proto.graph.node if node.op_type == "Gemm"]
    fixed = {name: feeds.pop(name) for name in weights if name in feeds}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in fixed.items())
    recipe = mxfp8_graph.Recipe(name="all", min_dim=0, output_projections=True)
    rewritten, report = mxfp8_graph.rewrite(proto, recipe)
    assert len(report.rewritten) == len(weights)
    assert expected
    (y,) = run(rewritten, feeds)
    assert 0 < np.linalg.norm(y - expected[0]) < 0.12 * np.linalg.norm(expected[0])
