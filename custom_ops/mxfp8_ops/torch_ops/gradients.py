"""Shared by the ops with gradients: they record gradients in reverse mode, for backward() and torch.func.grad.

`torch.library.register_autograd` serves backward() alone: torch.func.grad refuses such an op, and torch.func.jvp
returns a tangent of zeros. It also takes 3 us more of a call that needs no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction, once_differentiable

from mxfp8_ops.errors import Mxfp8Error

Gradient = Tensor | None
Kernel = Callable[..., Any]

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
            advice=f"differentiate with backward(), torch.func.grad or torch.func.jacrev, or {instead}",
        )


def refuse_cut(op: str, x: Tensor, name: str = "x", why: str = "quantized values pass no derivative on") -> None:
    """Raises Mxfp8Error if x needs a derivative, and says why the op passes none on.

    It raises no error while torch.export traces: the exported program checks when it runs.
    """
    # requires_grad alone is no reason: under torch.no_grad nothing is recorded.
    has = "requires a gradient" if x.requires_grad and torch.is_grad_enabled() else ""
    if has and torch.compiler.is_exporting():
        return
    if has or (forward_ad._current_level >= 0 and _has_tangent(x)):
        raise Mxfp8Error(
            op,
            f"{name} {has or 'carries a tangent'}, and {why}",
            expected="a tensor without one",
            advice="run inference under torch.no_grad(); to train a program, packed or not, rewrite it with "
            "training=True; in your own code use mxfp8::linear_packed or linear_train",
        )


def _has_tangent(*tensors: Tensor | None) -> bool:
    """Returns True if a tensor carries a tangent of the innermost transform."""
    if torch._C._are_functorch_transforms_active():
        interpreter = torch._C._functorch.peek_interpreter_stack()
        if interpreter is not None and interpreter.key() != torch._C._functorch.TransformType.Jvp:
            return False  # an outer transform checks when it is the innermost one
    unpack: Any = forward_ad.unpack_dual
    return any(t is not None and unpack(t).tangent is not None for t in tensors)


def below_autograd(op: Any, *arguments: Any) -> Any:
    """Returns op(*arguments) from its kernel for the tensors' device, without a record for gradients."""
    # Dispatch goes on below the autograd key: the op would otherwise call its autograd kernel again.
    with torch._C._AutoDispatchBelowAutograd():
        return op.default(*arguments)


def kernel(name: str, places: tuple[int, ...], record: Kernel, instead: str, cpu: Kernel | None = None) -> Kernel:
    """Returns the autograd kernel of an op, which records a call that needs a gradient.

    `places` are the places, among the op's arguments, of the operands with gradients. `record` is from `recorder`,
    `instead` is the advice in the error for a tangent, `cpu` is the op's CPU kernel, if it is not made of others.
    """

    def autograd(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        # The level is below 0 outside of forward mode: a comparison instead of a call for nearly every use.
        if forward_ad._current_level >= 0:
            refuse_tangents(name, instead, *(args[at] for at in places if at < len(args)))
        for at in places:
            # Operands that are absent have no place: torch leaves out arguments that equal their defaults.
            if at < len(args) and (operand := args[at]) is not None and operand.requires_grad:
                if torch.is_grad_enabled():
                    return record(*args)
                break
        # The usual call goes straight to its kernel: a second pass through the dispatcher costs time.
        if cpu is not None and keys.raw_repr() == PLAIN_CPU:
            return cpu(*args)
        return below_autograd(getattr(torch.ops.mxfp8, name), *args)

    return autograd


def cut(name: str, cpu: Kernel) -> Kernel:
    """Returns the autograd kernel of an op that quantizes its first argument, and refuses one with a derivative."""

    def autograd(keys: torch._C.DispatchKeySet, x: Tensor, *args: Any) -> Any:
        refuse_cut(name, x)
        if keys.raw_repr() == PLAIN_CPU:
            return cpu(x, *args)
        return below_autograd(getattr(torch.ops.mxfp8, name), x, *args)

    return autograd


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `backward` with results that torch refuses to differentiate (`once_differentiable`)."""
    once: Any = once_differentiable(backward)

    def first(ctx: Any, grad: Tensor) -> Any:
        if ctx.recorded_outside or _recorded_outside(grad):
            raise Mxfp8Error(
                "mxfp8",
                "a gradient is to be differentiated again by torch.func",
                expected="first derivatives",
                advice="keep this layer in high precision, or detach what is not differentiated",
            )
        if torch._C._are_functorch_transforms_active():
            with torch.no_grad():
                return backward(ctx, grad)
        # torch checks only if `grad` is recorded; without this, it would drop the contribution of the operands.
        return once(ctx, grad.detach().requires_grad_() if torch.is_grad_enabled() else grad)

    return first


def _recorded_outside(t: Any) -> bool:
    """Returns True if an outer level of torch.func, or autograd outside of it, records ops on `t`."""
    while isinstance(t, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
        if t.requires_grad:
            return True
    return False


def recorder(name: str, places: tuple[int, ...], save: Callable[..., None], backward: Callable[..., Any]) -> Kernel:
    """Returns the function that computes an op and records it.

    `save` (ctx, inputs, output) is the `setup_context` of torch, for all arguments of the op; `backward`
    (ctx, gradient) returns one gradient for each of the places, which are as in `kernel`.
    """

    def forward(*arguments: Any) -> Any:
        op = getattr(torch.ops.mxfp8, name)
        if not torch._C._are_functorch_transforms_active():
            return below_autograd(op, *arguments)
        # A forward pass runs with derivatives off, and the outer levels of torch.func, which run next, would inherit
        # the setting.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below_autograd(op, *arguments)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.recorded_outside = any(map(_recorded_outside, inputs))
        save(ctx, inputs, output)

    def by_argument(ctx: Any, grad: Tensor) -> tuple[Gradient, ...]:
        by_place: list[Gradient] = [None] * len(_defaults(name))  # of all arguments: `record` passes them all
        for at, gradient in zip(places, backward(ctx, grad), strict=True):
            by_place[at] = gradient
        return tuple(by_place)

    # In a graph of autograd a node has the name of its class: _WeightGemmBackward.
    title = "_" + name.title().replace("_", "")
    methods = {"forward": forward, "setup_context": setup, "backward": by_argument}
    function: Any = type(title, (_SingleLevelFunction,), {key: staticmethod(f) for key, f in methods.items()})

    def record(*args: Any) -> Any:
        # Under torch.func the autograd kernel of an op runs once per level, on the tensors of that level, as it should.
        # `torch.autograd.Function` and `torch.library.register_autograd` would refuse that.
        with enable_single_level_autograd_function():
            return function.apply(*args, *_defaults(name)[len(args) :])

    return record


@functools.cache
def _defaults(name: str) -> tuple[Any, ...]:
    """Returns the default of each argument of an op. Cached: each read of a schema makes all of its arguments again."""
    return tuple(argument.default_value for argument in getattr(torch.ops.mxfp8, name).default._schema.arguments)


def dtype_of(weight: Tensor) -> torch.dtype:
    """Returns the dtype of the gradient of a weight: its own, or the `grad_dtype` of a parameter."""
    # Only leaves have it, and None there stands for any dtype.
    wanted: torch.dtype | None = weight.grad_dtype if weight.is_leaf else None
    return wanted or weight.dtype


def of_bias(ctx: Any, at: int, grad: Tensor) -> Gradient:
    """Returns the gradient of a float32 bias [N], the argument at place `at`, if it is needed."""
    # Summed in float32: a sum over many rows of bfloat16 would lose the last of them.
    return grad.float().sum_to_size(grad.shape[-1]) if ctx.needs_input_grad[at] else None
