"""The ops on DTensors: an import of this module tells torch how they run on shards; the package does not import it.

A row of `EQUATIONS` names the axes of an op's operands, as einsum does. Along a dimension of the mesh one axis is
sharded or none: operands that have it are sharded along it, all others are replicated. The same is true for the
result; if the axis is summed, the result is a partial sum. The last operand that is sharded chooses the axis. So
weights stay where they are and activations move. They move as codes, 1.03 bytes per value, because an op that is made
of others runs as these others, and quantizes first.

Shards have one size, and along a blocked axis they hold whole blocks of 32; operands for which that is impossible are
replicated. Partial sums are float32, whatever the dtype of the result, and are reduced before it is rounded; a float32
result stays partial until DTensor needs it.

`torch.distributed.tensor.experimental.register_sharding` does not fit: it does not know which dimension of the mesh
is sharded, it may move a weight because that is smaller, and partial sums have the dtype of the result there.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from mxfp8_ops import checks, contract
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.torch_ops import LIBRARY, grouped_training, packed, train_product, training

EQUATIONS: Final[Mapping[str, str]] = {
    "quantize": "* -> *, *",
    "quantize_both": "mk -> mk, mK, km, kM",
    "dequantize": "*, * -> *",
    "gemm": "...mk, ...mK, ...nk, ...nK, +n -> ...mn",
    "weight_gemm": "...mk, ...nk, ...nK, +n -> ...mn",
    "embedding": "..., vd, vD -> ...d",
    "conv": "n~, v~, v~, v, n~ -> n~",
    "grouped_gemm": "sk, sK, enk, enK, e -> sn",
    "quantize_groups": "sk, e -> ks, kt",
    "grouped_wgrad": "ns, nt, ks, kt, e -> enk",
}
"""Axes of the operands and results of an op. A capital is an axis of scales: K has one for each block along k. "+" is
an operand that is added to the sum. "*" is a tensor of any rank, with its blocks along the argument `axis`. "~" stands
for all axes of the first operand but one."""

MADE_OF_OTHERS: Final[Mapping[str, Callable[..., Any]]] = {
    "linear_train": training.linear_train,
    "linear_packed": packed.linear_packed,
    "product": train_product.product,
    "grouped_linear_train": grouped_training.grouped_linear_train,
}
"""Ops that are made of other ops, and run as these."""

_WHOLE: Final = frozenset("vset")
"""Axes that are never sharded: indices and the ends of groups count along them, and "t" has the blocks of groups."""

Axes = tuple[str, ...]
Placements = tuple[Placement, ...]


class Operand(NamedTuple):
    """The properties of one DTensor that a plan depends on."""

    name: str
    shape: torch.Size
    placements: Placements


class Plan(NamedTuple):
    """The placements of the operands and results of one call."""

    operands: Mapping[str, Placements]
    results: Sequence[Placements]
    left_out: Sequence[str]
    """Operands that another process adds to the sum."""


class _Planner:
    """Plans one call."""

    def __init__(self, op: str, mesh: DeviceMesh, operands: Sequence[Operand], axis: int) -> None:
        """Names the axes, and chooses one for each dimension of the mesh."""
        self.mesh, self.operands = mesh, operands
        self.inputs, outputs = _terms(op, len(operands[0].shape), axis)
        self.axes = {each.name: _axes(self.inputs[each.name], len(each.shape)) for each in operands}
        pairs = [pair for each in operands for pair in zip(self.axes[each.name], each.shape, strict=True)]
        # A leading 1 broadcasts, so another size of that axis overrides it.
        self.sizes = dict(sorted(pairs, key=lambda pair: pair[1] != 1))
        leading = sum(name.isdigit() for name in self.sizes)
        results = [_axes(term, len(term.strip(".")) + leading * term.startswith("...")) for term in outputs]
        # A vector has no m.
        self.results = [tuple(name for name in axes if name.lower() in self.sizes) for axes in results]
        named = [name for axes in (*self.axes.values(), *self.results) for name in axes]
        self.blocked = {name.lower() for name in named if name.isupper()}
        self.summed = self.blocked - {name.lower() for axes in self.results for name in axes}
        self.chosen: list[str | None] = []
        """The axis that is sharded along each dimension of the mesh."""
        for at in range(mesh.ndim):
            self.chosen.append(next(filter(functools.partial(self._divides, at), self._candidates(at)), None))

    def plan(self) -> Plan:
        """Returns the plan."""
        partial = [name in self.summed for name in self.chosen]
        results = []
        for axes in self.results:
            pairs = zip(self._placements(axes), partial, strict=True)
            results.append(tuple(Partial() if sums else place for place, sums in pairs))
        first = not any(at and sums for at, sums in zip(self.mesh.get_coordinate() or (), partial, strict=False))
        return Plan(
            {each.name: self._placements(self.axes[each.name], each.shape) for each in self.operands},
            results,
            [name for name, term in self.inputs.items() if term.startswith("+") and not first],
        )

    def _candidates(self, at: int) -> list[str]:
        """Returns the axes along which operands are sharded over dimension `at` of the mesh, from the last operand."""
        candidates: list[str] = []
        of_later: set[str] = set()
        for each in reversed(self.operands):
            axes, place = [name.lower() for name in self.axes[each.name]], each.placements[at]
            # A sum is split only if its last operand is: to replicate the first one moves fewer bytes than to reduce
            # the result, and gives the bits of one process.
            if isinstance(place, Shard) and (name := axes[place.dim]) not in _WHOLE | (self.summed & of_later):
                candidates.append(name)
            of_later.update(axes)
        return candidates

    def _divides(self, at: int, name: str) -> bool:
        shards = self.mesh.size(at)
        for before, chosen in enumerate(self.chosen):
            shards *= self.mesh.size(before) if chosen == name else 1
        return bool(self.sizes[name] % (shards * BLOCK_SIZE if name in self.blocked else shards) == 0)

    def _placements(self, axes: Axes, shape: torch.Size | None = None) -> Placements:
        # An axis of size 1 is never sharded; one that broadcasts is not the axis of its name.
        names = [name.lower() if shape is None or shape[at] != 1 else "" for at, name in enumerate(axes)]
        return tuple(Shard(names.index(name)) if name in names else Replicate() for name in self.chosen)


def _terms(op: str, rank: int, axis: int) -> tuple[dict[str, str], list[str]]:
    """Returns the axes of each operand, by its name, and the axes of each result; `axis` has the blocks."""
    equation = EQUATIONS[op]
    if "*" in equation:
        axes = "".join(sorted({*string.ascii_lowercase} - _WHOLE)[:rank])
        blocked = axes[checks.normalize_axis(op, rank, axis)]
        pair = f"{axes}, {axes.replace(blocked, blocked.upper())}"
        equation = f"{axes} -> {pair}" if op == "quantize" else f"{pair} -> {axes}"
    equation = equation.replace("~", "s" * (rank - 1))
    inputs, outputs = ([term.strip() for term in side.split(",")] for side in equation.split("->"))
    return dict(zip(_INPUTS[op], inputs, strict=True)), outputs


def _axes(term: str, rank: int) -> Axes:
    """Returns a name for each axis of a tensor: "...mk" of rank 4 gives 1, 0, m, k, and of rank 1 gives k."""
    named = term.strip("+.")
    leading = [str(at) for at in reversed(range(rank - len(named)))]
    return tuple([*leading, *named][len(leading) + len(named) - rank :])


@functools.lru_cache(maxsize=4096)
def _plan(op: str, mesh: DeviceMesh, operands: tuple[Operand, ...], axis: int) -> Plan:
    return _Planner(op, mesh, operands, axis).plan()


def _on_shards(_cls: type, op: Any, _types: Sequence[type], args: Sequence[Any], _kwargs: object) -> Any:
    """Returns op(*args) of DTensors, for an op of EQUATIONS. Torch calls it."""
    name = op._schema.name.partition("::")[2]
    values = {**_defaults(op), **dict(zip(_defaults(op), args, strict=False))}
    mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
    tensors = {each: _distributed(name, values[each], mesh) for each in _INPUTS[name] if values[each] is not None}
    operands = tuple(Operand(each, tensor.shape, tensor.placements) for each, tensor in tensors.items())
    # Sizes are symbols while torch.compile traces, and have no hash.
    make = _plan.__wrapped__ if torch.compiler.is_compiling() else _plan
    plan = make(name, mesh, operands, values.get("axis", 0))
    with torch.no_grad():  # this is below autograd, which redistribute does not know
        for each, tensor in tensors.items():
            wanted = plan.operands[each]
            # redistribute takes 20 us where there is nothing to do
            moved = tensor if tensor.placements == wanted else tensor.redistribute(mesh, wanted)
            values[each] = moved.to_local()
        if any(place.is_partial() for place in plan.results[0]):
            return _sum(op, values, plan, mesh)
        local = op(*values.values())
        if isinstance(local, Tensor):
            return DTensor.from_local(local, mesh, plan.results[0], run_check=False)
        pairs = zip(local, plan.results, strict=True)
        return tuple(DTensor.from_local(part, mesh, places, run_check=False) for part, places in pairs)


def _sum(op: Any, values: dict[str, Any], plan: Plan, mesh: DeviceMesh) -> Tensor:
    """Returns the result of an op that sums over processes: reduced, unless it is float32."""
    first = next(iter(values.values()))
    dtype = values["dtype"] or (first.dtype if first.is_floating_point() else torch.float32)
    values |= {"dtype": torch.float32, **dict.fromkeys(plan.left_out)}
    return training.rounded(DTensor.from_local(op(*values.values()), mesh, plan.results[0], run_check=False), dtype)


def _distributed(op: str, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns an operand as a DTensor.

    Raises:
        ShapeError: it is a plain tensor outside of torch's `implicit_replication`, or it is on another mesh.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh == mesh:
        return tensor
    if not isinstance(tensor, DTensor) and DTensor._op_dispatcher._allow_implicit_replication:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    other = f"on {tensor.device_mesh}" if isinstance(tensor, DTensor) else "plain tensors"
    raise ShapeError(
        op,
        f"some operands are DTensors on {mesh}, others {other}",
        expected="DTensors on one mesh",
        advice="distribute them with torch.distributed.tensor.distribute_tensor, or call the op under "
        "torch.distributed.tensor.experimental.implicit_replication()",
    )


@functools.cache
def _defaults(op: Any) -> dict[str, Any]:
    """Returns the default of each argument: torch leaves out arguments that equal it."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}


def _inputs(op: str) -> tuple[str, ...]:
    """Returns the names of the operands of an op, which are its first arguments."""
    terms = EQUATIONS[op].partition("->")[0].split(",")
    return tuple(_defaults(getattr(torch.ops.mxfp8, op).default))[: len(terms)]


def _as_others(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule of an op that is computed by a function of other ops."""
    return lambda _cls, _op, _types, args, _kwargs: compute(*args)


_INPUTS: Final = {name: _inputs(name) for name in EQUATIONS}
_RULES: Final = {
    **dict.fromkeys(EQUATIONS, _on_shards),
    **{name: _as_others(compute) for name, compute in MADE_OF_OTHERS.items()},
}
for _name, _rule in _RULES.items():
    torch.library.register_torch_dispatch(f"{contract.DOMAIN}::{_name}", DTensor, _rule, lib=LIBRARY)
