"""A cache of quantized weights, for the micro-batches between two steps of an optimizer.

`linear_train` and `grouped_linear_train` quantize a weight along K in each forward pass and along N in each backward
pass. Inside of `weight_cache()` they do so once per step, as TransformerEngine does with `is_first_microbatch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp8_ops.torch_ops.operands import Pair

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_Entries = dict[tuple[Any, ...], tuple[int, Pair]]

_active: WeakKeyDictionary[torch.UntypedStorage, _Entries] | None = None
"""The copies of each weight, by its memory, as a program may use views: by layout, version, elements and scales.

Not a ContextVar: the backward pass of a GPU runs in threads of its own.
"""


@contextmanager
def weight_cache() -> Iterator[None]:
    """Keeps the quantized copies of trained weights, until the weight changes or the context ends.

    Results are the same bits. Each weight takes 2.06 more bytes per value, 1.03 for each of two copies; where FSDP2
    shards a weight, the copies are of the whole weight. The cache drops a copy when its weight changes in place or is
    freed, and all copies at the end of a step of any torch.optim optimizer. torch does not count the changes that FSDP2
    makes to the weights that it gathers, so run other code that changes sharded weights outside of the context. Code
    from torch.compile, tensor subclasses and traces do not use the cache. A context within another uses the outer
    cache.
    """
    global _active  # noqa: PLW0603 - the backward pass has no other way to reach it
    if _active is not None:
        yield
        return
    cache: WeakKeyDictionary[torch.UntypedStorage, _Entries] = WeakKeyDictionary()
    _active = cache
    handle = register_optimizer_step_post_hook(lambda *_: cache.clear())
    try:
        yield
    finally:
        handle.remove()
        _active = None


def quantized_weight(weight: Tensor, scale_rounding: str) -> Pair:
    """Returns `weight` [..., N, K] quantized to E4M3 along its last axis, from the cache if one is active."""
    entries = _entries(weight)
    if entries is None:
        pair: Pair = torch.ops.mxfp8.quantize.default(weight, -1, "e4m3", scale_rounding)
        return pair
    layout = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype, scale_rounding
    if layout not in entries or entries[layout][0] != weight._version:
        entries[layout] = weight._version, torch.ops.mxfp8.quantize.default(weight, -1, "e4m3", scale_rounding)
    return entries[layout][1]


def _entries(weight: Tensor) -> _Entries | None:
    """Returns the cached copies of the memory of `weight`, or None if the cache does not take it."""
    if _active is None or type(weight) not in _PLAIN or weight.is_inference():
        return None
    if torch._C._len_torch_dispatch_stack():  # a trace has to record the quantization
        return None
    storage = weight.untyped_storage()
    # A stack may be an activation, which no second call reads; in the backward pass a view has lost its parameter. The
    # local part of a DTensor is a view of a leaf that itself has no gradient.
    owner = weight if weight._base is None else weight._base
    if owner.is_leaf and weight.requires_grad:
        _active.setdefault(storage, {})
    return _active.get(storage)
