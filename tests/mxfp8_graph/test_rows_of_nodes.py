"""Checks, conversions and fusions know a node by its row of the contract: no file lists nodes to tell them apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mxfp8_ops import contract

PACKAGE = Path(__file__).parents[2] / "mxfp8_graph"
ROWS = {name for name, value in vars(contract).items() if isinstance(value, contract.Op)}
BUILDS = {"onnx_pass/replace.py"}
"""Files with a table of the nodes that they build."""


def listed(path: Path) -> list[str]:
    """Returns the tables of a file that name two rows of the contract or more."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple)):
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr in ROWS]
            if len({each.attr for each in inside}) > 1:
                found.append(f"{path}:{node.lineno}")
    return found


def test_no_file_lists_nodes_but_those_that_build_them() -> None:
    assert "GEMM" in ROWS
    tables = {path.relative_to(PACKAGE).as_posix(): listed(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {name for name, found in tables.items() if found} == BUILDS, tables


@pytest.mark.parametrize(
    ("op", "indices", "factors", "plain"),
    [
        (contract.QUANTIZE, None, None, True),
        (contract.DEQUANTIZE, None, None, True),
        (contract.GEMM, None, (0, 2), True),
        (contract.WEIGHT_GEMM, None, (0, 1), True),
        (contract.EMBEDDING, 0, None, True),
        (contract.GROUPED_GEMM, 4, (0, 2), True),
        (contract.GROUPED_WEIGHT_GEMM, 3, (0, 1), True),
        (contract.GATED_WEIGHT_GEMM, None, (0, 1), False),
        (contract.ATTENTION, None, (0, 1), False),
    ],
    ids=lambda value: value.name if isinstance(value, contract.Op) else "",
)
def test_what_a_row_says(op: contract.Op, indices: int | None, factors: tuple[int, int] | None, plain: bool) -> None:
    assert (op.indices_at, op.factors_at, op.is_plain) == (indices, factors, plain)


def test_a_fusion_is_of_one_node_and_one_kind() -> None:
    fusions = [op.fuses for op in contract.OPS.values() if op.fuses[0]]
    assert len(fusions) == len({*fusions}) == 4
    assert {name for name, _ in fusions} < {*contract.OPS}


def test_a_new_node_needs_no_edit() -> None:
    """One that multiplies by matrices of a stack, and one that fuses it with an activation."""
    code = """
from types import MappingProxyType
import onnx_ir as ir
from mxfp8_ops import contract
from mxfp8_ops.contract import ELEMENTS, INT64, SCALES, VALUES, Op, Port
inputs = Port("X", VALUES, ""), Port("picks", (INT64,), ""), Port("B", ELEMENTS, ""), Port("B_scales", SCALES, "")
toy = Op("MXFP8Toy", inputs, (Port("Y", VALUES, ""),), {}, "", print, is_gemm=True)
fused = Op("MXFP8FusedToy", inputs, toy.outputs, {}, "", toy.body, is_gemm=True, fuses=(toy.name, "activation"))
contract.OPS = MappingProxyType({**contract.OPS, toy.name: toy, fused.name: fused})
from mxfp8_graph.running import index_ranges, profile
from mxfp8_graph.onnx_pass.fuse.replacement import fused_with
from mxfp8_graph.packed.from_onnx import _elements_at
node = ir.node(toy.name, [None] * 4, domain=contract.DOMAIN)
assert index_ranges._TABLES[toy.name] == ((2, 1, None),)
assert profile._FACTORS[toy.name] == (0, 2)
event = {"op_name": toy.name, "input_type_shape": [{"float": []}] * 3}
assert profile._operands(event, "bfloat16") == "bfloat16 x float32"
assert fused_with(node, "activation") is fused and fused_with(node, "gate") is None
assert _elements_at(node) == 2
assert toy.weight_only and toy.is_plain and not fused.is_plain
"""
    subprocess.run([sys.executable, "-c", code], check=True)
