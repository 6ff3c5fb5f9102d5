"""Constant weights of products on the CPU, kept in the layout of the kernel: the setting `prepack` of the torch ops.

An op cannot know which of its operands are constant. A weight counts as constant if a second product of three
rows or more reads it unchanged; its copy is freed when the weight is changed in place or freed. Changes that torch does
not count - of `weight.data`, or of a NumPy array that shares the memory - need `set_prepack("never")`.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mxfp8_ops import native

_LEAST_ROWS: Final = 3
"""One or two rows take as long without a copy, and with a copy the second product would add in another order."""

_Copies = dict[Any, tuple[tuple[int, int], native.ConstantWeight | None]]
_known: WeakKeyDictionary[torch.UntypedStorage, WeakKeyDictionary[torch.UntypedStorage, _Copies]] = WeakKeyDictionary()
"""By the memory of a weight, the memory of its scales, and their places there: the versions of both, and the copy of
the weight from its second product on. Whichever memory is freed first, the copy goes with it: an address, which the
next tensor may get, is never a key."""

_setting = "auto"


def set_prepack(prepack: str) -> None:
    """Sets the form of the copies of constant weights, in the whole process, and frees the copies so far.

    Args:
        prepack: "auto": the codes in the layout of the kernel, 1.03 bytes a value. "never": no copies.

    Raises:
        BackendError: `prepack` has another value.
    """
    global _setting  # noqa: PLW0603 - the ops have no other way to reach it
    native.check_prepack(prepack)
    _setting = prepack
    _known.clear()


def constant_weight(b: Tensor, b_scales: Tensor, rows: int) -> native.ConstantWeight | None:
    """Returns the copy of the weight `b` [N, K] for a product of so many rows; None if `b` is not known to be constant.

    The caller holds the result until this product is done: another thread may free the copy meanwhile.
    """
    if rows < _LEAST_ROWS or _setting == "never" or b.dim() != 2 or b.is_inference() or b_scales.is_inference():
        return None  # torch does not count the changes of tensors from inference mode
    of_scales = _known.get(b.untyped_storage())
    if of_scales is None:
        of_scales = _known.setdefault(b.untyped_storage(), WeakKeyDictionary())
    copies = of_scales.setdefault(b_scales.untyped_storage(), {})
    place = b.storage_offset(), b.shape, b_scales.storage_offset()
    versions = b._version, b_scales._version
    known = copies.get(place)
    if known is None or known[0] != versions:
        copies[place] = versions, None
        return None
    weight = known[1]
    if weight is None:
        weight = native.ConstantWeight()
        copies[place] = versions, weight
    return weight
