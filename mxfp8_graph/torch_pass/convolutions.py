"""Reads convolutions: the window, the weight with channels last, and the affine steps behind, which go into both.

conv1d, conv2d, convolution (x, w [O, C / group, k...], b)    the weight as [O, k..., C / group]
batch_norm, mul, div, add, sub behind                         times one factor, plus one number, for each channel
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Node

from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.operands import Static, StaticOperands
from mxfp8_graph.torch_pass.ops import Form
from mxfp8_graph.torch_pass.program import Program

_ATEN: Final = torch.ops.aten
_OPS: Final = internals.op_names("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
_NORMS: Final = internals.op_names("batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training")
_TRANSPOSED: Final = "a transposed convolution in a program; expected conv1d or conv2d, or the ONNX file of the model"

Floats = npt.NDArray[np.float32]
Line = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""(factor, number) of each channel, or one for all."""


@dataclass(frozen=True, kw_only=True)
class Convolution(Form):
    """A convolution of a with the weight b, plus c: a list has a number for each axis, pads the begins and the ends."""

    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    group: int = 1
    blocker: str | None = None
    """The reason why no recipe can rewrite it, or None."""


@dataclass(frozen=True, kw_only=True)
class Affine:
    """The steps behind a convolution that its weight and its bias take over."""

    factors: Floats | None
    """The factors of the weight, one for each output channel; None without a product."""
    numbers: Floats | None
    """The bias after these steps; None without a sum."""
    nodes: tuple[Node, ...]
    """The nodes of the steps. The last one has the result; the others go away."""


# --- The window and the weight


def form_of(node: Node) -> Convolution | None:
    """Returns the form of a convolution, or None for another op."""
    if (op := internals.op_name(node)) not in _OPS or "val" not in node.meta:
        return None
    x, w, c = (internals.argument(node, name) for name in ("input", "weight", "bias"))
    form = Convolution(a=x, b=w, c=c, b_transposed=False, group=internals.argument(node, "groups"))
    if "transpose" in op or internals.argument(node, "transposed"):
        return replace(form, blocker=_TRANSPOSED)
    axes = w.meta["val"].dim() - 2
    if x.meta["val"].dim() != axes + 2:
        return replace(form, blocker="its input has no batch axis; expected [N, C, ...]")
    strides, dilations = (_list(internals.argument(node, name), axes) for name in ("stride", "dilation"))
    padding = internals.argument(node, "padding")
    padding = padding if isinstance(padding, str) else _list(padding, axes)
    pads = pads_of(padding, w.meta["val"].shape[2:], dilations)
    return replace(form, strides=strides, pads=pads, dilations=dilations)


def pads_of(padding: str | Sequence[int], kernel: Sequence[int], dilations: Sequence[int]) -> tuple[int, ...]:
    """Returns the zeros before each axis, then behind each, for torch's `padding`: a text or a number for each axis."""
    if not isinstance(padding, str):
        return (*padding, *padding)
    totals = [d * (k - 1) * (padding == "same") for d, k in zip(dilations, kernel, strict=True)]
    # If a total is odd, the end has one zero more.
    return (*(total // 2 for total in totals), *(total - total // 2 for total in totals))


def _list(numbers: Sequence[int], axes: int) -> tuple[int, ...]:
    return tuple(numbers) * (axes if len(numbers) == 1 else 1)


def packed_weight(static: Static) -> tuple[Static, tuple[int, ...]]:
    """Returns (the weight as a matrix [O x taps, C / group], its shape [O, k..., C / group])."""
    o, c, *kernel = static.shape
    shape, matrix = (o, *kernel, c), (o * math.prod(kernel), c)
    moved = (_ATEN.permute.default, ([0, *range(2, len(static.shape)), 1],), ())
    steps = (*static.steps, moved, (_ATEN.reshape.default, ([*matrix],), ()))
    return replace(static, steps=steps, shape=matrix), shape


# --- The affine steps behind it


def affine_behind(program: Program, node: Node, form: Convolution, statics: StaticOperands) -> Affine:
    """Returns the steps behind a convolution that only it feeds."""
    outputs = form.b.meta["val"].shape[0]
    nodes: list[Node] = []
    lines: list[Line] = []
    last = node
    while (step := _step(last)) and (line := _line(program, step[0], last, statics)):
        if any(each.size not in {1, outputs} for each in line) or _writes(last, step[-1]):
            break
        lines.append(line)
        nodes += step
        last = step[-1]
    return affine_of(outputs, _values(program, form.c, statics), lines, nodes)


def affine_of(
    outputs: int, bias: npt.NDArray[np.float64] | None, lines: Sequence[Line], nodes: Sequence[Node] = ()
) -> Affine:
    """Returns the steps behind a convolution with this bias, whose lines are given first to last."""
    factors, numbers = np.ones(outputs), np.zeros(outputs) if bias is None else bias
    for factor, number in lines:
        factors, numbers = factors * factor, numbers * factor + number
    return Affine(
        factors=None if np.all(factors == 1) else factors.astype(np.float32),
        numbers=None if bias is None and not lines else numbers.astype(np.float32),
        nodes=tuple(nodes),
    )


def _step(x: Node) -> tuple[Node, ...]:
    """Returns the only user of x, with the getitem of its result if it makes several; () if there is no such user."""
    user = next(iter(x.users), None)
    if user is None or len(x.users) > 1 or user.op != "call_function":
        return ()
    if isinstance(user.meta.get("val"), torch.Tensor):
        nodes: tuple[Node, ...] = (user,)
    else:
        picks = list(user.users)
        nodes = (user, *picks) if len(picks) == 1 and picks[0].args[1:] == (0,) else ()
    # A result of another dtype or shape is no step per channel; as text, because sizes may be symbolic.
    return nodes if nodes and _kind(nodes[-1]) == _kind(x) else ()


def _kind(node: Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.dtype, str(tuple(value.shape))) if isinstance(value, torch.Tensor) else (node,)


def _writes(after: Node, last: Node) -> bool:
    """Returns True if an op between the two changes a tensor: the convolution will run where `last` is."""
    node = after.next
    while node is not last and not internals.written(node):
        node = node.next
    return node is not last


def _line(program: Program, node: Node, x: Node, statics: StaticOperands) -> Line | None:
    """Returns the line that a normalization in evaluation, or arithmetic of `x` and a constant is; else None."""
    op = internals.op_name(node)
    if op in _NORMS:
        return _batch_norm(program, node, x, statics)
    op = op.removesuffix("_")
    if op not in {"mul", "div", "add", "sub"} or len(node.args) != 2 or internals.argument(node, "rounding_mode"):
        return None
    first, second = node.args
    other = second if first is x else first
    if internals.argument(node, "alpha", 1) != 1 or not (first is x or op in {"mul", "add"}):
        return None
    rank = x.meta["val"].dim()
    shape = tuple(other.meta["val"].shape) if isinstance(other, Node) else ()
    # Only along the channels, the second axis.
    sizes = (1,) * (rank - len(shape)) + shape
    # torch multiplies by a number in float32, and its ONNX file has float32.
    number = np.array([np.float32(other)], np.float64) if isinstance(other, (int, float)) else None
    values = _values(program, other, statics) if number is None else number
    if values is None or len(sizes) != rank or math.prod(sizes) != sizes[1]:
        return None
    one, zero = np.ones(1), np.zeros(1)
    return {"mul": (values, zero), "div": (1 / values, zero), "add": (one, values), "sub": (one, -values)}[op]


def _batch_norm(program: Program, node: Node, x: Node, statics: StaticOperands) -> Line | None:
    if internals.argument(node, "training") or internals.argument(node, "input") is not x:
        return None
    mean, variance = (
        _values(program, internals.argument(node, f"running_{name}"), statics) for name in ("mean", "var")
    )
    affine = [internals.argument(node, name) for name in ("weight", "bias")]
    scale, shift = (_values(program, each, statics) for each in affine)
    if mean is None or variance is None or any(v is None for v, a in zip((scale, shift), affine, strict=True) if a):
        return None
    return norm_line(mean, variance, scale, shift, internals.argument(node, "eps"))


def norm_line(
    mean: npt.NDArray[np.float64],
    variance: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64] | None,
    shift: npt.NDArray[np.float64] | None,
    eps: float,
) -> Line:
    """Returns the line of a batch normalization by running statistics [C]."""
    factor = (1.0 if scale is None else scale) / np.sqrt(variance + np.float32(eps))
    return factor, (0.0 if shift is None else shift) - mean * factor


def _values(program: Program, node: Any, statics: StaticOperands) -> npt.NDArray[np.float64] | None:
    """Returns the values of a stored tensor, flat; None for any other operand."""
    static = statics.resolve(node)
    if static is None or static.broadcast or static.gather is not None:
        return None
    stored = program.tensor(static.name)
    if not internals.has_values(stored) or not stored.is_floating_point():
        return None
    return static.apply(stored).double().cpu().reshape(-1).numpy()
