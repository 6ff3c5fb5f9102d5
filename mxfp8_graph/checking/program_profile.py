"""Profiles of exported programs: ops are called one by one, and the native library records its kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Interpreter, Node

from mxfp8_graph.checking.profile import NodeProfile, gemms_of, isas_of
from mxfp8_graph.torch_program import internals
from mxfp8_ops import contract, cpu, formats
from mxfp8_ops.checks import dtype_name

MULTIPLIES: Final = internals.op_names(
    "linear matmul mm addmm bmm baddbmm addbmm einsum scaled_dot_product_attention _grouped_mm _scaled_mm "
    "conv1d conv2d conv3d convolution lstm.input gru.input"
)
"""Ops of torch whose first two tensors are multiplied, or have the dtype of the product."""


def of_program(module: GraphModule, inputs: Sequence[Any], runs: int) -> list[NodeProfile]:
    """Returns the calls of `runs` runs after one that is not counted, in order; those that no run reached are left out.

    Args:
        module: of a program.
        inputs: one for each of its placeholders, in order.
        runs: at least 1.
    """
    profiler = _Profiler(module)
    with cpu.profiled() as profiler.written:
        # The first run is not counted: first calls of kernels are slower.
        for _ in range(runs + 1):
            profiler.run(*inputs, enable_io_processing=False)
    return [
        NodeProfile(
            name=node.name,
            op=internals.op_name(node),
            operands=profiler.operands[node],
            kernel=gemms_of(profiler.calls[node]),
            isa=isas_of(profiler.calls[node]),
            seconds=sum(seconds[1:]) / runs,
        )
        for node, seconds in profiler.seconds.items()
    ]


class _Profiler(Interpreter):
    """Runs a program node by node, and records the time and the kernels of each."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.written: cpu.Profile
        self.seconds: dict[Node, list[float]] = defaultdict(list)
        self.calls: dict[Node, list[cpu.Call]] = {}
        self.operands: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        """Runs one node."""
        if n.op != "call_function":
            return super().run_node(n)
        tensors = [value for node in n.all_input_nodes if isinstance(value := self.env[node], torch.Tensor)]
        self.operands[n] = _operands(n, [dtype_name(tensor.dtype) for tensor in tensors])
        self.written.clear()
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n].append(time.perf_counter() - start)
        self.calls[n] = self.written.calls()
        return result


def _operands(node: Node, dtypes: Sequence[str]) -> str:
    """Returns the dtypes of a node's product, "e4m3 x e4m3", or "". `dtypes` are those of its tensors."""
    name = internals.op_name(node)
    op = contract.TORCH_OPS.get(name)
    if op is None:
        return " x ".join(dtypes[:2]) if name in MULTIPLIES else ""
    if not op.multiplies:
        return ""
    a, b = (internals.argument(node, f"{side}_format", formats.E4M3.name) for side in "ab")
    if name == "mxfp8::weight_gemm":
        rounded = internals.argument(node, "activation_dtype")
        a = dtypes[0] if rounded is None else dtype_name(rounded)
    elif name == "mxfp8::grouped_gemm" and internals.argument(node, "a_scales") is None:
        a = dtypes[0]
    return f"{a} x {b}"
