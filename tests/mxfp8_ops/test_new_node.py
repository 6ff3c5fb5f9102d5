"""A new node is three files: its own in nodes/, the registry, and a test like this one."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from node_examples import generator, in_standard_ops
from one_node import one_node_model, run

from mxfp8_ops import contract, numpy_nodes
from mxfp8_ops.function_body import Body
from mxfp8_ops.node import ELEMENTS, FLOAT, SCALES, UINT8, VALUES, Op, Port

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"

# --- What the file of the node has: reference, body, row ----------------------------------------------------------


def multiple(elements: np.ndarray, scales: np.ndarray, *, times: float = 2.0) -> np.ndarray:
    return np.float32(times) * numpy_nodes.dequantize(elements, scales)


def _body(g: Body) -> None:
    values = g("Mul", g.values("elements", "scales", g.known("elements")), g.number("times"))
    g.result(g.cast(values, "output_dtype"), "Y")


MULTIPLE = Op(
    "MXFP8Multiple",
    (Port("elements", ELEMENTS, "[..., K]"), Port("scales", SCALES, "[..., ceil(K / 32)]")),
    (Port("Y", VALUES, "shape of elements"),),
    MappingProxyType({"times": 2.0, "output_dtype": FLOAT}),
    "times * MXFP8Dequantize.",
    _body,
)

# --- What the others make of it --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "OPS", MappingProxyType({**contract.OPS, MULTIPLE.name: MULTIPLE}))


def test_its_body_runs_in_stock_onnx_runtime_as_a_function_and_as_standard_ops() -> None:
    rng = np.random.default_rng(0)
    elements, scales = rng.integers(0, 0x7F, (5, 70), np.uint8), rng.integers(100, 150, (5, 3), np.uint8)
    inputs = {"elements": (elements, contract.FLOAT8E4M3FN), "scales": (scales, UINT8)}
    model = one_node_model(MULTIPLE.name, inputs, {"Y": FLOAT}, 21, {"times": 3.0})
    for each in (model, in_standard_ops(model)):
        np.testing.assert_array_equal(run(each, inputs)[0], multiple(elements, scales, times=3.0))


@pytest.mark.parametrize(
    ("written", "text"), [("header", '{"MXFP8Multiple", {{"elements"'), ("page", "### MXFP8Multiple")]
)
def test_what_is_generated_has_it(written: str, text: str) -> None:
    assert text in getattr(generator(), written)()


def test_the_names_of_nodes_are_in_their_files_alone() -> None:
    """So no other file of Python has to change for a new node."""
    ours = re.compile("|".join(f'"{name}"' for name in contract.OPS))
    files = [*(CUSTOM_OPS / "mxfp8_ops").rglob("*.py"), *(CUSTOM_OPS.parent / "mxfp8_graph").rglob("*.py")]
    assert len(files) > 200
    naming = [path.relative_to(CUSTOM_OPS.parent).as_posix() for path in files if ours.search(path.read_text("utf-8"))]
    assert {Path(name).parent.as_posix() for name in naming} == {"custom_ops/mxfp8_ops/nodes"}, naming
