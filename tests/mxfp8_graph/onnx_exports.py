"""Programs to export to ONNX, and what tests ask of the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from oracle import Expected, expect

import mxfp8_graph
from mxfp8_graph.running.sessions import Session
from mxfp8_ops import contract, torch_ops  # noqa: F401 - registers torch.ops.mxfp8


class Linear(torch.nn.Module):
    """relu(x @ w.T + b), so that the linear is not an output projection."""

    def __init__(self, k: int = 64, n: int = 96, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(k, n, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x))


class Packed(torch.nn.Module):
    """Holds weights as the pass leaves them, for programs that it would not make."""

    def __init__(self, *weights: Any, formats: tuple[str, ...] = ()) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            element_format = formats[index] if formats else "e4m3"
            elements, scales = torch.ops.mxfp8.quantize(weight, element_format=element_format)
            self.register_buffer(f"w{index}_mxfp8", elements)
            self.register_buffer(f"w{index}_mxfp8_scales", scales)

    def gemm(self, x: Any, index: int, b_format: str = "e4m3") -> Any:
        codes = torch.ops.mxfp8.quantize(x)
        weight = getattr(self, f"w{index}_mxfp8"), getattr(self, f"w{index}_mxfp8_scales")
        return torch.ops.mxfp8.gemm(*codes, *weight, b_format=b_format)


def program(module: Any, *inputs: Any, batch: bool = True) -> Any:
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if batch else None
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, dynamic_shapes=shapes)


def packed(module: Any, *inputs: Any, recipe: Any = "mxfp8", batch: bool = True) -> Any:
    return mxfp8_graph.rewrite(program(module, *inputs, batch=batch), recipe)[0]


def exported(ep: Any, path: Path, **options: Any) -> onnx.ModelProto:
    return onnx.load(mxfp8_graph.to_onnx(ep, path, **options))


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for node in model.graph.node:
        for attribute in node.attribute:
            yield from attribute.g.node
        yield node


def ours(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in nodes(model) if node.domain == contract.DOMAIN]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def data(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    return {t.name: (t.data_type, tuple(t.dims), t.raw_data) for t in model.graph.initializer}


def run(path: Path | onnx.ModelProto, x: np.ndarray, *, kernels: bool) -> np.ndarray:
    model = onnx.load(path) if isinstance(path, Path) else path
    session = Session(path, kernels=kernels)
    return next(iter(session.run({model.graph.input[0].name: x}).values()))


def expected(linear: Any, x: np.ndarray, **options: Any) -> Expected:
    weight, bias = (tensor.detach().float().numpy() for tensor in (linear.weight, linear.bias))
    return expect(x, weight, bias, **options).then(lambda y: np.maximum(y, 0))
