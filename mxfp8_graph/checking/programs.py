"""Exported torch programs as models to run and compare: inputs by name, outputs by name, arrays in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from mxfp8_graph.checking.inputs import BFLOAT16, PASS_OTHERS, Array, Inputs, InputSpec
from mxfp8_graph.checking.sessions import Timing, timed
from mxfp8_graph.torch_program import load  # before torch: it says what to install where torch is missing
from mxfp8_ops.errors import BackendError

# isort: split
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils import _pytree as pytree  # the call specification of a program is one of its trees

from mxfp8_graph.torch_program.values import to_numpy

_MOVES: Final = frozenset(
    {"to", "_to_copy", "view", "reshape", "unsqueeze", "squeeze", "expand", "slice", "clone", "contiguous", "flatten"}
    | {"alias", "detach", "transpose", "permute", "select"}
)
"""aten ops whose result holds the values of their first argument."""


class TorchProgram:
    """A program, in memory or in a .pt2 file, ready to run.

    Raises:
        ContractError: the file cannot be read.
    """

    def __init__(self, model: str | Path | ExportedProgram) -> None:
        if isinstance(model, ExportedProgram):
            self.name, program = "program", model
        else:
            self.name, program = str(model), load(model)
        self._program = program
        self._module = program.module()
        self._inputs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        tensors = [s.arg.name for s in self._inputs if isinstance(s.arg, TensorArgument)]
        self.specs = [_spec(placeholders[name]) for name in tensors]
        self.ranges = {name: span for name in tensors if (span := _table_rows(placeholders[name], program)) is not None}
        self._outputs = [
            s.arg.name if isinstance(s.arg, TensorArgument) else None
            for s in program.graph_signature.output_specs
            if s.kind.name == "USER_OUTPUT"
        ]

    @property
    def output_names(self) -> list[str]:
        """Names of the tensors the program returns, in order."""
        return [name for name in self._outputs if name is not None]

    def run(self, inputs: Mapping[str, Array]) -> Inputs:
        """Returns the outputs by name; bfloat16 as ml_dtypes has it.

        Raises:
            BackendError: the program fails on these inputs.
        """
        return self._arrays(self._call(*self._arguments(inputs)))

    def time(self, inputs: Mapping[str, Array], repeat: int) -> Timing:
        """Returns outputs and latencies of `repeat` runs after one that is not counted."""
        args, kwargs = self._arguments(inputs)
        result, seconds = timed(lambda: self._call(args, kwargs), repeat)
        return Timing(self._arrays(result), seconds)

    def _arguments(self, inputs: Mapping[str, Array]) -> tuple[Any, Any]:
        leaves = [
            s.arg.value if isinstance(s.arg, ConstantArgument) else _tensor(inputs[s.arg.name]) for s in self._inputs
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._program.call_spec.in_spec)
        return args, kwargs

    def _call(self, args: Any, kwargs: Any) -> Any:
        try:
            with torch.inference_mode():
                return self._module(*args, **kwargs)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            what = f"torch cannot run it: {str(error).splitlines()[0]}"
            raise BackendError(self.name, what, expected="inputs the program accepts", advice=PASS_OTHERS) from None

    def _arrays(self, result: Any) -> Inputs:
        leaves = pytree.tree_leaves(result)
        pairs = zip(self._outputs, leaves, strict=True)
        return {
            name: to_numpy(leaf.contiguous())
            for name, leaf in pairs
            if name is not None and isinstance(leaf, torch.Tensor)
        }


def _spec(placeholder: torch.fx.Node) -> InputSpec:
    value = placeholder.meta["val"]
    dims = tuple(int(d) if isinstance(d, int) else str(d) for d in value.shape)
    dtype = BFLOAT16 if value.dtype == torch.bfloat16 else torch.empty(0, dtype=value.dtype).numpy().dtype
    return InputSpec(placeholder.name, dtype, dims)


def _table_rows(placeholder: torch.fx.Node, program: ExportedProgram) -> range | None:
    """Returns which ids stay inside every embedding that `placeholder` indexes, or None if it indexes none."""
    rows: list[int] = []
    stack, seen = [placeholder], {placeholder}
    while stack:
        node = stack.pop()
        for user in node.users:
            name = getattr(user.target, "_opname", "") if user.op == "call_function" else ""
            if name == "embedding" and user.args[1] is node:
                table: Any = user.args[0]
                rows.append(int(table.meta["val"].shape[0]))
            elif name in _MOVES and user.args and user.args[0] is node and user not in seen:
                seen.add(user)
                stack.append(user)
    return range(min(rows)) if rows else None


def _tensor(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
