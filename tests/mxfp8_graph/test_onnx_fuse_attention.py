"""MXFP8Attention takes the place of attention, however it is written, and of nothing that merely looks like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from attention_models import (
    BATCH,
    HEADS,
    HIDDEN,
    PAST,
    ROWS,
    SIZE,
    attention,
    check_same,
    decoder,
    feeds,
    fused,
    split,
    standard,
)
from builders import steps
from grids import looped
from oracle import kinds, run
from releases import release

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.recipe import load_recipe

F32, F16 = np.float32, np.float16

pytestmark = pytest.mark.usefixtures("runtime")


K_HEADS = [*split("k"), *steps("Transpose k2>k3|perm=[0,1,3,2]")]
TURNED_KEYS = steps("Transpose kh>k2|perm=[0,1,3,2]")
IN_HEADS = {
    name: (F32, ["batch", HEADS, length, SIZE]) for name, length in (("q2", "rows"), ("kh", "keys"), ("v2", "keys"))
}
LOWEST = np.array(np.finfo(F32).min, F32)
ZERO, HALF = {"zero": np.array(0, F32)}, {"half": np.array(0.5, F32)}


GUARDED = steps("Softmax masked>w; IsNaN w>nan; Where nan zero w>weights")
"""A softmax behind which NaN is replaced by zero."""
CONDITION = {"seen": (np.bool_, ["batch", 1, "rows", "keys"])}
IN_THREE = [*split("k"), *steps("Reshape k2 three>k3; Transpose k3>k4|perm=[0,2,1]; Reshape k4 four>k5")]
STATIC = {name: (F32, [BATCH, ROWS, HIDDEN]) for name in "qkv"}


def mask(text: str, **more: Any) -> onnx.ModelProto:
    return attention(mask=steps(text), **more)


PLAIN = steps("Add scores mask>masked")
"""The mask where nothing scales the scores."""
WHERE = {"inputs": CONDITION, "constants": {"lowest": LOWEST}}
FORMS: dict[str, onnx.ModelProto] = {
    "as BERT": attention(),
    "without a mask": attention(mask=[], softmax=steps("Softmax scaled>weights")),
    "without a scale": attention(scale=[], mask=PLAIN),
    "scaled by a product": attention(scale=steps("Mul half scores>scaled"), constants=HALF),
    "scaled on both sides": attention(
        scores=steps("Mul q2 half>q3; Div k2 root>k3; MatMul q3 k3>scores"), scale=[], mask=PLAIN, constants=HALF
    ),
    "scaled before the heads": attention(
        q=[*steps("Mul q half>qs"), *split("qs")], constants=HALF, scores=steps("MatMul qs2 k2>scores")
    ),
    "the mask comes first": mask("Add mask scaled>masked"),
    "two masks": mask("Add scaled mask>m; Add mask2 m>masked", inputs={"mask2": (F32, [1, HEADS, 1, "keys"])}),
    "a condition and lowest": mask("Where seen scaled lowest>masked", **WHERE),
    "a condition and -Inf": mask(
        "Where seen scaled lowest>masked", inputs=CONDITION, constants={"lowest": np.array([-np.inf], F32)}
    ),
    "a condition the other way": mask(
        "Where hidden lowest scaled>masked", inputs={"hidden": CONDITION["seen"]}, constants={"lowest": LOWEST}
    ),
    "a condition and a mask": mask("Where seen scaled lowest>m; Add m mask>masked", **WHERE),
    "a guard against NaN": attention(softmax=GUARDED, constants=ZERO),
    "keys in heads, then turned": attention(k=K_HEADS, scores=steps("MatMul q2 k3>scores")),
    "keys turned in three dimensions": attention(
        k=IN_THREE, scores=steps("MatMul q2 k5>scores"), inputs=STATIC,
        constants={"three": np.array([-1, ROWS, SIZE]), "four": np.array([BATCH, HEADS, SIZE, ROWS])},
    ),
    "inputs in heads": attention(q=[], k=TURNED_KEYS, v=[], inputs=IN_HEADS),
    "one head of keys for all": attention(
        k=TURNED_KEYS, v=[], inputs={name: (F32, ["batch", 1, "keys", SIZE]) for name in ("kh", "v2")}
    ),
    "rows merged": attention(
        merge=steps("Transpose heads>apart|perm=[0,2,1,3]; Reshape apart flat>a"),
        constants={"flat": np.array([-1, HIDDEN])}, outputs={"y": (F32, ["all", HIDDEN])},
    ),
    "reshaped to what it is": attention(
        merge=steps("Reshape heads four>h; Transpose h>apart|perm=[0,2,1,3]; Reshape apart merged>a"),
        constants={"four": np.array([0, HEADS, -1, SIZE])},
    ),
    "the other axis for the last": attention(softmax=steps("Softmax masked>weights|axis=3")),
}  # fmt: skip


@looped("name", FORMS)
def test_attention_becomes_one_node_and_gives_the_same(name: str) -> None:
    proto = FORMS[name]
    result, found = fused(proto)
    assert len(found) == 1
    assert not kinds(result).keys() & {"Softmax", "MatMul", "IsNaN"}
    assert (found[0]["q_num_heads"], found[0]["nan_guard"]) == (HEADS, int(name == "a guard against NaN"))
    static = "three dimensions" in name
    check_same(proto, feeds(proto) if static else feeds(proto, rows=3, keys=6))


def test_the_inputs_of_the_node_are_the_projections() -> None:
    result, (found,) = fused(attention())
    assert found["inputs"][:4] == ["q", "k", "v", "mask"]
    assert kinds(result) == {"Constant": 2, "MXFP8Attention": 1, "MXFP8WeightGemm": 1, "Neg": 1}


def test_factors_of_queries_keys_and_scores_become_one_scale() -> None:
    assert fused(FORMS["scaled on both sides"])[1][0]["scale"] == 0.5 / 4
    assert fused(FORMS["scaled before the heads"])[1][0]["scale"] == 0.5 / 4
    assert fused(FORMS["without a scale"])[1][0]["scale"] == 1


@looped("activations, dtype", [("e4m3", 16), ("e5m2", 16), ("bfloat16", 16), ("unchanged", 1)])
def test_values_are_rounded_where_the_recipe_rounds_activations(activations: str, dtype: int) -> None:
    assert fused(attention(), Recipe(activations=activations))[1][0]["activation_dtype"] == dtype


def test_rows_whose_keys_are_all_hidden_are_as_they_were() -> None:
    for name, expected in (("a condition and -Inf", np.isnan), ("a condition and lowest", np.isfinite)):
        proto = FORMS[name]
        given = feeds(proto)
        given["seen"][0, :, 2] = False
        y, unfused = run(fused(proto)[0], given)[0], run(proto, given)[0]
        assert expected(y[0, 2]).all()
        assert not np.isnan(y[0, :2]).any()
        if expected is np.isfinite:
            assert np.linalg.norm(y[0, 2] - unfused[0, 2]) < 0.05 * np.linalg.norm(unfused[0, 2])
    if release("onnxruntime") >= (1, 24):  # before, ONNX Runtime gives NaN for the standard op itself
        given = feeds(STANDARD["a condition"])
        given["bool_mask"][0, :, 2] = False
        for model in (STANDARD["a condition"], fused(STANDARD["a condition"])[0]):
            assert not run(model, given)[0][0, 2].any()
    proto = attention(softmax=GUARDED, constants=ZERO)
    hidden = np.zeros((BATCH, 1, ROWS, ROWS), F32)
    hidden[0, :, 2] = -np.inf
    y = run(fused(proto)[0], feeds(proto, mask=hidden))[0]
    assert not y[0, 2].any()
    assert y[0, 1].all()


def test_attention_of_float16_is_fused_also_with_a_softmax_in_float32() -> None:
    softmax = steps("Cast masked>wide|to=1; Softmax wide>w32; Cast w32>weights|to=10")
    for proto in (attention(dtype=F16), attention(dtype=F16, softmax=softmax)):
        assert len(fused(proto)[1]) == 1
        check_same(proto, feeds(proto), error=2e-3)


def test_the_node_takes_the_past_and_makes_the_present() -> None:
    proto = decoder()
    result, (found,) = fused(proto)
    assert found["inputs"] == ["q", "k", "v", "mask", "past_k", "past_v"]
    assert found["outputs"][1:] == ["kc", "vc"]
    assert (found["q_num_heads"], found["kv_num_heads"]) == (4, 2)
    assert kinds(result) == {"MXFP8Attention": 1, "MXFP8WeightGemm": 1, "Neg": 1}
    check_same(proto, feeds(proto))


def test_heads_that_are_repeated_in_another_order_stay_repeated() -> None:
    """Head 2 meets head 0 of the keys, not head 1."""
    proto = decoder(axis=1)
    _, (found,) = fused(proto)
    assert (found["q_num_heads"], found["kv_num_heads"]) == (4, 4)
    check_same(proto, feeds(proto))


def test_a_present_that_another_node_reads_is_an_output_of_the_node() -> None:
    proto = decoder(after=steps("Abs kc>z"), outputs={"z": (F32, [BATCH, 2, ROWS + PAST, SIZE])})
    assert fused(proto)[1][0]["outputs"][1] == "kc"
    check_same(proto, feeds(proto))


def test_a_present_that_the_mask_depends_on_stays_outside_of_the_node() -> None:
    mask = steps(
        "ReduceMean kc inner>m; Transpose m>turned|perm=[0,1,3,2]; ReduceMean turned second>of_keys; "
        "Add scaled of_keys>masked"
    )
    proto = decoder(mask=mask, constants={"inner": np.array([3]), "second": np.array([1])})
    _, (found,) = fused(proto)
    assert found["outputs"][1:] == ["", ""]
    assert not {"past_k", "past_v"} & set(found["inputs"])
    check_same(proto, feeds(proto))


STANDARD: dict[str, onnx.ModelProto] = {
    "plain": standard(),
    "heads": standard(heads=True),
    "scale": standard(scale=0.3),
    "a mask": standard("q k v mask"),
    "a condition": standard("q k v bool_mask"),
    "a condition, heads": standard("q k v bool_mask", heads=True),
    "causal": standard(is_causal=1),
    "groups": standard(kv_num_heads=2, shapes={n: (F32, ["batch", "keys", HIDDEN // 2]) for n in "kv"}),
    "opset 24": standard("q k v mask", opset=24),
    "present": standard(outputs="a pk pv"),
    "past and present": standard("q k v - past_key past_value", "a pk pv"),
    "mask, past and present": standard(
        "q k v all_mask past_key past_value", "a pk pv", shapes={"all_mask": (F32, ["batch", 1, "rows", "all"])}
    ),
    "past, causal": standard("q k v - past_key past_value", "a pk pv", is_causal=1),
}


@looped("name", STANDARD)
def test_the_standard_op_is_one_node_and_gives_the_same(name: str) -> None:
    proto = STANDARD[name]
    result, (found,) = fused(proto)
    assert "Attention" not in kinds(result)
    assert found["inputs"][:3] == ["q", "k", "v"]
    assert found["is_causal"] == int("causal" in name)
    given = feeds(proto, rows=3, keys=6)
    given |= {"all_mask": np.zeros((BATCH, 1, 3, 6 + PAST), F32)} if "all_mask" in given else {}
    check_same(proto, given)


def test_a_cache_in_front_of_a_causal_op_stays_there() -> None:
    """Behind its own past, the op's last row sees the last key; behind a Concat, row 0 sees key 0 alone."""
    own = {
        name: steps(
            f"Reshape {name} split>{name}1; Transpose {name}1>{name}n|perm=[0,2,1,3]; "
            f"Concat past_{name} {name}n>{name}2|axis=2"
        )
        for name in "kv"
    }
    past = {f"past_{name}": (F32, ["batch", HEADS, "past", SIZE]) for name in "kv"}
    empty = dict.fromkeys(("scores", "scale", "mask", "softmax"), ())
    values = steps("Attention q2 k2 v2>heads|is_causal=1")
    proto = attention(**{**empty, **own}, values=values, inputs=past, opset=23)
    _, (found,) = fused(proto)
    assert found["outputs"][1:] == ["", ""]
    check_same(proto, feeds(proto))


@looped("turned", [False, True])
def test_a_fused_matmul_of_onnx_runtime_is_part_of_attention(turned: bool) -> None:
    """Its optimizer puts scales and transposes into products."""
    proto = attention(k=split("k") if turned else split("k", (0, 2, 3, 1)), scale=[], mask=PLAIN)
    product = next(each for each in proto.graph.node if each.output[0] == "scores")
    product.op_type, product.domain = "FusedMatMul", "com.microsoft"
    product.attribute.extend(onnx.helper.make_attribute(*each) for each in (("alpha", 0.3), ("transB", int(turned))))
    proto.opset_import.add(domain="com.microsoft", version=1)
    _, (found,) = fused(proto)
    assert found["scale"] == pytest.approx(0.3)
    check_same(proto, feeds(proto, rows=3, keys=6))
    product.attribute.append(onnx.helper.make_attribute("transA", 1))
    assert not fused(proto)[1]


def output(name: str, *shape: Any) -> dict[str, Any]:
    return {name: (F32, list(shape))}


SCORES = ("batch", HEADS, "rows", "keys")
KEY_MASK = output("key_mask", 1, 1, "rows", 1)
NEAR_MISSES: dict[str, onnx.ModelProto] = {
    "another axis of the softmax": attention(softmax=steps("Softmax masked>weights|axis=2")),
    "another order of the result's axes": attention(
        merge=steps("Transpose heads>apart|perm=[0,2,3,1]; Reshape apart merged>a")
    ),
    "the result stays in heads": attention(
        merge=steps("Reshape heads merged>a"), inputs=STATIC, constants={"merged": np.array([BATCH, ROWS, HIDDEN])}
    ),
    "keys that are not turned": attention(
        k=split("k", (0, 2, 1, 3)), inputs={n: (F32, [BATCH, SIZE, HIDDEN]) for n in "qkv"},
        constants={"split": np.array([BATCH, SIZE, HEADS, SIZE])},
    ),
    "a soft cap": attention(scale=steps("Tanh scores>t; Div t root>scaled")),
    "scaled after the mask": attention(scale=steps("Add scores mask>s"), mask=steps("Div s root>masked")),
    "a scale that is computed": attention(scale=steps("Mul scores scale>scaled"), inputs={"scale": (F32, [])}),
    "a scale per head": attention(constants={"root": np.full((HEADS, 1, 1), 4, F32)}),
    "divided by zero": attention(constants={"root": np.array(0, F32)}),
    "a mask after the softmax": attention(softmax=steps("Softmax scaled>w; Mul w mask>weights"), mask=[]),
    "a condition and a number that counts": mask(
        "Where seen scaled low>masked", inputs=CONDITION, constants={"low": np.array(-1e4, F32)}
    ),
    "a guard that puts 1": attention(softmax=GUARDED, constants={"zero": np.array(1, F32)}),
    "a guard of something else": attention(
        softmax=steps("Softmax masked>w; IsNaN scaled>n; Where n zero w>weights"), constants=ZERO
    ),
    "scores that are returned": attention(outputs=output("scores", *SCORES)),
    "weights that are returned": attention(outputs=output("weights", *SCORES)),
    "weights that something else needs": attention(after=steps("Abs weights>z"), outputs=output("z", *SCORES)),
    "heads that something else needs": attention(
        after=steps("Abs heads>z"), outputs=output("z", "batch", HEADS, "rows", SIZE)
    ),
    "a batch of its own": attention(inputs={n: (F32, ["other", "keys", HIDDEN]) for n in "kv"}),
    "heads of unknown number": attention(
        q=[], k=TURNED_KEYS, v=[], inputs={n: (F32, ["batch", "heads", "keys", SIZE]) for n in ("q2", "kh", "v2")}
    ),
    "a mask that makes more of one batch": attention(
        inputs={n: (F32, [1, "rows", HIDDEN]) for n in "qkv"} | {"mask": (F32, ["batch", 1, "rows", "rows"])}
    ),
    "the standard op's mask of one key": standard("q k v key_mask", shapes=KEY_MASK),
    "the standard op's mask of integers": standard(
        "q k v int_mask", shapes={"int_mask": (np.int32, ["batch", 1, "rows", "keys"])}
    ),
    "a soft cap of the standard op": standard(softcap=2.0),
    "the standard op's scores": standard(outputs="a pk pv scores"),
}  # fmt: skip


@looped("name", NEAR_MISSES)
def test_nodes_that_only_look_like_attention_are_left_alone(name: str) -> None:
    proto = NEAR_MISSES[name]
    result, found = fused(proto)
    assert not found
    kept = ("Softmax", "IsNaN", "MatMul", "Attention", "Transpose")
    before, after = kinds(proto), kinds(result)
    assert [after.get(op, 0) + (op == "MatMul") * after["MXFP8WeightGemm"] for op in kept] == [
        before.get(op, 0) for op in kept
    ]


@looped("products", [{"attention_scores": True}, {"attention_values": True}, {"fp8_dpa": True}])
def test_products_that_are_quantized_stay_gemms(products: dict[str, bool]) -> None:
    result, found = fused(attention(), Recipe(min_dim=0, **products))
    assert not found
    assert kinds(result)["MXFP8Gemm"] == 1 + (2 if "fp8_dpa" in products else 1)


@looped("recipe, how", [("mxfp8", "rounded to bfloat16"), ("mxfp8-weight-only", "not rounded")])
def test_the_reason_of_a_fused_product_says_how_it_is_rounded(recipe: str, how: str) -> None:
    report = mxfp8_graph.rewrite(attention(), load_recipe(recipe).setting(["min_dim=0"]))[1]
    assert [site.decision.reason for site in report.kept] == [
        f"attention scores, fused, {how}; set attention_scores: true to quantize it",
        f"attention values, fused, {how}; set attention_values: true to quantize it",
    ]
