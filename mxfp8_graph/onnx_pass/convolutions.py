"""Reads convolutions: the window, the weight with channels last, and the affine steps behind, which go into both.

    Conv(x, w [O, C / group, k...], b)               the weight as [O, k..., C / group]
    ConvTranspose(x, w [C, O / group, k...], b)      a convolution of phases: see `Convolution.phases`
    BatchNormalization, Mul, Div, Add, Sub behind    times one factor, plus one number, for each output channel

A stride s of ConvTranspose puts s - 1 pixels between two of x. Output pixel s * q + r, its phase r, reads the taps
r, r + s, r + 2 s, ... only. So the phases are outputs [O, phases] of one convolution over x, with ceil(k / s) taps and
stride 1. Nodes behind it interleave them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.forms import Form, Resolve, first_two, optional
from mxfp8_graph.onnx_pass.graph import attribute, is_op, shape_of
from mxfp8_graph.onnx_pass.views import Static, apply

Floats = npt.NDArray[np.float32]
Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Convolution(Form):
    """A convolution of a with the weight b, plus c: a list has a number for each axis, pads the begins and the ends."""

    strides: Sizes = ()
    pads: Sizes = ()
    dilations: Sizes = ()
    group: int = 1
    phases: Sizes = ()
    """The strides of ConvTranspose; () for Conv."""
    cut: Sizes = ()
    """Pixels to cut off the interleaved phases: begins, then ends."""


@dataclass(frozen=True, kw_only=True)
class Affine:
    """The steps behind a convolution that its weight and its bias take over, for each of its outputs and phases."""

    factors: Floats | None
    """The factors of the weight; None without a product."""
    numbers: Floats | None
    """The bias after these steps; None without a sum."""
    nodes: tuple[ir.Node, ...]
    """The nodes of the steps, which go away."""
    output: ir.Value
    """The result of the last."""


# --- The window


def conv(node: ir.Node, resolve: Resolve) -> Convolution:
    """Returns the form of Conv."""
    x, w = first_two(node)
    form = Convolution(a=x, b=w, c=optional(node, 2), group=attribute(node, "group", 1))
    weight = resolve(w)
    if weight is None or len(weight.shape) < 3:
        return form
    kernel = weight.shape[2:]
    ones = (1,) * len(kernel)
    strides, dilations = (tuple(attribute(node, name, ones)) for name in ("strides", "dilations"))
    form = _checked(replace(form, strides=strides, pads=(0, 0) * len(kernel), dilations=dilations), len(kernel))
    pads = form.blocker or _pads(node, kernel, strides, dilations)
    return replace(form, blocker=pads) if isinstance(pads, str) else _checked(replace(form, pads=pads), len(kernel))


def _checked(form: Convolution, axes: int) -> Convolution:
    """Returns a form, blocked if its lists do not fit its axes."""
    fits = [len(form.strides), len(form.dilations), len(form.pads)] == [axes, axes, 2 * axes]
    if fits and min(*form.strides, *form.dilations, form.group) > 0 and min(form.pads) >= 0:
        return form
    lists = f"strides {[*form.strides]}, dilations {[*form.dilations]}, pads {[*form.pads]}, group {form.group}"
    return replace(form, blocker=f"{lists}; expected {axes}, {axes} and {2 * axes} numbers, none negative")


def conv_transpose(node: ir.Node, resolve: Resolve) -> Convolution:
    """Returns the form of ConvTranspose."""
    x, w = first_two(node)
    form = Convolution(a=x, b=w, c=optional(node, 2), group=attribute(node, "group", 1), phases=(1,))
    weight = resolve(w)
    if weight is None or len(weight.shape) < 3:
        return form
    kernel = weight.shape[2:]
    ones = (1,) * len(kernel)
    strides = tuple(attribute(node, "strides", ones))
    obstacle = None
    pads = tuple(attribute(node, "pads", (0,) * 2 * len(kernel)))
    paddings = tuple(attribute(node, "output_padding", (0,) * len(kernel)))
    form = _checked(replace(form, strides=strides, pads=pads, dilations=ones), len(kernel))
    if form.blocker or len(paddings) != len(kernel):
        return form if form.blocker else replace(form, blocker=f"output_padding {[*paddings]}; expected one per axis")
    if attribute(node, "output_shape", None) or attribute(node, "auto_pad", "NOTSET") not in {"NOTSET", "VALID"}:
        obstacle = "its pads follow from the size of the output; expected pads as numbers"
    elif any(step != 1 for step in attribute(node, "dilations", ones)):
        obstacle = "a transposed convolution with dilations; expected dilations of 1"
    elif len({*strides}) > 1:
        obstacle = f"a transposed convolution with strides {list(strides)}; expected one for all axes"
    if obstacle is not None:
        return replace(form, blocker=obstacle)
    begins, ends, first, last = [], [], [], []
    for k, s, begin, end, extra in zip(kernel, strides, pads, pads[len(kernel) :], paddings, strict=False):
        taps = -(-k // s)
        # Whole positions that the pads cut off are not computed; the rest of them is cut off the phases.
        skipped = min(begin // s, taps - 1)
        begins.append(taps - 1 - skipped)
        ends.append(max(0, taps - 1 - (taps * s - k - extra + end) // s))
        first.append(begin - skipped * s)
        last.append((ends[-1] + 1) * s - k - extra + end)
    pads, cut = (*begins, *ends), (*first, *last)
    return replace(form, strides=ones, pads=pads, dilations=ones, phases=strides, cut=cut)


def _pads(node: ir.Node, kernel: Sizes, strides: Sizes, dilations: Sizes) -> Sizes | str:
    """Returns the zeros around x, or the reason why they are not known."""
    automatic = attribute(node, "auto_pad", "NOTSET")
    if automatic in {"NOTSET", "VALID"}:
        none = (0,) * 2 * len(kernel)
        return tuple(attribute(node, "pads", none)) if automatic == "NOTSET" else none
    shape = shape_of(node.inputs[0]) if node.inputs[0] is not None else None
    sizes = (None,) * len(kernel) if shape is None else shape[2:]
    totals = []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=False):
        if s > 1 and not isinstance(size, int):
            return f"auto_pad {automatic} of a size that is not known; give the model shape information"
        steps = (-(-size // s) - 1) * s - size if isinstance(size, int) else -1  # -1 for a stride of 1, of any size
        total = steps + d * (k - 1) + 1
        if total < -1:  # ONNX Runtime then begins behind the first pixel
            return f"auto_pad {automatic} with a kernel of {k} and a stride of {s}; expected pads as numbers"
        totals.append(max(0, total))
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*small, *large) if automatic == "SAME_UPPER" else (*large, *small)


# --- The weight


def packed_weight(static: Static, form: Convolution) -> tuple[Static, Sizes]:
    """Returns (the weight as a matrix [outputs x taps, C / group], its shape [outputs, taps..., C / group])."""
    if not form.phases:
        o, c, *kernel = static.shape
        axes = range(2, len(static.shape))
        shape = (o, *kernel, c)
        return _matrix(static.then("Transpose", (0, *axes, 1), shape=shape), shape), shape
    (all_c, o, *kernel), g, count = static.shape, form.group, len(form.phases)
    c, sizes = all_c // g, list(kernel)
    for axis, (k, s) in enumerate(zip(kernel, form.phases, strict=True)):
        sizes[axis] = -(-k // s) * s
        if sizes[axis] > k:
            shape = (all_c, o, *sizes[: axis + 1], *kernel[axis + 1 :])
            static = static.then("Pad", (axis + 2, sizes[axis] - k), shape=shape)
    split = [part for size, s in zip(sizes, form.phases, strict=True) for part in (size // s, s)]
    static = static.then("Reshape", (g, c, o, *split), shape=(g, c, o, *split))
    taps, phases = range(3, 3 + 2 * count, 2), range(4, 4 + 2 * count, 2)
    # A tap further back reads an earlier pixel, and a convolution reads later pixels by its later taps.
    static = static.then("Flip", tuple(taps))
    perm = (0, 2, *phases, *taps, 1)
    static = static.then("Transpose", perm, shape=tuple(static.shape[axis] for axis in perm))
    shape = (g * o * math.prod(form.phases), *split[::2], c)
    return _matrix(static, shape), shape


def _matrix(static: Static, shape: Sizes) -> Static:
    matrix = (math.prod(shape[:-1]), shape[-1])
    return static.then("Reshape", matrix, shape=matrix)


# --- The affine steps behind it


def affine_behind(node: ir.Node, form: Convolution, outputs: int, resolve: Resolve) -> Affine:
    """Returns the steps behind a convolution with `outputs` channels that only it feeds."""
    bias, rank = resolve(form.c), len(form.strides) + 2
    factors, numbers = np.ones(outputs), np.zeros(outputs) if bias is None else _values(bias)
    nodes: list[ir.Node] = []
    output = node.outputs[0]
    while (step := _only_user(output)) is not None and step.graph is node.graph:
        read = _batch_norm if is_op(step, "BatchNormalization") else _arithmetic
        line = read(step, output, rank, resolve)
        if line is None or any(each.size not in {1, outputs} for each in line):
            break
        factors, numbers = factors * line[0], numbers * line[0] + line[1]
        nodes.append(step)
        output = step.outputs[0]
    phases = math.prod(form.phases)
    return Affine(
        factors=None if np.all(factors == 1) else np.repeat(factors.astype(np.float32), phases),
        numbers=None if bias is None and not nodes else np.repeat(numbers.astype(np.float32), phases),
        nodes=tuple(nodes),
        output=output,
    )


Line = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""(factor, number) of each channel, or one for all."""


def _batch_norm(node: ir.Node, x: ir.Value, rank: int, resolve: Resolve) -> Line | None:
    """Returns the line that a BatchNormalization in inference is; None if an operand is computed."""
    operands = [resolve(value) for value in node.inputs[1:]]
    if len(node.outputs) > 1 or attribute(node, "training_mode", 0) or node.inputs[0] is not x:
        return None
    scale, shift, mean, variance = (None if each is None else _values(each) for each in operands)
    if scale is None or shift is None or mean is None or variance is None:
        return None
    factor = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
    return factor, shift - mean * factor


def _arithmetic(node: ir.Node, x: ir.Value, rank: int, resolve: Resolve) -> Line | None:
    """Returns the line that Mul, Div, Add or Sub of `x` and a constant is, or None."""
    if not is_op(node, "Mul", "Div", "Add", "Sub") or len(node.inputs) != 2:
        return None
    first = node.inputs[0] is x
    static = resolve(node.inputs[1] if first else node.inputs[0])
    if static is None or static.repeated_axes or not (first or is_op(node, "Mul", "Add")):
        return None
    # Only along the channels, the second axis; a constant of more axes would repeat the result.
    sizes = (1,) * (rank - len(static.shape)) + static.shape
    if len(sizes) != rank or math.prod(sizes) != sizes[1]:
        return None
    values, zero, one = _values(static), np.zeros(1), np.ones(1)
    match node.op_type:
        case "Mul":
            return values, zero
        case "Div":
            return 1 / values, zero
        case "Add":
            return one, values
        case _:
            return one, -values


def _values(static: Static) -> npt.NDArray[np.float64]:
    return apply(static.steps, static.tensor.numpy()).astype(np.float64).reshape(-1)


def _only_user(value: ir.Value) -> ir.Node | None:
    """Returns the one node that uses a value, once; None if there are others, or the model returns it."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
