"""A dialect is one row and one file: a toy of both is read and written."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import oracle
import pytest
from builders import matmul_model

import mxfp8_graph
from mxfp8_graph.onnx_pass import dialects
from mxfp8_graph.onnx_pass.dialect_ops import dialect_of
from mxfp8_graph.onnx_pass.fuse.replacement import in_place_of, is_ours, mxfp8_node
from mxfp8_graph.tools.dialects.edit import Edit, Nodes, heirs, operands
from mxfp8_graph.tools.dialects.gemms import take_apart
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

ROW = dialects.Dialect(
    name="toy",
    help="a toy",
    module="toy",
    ops={("toy", "Unpack"): (2, 2, 1)},
    versions={"toy": 3},
    attributes=("axis",),
)


def read(edit: Edit, node: ir.Node) -> Nodes | None:
    if dialect_of(node) != "toy":
        return None
    edit.counts["toy", "weights"] += 1
    return [mxfp8_node(node, contract.DEQUANTIZE, operands(node), heirs(node), axis=-1)]


def write(_: Edit, node: ir.Node) -> Nodes | None:
    if not is_ours(node, contract.DEQUANTIZE):
        return None
    return [in_place_of(node, "Unpack", operands(node), heirs(node), domain="toy")]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """Adds the row and the file, and returns a model in the new dialect."""
    file = ModuleType("mxfp8_graph.tools.dialects.toy")
    vars(file).update(read=read, WRITE={"toy": (take_apart, write)})
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(cast("dict[str, Any]", dialects.DIALECTS), "toy", ROW)
    monkeypatch.setitem(dialects.OPS, ("toy", "Unpack"), ROW)
    return mxfp8_graph.convert(packed(), "toy")[0]


def packed() -> onnx.ModelProto:
    return mxfp8_graph.rewrite(matmul_model(64, 32), "mxfp8-weight-only")[0]


def test_it_is_written_and_read_back(there: onnx.ModelProto) -> None:
    assert oracle.kinds(there)["Unpack"] == 1
    assert {entry.domain: entry.version for entry in there.opset_import}["toy"] == 3
    back, report = mxfp8_graph.convert(there, "mxfp8")
    assert report.to_dict()["found"] == {"toy": {"weights": 1, "activations": 0}}
    assert oracle.kinds(back) == oracle.kinds(packed())
    x = {"x": oracle.normal(1, 3, 64)}
    np.testing.assert_array_equal(oracle.run(back, x)[0], oracle.run(packed(), x)[0])


def test_its_nodes_are_checked_and_a_rewrite_refuses_them(there: onnx.ModelProto) -> None:
    with pytest.raises(ContractError, match="MXFP8 already, as toy"):
        mxfp8_graph.rewrite(there)
    (unpack,) = (node for node in there.graph.node if node.op_type == "Unpack")
    unpack.attribute.add(name="order", type=2, i=1)
    with pytest.raises(ContractError, match="attribute 'order'; expected axis alone"):
        mxfp8_graph.convert(there, "mxfp8")
