"""A new node is three files: its own in nodes/, the registry, and a test like this one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mxfp8_ops import contract, numpy_nodes, onnx_functions, standard_ops
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


def model(nodes: list[Any]) -> bytes:
    inputs = [
        helper.make_tensor_value_info("codes", TensorProto.UINT8, ["m", "k"]),
        helper.make_tensor_value_info("scales", UINT8, ["m", "b"]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", "k"])
    graph = helper.make_graph(nodes, "g", inputs, [output])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=10)
    made.functions.extend(onnx_functions.functions(made))
    return bytes(made.SerializeToString())


def test_its_body_runs_in_stock_onnx_runtime_as_a_function_and_as_standard_ops() -> None:
    # E4M3 codes 0x38 to 0x3f are 1 to 1.875: eight values that a table makes of the codes 0 to 7.
    table = numpy_nodes.dequantize(np.arange(0x38, 0x40, dtype=np.uint8)[None], np.full((1, 1), 127, np.uint8))[0]
    to_elements = [
        helper.make_node("Constant", [], ["table"], value_floats=[*map(float, table)]),
        helper.make_node("Cast", ["codes"], ["at"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "at"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["elements"], to=TensorProto.FLOAT8E4M3FN),
    ]
    node = helper.make_node(MULTIPLE.name, ["elements", "scales"], ["y"], domain=contract.DOMAIN, times=3.0)
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 8, (5, 70), np.uint8), rng.integers(100, 150, (5, 3), np.uint8)
    expected = multiple(codes + np.uint8(0x38), scales, times=3.0)
    names = iter(range(1000))
    case = onnx_functions.case_of(node, {})
    plain = standard_ops.in_place_of(node, case, lambda name: f"{name}_{next(names)}")
    for nodes in ([node], plain):
        session = onnxruntime.InferenceSession(model([*to_elements, *nodes]))
        (y,) = session.run(None, {"codes": codes, "scales": scales})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("written", "text"), [("header", '{"MXFP8Multiple", {{"elements"'), ("page", "### MXFP8Multiple")]
)
def test_what_is_generated_has_it(written: str, text: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", CUSTOM_OPS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert text in getattr(module, written)()


def test_the_names_of_nodes_are_in_their_files_alone() -> None:
    """So no other file of Python has to change for a new node."""
    ours = re.compile("|".join(f'"{name}"' for name in contract.OPS))
    files = [*(CUSTOM_OPS / "mxfp8_ops").rglob("*.py"), *(CUSTOM_OPS.parent / "mxfp8_graph").rglob("*.py")]
    assert len(files) > 200
    naming = [path.relative_to(CUSTOM_OPS.parent).as_posix() for path in files if ours.search(path.read_text("utf-8"))]
    assert {Path(name).parent.as_posix() for name in naming} == {"custom_ops/mxfp8_ops/nodes"}, naming
