"""Shared by the ops with gradients: they record them in reverse mode, by backward() and torch.func.grad.

`torch.library.register_autograd` would do the same, and take 3 us more of a call that wants no gradient.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from mxfp8_ops.errors import Mxfp8Error

Gradient = Tensor | None

GRADIENT_FORMATS: Final = {"E4M3": "e4m3", "HYBRID": "e5m2"}
"""Element format of gradients, by TransformerEngine's name for the choice; everything else is E4M3."""


PLAIN_CPU: Final = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
).raw_repr()
"""The keys of a call whose tensors are all plain CPU tensors: no mode, subclass or transform intercepts it."""


def refuse_tangents(op: str, instead: str, *tensors: Tensor | None) -> None:
    """Raises Mxfp8Error if a tensor carries a tangent (forward-mode differentiation)."""
    if forward_ad._current_level >= 0 and _has_tangent(*tensors):
        raise Mxfp8Error(
            op,
            "an operand carries a tangent",
            expected="no tangent (the op has gradients in reverse mode only)",
            advice="differentiate with backward(), torch.func.grad or torch.func.jacrev (of itself for a Hessian), or "
            f"{instead}",
        )


def refuse_cut(op: str, x: Tensor) -> None:
    """Raises Mxfp8Error if a derivative by x is wanted: the results are integers, which pass none on.

    Not while torch.export traces: the exported program checks when it runs.
    """
    # requires_grad alone is no reason: under torch.no_grad nothing is recorded.
    has = "requires a gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    if has and torch.compiler.is_exporting():
        return
    if has or (forward_ad._current_level >= 0 and _has_tangent(x)):
        raise Mxfp8Error(
            op,
            f"x {has or 'carries a tangent'}, and quantized values pass no derivative on",
            expected="an x without one",
            advice="run inference under torch.no_grad(); to train a program, packed or not, rewrite it with "
            "training=True; in your own code use mxfp8::linear_packed or linear_train",
        )


def _has_tangent(*tensors: Tensor | None) -> bool:
    """Whether a tensor carries a tangent of the innermost transform."""
    if torch._C._are_functorch_transforms_active():
        interpreter = torch._C._functorch.peek_interpreter_stack()
        if interpreter is not None and interpreter.key() != torch._C._functorch.TransformType.Jvp:
            return False  # an outer transform checks when it is the innermost one
    unpack: Any = forward_ad.unpack_dual
    return any(t is not None and unpack(t).tangent is not None for t in tensors)


def apply(function: Any, *arguments: Any) -> Any:
    """Returns function(*arguments) and records it, also inside torch.func.grad and its kin.

    There the autograd kernel of an op runs once per level, on the tensors of that level, as it should.
    `torch.autograd.Function` and `torch.library.register_autograd` would refuse that.
    """
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


def below_autograd(op: Any, *arguments: Any) -> Any:
    """Returns op(*arguments) as its kernel for the tensors' device computes it, recording nothing."""
    # Dispatch goes on below the autograd key: the op would otherwise call its autograd kernel again.
    with torch._C._AutoDispatchBelowAutograd():
        return op.default(*arguments)


def recorded(op: Any, *arguments: Any) -> Any:
    """Returns the same, for the forward pass of a function that `apply` records.

    That pass runs with derivatives off, and the outer levels of torch.func, which run next, would inherit the setting.
    """
    if not torch._C._are_functorch_transforms_active():
        return below_autograd(op, *arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below_autograd(op, *arguments)
