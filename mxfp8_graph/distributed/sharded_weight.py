"""Weights that FSDP2 gathers in MXFP8: rows for the forward pass, columns for the backward pass.

FSDP2 has two extension points for tensor subclasses: the local tensor of a sharded parameter returns the tensors to
gather (`fsdp_pre_all_gather`), and builds the result of the gather (`fsdp_post_all_gather`). A `ShardedWeight` [n, K]
of N / n processes quantizes its rows as `mxfp8::linear_train` would:

    rows      elements [n, K] and scales [n, ceil(K/32)], blocked along K        for x w^T
    columns   elements [K, n] and scales [K, n/32], blocked along N              for dy w

n is a multiple of 32, so no block along N lies in two shards, and each process has the codes that one process
computes from the whole weight. A copy is sent as one row of bytes, elements first, because torch's path for one process
reads the first tensor only. Both copies have the same length, because FSDP2 allocates its buffers once.

The result, a `GatheredWeight` [N, K], has no values. `quantize` of it, or of its transpose, returns the codes. A
missing copy is gathered on request: activation checkpointing repeats the forward pass after FSDP2 gathered columns. All
processes run the same ops in the same order, so each takes part in that gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError
from mxfp8_ops.torch_ops.training import linear_train

Copy = Literal["rows", "columns"]

_ATEN: Final = torch.ops.aten
_STILL_WEIGHTS: Final = {
    _ATEN.alias.default,
    _ATEN.as_strided.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.empty_like.default,
    _ATEN._pin_memory.default,
    _ATEN._to_copy.default,
    _ATEN.new_zeros.default,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.view.default,
}
"""Ops that FSDP2, DTensor and nn.Module use to create and move shards; results of other ops are plain tensors."""

_SAME: Final = {_ATEN.alias.default, _ATEN.as_strided.default, _ATEN.detach.default, _ATEN.view.default}
_ZEROS: Final = {_ATEN.zeros_like.default, _ATEN.empty_like.default}


def _empty(kind: type[Any], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a contiguous tensor of the class `kind` without memory; its `__torch_dispatch__` computes."""
    return torch.Tensor._make_wrapper_subclass(kind, torch.Size(size), dtype=dtype, device=device)


class ShardedWeight(Tensor):
    """The rows [n, K] of a weight that this process has, in the memory of the plain tensor `master`."""

    master: Tensor
    scale_rounding: str
    both: bool
    """Whether one gather brings both copies, for a block that is not resharded between the passes."""

    @staticmethod
    def __new__(cls, master: Tensor, scale_rounding: str, both: bool) -> ShardedWeight:  # noqa: D102
        self: ShardedWeight = _empty(cls, master.shape, master.dtype, master.device)
        self.master, self.scale_rounding, self.both = master, scale_rounding, both
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.master}, {self.scale_rounding!r}, both={self.both})"

    def like(self, master: Tensor) -> ShardedWeight:
        """Returns other rows with the same settings."""
        return ShardedWeight(master, self.scale_rounding, self.both)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes with the plain tensors."""
        weights: list[ShardedWeight] = []

        def plain(weight: ShardedWeight) -> Tensor:
            weights.append(weight)
            return weight.master

        plain_args, plain_kwargs = tree_map_only(ShardedWeight, plain, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in _STILL_WEIGHTS:
            return tree_map_only(Tensor, weights[0].like, result)
        # An in-place op returns its argument, and autograd checks that it is the same object.
        return args[0] if func._schema.is_mutable and isinstance(result, Tensor) else result

    def coded(self, copy: Copy) -> Tensor:
        """Returns a copy as a row of bytes: elements, scales, and zeros up to the length of the longer copy."""
        n, k = self.shape
        with torch.no_grad():
            matrix = self.master if copy == "rows" else self.master.mT
            codes = torch.ops.mxfp8.quantize.default(matrix, -1, "e4m3", self.scale_rounding)
            row = torch.cat([part.reshape(-1) for part in codes])
            return torch.nn.functional.pad(row, (0, n * k + math.prod(scale_shape((n, k), -1)) - row.numel()))

    def fsdp_pre_all_gather(  # noqa: D102 - FSDP2's protocol
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], Any]:
        # -1: no backward pass runs. FSDP2 itself checks this id; it prefetches a block before any hook of it runs.
        phase: Copy = "rows" if torch._C._current_graph_task_id() == -1 else "columns"
        copies: Sequence[Copy] = ["rows", "columns"] if self.both else [phase]
        return (torch.cat([self.coded(copy) for copy in copies]),), (copies, mesh, outer_size)

    def fsdp_post_all_gather(  # noqa: D102 - FSDP2's protocol
        self, outputs: tuple[Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        copies, mesh, size = metadata
        by_copy = outputs[0].view(mesh.size(), len(copies), -1).unbind(1)
        weight = GatheredWeight(size, param_dtype, self.device) if out is None else out
        weight.gathered.update(source=self, mesh=mesh, rows=None, columns=None)
        weight.gathered.update(zip(copies, by_copy, strict=True))
        # No inner tensors: the codes lie in FSDP2's buffers, which it frees itself.
        return None if out is not None else (weight, ())


class GatheredWeight(Tensor):
    """A whole weight [N, K] that has codes and no values; `transposed` if it is [K, N]."""

    gathered: dict[str, Any]
    """"source", its ShardedWeight; "mesh"; "rows" and "columns": [processes, bytes], or None. Views share it."""
    transposed: bool

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> GatheredWeight:  # noqa: D102
        self: GatheredWeight = _empty(cls, size, dtype, device)
        self.gathered, self.transposed = {}, False
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, transposed={self.transposed})"

    def _view(self, *, transpose: bool = False) -> GatheredWeight:
        size = self.shape[::-1] if transpose else self.shape
        view = GatheredWeight(size, self.dtype, self.device)
        view.gathered, view.transposed = self.gathered, self.transposed ^ transpose
        return view

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes the ops of MXFP8 training and of FSDP2; raises ContractError for other ops."""
        self = args[0]
        if func is torch.ops.mxfp8.linear_train.default:
            return linear_train(*args, **(kwargs or {}))  # it calls `quantize` of the weight, below
        if isinstance(self, GatheredWeight):
            if func in _SAME:
                return self._view()
            if func in {_ATEN.transpose.int, _ATEN.t.default}:
                return self._view(transpose=True)
            if func in _ZEROS:
                return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            if func is torch.ops.mxfp8.quantize.default and self._fits(*args[1:]):
                return self.codes()
        what = f"{func} reads a weight that was gathered in MXFP8"
        advice = 'call shard with gather="high_precision"'
        raise ContractError("distributed.shard", what, expected="mxfp8.linear_train and its gradients", advice=advice)

    def _fits(self, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil") -> bool:
        return (axis % 2, element_format, scale_rounding) == (1, "e4m3", self.gathered["source"].scale_rounding)

    def codes(self) -> tuple[Tensor, Tensor]:
        """Returns (elements, scales) of this weight, blocked along its last axis."""
        copy: Copy = "columns" if self.transposed else "rows"
        source, mesh = self.gathered["source"], self.gathered["mesh"]
        gathered = self.gathered[copy]
        if gathered is None:
            mine = source.coded(copy)
            gathered = mine.new_empty(mesh.size(), mine.numel())
            dist.all_gather([*gathered.unbind()], mine, group=mesh.get_group())
        n, k = source.shape
        shape = (k, n) if self.transposed else (n, k)
        # A shard has rows of the weight, which are columns of the transpose.
        axis = 1 if self.transposed else 0

        def joined(begin: int, shape: Sequence[int]) -> Tensor:
            shards = gathered[:, begin : begin + math.prod(shape)]
            return torch.cat([shard.view(*shape) for shard in shards.unbind()], axis)

        return joined(0, shape), joined(n * k, scale_shape(shape, -1))
