"""Convolutions of exported programs: which are packed, what is folded into them, and the bits that they give."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import looped
from onnx_exports import data, exported, ours, run

torch = pytest.importorskip("torch")

from tensors import assert_equal  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_programs import Apply, call_targets, export, kept, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_ops import torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError  # noqa: E402

ops, functional = torch.ops.mxfp8, torch.nn.functional
INT8 = Recipe(activations="int8", weight_format="int8")
WEIGHT_ONLY = Recipe(activations="unchanged", weight_format="int8")
X, SIGNAL = values(2, 32, 9, 8), values(2, 64, 30)
W, BIAS, C = values(24, 32, 3, 3, seed=1) / 16, values(24, seed=2), values(24, seed=3).abs() + 0.5


MEAN, SCALE, SHIFT = (values(24, seed=seed) for seed in (4, 5, 6))
CONV = functional.conv2d


def packed(w: Tensor) -> Any:
    return ops.quantize(w.movedim(1, -1), -1, "int8")


def unpacked(elements: Tensor, scales: Tensor) -> Tensor:
    w: Tensor = ops.dequantize(elements, scales, -1, "int8").movedim(-1, 1)
    return w


def rewritten(f: Callable[..., Any], x: Tensor, recipe: Any = INT8, decompose: bool = False, **weights: Tensor) -> Any:
    """Returns the rewritten program of f(module with these weights as buffers, x), and what it computes."""
    source = export(Apply(f, {}, weights), x)
    new, _ = mxfp8_graph.rewrite(source.run_decompositions() if decompose else source, recipe)
    return new, new.module()(x)


# --- The bits of the op -------------------------------------------------------------------------------------------

PLAIN: list[tuple[Any, Tensor, Tensor, dict[str, Any]]] = [
    (lambda m, x: CONV(x, m.w, m.b, (2, 1), 1, 2), X, W, {"strides": [2, 1], "pads": [1], "dilations": [2]}),
    (lambda m, x: CONV(x, m.w, m.b, 1, "same"), X, W[:, :, :2].clone(), {"pads": [0, 1, 1, 1]}),
    (lambda m, x: CONV(x, m.w, m.b, 1, "valid"), X, W, {}),
    (lambda m, x: functional.conv1d(x, m.w, m.b, 3, 2), SIGNAL, values(24, 64, 5), {"strides": [3], "pads": [2]}),
    (lambda m, x: functional.conv1d(x, m.w, groups=2), SIGNAL, values(32, 32, 5), {"group": 2}),
    (lambda m, x: CONV(x, m.w, m.b), X.half(), W.half(), {"dtype": torch.float16}),
]


@looped("f, x, w, settings, decompose", [(*case, decompose) for case in PLAIN for decompose in (False, True)])
def test_a_convolution_has_the_bits_of_the_op(f: Any, x: Tensor, w: Tensor, settings: Any, decompose: bool) -> None:
    bias = None if "group" in settings else BIAS
    new, got = rewritten(f, x, decompose=decompose, w=w, b=BIAS.to(w.dtype))
    bias = None if bias is None else bias.to(w.dtype).float()
    assert torch.equal(got, ops.conv(x, *packed(w), bias, b_format="int8", **settings))
    assert "w" not in new.state_dict


@looped("recipe", [WEIGHT_ONLY, "mxint8-bf16"])
def test_weights_alone_are_packed(recipe: Any) -> None:
    new, got = rewritten(lambda m, x: CONV(x, m.w, m.b, 2, 1).relu(), X, recipe, w=W, b=BIAS)
    w = unpacked(new.state_dict["w_mxfp8"], new.state_dict["w_mxfp8_scales"])
    assert torch.equal(got, CONV(X, w, BIAS, 2, 1).relu())
    assert mxfp8_graph.rewrite(new, recipe)[1].already_rewritten


# --- Folds --------------------------------------------------------------------------------------------------------


def norm(m: Any, x: Tensor) -> Tensor:
    return functional.batch_norm(CONV(x, m.w, m.b), m.mean, m.var, m.scale, m.shift)


def arithmetic(m: Any, x: Tensor) -> Tensor:
    return 2.0 * (CONV(x, m.w, m.b) * m.scale[:, None, None] + m.shift[:, None, None]) / 4 - 1


@looped("f, recipe, decompose", itertools.product((norm, arithmetic), (INT8, WEIGHT_ONLY), (False, True)))
def test_what_is_linear_per_channel_goes_into_weight_and_bias(f: Any, recipe: Recipe, decompose: bool) -> None:
    scale, shift, mean, variance = (t.double() for t in (SCALE, SHIFT, MEAN, C))
    factor = scale / (variance + float(np.float32(1e-5))).sqrt() if f is norm else scale / 2
    number = shift + (BIAS - mean) * factor if f is norm else (BIAS * scale + shift) / 2 - 1
    more = {"mean": MEAN, "var": C} if f is norm else {}
    new, got = rewritten(f, X, recipe, decompose, w=W, b=BIAS, scale=SCALE, shift=SHIFT, **more)
    elements, scales, bias = (new.state_dict.pop(name) for name in ("w_mxfp8", "w_mxfp8_scales", "bias_f32"))
    assert not new.state_dict
    assert_equal((elements, scales), packed(W * factor.float()[:, None, None, None]))
    torch.testing.assert_close(bias, number.float())
    if recipe is INT8:
        assert call_targets(new) == ["mxfp8.conv.default"]
        assert torch.equal(got, ops.conv(X, elements, scales, bias, b_format="int8"))
    else:
        torch.testing.assert_close(got, CONV(X, unpacked(elements, scales), bias))


def written(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    y = CONV(z, m.w)
    z.relu_()
    return y * m.c[:, None, None]


@looped("f", [
    lambda m, x: (y := CONV(x, m.w), y * m.c[:, None, None])[1] + y,
    lambda m, x: CONV(x, m.w) * m.c[:6],
    lambda m, x: functional.batch_norm(CONV(x, m.w), None, None, training=True),
    lambda m, x: CONV(x, m.w) * m.c.double()[:, None, None],
    written,
])  # fmt: skip
def test_what_is_not_stays_behind(f: Any) -> None:
    new, got = rewritten(f, X, w=W, c=C)
    wanted = f(
        Apply(f, {}, {"w": unpacked(*packed(W)), "c": C}), ops.dequantize(*ops.quantize(X, 1, "int8"), 1, "int8")
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert torch.equal(new.state_dict["w_mxfp8"], packed(W)[0])


# --- What stays ---------------------------------------------------------------------------------------------------


@looped("f, x, w, recipe, reason", [
    (CONV, X, W, "mxfp8", "convolution: E4M3 costs .* set convolutions: true"),
    (CONV, X[:, :8], W[:, :8], INT8, "tiny: 8 input channels are below min_channels = 16"),
    (lambda x, w: CONV(x, w, groups=32), X, values(32, 1, 3, 3), INT8, "depthwise"),
    (lambda x, w: CONV(x, w, groups=2), X, W[:, :16], INT8, "2 groups of 16 input and 12 output"),
    (functional.conv_transpose2d, X, values(32, 24, 2, 2), INT8, "a transposed convolution in a program"),
    (functional.conv3d, values(1, 32, 4, 4, 4), values(16, 32, 2, 2, 2), INT8, "a convolution over 3 axes"),
    (CONV, X[0], W, INT8, "its input has no batch axis"),
    (lambda x, w: CONV(x, w * x.mean()), X, W, INT8, "its weight is computed"),
    (CONV, X.double(), W.double(), INT8, "dtype float64"),
])  # fmt: skip
def test_a_convolution_stays_with_a_reason(f: Any, x: Tensor, w: Tensor, recipe: Any, reason: str) -> None:
    (got,) = kept(export(Apply(lambda m, x: f(x, m.w), {}, {"w": w}), x), recipe)
    assert re.match(reason, got), got


def test_training_keeps_convolutions() -> None:
    source = export(Apply(lambda m, x: CONV(x, m.w), {"w": W}), X)
    (reason,) = kept(source, Recipe(convolutions=True), training=True)
    assert "convolutions stay in high precision in training" in reason
    with pytest.raises(ContractError, match="a packed convolution passes no gradients on"):
        mxfp8_graph.rewrite(mxfp8_graph.rewrite(source, INT8)[0], INT8, training=True)


# --- ONNX ---------------------------------------------------------------------------------------------------------


def net(m: Any, x: Tensor) -> Tensor:
    y = functional.batch_norm(CONV(x, m.w[:, :, :2, :2], None, 1, "same"), m.mean, m.var, m.scale, m.shift).relu()
    return CONV(y, m.w[:, :24], m.b, 2, 1).relu()


@looped("recipe", [INT8, Recipe(convolutions=True), WEIGHT_ONLY])
def test_to_onnx_writes_the_bytes_of_the_onnx_pass(tmp_path: Path, recipe: Recipe) -> None:
    weights = {"w": W, "b": BIAS, "mean": MEAN, "var": C, "scale": SCALE, "shift": SHIFT}
    source = export(Apply(net, {}, weights), X)
    new = mxfp8_graph.rewrite(source, recipe)[0]
    model = exported(new, tmp_path / "a.onnx", overwrite=True)
    plain = torch.onnx.export(source, dynamo=True, opset_version=21, verbose=False).model_proto
    other = mxfp8_graph.rewrite(plain, recipe)[0]
    stored, theirs = (sorted(t for name, t in data(m).items() if "mxfp8" in name) for m in (model, other))
    assert len(stored) == 4
    assert stored == theirs
    assert [node.op_type for node in ours(model)] == ["MXFP8Conv"] * (0 if recipe is WEIGHT_ONLY else 2)
    y = new.module()(X).numpy()
    for each in (tmp_path / "a.onnx", other):
        bound = 1e-5 * np.abs(y).max() if recipe is WEIGHT_ONLY else 0  # ONNX Runtime's own sums, and ours
        np.testing.assert_allclose(run(each, X.numpy(), kernels=True), y, rtol=0, atol=bound)
