"""A packed embedding in what comes after the passes: to_onnx, unpack, safetensors, and kernel against function body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors
import torch
from onnx_exports import Packed, attributes, data, exported, ours, program, run

import mxfp8_graph
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.running.node_check import check_nodes
from mxfp8_ops import contract, numpy_nodes

TABLE = torch.randn(50, 80, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[3, 0, -1], [49, -50, 7]])


class Lookup(Packed):
    """Rows of one packed table."""

    def __init__(self, b_format: str = "e4m3", dtype: Any = None) -> None:
        super().__init__(TABLE, formats=(b_format,))
        self.settings = {"b_format": b_format, "dtype": dtype}

    def forward(self, ids: Any) -> Any:
        return torch.ops.mxfp8.embedding(ids, self.w0_mxfp8, self.w0_mxfp8_scales, **self.settings)


class Tied(Lookup):
    """The rows of a table, times the same table: a language model without its middle."""

    def forward(self, ids: Any) -> Any:
        return self.gemm(super().forward(ids), 0)


def rows(ids: torch.Tensor, b_format: str = "e4m3", dtype: str = "float32") -> np.ndarray:
    table = numpy_nodes.quantize(TABLE.numpy(), element_format=b_format)
    return numpy_nodes.embedding(ids.numpy(), *table, b_format=b_format, dtype=dtype)


@pytest.mark.parametrize(("index", "b_format"), [(torch.int32, "e4m3"), (torch.int64, "e5m2")])
def test_to_onnx_writes_an_embedding_whose_body_and_kernel_give_the_same(
    index: torch.dtype, b_format: str, tmp_path: Path
) -> None:
    path = mxfp8_graph.to_onnx(program(Lookup(b_format), IDS.to(index)), tmp_path / "a.onnx")
    (node,) = ours(onnx.load(path))
    assert (node.op_type, attributes(node)) == ("MXFP8Embedding", {"output_dtype": contract.FLOAT})
    ids = IDS[:1].to(index)
    for kernels in (False, True):
        np.testing.assert_array_equal(run(path, ids.numpy(), kernels=kernels), rows(ids, b_format))
    model = onnx.load(path)
    (check,) = check_nodes(load(model), {model.graph.input[0].name: IDS.to(index).numpy()})
    assert (check.op, check.excess, check.passed, check.has_bound) == ("MXFP8Embedding", 0, True, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_onnx_keeps_the_dtype_of_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    path = mxfp8_graph.to_onnx(program(Lookup(dtype=dtype), IDS), tmp_path / "a.onnx")
    name = str(dtype).removeprefix("torch.")
    got = run(path, IDS.numpy(), kernels=True)
    np.testing.assert_array_equal(got, rows(IDS, dtype=name))
    assert got.dtype.name == name


def test_a_tied_table_is_one_tensor_of_the_file(tmp_path: Path) -> None:
    model = exported(program(Tied(), IDS), tmp_path / "a.onnx")
    embedding = next(node for node in ours(model) if node.op_type == "MXFP8Embedding")
    gemm = next(node for node in ours(model) if node.op_type == "MXFP8Gemm")
    assert list(embedding.input[1:]) == list(gemm.input[2:4])
    stored = data(model)
    assert [stored[name][1] for name in embedding.input[1:]] == [(50, 80), (50, 3)]
    assert sum(len(content) for *_, content in stored.values()) < 50 * 83 + 100


@pytest.mark.parametrize(("model", "weight_only"), [(Lookup, True), (Tied, False)])
def test_unpack_gives_the_table_by_its_name(model: Any, weight_only: bool, tmp_path: Path) -> None:
    packed = program(model(), IDS)
    for each in (packed, mxfp8_graph.to_onnx(packed, tmp_path / "a.onnx")):
        weights = mxfp8_graph.unpack(each)
        assert list(weights) == ["w0"]
        assert weights["w0"].weight_only is weight_only
        np.testing.assert_array_equal(weights["w0"].dequantize(), rows(torch.arange(50)))


def test_a_checkpoint_quantizes_no_activation_for_a_table(tmp_path: Path) -> None:
    path = mxfp8_graph.export_safetensors(program(Lookup(), IDS), tmp_path / "a.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        groups = json.loads(file.metadata()["quantization_config"])["config_groups"]
    assert [(group["targets"], group["input_activations"]) for group in groups.values()] == [(["w0"], None)]
    np.testing.assert_array_equal(mxfp8_graph.import_safetensors(path)["w0"].dequantize(), rows(torch.arange(50)))


def test_a_kernel_that_gives_other_values_does_not_pass(tmp_path: Path) -> None:
    model = exported(program(Lookup(), IDS), tmp_path / "a.onnx")
    last = model.functions[0].node[-1]  # the body's Cast to output_dtype
    negate = onnx.helper.make_node("Neg", [last.input[0]], ["negated"])
    last.input[0] = "negated"
    model.functions[0].node.insert(len(model.functions[0].node) - 1, negate)
    (check,) = check_nodes(load(model), {model.graph.input[0].name: IDS.numpy()})
    assert not check.passed
    assert "kernel and function body differ in" in str(check)
