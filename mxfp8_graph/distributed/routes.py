"""Sends rows to the processes that hold their experts, in MXFP8, and results back.

Each process has rows [S, K], sorted by expert, and holds the weights of E / P of all E experts. A row goes to its
expert as the codes that the product there would make of it: elements, then scales, in one uint8 row of K + ceil(K / 32)
bytes, 1.03 per value. Results come back in their own dtype. In the backward pass gradients of results go to the experts
in MXFP8 and gradients of rows come back.

Experts get their rows by process, and by place within a process: the order in which one process that has all rows,
those of process 0 first, would sort them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8


@dataclass(frozen=True)
class Route:
    """The way of the rows of one mixture of experts."""

    group: dist.ProcessGroup
    rows: int
    """S, of which the last may belong to no expert: they are not sent, and their results are 0."""
    sent: list[int]
    """Rows for each process."""
    received: list[int]
    """Rows from each process."""
    order: Tensor
    """int64 [R], the places of the received rows in the order of the experts here."""
    offs: Tensor
    """[E / P], where the rows of each expert here end."""

    def there(self, x: Tensor, element_format: str, scale_rounding: str) -> Tensor:
        """Returns the rows [R, K] for the experts here, rounded to MXFP8, in the dtype of `x` [S, K]."""
        codes = torch.ops.mxfp8.quantize.default(x[: sum(self.sent)], -1, element_format, scale_rounding)
        got = self._exchange(torch.cat(codes, -1), self.sent, self.received)[self.order]
        elements, scales = got[:, : x.shape[1]], got[:, x.shape[1] :]
        values: Tensor = torch.ops.mxfp8.dequantize.default(elements, scales, -1, element_format, x.dtype)
        return values

    def back(self, y: Tensor) -> Tensor:
        """Returns the rows [S, N] of this process, of the results `y` [R, N] of the experts here."""
        as_received = torch.empty_like(y, memory_format=torch.contiguous_format)
        as_received[self.order] = y
        got = self._exchange(as_received, self.received, self.sent)
        return torch.cat([got, got.new_zeros((self.rows - got.shape[0], y.shape[1]))])

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = rows.new_empty((sum(received), rows.shape[1]))
        # As bytes: not every backend sends every dtype.
        dist.all_to_all_single(result.view(torch.uint8), rows.view(torch.uint8), received, sent, group=self.group)
        return result


def route(x: Tensor, offs: Tensor, group_name: str) -> Route:
    """Returns the way of the rows of `x` [S, K], of which `offs` [E] says where those of each expert end."""
    group: Any = getattr(distributed_c10d, "_resolve_process_group")(group_name)  # noqa: B009 - torch does not export it
    ours = offs.diff(prepend=offs.new_zeros(1)).view(dist.get_world_size(group), -1)
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    # From each process, rows of each expert here.
    experts = torch.arange(ours.shape[1], device=offs.device).repeat(len(ours)).repeat_interleave(theirs.flatten())
    return Route(
        group=group,
        rows=x.shape[0],
        sent=ours.sum(1).tolist(),
        received=theirs.sum(1).tolist(),
        order=experts.argsort(stable=True),
        offs=theirs.sum(0).cumsum(0).to(offs.dtype),
    )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, scale_rounding: str) -> Tensor:
        ctx.route = route
        return route.there(x, "e4m3", scale_rounding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.route.back(grad), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, route: Route, element_format: str, scale_rounding: str) -> Tensor:
        ctx.route, ctx.settings = route, (element_format, scale_rounding)
        return route.back(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.route.there(grad, *ctx.settings), None, None, None


def dispatch(x: Tensor, route: Route, scale_rounding: str) -> Tensor:
    """Returns `Route.there` of x in E4M3, whose gradient comes back as it is."""
    apply: Any = _Dispatch.apply
    result: Tensor = apply(x, route, scale_rounding)
    return result


def combine(y: Tensor, route: Route, element_format: str, scale_rounding: str) -> Tensor:
    """Returns `Route.back` of y, whose gradient goes there in MXFP8."""
    apply: Any = _Combine.apply
    result: Tensor = apply(y, route, element_format, scale_rounding)
    return result
