"""Checks, conversions and fusions know a node by its row of the contract: no file lists nodes to tell them apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mxfp8_ops import contract

PACKAGE = Path(__file__).parents[2] / "mxfp8_graph"
ROWS = {name for name, value in vars(contract).items() if isinstance(value, contract.Op)}
BUILDS = {"onnx_pass/replace.py"}
"""Files with a table of the nodes that they build."""


def tables(path: Path) -> list[str]:
    """Returns where a file has tables that name two rows of the contract or more."""
    places = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Dict, ast.Set, ast.List, ast.Tuple)):
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr in ROWS]
            if len({each.attr for each in inside}) > 1:
                places.append(f"{path}:{node.lineno}")
    return places


def test_no_file_lists_nodes_but_those_that_build_them() -> None:
    assert "GEMM" in ROWS
    listed = {path.relative_to(PACKAGE).as_posix(): tables(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {name for name, places in listed.items() if places} == BUILDS, listed


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
def test_a_row_says_where_indices_and_factors_are(
    op: contract.Op, indices: int | None, factors: tuple[int, int] | None, plain: bool
) -> None:
    assert (op.indices_at, op.factors_at, op.is_plain) == (indices, factors, plain)


def test_a_fusion_is_of_one_node_and_one_kind() -> None:
    fusions = [op.fuses for op in contract.OPS.values() if op.fuses[0]]
    assert len(fusions) == len({*fusions}) == 4
    assert {name for name, _ in fusions} < {*contract.OPS}
