"""What the ops with gradients share: they record them in reverse mode, by backward() and torch.func.grad, never twice.

`torch.library.register_autograd` would do the same, and take 3 us more of a call that wants no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from mxfp8_ops.errors import Mxfp8Error

Gradient = Tensor | None


def refuse_tangents(op: str, instead: str, *tensors: Tensor | None) -> None:
    """Raises Mxfp8Error if a tensor carries a tangent (forward-mode differentiation)."""
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    if any(t is not None and unpack(t).tangent is not None for t in tensors):
        raise Mxfp8Error(
            op,
            "an operand carries a tangent",
            expected="none (it has gradients in reverse mode only)",
            advice=f"differentiate with backward() or torch.func.grad, or {instead}",
        )


def apply(function: Any, *arguments: Any) -> Any:
    """Returns function(*arguments) and records it, also inside torch.func.grad and its kin.

    There the autograd kernel of an op runs once per level, on that level's tensors: what `torch.autograd.Function` and
    `torch.library.register_autograd` refuse is just what is wanted.
    """
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def below_autograd(op: Any, *arguments: Any) -> Tensor:
    """Returns op(*arguments) as its kernel for the tensors' device computes it, recording nothing."""
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = op.default(*arguments)
    return result
