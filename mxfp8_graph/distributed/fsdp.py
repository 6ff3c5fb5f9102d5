"""FSDP2 over the module of a rewritten program: gathers block by block, and weights in MXFP8 where possible."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import Node

from mxfp8_graph.distributed.patterns import leading
from mxfp8_graph.distributed.sharded_weight import ShardedWeight
from mxfp8_graph.torch_pass import internals
from mxfp8_ops.errors import ContractError

_WHERE = "distributed.shard"
_ROOT = "the root"


@dataclass(frozen=True)
class ShardReport:
    """How FSDP2 gathers each parameter after `shard`."""

    blocks: tuple[str, ...]
    """The submodules that are gathered one by one; other parameters are gathered with the root."""
    mxfp8: tuple[str, ...] = ()
    """The weights that are gathered in MXFP8."""
    high_precision: Mapping[str, str] = field(default_factory=dict)
    """All other parameters -> the reason."""

    def __str__(self) -> str:
        """Returns a line for each parameter."""
        lines = [f"{len(self.blocks)} blocks; {len(self.mxfp8)} weights are gathered in MXFP8"]
        lines += [f"  {name}: MXFP8" for name in self.mxfp8]
        return "\n".join(lines + [f"  {name}: high precision, {why}" for name, why in self.high_precision.items()])


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    gather: Literal["mxfp8", "high_precision"] = "mxfp8",
    blocks: str = "blocks.*",
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> ShardReport:
    """Applies `fully_shard` to the blocks of a module and to the module, in place; returns how weights are gathered.

    With gather="mxfp8", weights that only MXFP8 products read are quantized before they are gathered, to 1.03 bytes per
    value. Each process gets the codes that it would compute from the whole weight. Optimizer, gradients and checkpoints
    (state_dict) keep the master weights.

    Args:
        module: the result of `distributed.module`; the activations of its blocks may be checkpointed.
        mesh: the processes; in a mesh of two dimensions, the first replicates and the second shards.
        gather: "mxfp8", or "high_precision" for FSDP2's own gather.
        blocks: pattern for the names of the submodules that are gathered one by one; "*" stands for one part of a name.
        reshard_after_forward: whether to free a block's weights after the forward pass and gather them again for the
            backward pass: the rows first, then the columns. Otherwise one gather brings both copies. The root is not
            freed, so one gather brings both of its copies, too.
        mp_policy: as for `fully_shard`. Weights are quantized from their own dtype, not from its `param_dtype`.

    Returns:
        The weights that are gathered in MXFP8, and the reason for each other parameter.

    Raises:
        ContractError: the module is not from `distributed.module`, is sharded already, or calls no submodule that
            matches `blocks`.
    """
    if gather not in {"mxfp8", "high_precision"}:
        raise ContractError.unknown("gather", gather, ("mxfp8", "high_precision"))
    _check(module)
    matched = _blocks(module, blocks)
    _leave_meta(module, mesh.device_type)
    reasons = _wrap_weights(module, gathers(module, matched, mesh.size(mesh.ndim - 1)), gather, reshard_after_forward)
    policy = mp_policy or MixedPrecisionPolicy()
    for block in matched.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # Parameters outside of the blocks stay gathered: the last layer's backward pass follows its forward pass at once.
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    mxfp8 = tuple(name for name, why in reasons.items() if not why)
    return ShardReport(tuple(matched), mxfp8, {name: why for name, why in reasons.items() if why})


def _check(module: nn.Module) -> None:
    advice = "pass what mxfp8_graph.distributed.module(tuned) returned"
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        raise ContractError(_WHERE, "the module is sharded already", expected="one that is not", advice=advice)
    if isinstance(module, torch.fx.GraphModule) or not list(internals.graphs(module)):
        what = f"a {type(module).__name__}, which calls no submodules of a program"
        raise ContractError(_WHERE, what, expected="the module of a program with its submodules", advice=advice)


def _clean(name: str) -> str:
    return name.replace(internals.CHECKPOINT_PREFIX, "")


def _blocks(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Returns the submodules that match the pattern and that a graph calls; hooks of others never run."""
    called = {
        _clean(f"{name}.{node.target}".removeprefix("."))
        for name, _, graph in internals.graphs(module)
        for node in graph.nodes
        if node.op == "call_module"
    }
    matched: dict[str, nn.Module] = {}
    for name, each in module.named_modules():
        clean = _clean(name).removesuffix("." + internals.CHECKPOINT_PREFIX[:-1])
        if clean in called and leading(clean, pattern) == clean:
            matched.setdefault(clean, each)  # a checkpoint wrapper comes before the module inside
    if not matched:
        what = f"blocks={pattern!r} matches no submodule that the program calls"
        some = sorted(called, key=lambda name: (name.count("."), name))[:8]
        raise ContractError(_WHERE, what, expected=f"one of {', '.join(some)}, ...", advice="correct the pattern")
    return matched


@dataclass(frozen=True)
class Gather:
    """How a parameter is gathered."""

    why: str
    """The reason against MXFP8; empty if it is gathered in MXFP8."""
    block: str
    """The block that it is gathered with, or "the root"."""
    scale_rounding: str = ""
    """The scale rounding of its codes."""


def gathers(module: nn.Module, blocks: Collection[str], processes: int) -> dict[str, Gather]:
    """Returns how FSDP2 gathers each parameter of a module with these blocks, by name without wrappers.

    Raises:
        ContractError: tied parameters are in different blocks.
    """
    reads: dict[int, list[tuple[Node, Node]]] = {}
    for _, owner, graph in internals.graphs(module):
        for node in graph.nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(owner)
                reads.setdefault(id(value), []).extend((node, user) for user in node.users)
    parameters: dict[int, nn.Parameter] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameters[id(parameter)] = parameter
        names.setdefault(id(parameter), []).append(_clean(name))
    result = {}
    for key, (first, *ties) in names.items():
        users = reads.get(key, [])
        homes = {next((block for block in blocks if each.startswith(f"{block}.")), _ROOT) for each in (first, *ties)}
        if len(homes) > 1:  # FSDP2 gathers a parameter in one place
            what = f"{first!r} is tied to {ties[0]!r}, and they are in {' and in '.join(sorted(homes))}"
            advice = "choose `blocks` so that one block has both, or untie them"
            raise ContractError(_WHERE, what, expected="tied parameters in one block", advice=advice)
        why = _obstacle(parameters[key], users, processes) or (f"tied to {ties[0]}" if ties else "")
        result[first] = Gather(why, homes.pop(), "" if why else _roundings(users)[0])
    return result


def _obstacle(parameter: nn.Parameter, reads: list[tuple[Node, Node]], processes: int) -> str:
    """Returns the reason why a parameter with these reads cannot be gathered in MXFP8, or ""."""
    if not any(_is_weight(node, user) for node, user in reads):
        return "not the weight of an MXFP8 product"
    if others := sorted({internals.op_name(user) or user.op for node, user in reads if not _is_weight(node, user)}):
        return f"{', '.join(others)} reads it, too"
    if len(roundings := _roundings(reads)) > 1:
        return f"read with scale_rounding {' and '.join(roundings)}"
    if isinstance(parameter, DTensor):
        return "sharded already"
    if parameter.dim() != 2:
        return f"shape {list(parameter.shape)} is no matrix"
    # A block along N must not lie in two shards, see `weights`.
    if parameter.shape[0] % (32 * processes):
        return f"its {parameter.shape[0]} rows are no multiple of 32 rows in each of {processes} processes"
    return ""


def _roundings(reads: list[tuple[Node, Node]]) -> list[str]:
    return sorted({str(internals.argument(user, "scale_rounding")) for _, user in reads})


def _is_weight(node: Node, user: Node) -> bool:
    is_train = user.op == "call_function" and user.target is torch.ops.mxfp8.linear_train.default
    # A parameter that is also x needs its values.
    return is_train and internals.argument(user, "weight") is node and internals.argument(user, "x") is not node


def _wrap_weights(module: nn.Module, how: Mapping[str, Gather], gather: str, reshard: bool) -> dict[str, str]:
    """Wraps the weights to gather in MXFP8; returns the reason against MXFP8 for each parameter, or ""."""
    if gather != "mxfp8":
        return dict.fromkeys(how, "as asked for")
    for name, _ in list(module.named_parameters()):
        each = how[_clean(name)]
        if not each.why:
            _wrap(module, name, each.scale_rounding, not reshard or each.block == _ROOT)
    return {name: each.why for name, each in how.items()}


def _wrap(module: nn.Module, name: str, scale_rounding: str, both: bool) -> None:
    """Turns a parameter into a ShardedWeight; the state dicts of its module keep the plain parameter."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = getattr(owner, attribute)
    weight = ShardedWeight(parameter.detach(), scale_rounding, both)
    setattr(owner, attribute, nn.Parameter(weight, parameter.requires_grad))

    def unwrap(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        key = prefix + attribute
        if isinstance(state.get(key), Tensor):
            state[key] = _with_local(state[key], _plain)

    def rewrap(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        key = prefix + attribute
        # load_state_dict(assign=True) makes the new tensor the parameter.
        if isinstance(state.get(key), DTensor):
            state[key] = _with_local(state[key], lambda local: weight.like(_plain(local)))

    owner.register_state_dict_post_hook(unwrap)  # type: ignore[no-untyped-call]
    owner.register_load_state_dict_pre_hook(rewrap)  # type: ignore[no-untyped-call]


def _plain(local: Tensor) -> Tensor:
    return local.master if isinstance(local, ShardedWeight) else local


def _with_local(tensor: Tensor, change: Any) -> Tensor:
    """Returns a tensor after `change` of its local part; a plain tensor is its own local part."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            changed: Tensor = change(tensor)
            return changed
        local = change(tensor.to_local())
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, stride = tensor.shape, tensor.stride()
        result: Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        return result


def _leave_meta(module: nn.Module, device: str) -> None:
    """Makes ops that create tensors on the meta device, where the model was exported, create them on `device`."""
    for _, _, graph in internals.graphs(module):
        for node in graph.nodes:
            if str(node.kwargs.get("device")) == "meta":
                node.update_kwarg("device", torch.device(device))
