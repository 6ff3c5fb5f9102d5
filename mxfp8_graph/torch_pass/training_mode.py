"""Training mode and evaluation mode of programs. Export writes the mode into the calls: dropout(x, 0.1, True)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.program import clone

_FLAGS: Final = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments that set the mode of aten ops (dropout, lstm; batch_norm, rrelu; attention) -> their evaluation values."""


def switches(module: torch.nn.Module) -> Iterator[tuple[Node, str, Any]]:
    """Yields (node, name of the argument, its value) of each call that differs between the modes."""
    for _, _, graph in internals.graphs(module):
        for node in graph.nodes:
            # A dropout of probability 0 is the same in both modes.
            drops = internals.argument(node, "p", 1) and internals.argument(node, "dropout", 1)
            # Normalizations that keep no statistics use the batch's in both modes.
            keeps = "norm" not in internals.op_name(node) or internals.argument(node, "running_mean") is not None
            for name in _FLAGS if drops and keeps else ():
                if (value := internals.argument(node, name)) is not None:
                    yield node, name, value


def evaluated(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` in evaluation mode, with the same tensors; the same object if it is in that mode already."""
    if not any(value for _, _, value in switches(program.graph_module)):
        return program
    module = clone(program.graph_module)
    evaluate(module)
    signature = program.graph_signature
    return internals.updated(program, module, signature.input_specs, program.state_dict, program.constants)


def evaluate(module: torch.nn.Module) -> None:
    """Switches the calls of a graph module to evaluation mode, in place."""
    _set(module, lambda node, name, value: _FLAGS[name])


def follow(module: torch.nn.Module) -> None:
    """Makes train() and eval() switch the mode of a module of `ExportedProgram.module` or `unflatten`, in place."""
    off = sorted({internals.op_name(node) for node, _, value in switches(module) if value is False})

    def flag(node: Node, name: str, value: Any) -> Node:
        with node.graph.inserting_before(node):
            training = node.graph.create_node("get_attr", "training")  # nn.Module has it; train() and eval() set it
            # A probability times the flag is 0 in evaluation mode.
            return training if value is True else node.graph.call_function(operator.mul, (training, value))

    def train(mode: bool = True) -> torch.nn.Module:
        if mode and off:
            what = f"train() leaves {', '.join(off)} in evaluation mode, as the program was exported or packed"
            warnings.warn(f"{what}; export the model in training mode to train with dropout", stacklevel=2)
        return torch.nn.Module.train(module, mode)

    _set(module, flag)
    # torch's own methods raise NotImplementedError. A local function keeps modules from being pickled, which would
    # trace them again and write the current mode into the calls.
    module.train = train  # type: ignore[method-assign]
    module.__dict__.pop("eval", None)  # nn.Module.eval calls train(False)


def _set(module: torch.nn.Module, change: Any) -> None:
    """Sets the arguments that are in training mode to `change(node, name, value)`."""
    active = [switch for switch in switches(module) if switch[2]]
    for node, name, value in active:
        internals.set_argument(node, name, change(node, name, value))
    for owner in filter(None, {node.graph.owning_module for node, _, _ in active}):
        owner.recompile()
