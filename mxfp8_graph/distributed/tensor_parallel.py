"""Tensor parallelism of rewritten programs: each process has a part of the weights that a plan names.

"column" splits a weight [N, K] along N, and its bias and the result with it. "row" splits it along K: the results of
the processes are partial sums, which one all-reduce adds up in float32. So a column product and a row product after it,
as in {"blocks.*.up": "column", "blocks.*.down": "row"}, need one all-reduce. All other tensors are replicated.

Every tensor in the module becomes a DTensor, which has the shape of the whole tensor, so sizes that are constants in
the graph stay right. `mxfp8_ops.torch_ops.sharding` has the rules for this project's ops on shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import mxfp8_ops.torch_ops.sharding  # noqa: F401 - registers how ops run on DTensors, as does aten_rules
from mxfp8_graph.distributed import aten_rules  # noqa: F401
from mxfp8_graph.distributed.patterns import leading
from mxfp8_graph.distributed.products import Product, find
from mxfp8_graph.torch_pass import internals
from mxfp8_ops.errors import ContractError

_WHERE: Final = "parallelize"
_WORDS: Final = ("column", "row")


@dataclass(frozen=True)
class ParallelReport:
    """The tensors that `parallelize` split, and the weights of the plan that it did not."""

    split: Mapping[str, str]
    """The split tensors -> the word of the plan, the shape and the axis."""
    replicated: Mapping[str, str]
    """The weights of the plan that every process has in full -> the reason."""
    bytes_of_all: int
    """Bytes of all parameters and buffers."""
    bytes_here: int
    """Bytes of them in this process."""

    def __str__(self) -> str:
        """Returns a line for each tensor that the plan names."""
        lines = [f"{self.bytes_here} of {self.bytes_of_all} bytes in this process"]
        lines += [f"  {name}: {how}" for name, how in self.split.items()]
        return "\n".join(lines + [f"  {name}: replicated, {why}" for name, why in self.replicated.items()])


def parallelize(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Literal["column", "row"]]) -> ParallelReport:
    """Splits weights of a rewritten program's module among processes, in place; returns what is split and what is not.

    The module is called as before: each process passes the same tensors and gets the same result. DTensors as inputs
    (sharded along the batch or the sequence) give DTensors.

    Args:
        module: `program.module()` of a packed program or of one to train, or `distributed.module(program)` of one to
            train. All processes get the values of the first process of the mesh.
        mesh: the processes, in one dimension. To add FSDP, pass `mesh["tensor"]` of a mesh of two dimensions, and then
            call `fully_shard` with the other one on the submodules of an unflattened program.
        plan: "column" or "row" for patterns of module names, or names of weights; "*" stands for one part of a name or
            for characters of it. The first pattern that matches decides.

    Returns:
        The tensors that are split, and the reason for each weight of the plan that is not.

    Raises:
        ContractError: the mesh has more than one dimension, the plan has another word or a pattern that matches no
            weight of a product, or a tensor is a DTensor already.
    """
    if mesh.ndim != 1:
        advice = f"pass one of them: mesh[{(mesh.mesh_dim_names or ('tensor',))[-1]!r}]"
        raise ContractError(_WHERE, f"a mesh of {mesh.ndim} dimensions", expected="one dimension", advice=advice)
    for pattern, asked in plan.items():
        if asked not in _WORDS:
            raise ContractError.unknown(f"{_WHERE}: plan {pattern!r}", asked, _WORDS)
    tensors = dict(_tensors(module))
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            advice = "call parallelize once, before fully_shard, on a new module of the program"
            raise ContractError(_WHERE, f"{name} is a DTensor already", expected="plain tensors", advice=advice)
    split: dict[str, str] = {}
    replicated: dict[str, str] = {}
    placements: dict[int, Placement] = {}
    for product, word in _planned(find(module, tensors), plan):
        if (why := product.obstacle(word, mesh.size())) is not None:
            replicated.update(dict.fromkeys(product.weights, why))
            continue
        for name, place in _split(product, word, tensors).items():
            placements[id(tensors[name])] = place
            split[name] = f"{word}, {tuple(tensors[name].shape)} along axis {place.dim}"
    _distribute(module, tensors, mesh, placements)
    _distribute_created(module, mesh)
    _convert_inputs_and_results(module, mesh)
    unique = {id(tensor): tensor for _, tensor in _tensors(module)}.values()
    local = sum(t.to_local().nbytes for t in unique if isinstance(t, DTensor))
    return ParallelReport(split, replicated, sum(tensor.nbytes for tensor in unique), local)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of the parameters, buffers and constants of the module."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}" if path else name, value


def _planned(products: list[Product], plan: Mapping[str, str]) -> Iterator[tuple[Product, str]]:
    """Yields (product, word of the plan) of the products that the plan names."""
    matched: set[str] = set()
    for product in products:
        patterns = [pattern for pattern in plan if any(_matches(name, pattern) for name in product.weights)]
        matched.update(patterns)
        if patterns:
            yield product, plan[patterns[0]]
    if left := [pattern for pattern in plan if pattern not in matched]:
        names = sorted({product.weights[0].rpartition(".")[0] for product in products})
        raise ContractError(
            f"{_WHERE}: plan {left[0]!r}",
            "matches no weight of a product",
            expected="the name of one, or of its module",
            advice=f"the products of this module are {', '.join(names[:8])}" + ", ..." * (len(names) > 8),
        )


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a tensor, or its module."""
    return leading(name, pattern) in {name, name.rpartition(".")[0]}


def _split(product: Product, word: str, tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Returns the axis of the split of each tensor of a product."""
    # K is the last axis of a weight, unless it is stored transposed.
    last = (word == "row") != product.transposed
    places = {name: Shard(tensors[name].dim() - (1 if last else 2)) for name in product.weights}
    if word == "column" and product.bias is not None and product.bias in tensors:
        places[product.bias] = Shard(0)
    return places


def _distribute(
    module: nn.Module, tensors: Mapping[str, Tensor], mesh: DeviceMesh, placements: Mapping[int, Placement]
) -> None:
    """Replaces all tensors by DTensors; a tensor with several names stays one tensor."""
    distributed: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in distributed:
            new: Tensor = distribute_tensor(tensor.detach(), mesh, [placements.get(id(tensor), Replicate())])
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            distributed[id(tensor)] = new
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, distributed[id(tensor)])


class _Distribute(nn.Module):
    """Returns a tensor that every process has as a replicated DTensor."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)


def _distribute_created(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turns tensors that graphs create, such as masks, into DTensors: torch refuses to combine the two kinds."""
    for _, owner, graph in [*internals.graphs(module)]:
        for node in [*graph.nodes]:
            inputs = pytree.tree_leaves([each.meta.get("val") for each in node.all_input_nodes])
            creates = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
            if creates and not any(isinstance(each, Tensor) for each in inputs):
                owner.add_module("distribute", _Distribute(mesh))
                with graph.inserting_after(node):
                    # Not graph.call_module: graphs of an unflattened program belong to another module.
                    new = graph.create_node("call_module", "distribute", (node,))
                node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
                new.meta["val"] = node.meta["val"]
        if isinstance(owner, GraphModule):
            owner.recompile()


def _convert_inputs_and_results(module: nn.Module, mesh: DeviceMesh) -> None:
    """Lets the module take plain tensors, which become replicated DTensors, and then return plain tensors."""
    distribute = _Distribute(mesh)
    calls: list[tuple[bool, contextlib.ExitStack]] = []
    """For each call in progress: whether its tensors are plain, and the contexts to leave at its end."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = contextlib.ExitStack()
        if torch.is_inference_mode_enabled():
            # In that mode torch 2.13 applies the global sizes of unflatten to the shards, and returns wrong results.
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        calls.append((not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))), stack))

        def convert(leaf: Any) -> Any:
            return distribute(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) else leaf

        return pytree.tree_map(convert, (args, kwargs))

    def after(_: nn.Module, _args: Any, result: Any) -> Any:
        plain, stack = calls.pop()
        with stack:
            if not plain:
                return result
            return pytree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, result)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)  # after an error too, or `calls` would keep its entry
