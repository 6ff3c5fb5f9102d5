"""Exported torch programs as models to run and compare: inputs by name, outputs by name, arrays in and out."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from mxfp8_graph.naming import first_line
from mxfp8_graph.running.inputs import BFLOAT16, PASS_OTHERS, Array, Inputs, InputSpec, Signature
from mxfp8_graph.running.profile import NodeProfile, kernels_of
from mxfp8_graph.running.sessions import Runnable
from mxfp8_graph.torch_pass.load import load  # before torch, since its error names the packages to install
from mxfp8_ops import contract, cpu, formats
from mxfp8_ops.checks import dtype_name
from mxfp8_ops.errors import BackendError

# isort: split
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree  # the call specification of a program is one of its trees

from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.internals import to_numpy
from mxfp8_graph.torch_pass.training_mode import evaluated

_MOVES: Final = frozenset(
    {"to", "_to_copy", "view", "reshape", "unsqueeze", "squeeze", "expand", "slice", "clone", "contiguous", "flatten"}
    | {"alias", "detach", "transpose", "permute", "select"}
)
"""aten ops whose result holds the values of their first argument."""


_MULTIPLIES: Final = internals.op_names(
    "linear matmul mm addmm bmm baddbmm addbmm einsum scaled_dot_product_attention _grouped_mm _scaled_mm "
    "conv1d conv2d conv3d convolution lstm.input gru.input"
)
"""Ops of torch that multiply their first two tensors, or whose first two tensors have the dtypes of the product."""


class TorchProgram(Runnable):
    """A program, in memory or in a .pt2 file; `load` has the errors of a file.

    A run may write to tensors that a caller's program in memory shares. They are restored after each call, so that
    every run of this program, or of a program that shares its tensors, begins with the same values.
    """

    def __init__(self, model: str | Path | ExportedProgram) -> None:
        if isinstance(model, ExportedProgram):
            self.name, program = "program", model
        else:
            self.name, program = str(model), load(model)
        program = evaluated(program)  # with dropout, two runs would differ
        self._module = program.module()
        self._program = program
        self._written = _written(program)
        self._inputs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        tensors = [s.arg.name for s in self._inputs if isinstance(s.arg, TensorArgument)]
        specs = [_spec(placeholders[name]) for name in tensors]
        ranges = {name: span for name in tensors if (span := _table_rows(placeholders[name], program)) is not None}
        rewritten = record.find(program)
        recipe = None if rewritten is None else rewritten.recipe
        self.signature = Signature(self.name, specs, ranges, rewritten is not None, recipe)
        self._returned = [s.kind == OutputKind.USER_OUTPUT for s in program.graph_signature.output_specs]
        returned = [s.arg for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
        self._outputs = [arg.name if isinstance(arg, TensorArgument) else None for arg in returned]
        self.output_names = [name for name in self._outputs if name is not None]

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        before = [tensor.detach().clone() for tensor in self._written]
        try:
            yield
        finally:
            # A parameter that requires a gradient refuses an in-place copy otherwise.
            with torch.no_grad():
                for tensor, values in zip(self._written, before, strict=True):
                    tensor.copy_(values)

    def profile(self, inputs: Mapping[str, Array], repeat: int) -> list[NodeProfile]:
        """Returns the nodes of `repeat` runs after a warm-up, each node called and timed on its own."""
        leaves = self.placeholders(inputs).values()
        profiler = _Profiler(self._module)
        try:
            with torch.inference_mode(), self._restored(), cpu.profiled() as profiler.written:
                profiler.run(*leaves, enable_io_processing=False)
                profiler.seconds.clear()  # first calls of kernels are slower
                for _ in range(repeat):
                    profiler.run(*leaves, enable_io_processing=False)
        except Exception as error:  # ops may raise any class
            raise unrunnable(self.name, error) from None
        return [replace(node, seconds=statistics.median(profiler.seconds[n])) for n, node in profiler.nodes.items()]

    def _feeds(self, inputs: Mapping[str, Array]) -> Any:
        return pytree.tree_unflatten(self.placeholders(inputs).values(), self._program.call_spec.in_spec)

    def placeholders(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Returns the argument of each user input, by the name of its placeholder, in order."""
        return {
            s.arg.name: s.arg.value if isinstance(s.arg, ConstantArgument) else _tensor(inputs[s.arg.name])
            for s in self._inputs
        }

    def outputs_of(self, results: Sequence[Any]) -> Inputs:
        """Returns the outputs by name, from all results of the program's graph, which include mutated tensors."""
        return self._arrays([result for result, is_output in zip(results, self._returned, strict=True) if is_output])

    def _call(self, feeds: tuple[Any, Any]) -> Any:
        args, kwargs = feeds
        try:
            with torch.inference_mode():
                return self._module(*args, **kwargs)
        except Exception as error:  # ops may raise any class
            raise unrunnable(self.name, error) from None

    def _arrays(self, results: Any) -> Inputs:
        named = zip(self._outputs, pytree.tree_leaves(results), strict=True)
        tensors = ((name, leaf) for name, leaf in named if name is not None and isinstance(leaf, torch.Tensor))
        return {name: to_numpy(leaf.contiguous()) for name, leaf in tensors}


def unrunnable(name: str, error: Exception) -> BackendError:
    """Returns the error for an exception that torch raised for the inputs of a program."""
    what = f"torch cannot run it: {first_line(error)}"
    return BackendError(name, what, expected="inputs the program accepts", advice=PASS_OTHERS)


def _written(program: ExportedProgram) -> list[torch.Tensor]:
    """Returns the parameters, buffers and constants that a run of a program may write to."""
    signature = program.graph_signature
    stored = signature.inputs_to_parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    names = internals.written_names(program.graph, lambda node: stored.get(node.name))
    names.update(signature.buffers_to_mutate.values(), signature.parameters_to_mutate.values())
    return [program.state_dict[name] if name in program.state_dict else program.constants[name] for name in names]


def _spec(placeholder: torch.fx.Node) -> InputSpec:
    value = placeholder.meta["val"]
    dims = tuple(int(d) if isinstance(d, int) else str(d) for d in value.shape)
    dtype = BFLOAT16 if value.dtype == torch.bfloat16 else torch.empty(0, dtype=value.dtype).numpy().dtype
    return InputSpec(placeholder.name, dtype, dims)


def _table_rows(placeholder: torch.fx.Node, program: ExportedProgram) -> range | None:
    """Returns the ids that are inside every embedding that `placeholder` indexes, or None if it indexes none."""
    rows: list[int] = []
    same = {placeholder}  # nodes that hold its values
    for node in program.graph.nodes:
        name = getattr(node.target, "_opname", "") if node.op == "call_function" else ""
        if name == "embedding" and node.args[1] in same:
            rows.append(int(node.args[0].meta["val"].shape[0]))
        elif name in _MOVES and node.args and node.args[0] in same:
            same.add(node)
    # The smallest table limits the ids.
    return range(min(rows)) if rows else None


def _tensor(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


class _Profiler(Interpreter):
    """Runs a program node by node, and records the kernels of each node and the time of each of its runs."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.written: cpu.Profile
        self.nodes: dict[Node, NodeProfile] = {}
        """Without times, which are in `seconds`."""
        self.seconds: dict[Node, list[float]] = defaultdict(list)

    def run_node(self, n: Node) -> Any:
        """Runs one node."""
        if n.op != "call_function":
            return super().run_node(n)
        tensors = [value for node in n.all_input_nodes if isinstance(value := self.env[node], torch.Tensor)]
        operands = _operands(n, [dtype_name(tensor.dtype) for tensor in tensors])
        self.written.clear()
        start = time.perf_counter()
        result = super().run_node(n)
        self.seconds[n].append(time.perf_counter() - start)
        kernel, isa = kernels_of(self.written.calls())
        self.nodes[n] = NodeProfile(
            name=n.name, op=internals.op_name(n), operands=operands, kernel=kernel, isa=isa, seconds=0
        )
        return result


def _operands(node: Node, dtypes: Sequence[str]) -> str:
    """Returns the dtypes of a node's product, "e4m3 x e4m3", or "". `dtypes` are the dtypes of its tensors."""
    name = internals.op_name(node)
    op = contract.TORCH_OPS.get(name)
    if op is None:
        return " x ".join(dtypes[:2]) if name in _MULTIPLIES else ""
    if name == "mxfp8::conv":
        return f"{internals.argument(node, 'x_format')} x {internals.argument(node, 'b_format')}"
    if not op.multiplies:
        return ""
    a, b = (internals.argument(node, f"{side}_format", formats.E4M3.name) for side in "ab")
    if name == "mxfp8::weight_gemm":
        rounded = internals.argument(node, "activation_dtype")
        a = dtypes[0] if rounded is None else dtype_name(rounded)
    elif name == "mxfp8::grouped_gemm" and internals.argument(node, "a_scales") is None:
        a = dtypes[0]
    return f"{a} x {b}"
