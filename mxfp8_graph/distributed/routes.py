"""Sends rows to the processes that hold their experts, in MXFP8, and results back.

Each process has rows [S, K], sorted by expert, and holds the weights of E / P of all E experts. A row is sent to its
expert as the codes that the product there would compute: elements, then scales, in one uint8 row of K + ceil(K / 32)
bytes, 1.03 per value. Results are sent back in their own dtype. In the backward pass, gradients of results are sent to
the experts in MXFP8, and gradients of rows are sent back.

An expert gets its rows ordered by process, and by position within a process. One process with all rows, the rows of
process 0 first, would sort them in the same order.
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
    """The numbers of rows of one mixture of experts that a process sends to and receives from each process."""

    group: dist.ProcessGroup
    rows: int
    """S. The last rows may belong to no expert: they are not sent, and their results are 0."""
    sent: list[int]
    """Number of rows for each process."""
    received: list[int]
    """Number of rows from each process."""
    order: Tensor
    """int64 [R], the positions of the received rows in the order of the experts here."""
    offs: Tensor
    """[E / P], where the rows of each expert here end."""

    def there(self, x: Tensor, element_format: str, scale_rounding: str) -> Tensor:
        """Returns the rows [R, K] for the experts here, rounded to MXFP8, in the dtype of `x` [S, K]."""
        codes = torch.ops.mxfp8.quantize.default(x[: sum(self.sent)], -1, element_format, scale_rounding)
        # One row of bytes, so that one exchange sends elements and scales.
        rows = self._exchange(torch.cat(codes, -1), self.sent, self.received)[self.order]
        elements, scales = rows[:, : x.shape[1]], rows[:, x.shape[1] :]
        values: Tensor = torch.ops.mxfp8.dequantize.default(elements, scales, -1, element_format, x.dtype)
        return values

    def back(self, y: Tensor) -> Tensor:
        """Returns the results [S, N] for the rows of this process; `y` [R, N] are the results of the experts here."""
        as_received = torch.empty_like(y, memory_format=torch.contiguous_format)
        as_received[self.order] = y
        rows = self._exchange(as_received, self.received, self.sent)
        return torch.cat([rows, rows.new_zeros((self.rows - rows.shape[0], y.shape[1]))])

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = rows.new_empty((sum(received), rows.shape[1]))
        # As bytes: not every backend sends every dtype.
        dist.all_to_all_single(result.view(torch.uint8), rows.view(torch.uint8), received, sent, group=self.group)
        return result


def route(x: Tensor, offs: Tensor, group_name: str) -> Route:
    """Returns the route of the rows of `x` [S, K]; `offs` [E] says where the rows of each expert end."""
    group: Any = getattr(distributed_c10d, "_resolve_process_group")(group_name)  # noqa: B009 - torch does not export it
    ours = offs.diff(prepend=offs.new_zeros(1)).view(dist.get_world_size(group), -1)
    # The numbers of rows first: the exchange of rows needs to know the sizes.
    theirs = torch.empty_like(ours)
    dist.all_to_all_single(theirs, ours, group=group)
    # The expert of each received row: rows come by process, then by expert.
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
    """Returns `Route.there` of x in E4M3; its gradient is sent back unchanged."""
    apply: Any = _Dispatch.apply
    result: Tensor = apply(x, route, scale_rounding)
    return result


def combine(y: Tensor, route: Route, element_format: str, scale_rounding: str) -> Tensor:
    """Returns `Route.back` of y; its gradient is sent to the experts in MXFP8."""
    apply: Any = _Combine.apply
    result: Tensor = apply(y, route, element_format, scale_rounding)
    return result
