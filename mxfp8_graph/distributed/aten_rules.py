"""How ops of torch run on DTensors where torch 2.13 has no rule: attention on a CPU, and constants of a program.

Importing this module registers them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_ATEN: Final = torch.ops.aten


def _attention(*args: Any, attn_mask: Any = None, **_: Any) -> Any:
    return _alike(args, operands=3, results=2, mask=attn_mask)


def _attention_backward(*args: Any, attn_mask: Any = None, **_: Any) -> Any:
    return _alike(args, operands=6, results=3, mask=attn_mask)


def _constant(_: Any) -> Any:
    # Every process has the same constants.
    return [([Replicate()], [Replicate()])]


def _alike(args: tuple[Any, ...], operands: int, results: int, mask: Any) -> Any:
    """Returns the placements of results and operands of attention: all along the batch, the heads or nothing."""
    places: list[Any] = [Replicate()]
    for axis in (0, 1):  # of [batch, heads, ...], which all results and operands have
        # The mask stays whole, since torch does not redistribute keywords. So it must have size 1 along a split axis.
        broadcasts = mask is None or mask.ndim < 4 or mask.shape[axis] == 1
        if broadcasts and all(each.shape[axis] % each.mesh.size() == 0 for each in args[:operands]):
            places.append(Shard(axis))
    options = [None] * (len(args) - operands) + [Replicate()] * (mask is not None)
    return [([place] * results, [place] * operands + options) for place in places]


for _op, _rule in {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _ATEN.lift_fresh_copy.default: _constant,
}.items():
    register_sharding(_op)(_rule)
