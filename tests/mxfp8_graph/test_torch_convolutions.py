"""Convolutions of exported programs: which are packed, what is folded into them, and the bits that they give."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from grids import looped
from onnx_exports import data, exported, ours, program, run

torch = pytest.importorskip("torch")

from tensors import assert_equal  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_programs import Apply, call_targets, export, kept, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe  # noqa: E402
from mxfp8_ops import torch_ops  # noqa: E402, F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import ContractError  # noqa: E402

ops, functional = torch.ops.mxfp8, nn.functional
INT8 = Recipe(activations="int8", weight_format="int8")
WEIGHT_ONLY = Recipe(activations="unchanged", weight_format="int8")
X, SIGNAL = values(2, 32, 9, 8), values(2, 64, 30)
W, BIAS, C = values(24, 32, 3, 3, seed=1) / 16, values(24, seed=2), values(24, seed=3).abs() + 0.5


def packed(w: Tensor, element_format: str = "int8") -> tuple[Tensor, Tensor]:
    elements, scales = ops.quantize(w.movedim(1, -1).contiguous(), -1, element_format)
    return elements, scales


def rewritten(f: Callable[..., Any], x: Tensor, recipe: Any = INT8, decompose: bool = False, **weights: Tensor) -> Any:
    """Returns the rewritten program of f(module with these weights as buffers, x), and what it computes."""
    source = export(Apply(f, {}, weights), x)
    new, _ = mxfp8_graph.rewrite(source.run_decompositions() if decompose else source, recipe)
    return new, new.module()(x)


# --- The bits of the op -------------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[Any, Tensor, dict[str, Tensor], dict[str, Any]]] = {
    "2-D": (lambda m, x: functional.conv2d(x, m.w, m.b, (2, 1), 1, 2), X, {"w": W, "b": BIAS},
            {"strides": [2, 1], "pads": [1], "dilations": [2]}),
    "same": (lambda m, x: functional.conv2d(x, m.w[:, :, :2], None, 1, "same"), X, {"w": W},
             {"pads": [0, 1, 1, 1]}),
    "valid": (lambda m, x: functional.conv2d(x, m.w, None, 1, "valid"), X, {"w": W}, {}),
    "1-D": (lambda m, x: functional.conv1d(x, m.w, m.b, 3, 2), SIGNAL, {"w": values(20, 64, 5), "b": BIAS[:20]},
            {"strides": [3], "pads": [2]}),
    "groups": (lambda m, x: functional.conv1d(x, m.w, groups=2), SIGNAL, {"w": values(32, 32, 5)}, {"group": 2}),
    "float16": (lambda m, x: functional.conv2d(x, m.w, m.b), X.half(), {"w": W.half(), "b": BIAS.half()},
                {"dtype": torch.float16}),
}  # fmt: skip


@looped("case, decompose", [(case, decompose) for case in PLAIN for decompose in (False, True)])
def test_a_convolution_has_the_bits_of_the_op(case: str, decompose: bool) -> None:
    f, x, weights, settings = PLAIN[case]
    new, got = rewritten(f, x, decompose=decompose, **weights)
    w = weights["w"][:, :, :2] if case == "same" else weights["w"]
    bias = weights["b"].float() if "b" in weights else None
    assert torch.equal(got, ops.conv(x, *packed(w), bias, b_format="int8", **settings))
    assert "w" not in new.state_dict


@looped("recipe", [WEIGHT_ONLY, "mxint8-bf16"])
def test_weights_alone_are_packed(recipe: Any) -> None:
    new, got = rewritten(lambda m, x: functional.conv2d(x, m.w, m.b, 2, 1).relu(), X, recipe, w=W, b=BIAS)
    stored = new.state_dict["w_mxfp8"], new.state_dict["w_mxfp8_scales"]
    w = ops.dequantize(*stored, -1, "int8").movedim(-1, 1)
    assert torch.equal(got, functional.conv2d(X, w, BIAS, 2, 1).relu())
    assert mxfp8_graph.rewrite(new, recipe)[1].already_rewritten


# --- Folds --------------------------------------------------------------------------------------------------------


def norm(m: Any, x: Tensor) -> Tensor:
    return functional.batch_norm(functional.conv2d(x, m.w, m.b), m.mean, m.var, m.scale, m.shift)


def arithmetic(m: Any, x: Tensor) -> Tensor:
    return 2.0 * (functional.conv2d(x, m.w, m.b) * m.scale[:, None, None] + m.shift[:, None, None]) / 4 - 1


MEAN, SCALE, SHIFT = (values(24, seed=seed) for seed in (4, 5, 6))


FOLDED = ("w_mxfp8", "w_mxfp8_scales", "w_bias_f32")


@looped("f, recipe, decompose", itertools.product((norm, arithmetic), (INT8, WEIGHT_ONLY), (False, True)))
def test_what_is_linear_per_channel_goes_into_weight_and_bias(f: Any, recipe: Recipe, decompose: bool) -> None:
    scale, shift, mean, variance = (t.double() for t in (SCALE, SHIFT, MEAN, C))
    factor = scale / (variance + float(np.float32(1e-5))).sqrt() if f is norm else scale / 2
    number = shift + (BIAS - mean) * factor if f is norm else (BIAS * scale + shift) / 2 - 1
    more = {"mean": MEAN, "var": C} if f is norm else {}
    new, got = rewritten(f, X, recipe, decompose, w=W, b=BIAS, scale=SCALE, shift=SHIFT, **more)
    elements, scales, bias = (new.state_dict[name] for name in FOLDED)
    assert new.state_dict.keys() == {*FOLDED}
    assert_equal((elements, scales), packed(W * factor.float()[:, None, None, None]))
    torch.testing.assert_close(bias, number.float())
    if recipe is INT8:
        assert call_targets(new) == ["mxfp8.conv.default"]
        assert torch.equal(got, ops.conv(X, elements, scales, bias, b_format="int8"))
    else:
        w = ops.dequantize(elements, scales, -1, "int8").movedim(-1, 1)
        torch.testing.assert_close(got, functional.conv2d(X, w, bias))


KEPT_BEHIND: dict[str, Callable[..., Any]] = {
    "another user": lambda m, x: (y := functional.conv2d(x, m.w), y * m.c[:, None, None])[1] + y,
    "not per channel": lambda m, x: functional.conv2d(x, m.w) * m.c,
    "the batch's statistics": lambda m, x: functional.batch_norm(functional.conv2d(x, m.w), None, None, training=True),
    "another dtype": lambda m, x: functional.conv2d(x, m.w) * m.c.double()[:, None, None],
    "x is written to": lambda m, x: (z := x.clone(), y := functional.conv2d(z, m.w), z.relu_(), y * m.c[:, None, None])[
        3
    ],
}


@looped("case", KEPT_BEHIND)
def test_what_is_not_stays_behind(case: str) -> None:
    weights = {"w": W, "c": values(6) if case == "not per channel" else C}
    new, got = rewritten(KEPT_BEHIND[case], X, **weights)
    w = ops.dequantize(*packed(W), -1, "int8").movedim(-1, 1)
    x = ops.dequantize(*ops.quantize(X, 1, "int8"), 1, "int8")
    wanted = KEPT_BEHIND[case](Apply(KEPT_BEHIND[case], {}, {**weights, "w": w}), x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert torch.equal(new.state_dict["w_mxfp8"], packed(W)[0])


# --- What stays ---------------------------------------------------------------------------------------------------

KEPT: dict[str, tuple[Any, Tensor, Tensor, Any, str]] = {
    "preset": (functional.conv2d, X, W, "mxfp8", "convolution: E4M3 costs .* set convolutions: true"),
    "few channels": (functional.conv2d, X[:, :8], W[:, :8], INT8, "tiny: 8 input channels are below min_channels = 16"),
    "depthwise": (lambda x, w: functional.conv2d(x, w, groups=32), X, values(32, 1, 3, 3), INT8, "depthwise"),
    "groups": (
        lambda x, w: functional.conv2d(x, w, groups=2),
        X,
        W[:, :16],
        INT8,
        "2 groups of 16 input and 12 output",
    ),
    "transposed": (functional.conv_transpose2d, X, values(32, 24, 2, 2), INT8, "a transposed convolution in a program"),
    "3-D": (functional.conv3d, values(1, 32, 4, 4, 4), values(16, 32, 2, 2, 2), INT8, "a convolution over 3 axes"),
    "no batch": (functional.conv2d, X[0], W, INT8, "its input has no batch axis"),
    "computed": (lambda x, w: functional.conv2d(x, w * x.mean()), X, W, INT8, "its weight is computed"),
    "float64": (functional.conv2d, X.double(), W.double(), INT8, "dtype float64"),
}


@looped("case", KEPT)
def test_a_convolution_stays_with_a_reason(case: str) -> None:
    f, x, w, recipe, reason = KEPT[case]
    (got,) = kept(export(Apply(lambda m, x: f(x, m.w), {}, {"w": w}), x), recipe)
    assert re.match(reason, got), got


def test_training_keeps_convolutions() -> None:
    source = export(Apply(lambda m, x: functional.conv2d(x, m.w), {"w": W}), X)
    assert (
        "convolutions stay in high precision in training" in kept(source, Recipe(convolutions=True), training=True)[0]
    )
    with pytest.raises(ContractError, match="a packed convolution passes no gradients on"):
        mxfp8_graph.rewrite(mxfp8_graph.rewrite(source, INT8)[0], INT8, training=True)


# --- ONNX ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two convolutions with normalization and groups, and an uneven padding."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(32, 64, 2, padding="same", bias=False), nn.BatchNorm2d(64), nn.ReLU()
        self.body = nn.Sequential(*layers, nn.Conv2d(64, 32, 3, 2, 1, groups=2), nn.ReLU())
        self.body[1].load_state_dict(
            {k: values(64).abs() + 0.5 for k in ("weight", "bias", "running_mean", "running_var")}, strict=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@looped("recipe", [INT8, Recipe(convolutions=True), WEIGHT_ONLY])
def test_to_onnx_writes_the_bytes_of_the_onnx_pass(tmp_path: Path, recipe: Recipe) -> None:
    source = program(Net(), X)
    packed_program = mxfp8_graph.rewrite(source, recipe)[0]
    model = exported(packed_program, tmp_path / "a.onnx", overwrite=True)
    plain = torch.onnx.export(source, dynamo=True, opset_version=21, verbose=False).model_proto
    other = mxfp8_graph.rewrite(plain, recipe)[0]

    def weights(proto: onnx.ModelProto) -> list[Any]:
        return sorted(value for name, value in data(proto).items() if "mxfp8" in name)

    assert len(weights(model)) == 4
    assert weights(model) == weights(other)
    assert [node.op_type for node in ours(model)] == ["MXFP8Conv"] * (0 if recipe is WEIGHT_ONLY else 2)
    with torch.no_grad():
        y = packed_program.module()(X).numpy()
    for each in (tmp_path / "a.onnx", other):
        got = run(each, X.numpy(), kernels=True)
        np.testing.assert_allclose(got, y, rtol=0, atol=0 if recipe is not WEIGHT_ONLY else 1e-5 * np.abs(y).max())
