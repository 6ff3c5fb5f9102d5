"""The module of a program to train in many processes, and `collect`, which copies its values into the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.checked_program import CheckedProgram, watch, whole
from mxfp8_ops.errors import ContractError


@dataclass(frozen=True)
class CollectReport:
    """The tensors that `collect` copied into a program."""

    tensors: tuple[str, ...]
    """Names of the parameters and buffers with new values."""
    gathered: tuple[str, ...]
    """Names of the sharded ones in the module."""
    here: bool
    """Whether the program of this process has the values; false in all processes but 0 with rank0_only."""


def module(tuned: ExportedProgram) -> nn.Module:
    """Returns the module of a program to train, with the submodules of the model: "blocks.0", "blocks.0.up".

    It computes what `tuned.module()` computes, and train() and eval() switch dropout and batch normalization in the
    same way. It shares its parameters with the program, until a call such as `shard` replaces them. FSDP2 and
    activation checkpointing of a block need the submodules: their hooks run when a submodule is called, and the graph
    of `tuned.module()` calls none.

    Args:
        tuned: the result of `mxfp8_graph.rewrite(..., training=True)`, also with parameters on the meta device.

    Raises:
        ContractError: `tuned` is not a program to train.
    """
    tuned = _training_program(tuned, "distributed.module")
    with internals.quiet():
        unflattened = torch.export.unflatten(tuned)
    # The program refers to the module that unflatten made last: it would live as long as the program.
    tuned.graph_module.meta.pop("unflattened_module", None)
    # unflatten copies the parameters. With the program's own, a training without shards needs no `collect`.
    unflattened.load_state_dict(tuned.state_dict, assign=True)
    watch(tuned, unflattened)
    result: nn.Module = unflattened
    return result


def collect(module: nn.Module, tuned: ExportedProgram, *, rank0_only: bool = False) -> CollectReport:
    """Copies the values of a trained module into its program, for `rewrite`, `save` and `to_onnx`; returns a report.

    Call it in every process: sharded tensors are gathered one by one, in their own dtype. A process needs memory for
    the whole model, and for one tensor more.

    Args:
        module: the result of `distributed.module(tuned)`, sharded or not, inside of DDP or not.
        tuned: the program.
        rank0_only: whether only the program of process 0 gets the values. The other programs keep their old values,
            which `rewrite` and `save` refuse; their processes need memory for one tensor.

    Raises:
        ContractError: the module has other names or shapes than the program, or a constant of the program is on the
            meta device.
    """
    tuned = _training_program(tuned, "distributed.collect")
    state: dict[str, Any] = get_model_state_dict(module)
    tuned.check_names(state, "distributed.collect")
    here = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    on_meta = not all(map(internals.has_values, tuned.state_dict.values()))
    for name, value in state.items():
        full = whole(value)
        if here:
            tuned.set_tensor(name, full)
        del full
    if here:
        tuned.mark_synced()
        if on_meta:
            _leave_meta(tuned)
    gathered = tuple(name for name, value in state.items() if hasattr(value, "full_tensor"))
    return CollectReport(tensors=tuple(state) if here else (), gathered=gathered, here=here)


def _training_program(program: ExportedProgram, where: str) -> CheckedProgram:
    rewrite_record = record.find(program) if isinstance(program, ExportedProgram) else None
    if not isinstance(program, CheckedProgram) or rewrite_record is None or not rewrite_record.training:
        what = f"a {type(program).__name__} without nodes to train"
        expected, advice = "a program to train", "pass what mxfp8_graph.rewrite(..., training=True) returned"
        raise ContractError(where, what, expected=expected, advice=advice)
    return program


def _leave_meta(program: ExportedProgram) -> None:
    """Moves a program that was exported on the meta device, in place, to the device of its values."""
    for name, constant in program.constants.items():
        if isinstance(constant, torch.Tensor) and not internals.has_values(constant):
            what = f"constant {name!r} is on the meta device"
            expected = "values, which no training changes"
            advice = "create it on a real device in the model, or make it a persistent buffer"
            raise ContractError("distributed.collect", what, expected=expected, advice=advice)
    # Sample inputs on meta cannot move, and nothing needs their values.
    device = str(next(iter(program.state_dict.values())).device)
    move_to_device_pass(internals.with_samples(program, None), {"meta": device})
