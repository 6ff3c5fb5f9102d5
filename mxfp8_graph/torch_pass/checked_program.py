"""A program that checks whether its modules still share its tensors.

A module of torch's `ExportedProgram.module` shares tensors with the program. Calls that replace them in the module
(`fully_shard`, `setattr`, `load_state_dict(assign=True)`) or copy them (`unflatten`, `deepcopy`) train other tensors.
The program lacks their values, so rewriting or saving it would take the values from before the training. The modules of
`distributed.module` share tensors with the program, too, until they are sharded.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from mxfp8_graph.torch_pass import internals, training_mode
from mxfp8_graph.torch_pass.program import STORED
from mxfp8_ops.errors import ContractError

_ADVICE: Final = "call program.load_state_dict(module.state_dict()) first, with the module that was trained"
_COLLECT: Final = "call mxfp8_graph.distributed.collect(module, program) first, in every process"
_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}

# Weak on both sides: the record must keep neither programs nor their weights alive.
_modules: weakref.WeakKeyDictionary[ExportedProgram, weakref.WeakKeyDictionary[torch.nn.Module, int | None]]
_modules = weakref.WeakKeyDictionary()
"""Program -> its modules -> checksum of the module when the program last took its values, or None."""


class CheckedProgram(ExportedProgram):
    """The class of the programs that `rewrite` and `load` return. Its modules follow train() and eval()."""

    prepared: int | None = None
    """Checksum of the parameters when training was prepared; None without preparation, or with the trained values."""

    def module(self, check_guards: bool = True) -> GraphModule:
        """Returns the module of `ExportedProgram.module`, with a train() and an eval() that switch dropout."""
        module: GraphModule = super().module(check_guards)
        watch(self, module)
        return module

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copies trained values into the program. After more training, call it again.

        Sharded tensors (DTensor) are gathered, so call this in every process.

        Args:
            state_dict: every parameter and buffer by name, such as `module.state_dict()`.

        Raises:
            ContractError: a name is missing or unknown, or a shape differs.
        """
        self.check_names(state_dict)
        for name, value in state_dict.items():
            self.set_tensor(name, whole(value))
        self.mark_synced()

    def set_tensor(self, name: str, value: torch.Tensor) -> None:
        """Copies `value` into a tensor of the program; replaces a tensor that has no values, such as one on meta."""
        own = self.state_dict[name]
        if internals.has_values(own):
            with torch.no_grad():
                own.copy_(value)
        else:
            new = value.detach().to(own.dtype).clone()
            is_parameter = isinstance(own, torch.nn.Parameter)
            self.state_dict[name] = torch.nn.Parameter(new, own.requires_grad) if is_parameter else new

    def mark_synced(self) -> None:
        """Records that the program has the values of the trained modules."""
        self.prepared = None
        # Earlier modules may keep other values. Their checksum detects training after this call.
        for module in _modules.get(self, {}):
            _modules[self][module] = _checksum(module)

    def check_names(self, state_dict: Mapping[str, torch.Tensor], where: str = "load_state_dict") -> None:
        """Raises ContractError if a name is missing or unknown, or a shape differs."""
        own = super().module().state_dict()
        ours, theirs = ({name: list(t.shape) for name, t in state.items()} for state in (own, state_dict))
        # Before the first copy: an error must not leave a program with values of two models.
        if name := next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None):
            what = f"{name!r} has shape {theirs[name]}" if name in theirs else f"{name!r} is missing"
            expected = f"shape {ours[name]}" if name in ours else "no such name"
            advice = "pass the names of program.state_dict, without the prefixes of wrappers"
            raise ContractError(where, what, expected=expected, advice=advice)


def watch(program: ExportedProgram, module: torch.nn.Module) -> None:
    """Makes train() and eval() switch the mode of `module`, and `check_values` compare its tensors."""
    training_mode.follow(module)
    _modules.setdefault(program, weakref.WeakKeyDictionary())[module] = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with all its values; a sharded one (DTensor) is gathered, in every process."""
    gather: Any = getattr(tensor, "full_tensor", None)
    result: torch.Tensor = tensor if gather is None else gather()
    return result


def checked(program: ExportedProgram, *, prepared: bool = False) -> ExportedProgram:
    """Turns `program` into a CheckedProgram, in place, and returns it; `prepared` says that training follows."""
    # Not a copy: ExportedProgram has no constructor that takes another program.
    program.__class__ = CheckedProgram
    assert isinstance(program, CheckedProgram)
    program.prepared = _checksum(program) if prepared else None
    return program


def check_values(program: ExportedProgram, where: str | Path) -> None:
    """Raises ContractError if a module of `program` has tensors with other values than the program.

    It also checks the program's own tensors, see `check_stored`.
    """
    for module, synced in list(_modules.get(program, {}).items()):
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        has = {name.replace(internals.CHECKPOINT_PREFIX, ""): tensor for name, tensor in tensors.items()}
        lost = [name for name, mine in program.state_dict.items() if not _equal(mine, has.get(name))]
        if lost and synced != _checksum(module):
            what = f"{lost[0]!r} of its module() is another tensor now, with values that the program lacks"
            advice = _ADVICE if isinstance(module, GraphModule) else _COLLECT
            raise ContractError(where, what, expected="the program's own", advice=advice)
    check_stored(program, where, "undo what changed it, such as module.half(), or export the model in that dtype")


def check_stored(program: ExportedProgram, where: object, advice: str = "save it again") -> None:
    """Checks that a program has all its parameters, buffers and constants, in the shapes and dtypes of its graph.

    Raises:
        ContractError: a tensor is missing, or its shape or dtype differs; the message begins with `where`.
    """
    graph = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in STORED:
            continue
        tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
        fake = graph.get(getattr(spec.arg, "name", ""))
        if not isinstance(tensor, torch.Tensor) or not isinstance(fake, torch.Tensor):
            what, expected = f"no tensor {spec.target!r}", "all tensors that its graph uses"
            raise ContractError(where, what, expected=expected, advice=advice)
        # torch itself does not compare them.
        if tensor.shape != fake.shape or tensor.dtype != fake.dtype:
            what = f"tensor {spec.target!r} is {tensor.dtype} {list(tensor.shape)}"
            expected = f"{fake.dtype} {list(fake.shape)}, as its graph says"
            raise ContractError(where, what, expected=expected, advice=advice)


def untrained(program: ExportedProgram) -> str | None:
    """Returns a warning if no parameter changed since the program was prepared for training, or None."""
    if not isinstance(program, CheckedProgram) or program.prepared is None or program.prepared != _checksum(program):
        return None
    return f"no parameter changed since training was prepared; if a copy was trained (unflatten, deepcopy), {_ADVICE}"


def _equal(mine: torch.Tensor, other: Any) -> bool:
    if other is mine:
        return True
    if type(other) not in _PLAIN or mine.shape != other.shape or not all(map(internals.has_values, (mine, other))):
        return False
    return torch.equal(mine.detach().to(other.device, other.dtype), other.detach())


def _checksum(owner: ExportedProgram | torch.nn.Module) -> int:
    """Returns a checksum of the parameters. It reads 4096 values of a large one, since optimizers change all of them.

    `Tensor._version` does not help: fused optimizers do not change it.
    """
    result = 0
    for tensor in owner.parameters():
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local = getattr(local, "master", local)  # `distributed.shard` wraps the weights that it gathers in MXFP8
        if type(local) in _PLAIN and internals.has_values(local):
            values = local.detach().reshape(-1)
            sample = values[:: max(1, values.numel() // 4096)].contiguous().cpu()
            result = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), result)
    return result
