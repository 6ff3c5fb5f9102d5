"""Convolutions: what is rewritten, what goes into the node, and what is kept with which reason.

Integers up to 8 are exact in E4M3 and in INT8, and so are sums of their products in float32: the rewritten model must
give what ONNX Runtime computes of the original, to the bit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from contrib_models import integers
from grids import looped
from models import text_model
from onnx import helper
from oracle import kinds, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, load_recipe
from mxfp8_graph.policy import presets
from mxfp8_ops import cpu
from mxfp8_ops.errors import RecipeError
from mxfp8_ops.onnx_functions import settings_of

pytestmark = pytest.mark.usefixtures("runtime")

F32 = np.float32
X2, X1 = (2, 40, 7, 6), (2, 40, 9)
RECIPES = ("mxint8", "mxint8-weight-only", Recipe(convolutions=True))


def conv(text: str, x: tuple[int, ...] = X2, *, sizes: tuple[Any, ...] | None = None, **stored: Any) -> onnx.ModelProto:
    """y = the nodes of `text` on x; y has unknown sizes, and x has `sizes`, or its own."""
    names = re.findall(r"\w+", text)
    weights = {name: integers(*shape) for name, shape in SHAPES.items() if name in names}
    constants = {name: array for name, array in stored.items() if name in names}
    return text_model(text, sizes or x, [None] * len(x), **weights | constants)


def exact(proto: onnx.ModelProto, recipe: Any, nodes: dict[str, int] | None = None, *, fuse: bool = False) -> Any:
    """Rewrites a model; fails unless it has those nodes and computes the same to the bit. Returns its convolution."""
    declared = proto.graph.input[0].type.tensor_type
    shape = [dim.dim_value or 5 for dim in declared.shape.dim]
    x = integers(*shape, seed=3).astype(helper.tensor_dtype_to_np_dtype(declared.elem_type))
    result, _ = rewrite(proto, recipe, fuse=fuse)
    assert nodes is None or kinds(result) == nodes
    np.testing.assert_array_equal(run(result, {"x": x})[0], run(proto, {"x": x})[0])
    return next((node for node in result.graph.node if node.op_type in {"MXFP8Conv", "Conv"}), None)


# --- Forms -----------------------------------------------------------------------------------------------------------

SHAPES = {
    **{"w": (24, 40, 3, 3), "w1": (24, 40, 4), "wg": (32, 32, 2, 1), "b": (24,)},
    **{"wt": (40, 24, 4, 4), "wt1": (40, 24, 5), "wtg": (64, 24, 2, 2)},
}
"""The shapes of the weights."""


@dataclass
class Case:
    """Nodes from x to y, the shape of x, and the nodes of the result beside the convolution."""

    text: str
    x: tuple[int, ...] = X2
    nodes: dict[str, int] = field(default_factory=dict)
    sizes: tuple[Any, ...] | None = None


SLICE, PIXELS = {"Slice": 1, "Constant": 3}, {"DepthToSpace": 1}
TURNED = {"Reshape": 2, "Transpose": 1, "Constant": 5, "Slice": 1}
CASES = {
    "plain": Case("Conv x w>y"),
    "bias, pads, strides": Case("Conv x w b>y|pads=[1,0,2,1] strides=[2,1]"),
    "dilations": Case("Conv x w>y|dilations=[2,1]"),
    "one axis": Case("Conv x w1 b>y|pads=[3,1] dilations=[2]", X1),
    "sizes unknown": Case("Conv x w>y|pads=[1,1,1,1]", sizes=("n", 40, "h", "w")),
    "same, upper": Case("Conv x w>y|auto_pad='SAME_UPPER' strides=[2,2]"),
    "same, lower": Case("Conv x w>y|auto_pad='SAME_LOWER' strides=[2,2]"),
    "same, sizes unknown": Case("Conv x w>y|auto_pad='SAME_LOWER'", sizes=("n", 40, "h", "w")),
    "valid": Case("Conv x w>y|auto_pad='VALID'"),
    "groups": Case("Conv x wg>y|group=2", (2, 64, 7, 6)),
    "views before the weight": Case("Transpose w>v|perm=[1,0,2,3]; Transpose v>u|perm=[1,0,2,3]; Conv x u>y"),
    "transposed": Case("ConvTranspose x wt b>y|strides=[2,2]", nodes=PIXELS),
    "transposed, pads": Case("ConvTranspose x wt>y|strides=[2,2] pads=[1,1,1,1]", nodes=PIXELS | SLICE),
    "transposed, more pads": Case("ConvTranspose x wt>y|strides=[2,2] pads=[3,2,2,3]", nodes=PIXELS | SLICE),
    "transposed, longer": Case("ConvTranspose x wt>y|strides=[3,3] output_padding=[1,2]", nodes=PIXELS | SLICE),
    "transposed, stride 1": Case("ConvTranspose x wt>y"),
    "transposed, one axis": Case("ConvTranspose x wt1 b>y|strides=[2] pads=[1,0]", X1, TURNED),
    "transposed, groups": Case("ConvTranspose x wtg>y|strides=[2,2] group=2", (2, 64, 3, 3), PIXELS),
}  # fmt: skip


@looped("name", CASES)
def test_each_form_computes_the_same(name: str) -> None:
    case = CASES[name]
    proto = conv(case.text, case.x, sizes=case.sizes)
    for recipe in RECIPES:
        weight_only = recipe == "mxint8-weight-only"
        exact(proto, recipe, None if weight_only else {"MXFP8Conv": 1, **case.nodes})


def test_nodes_with_other_windows_and_without_residual_share_a_body() -> None:
    text = "Conv x w>p|pads=[1,1,1,1] strides=[2,2]; Conv x u>q|pads=[1,1,1,1]; Add q x>r; Neg p>z; Neg r>y"
    exact(conv(text, u=integers(40, 40, 3, 3)), "mxint8", {"MXFP8Conv": 2, "Neg": 2}, fuse=True)


def test_16_bits_keep_their_dtype() -> None:
    w, b = integers(24, 40, 3, 3).astype(np.float16), integers(24).astype(np.float16)
    for text in ("Conv x w>y", "Conv x w b>y", "Conv x w>h; Add h b1>y"):
        stored = {name: array for name, array in (("b", b), ("b1", b[:, None, None])) if f" {name}>" in text}
        proto = text_model(text, X2, [None] * 4, dtype=np.float16, w=w, **stored)
        for recipe in RECIPES[:2]:
            exact(proto, recipe)


# --- What a convolution takes over -----------------------------------------------------------------------------------

NORM = {"s": np.full(24, 2.0, F32), "o": integers(24), "m": integers(24, seed=5), "v": np.full(24, 0.25, F32)}
PER = {"p": integers(24, 1, 1, seed=6), "q": np.full((1, 24, 1, 1), 0.5, F32), "two": F32(2)}
FOLDS = {
    "batch norm": "BatchNormalization h s o m v>y|epsilon=0.0",
    "mul, add, sub, div": "Mul h q>i; Add p i>j; Sub j p>k; Div k two>y",
    "batch norm and a factor": "BatchNormalization h s o m v>i|epsilon=0.0; Mul two i>y",
}


@looped("name, bias", [(name, bias) for name in FOLDS for bias in ("", " b")])
def test_affine_steps_go_into_the_weight_and_the_bias(name: str, bias: str) -> None:
    for op, w in (("Conv", "w"), ("ConvTranspose", "wt")):
        proto = conv(f"{op} x {w}{bias}>h; {FOLDS[name]}", **NORM | PER)
        for recipe in RECIPES:
            assert exact(proto, recipe) is not None
            assert not {"BatchNormalization", "Add", "Sub", "Div"} & kinds(rewrite(proto, recipe)[0]).keys()


@looped("text", [
    "Mul h row>y",  # along pixels
    "Sub two h>y",
    "Mul h q>y; Neg h>z",  # the sum is needed without the factor
    "Mul h h>y",
])  # fmt: skip
def test_other_steps_stay(text: str) -> None:
    proto = conv(f"Conv x w>h; {text}", row=integers(1, 4), **PER)
    assert exact(proto, "mxint8", {"MXFP8Conv": 1} | {step.split()[0]: 1 for step in text.split("; ")}) is not None


# --- Activations and residuals ---------------------------------------------------------------------------------------

ACTIVATIONS = {
    "Relu h>y": ("relu", 0, 0),
    "Clip h zero six>y": ("clip", 0, 6),
    "Clip h one>y": ("clip", 1, 3.4e38),
    "Clip h - six>y": ("clip", -3.4e38, 6),
    "Max h one>a; Min a six>y": ("clip", 1, 6),
    "LeakyRelu h>y|alpha=0.25": ("leaky_relu", 0.25, 0),
    "HardSwish h>y": ("hard_swish", 1 / 6, 0.5),
    "HardSigmoid h>a|alpha=0.25 beta=0.5; Mul a h>y": ("hard_swish", 0.25, 0.5),
    "Add h three>a; Clip a zero six>c; Mul h c>d; Div d six>y": ("hard_swish", 1 / 6, 0.5),
    "Sigmoid h>a; Mul h a>y": ("silu", 0, 0),
    "Gelu h>y": ("gelu", 0, 0),
    "Tanh h>y": None,
}
NUMBERS = {"zero": F32(0), "one": F32(1), "three": F32(3), "six": F32(6)}


@looped("text", ACTIVATIONS)
def test_an_activation_becomes_the_epilogue(text: str) -> None:
    proto, x = conv(f"Conv x w>h; {text}", **NUMBERS), integers(*X2) / 64
    result, _ = rewrite(proto, "mxint8", fuse=True)
    settings = settings_of(next(node for node in result.graph.node if node.op_type == "MXFP8Conv"))
    expected = ACTIVATIONS[text] or ("none", 0, 0)
    assert settings["epilogue"] == expected[0]
    np.testing.assert_allclose([settings["alpha"], settings["beta"]], expected[1:], rtol=0.01)
    assert ("Tanh" in kinds(result)) == (ACTIVATIONS[text] is None)
    np.testing.assert_allclose(run(result, {"x": x})[0], run(proto, {"x": x})[0], rtol=1e-5, atol=1e-5)


SQUARE = {"w": integers(40, 40, 3, 3)}


@looped("text, epilogue, at", [
    ("Add h x>y", "none", "before"),
    ("Add x h>a; Relu a>y", "relu", "before"),
    ("LeakyRelu h>a|alpha=0.5; Add a x>y", "leaky_relu", "after"),
    ("Add h x>a; Add a x>y", "none", "before"),  # one residual
    ("Add h h>y", "none", None),
    ("Add h row>y", "none", None),  # repeated along an axis
    ("Add h x>y; Neg h>z", "none", None),
])  # fmt: skip
def test_a_residual_is_added_before_or_after(text: str, epilogue: str, at: str | None) -> None:
    node = exact(conv(f"Conv x w>h|pads=[1,1,1,1]; {text}", row=integers(1, 40, 1, 6), **SQUARE), "mxint8", fuse=True)
    assert settings_of(node)["epilogue"] == epilogue
    assert (len(node.input) > 4) == (at is not None)
    assert at is None or settings_of(node)["residual_at"] == at


# --- The policy ------------------------------------------------------------------------------------------------------

SQUARES, AXES = integers(40, 24, 2, 2), np.array([1, 2, 3])
KEPT = {
    "Conv x w>y|group=40": (integers(40, 1, 3, 3), "depthwise: each output reads one channel"),
    "Conv x w>y": (integers(32, 3, 3, 3), "tiny: 3 input channels are below min_channels = 16"),
    "Conv x w>y|strides=[1,1]": (integers(8, 40, 3, 3), "tiny: 8 output channels are below"),
    "Conv x w>y|group=4": (integers(40, 10, 1, 1), "4 groups of 10 input and 10 output"),
    "Conv x w>y|strides=[1,1,1]": (integers(24, 40, 1, 1, 1), "a convolution over 3 axes; expected 1 or 2"),
    "Conv x x>y": (SQUARES, "its weight is computed; expected a stored one"),
    "ReduceMax x axes>b|keepdims=0; Conv x w b>y": (integers(24, 40, 1, 1), "its bias is computed"),
    "Conv x w>y|auto_pad='SAME_UPPER' strides=[2,2]": (integers(24, 40, 3, 3), "auto_pad SAME_UPPER of a size"),
    "Conv x w>y|auto_pad='SAME_UPPER' strides=[4,4]": (
        integers(24, 40, 1, 1),
        "auto_pad SAME_UPPER with a kernel of 1",
    ),
    "Conv x w axes>y": (integers(24, 40, 1, 1), "its bias has shape [3]; expected [24]"),
    "ConvTranspose x w>y|dilations=[2,2]": (SQUARES, "a transposed convolution with dilations"),
    "ConvTranspose x w>y|strides=[2,1]": (SQUARES, "a transposed convolution with strides [2, 1]"),
    "ConvTranspose x w>y|output_shape=[9,9]": (SQUARES, "its pads follow from the size"),
}


@looped("text", KEPT)
def test_a_convolution_is_kept_with_the_reason(text: str) -> None:
    weight, reason = KEPT[text]
    channels = 3 if weight.shape[1] == 3 else 40
    x = (40, channels, 5, 5) if "computed" in reason else (2, channels, *("h", "w", "d")[: weight.ndim - 2])
    x = (2, 40, 8, 8) if "of 1" in reason else x
    axes = AXES.astype(F32) if "shape" in reason else AXES
    stored = {"w": weight, "axes": axes} if "axes" in text else {"w": weight}
    proto = text_model(text, x, [None] * weight.ndim, **stored)
    assert refusal(proto, "mxint8").startswith(reason)


def test_mxfp8_keeps_convolutions_and_the_error_says_what_they_hold() -> None:
    proto = conv("Conv x w>h; Neg h>y")
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(proto, "mxfp8")
    assert "none of its 1 convolution is eligible" in str(caught.value)
    assert "1 of the convolutions hold 0.0 MB: take --recipe mxint8, or set convolutions: true" in str(caught.value)
    assert refusal(proto, load_recipe("mxint8", convolutions=False)).endswith("set convolutions: true to quantize it")


def test_a_rule_and_min_channels_change_the_choice() -> None:
    w, v = integers(8, 40, 1, 1), integers(24, 8, 1, 1)
    proto = text_model("first:Conv x w>h; second:Conv h v>y", (1, 40, 5, 5), [None] * 4, w=w, v=v)
    assert kinds(rewrite(proto, load_recipe("mxint8", min_channels=8))[0]) == {"MXFP8Conv": 2}
    rule = mxfp8_graph.Rule(name="second")
    assert kinds(rewrite(proto, Recipe(rules=(rule,)))[0]) == {"Conv": 1, "MXFP8Conv": 1}


def test_a_record_of_a_recipe_without_the_new_fields_is_as_before() -> None:
    for name in ("mxfp8", "mxint8"):
        assert not {"convolutions", "min_channels"} & json.loads(load_recipe(name).to_record()).keys()
    assert json.loads(Recipe(min_channels=8, convolutions=False).to_record())["min_channels"] == 8


# --- Weight-only -----------------------------------------------------------------------------------------------------


def test_weight_only_is_standard_ops_of_a_quarter_that_onnx_runtime_folds(tmp_path: Any) -> None:
    import onnxruntime

    proto = conv("Conv x w>h; Neg h>y", (1, 128, 5, 5), w=integers(256, 128, 3, 3))
    for name in ("mxint8-weight-only", "mxint8-bf16", Recipe(activations="unchanged", convolutions=True)):
        result, report = rewrite(proto, name)
        assert not [node for node in result.graph.node if node.domain]
        assert len(result.SerializeToString()) < 0.27 * len(proto.SerializeToString())
        assert report.rewritten[0].decision.activations == "unchanged"
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "folded.onnx")
        onnxruntime.InferenceSession(result.SerializeToString(), options)
        assert set(kinds(onnx.load(tmp_path / "folded.onnx"))) <= {"Conv", "Neg", "ReorderInput", "ReorderOutput"}


def test_a_weight_only_model_of_convolutions_is_known_as_rewritten() -> None:
    result, _ = rewrite(conv("Conv x w>h; Neg h>y"), "mxint8-weight-only")
    assert mxfp8_graph.rewrite(result, "mxint8-weight-only")[1].already_rewritten
    with pytest.raises(RecipeError, match="Recipe mismatch for 'Conv_h'"):
        mxfp8_graph.rewrite(result, "mxint8")


@looped("isa", cpu.available_isas())
def test_where_int8_convolutions_are_slow_auto_packs_their_weights_alone(isa: str) -> None:
    proto = conv("Conv x w>h; Neg h>y")
    with cpu.forced_isa(isa):
        slow = isa in presets.SLOW_CONVOLUTIONS
        assert slow == (load_recipe("auto").convolutions == "weight-only")
        assert slow == ("convolutions=weight-only" in mxfp8_graph.rewrite(proto, "mxint8")[1].advice)
        assert "convolutions" not in mxfp8_graph.rewrite(proto, "auto")[1].advice
