"""A new node is three files: its own in nodes/, the registry, and a test like this one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from node_examples import generator, in_standard_ops
from one_node import one_node_model, run
from onnx import helper

from mxfp8_ops import contract, numpy_nodes
from mxfp8_ops.case import Case
from mxfp8_ops.function_body import Body
from mxfp8_ops.node import ELEMENTS, FLOAT, SCALES, UINT8, VALUES, Op, Port
from mxfp8_ops.onnx_functions import case_of, functions
from mxfp8_ops.torch_ops import schemas

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"

# --- What the file of the node has: reference, body, row ----------------------------------------------------------


def multiple(
    elements: np.ndarray, scales: np.ndarray, *, times: float = 2.0, powers: tuple[int, ...] = (0,)
) -> np.ndarray:
    return np.float32(times * 2.0 ** sum(powers)) * numpy_nodes.dequantize(elements, scales)


def _body(g: Body) -> None:
    power = g("ReduceSum", g("Cast", g.vector("powers"), to=FLOAT), keepdims=0)
    factor = g("Mul", g("Pow", g.constant(np.float32(2)), power), g.number("times"))
    values = g("Mul", g.values("elements", "scales", g.known("elements")), factor)
    g.result(g.cast(values, "output_dtype"), "Y")


MULTIPLE = Op(
    "MXFP8Multiple",
    (Port("elements", ELEMENTS, "[..., K]"), Port("scales", SCALES, "[..., ceil(K / 32)]")),
    (Port("Y", VALUES, "shape of elements"),),
    MappingProxyType({"times": 2.0, "powers": (0,), "output_dtype": FLOAT}),
    "times * 2^(sum of powers) * MXFP8Dequantize.",
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
    model = one_node_model(MULTIPLE.name, inputs, {"Y": FLOAT}, 21, {"times": 3.0, "powers": [1, -3]})
    for each in (model, in_standard_ops(model)):
        np.testing.assert_array_equal(run(each, inputs)[0], multiple(elements, scales, times=3.0, powers=(1, -3)))


def test_the_body_of_two_nodes_reads_the_list_of_each() -> None:
    elements, scales = np.full((5, 70), 0x38, np.uint8), np.full((5, 3), 127, np.uint8)
    inputs = {"elements": (elements, contract.FLOAT8E4M3FN), "scales": (scales, UINT8)}
    model = one_node_model(MULTIPLE.name, inputs, {"Y": FLOAT}, 21, {"times": 3.0, "powers": [1, -3]}, bodies=False)
    second = model.graph.node.add()
    second.CopyFrom(model.graph.node[0])
    second.name, second.output[0] = "two", "Y2"
    second.attribute.remove(next(a for a in second.attribute if a.name == "powers"))
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[1].name = "Y2"
    model.functions.extend(functions(model))
    first, other = run(model, inputs)
    np.testing.assert_array_equal(first, multiple(elements, scales, times=3.0, powers=(1, -3)))
    np.testing.assert_array_equal(other, multiple(elements, scales, times=3.0))


def test_a_case_of_it_passes_through_json() -> None:
    node = helper.make_node(MULTIPLE.name, ["elements", "scales"], ["Y"], "one", domain=contract.DOMAIN, powers=[1, -3])
    case = case_of(node, {})
    assert Case.from_json(MULTIPLE, json.loads(json.dumps(case.to_json()))) == case
    with pytest.raises(ValueError, match="other attributes"):
        Case.from_json(MULTIPLE, {**case.to_json(), "attributes": {**MULTIPLE.attributes, "powers": 1}})


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("header", '{"MXFP8Multiple", {{"elements"'),
        ("header", "ROW(std::vector<int64_t>, powers, {0})"),
        ("page", "### MXFP8Multiple"),
        ("page", "attributes: times = 2, powers = [0], output_dtype = 1"),
    ],
)
def test_what_is_generated_has_it(written: str, text: str) -> None:
    assert text in getattr(generator(), written)()


def test_the_torch_op_has_its_attributes() -> None:
    assert "float times=2.0, int[] powers=[0]" in schemas.schema("multiple", MULTIPLE)


def test_the_binding_of_onnx_runtime_compiles_with_its_attributes(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    shutil.copytree(CUSTOM_OPS / "mxfp8_ops/src", tmp_path / "src", ignore=shutil.ignore_patterns("cuda", "*.cu"))
    header = generator().header().replace("powers, {0}", "powers, {0, 1}")  # a list with a comma
    (tmp_path / "src/contract.h").write_text(header)
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Werror", "-Wall", str(tmp_path / "src/ort/kernels.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_names_of_nodes_are_in_their_files_alone() -> None:
    """So no other file of Python has to change for a new node."""
    ours = re.compile("|".join(f'"{name}"' for name in contract.OPS))
    files = [*(CUSTOM_OPS / "mxfp8_ops").rglob("*.py"), *(CUSTOM_OPS.parent / "mxfp8_graph").rglob("*.py")]
    assert len(files) > 200
    naming = [path.relative_to(CUSTOM_OPS.parent).as_posix() for path in files if ours.search(path.read_text("utf-8"))]
    assert {Path(name).parent.as_posix() for name in naming} == {"custom_ops/mxfp8_ops/nodes"}, naming
