"""MXFP8Attention takes the place of attention, however it is written, and of nothing that merely looks like it."""

from __future__ import annotations

import attention_models as models
import numpy as np
import onnx
import pytest
from attention_models import BATCH, EXACT, HEADS, HIDDEN, PAST, ROWS, SIZE, attention, check_same, decoder, feeds, fused
from grids import looped
from oracle import kinds, rewrite, run
from releases import release

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.recipe import load_recipe

F32, F16 = np.float32, np.float16

pytestmark = pytest.mark.usefixtures("runtime")


def heads(name: str, perm: str = "[0,2,1,3]") -> str:
    return f"Reshape {name} split>{name}1; Transpose {name}1>{name}2|perm={perm}"


TURNED_KEYS = "Transpose kh>k2|perm=[0,1,3,2]"
GUARDED = "Softmax masked>w; IsNaN w>nan; Where nan zero w>weights"
"""A softmax behind which NaN is replaced by zero."""
STATIC = {**{name: [BATCH, ROWS, HIDDEN] for name in "qkv"}, "mask": [BATCH, 1, ROWS, ROWS]}
FORMS: dict[str, onnx.ModelProto] = {
    "as BERT": attention(),
    "without a mask": attention(mask="", softmax="Softmax scaled>weights"),
    "without a scale": attention(scale="", mask="Add scores mask>masked"),
    "scaled by a product": attention(scale="Mul half scores>scaled"),
    "scaled on both sides": attention(
        scores="Mul q2 half>q3; Div k2 root>k3; MatMul q3 k3>scores", scale="", mask="Add scores mask>masked"
    ),
    "scaled before the heads": attention(q=f"Mul q half>qs; {heads('qs')}", scores="MatMul qs2 k2>scores"),
    "the mask comes first": attention(mask="Add mask scaled>masked"),
    "two masks": attention(mask="Add scaled mask>m; Add mask2 m>masked"),
    "a condition and lowest": attention(mask="Where seen scaled lowest>masked"),
    "a condition and -Inf": attention(
        mask="Where seen scaled lowest>masked", constants={"lowest": np.array([-np.inf], F32)}
    ),
    "a condition the other way": attention(mask="Where hidden lowest scaled>masked"),
    "a condition and a mask": attention(mask="Where seen scaled lowest>m; Add m mask>masked"),
    "a guard against NaN": attention(softmax=GUARDED),
    "keys in heads, then turned": attention(
        k=f"{heads('k')}; Transpose k2>k3|perm=[0,1,3,2]", scores="MatMul q2 k3>scores"
    ),
    "keys turned in three dimensions": attention(
        k=f"{heads('k')}; Reshape k2 three>k3; Transpose k3>k4|perm=[0,2,1]; Reshape k4 four>k5",
        scores="MatMul q2 k5>scores", inputs=STATIC,
        constants={"three": [-1, ROWS, SIZE], "four": [BATCH, HEADS, SIZE, ROWS]},
    ),
    "inputs in heads": attention(
        q="", k=TURNED_KEYS, v="",
        inputs={n: ["batch", HEADS, "rows" if n == "q2" else "keys", SIZE] for n in ("q2", "kh", "v2")},
    ),
    "one head of keys for all": attention(
        k=TURNED_KEYS, v="", inputs={key: ["batch", 1, "keys", SIZE] for key in ("kh", "v2")}
    ),
    "rows merged": attention(
        merge="Transpose heads>apart|perm=[0,2,1,3]; Reshape apart flat>a", constants={"flat": [-1, HIDDEN]},
        outputs={"y": ["all", HIDDEN]},
    ),
    "reshaped to what it is": attention(
        merge="Reshape heads four>h; Transpose h>apart|perm=[0,2,1,3]; Reshape apart merged>a",
        constants={"four": [0, HEADS, -1, SIZE]},
    ),
    "a number of heads that Reshape works out": attention(constants={"split": [0, 0, -1, SIZE]}),
    "lengths that Reshape works out": attention(
        constants={"split": [0, -1, HEADS, SIZE], "merged": [0, -1, HIDDEN]}
    ),
    "a batch that Reshape works out": attention(inputs=STATIC, constants={"merged": [-1, ROWS, HIDDEN]}),
    "sizes that are stored": attention(
        inputs=STATIC, constants={"split": [BATCH, ROWS, HEADS, SIZE], "merged": [BATCH, ROWS, HIDDEN]}
    ),
    "the other axis for the last": attention(softmax="Softmax masked>weights|axis=3"),
}  # fmt: skip


@looped("name", FORMS)
def test_attention_becomes_one_node_and_gives_the_same(name: str) -> None:
    proto = FORMS[name]
    result, ops = fused(proto)
    assert len(ops) == 1
    assert not kinds(result).keys() & {"Softmax", "MatMul", "IsNaN"}
    assert (ops[0]["q_num_heads"], ops[0]["nan_guard"]) == (HEADS, int(name == "a guard against NaN"))
    check_same(proto, feeds(proto, rows=3, keys=6))


def test_the_inputs_of_the_node_are_the_projections() -> None:
    result, (op,) = fused(attention())
    assert op["inputs"][:4] == ["q", "k", "v", "mask"]
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
        inputs = feeds(proto)
        inputs["seen"][0, :, 2] = False
        y, unfused = run(fused(proto)[0], inputs)[0], run(proto, inputs)[0]
        assert expected(y[0, 2]).all()
        assert not np.isnan(y[0, :2]).any()
        if expected is np.isfinite:
            assert np.linalg.norm(y[0, 2] - unfused[0, 2]) < 0.05 * np.linalg.norm(unfused[0, 2])
    if release("onnxruntime") >= (1, 24):  # before, ONNX Runtime gives NaN for the standard op itself
        inputs = feeds(STANDARD["a condition"])
        inputs["bool_mask"][0, :, 2] = False
        for model in (STANDARD["a condition"], fused(STANDARD["a condition"])[0]):
            assert not run(model, inputs)[0][0, 2].any()
    proto = attention(softmax=GUARDED)
    hidden = np.zeros((BATCH, 1, ROWS, ROWS), F32)
    hidden[0, :, 2] = -np.inf
    y = run(fused(proto)[0], feeds(proto, mask=hidden))[0]
    assert not y[0, 2].any()
    assert y[0, 1].all()


def test_attention_of_float16_is_fused_also_with_a_softmax_in_float32() -> None:
    softmax = "Cast masked>wide|to=1; Softmax wide>w32; Cast w32>weights|to=10"
    for proto in (attention(dtype=F16), attention(dtype=F16, softmax=softmax)):
        assert len(fused(proto)[1]) == 1
        check_same(proto, feeds(proto), error=2e-3)


def test_the_node_takes_the_past_and_makes_the_present() -> None:
    proto = decoder()
    result, (op,) = fused(proto)
    assert op["inputs"] == ["q", "k", "v", "mask", "past_k", "past_v"]
    assert op["outputs"][1:] == ["kc", "vc"]
    assert (op["q_num_heads"], op["kv_num_heads"]) == (4, 2)
    assert kinds(result) == {"MXFP8Attention": 1, "MXFP8WeightGemm": 1, "Neg": 1}
    check_same(proto, feeds(proto))


def test_heads_that_are_repeated_in_another_order_stay_repeated() -> None:
    """Head 2 meets head 0 of the keys, not head 1."""
    proto = decoder(axis=1)
    _, (op,) = fused(proto)
    assert (op["q_num_heads"], op["kv_num_heads"]) == (4, 4)
    check_same(proto, feeds(proto))


def test_a_present_that_another_node_reads_is_an_output_of_the_node() -> None:
    proto = decoder(after="Abs kc>z", outputs={"z": [BATCH, 2, ROWS + PAST, SIZE]})
    assert fused(proto)[1][0]["outputs"][1] == "kc"
    check_same(proto, feeds(proto))


def test_a_present_that_the_mask_depends_on_stays_outside_of_the_node() -> None:
    mask = "ReduceMean kc inner>m; Transpose m>t|perm=[0,1,3,2]; ReduceMean t second>of_keys; Add scaled of_keys>masked"
    proto = decoder(mask=mask, constants={"inner": [3], "second": [1]})
    _, (op,) = fused(proto)
    assert op["outputs"][1:] == ["", ""]
    assert not {"past_k", "past_v"} & set(op["inputs"])
    check_same(proto, feeds(proto))


STANDARD: dict[str, onnx.ModelProto] = {
    "plain": models.standard(),
    "heads": models.standard(heads=True),
    "scale": models.standard(scale=0.3),
    "a mask": models.standard("q k v mask"),
    "a condition": models.standard("q k v bool_mask"),
    "a condition, heads": models.standard("q k v bool_mask", heads=True),
    "causal": models.standard(is_causal=1),
    "groups": models.standard(kv_num_heads=2, shapes={key: ["batch", "keys", HIDDEN // 2] for key in "kv"}),
    "opset 24": models.standard("q k v mask", opset=24),
    "present": models.standard(outputs="a pk pv"),
    "past and present": models.standard("q k v - past_key past_value", "a pk pv"),
    "mask, past and present": models.standard(
        "q k v all_mask past_key past_value", "a pk pv", shapes={"all_mask": ["batch", 1, "rows", "all"]}
    ),
    "past, causal": models.standard("q k v - past_key past_value", "a pk pv", is_causal=1),
}


@looped("name", STANDARD)
def test_the_standard_op_is_one_node_and_gives_the_same(name: str) -> None:
    proto = STANDARD[name]
    result, (op,) = fused(proto)
    assert "Attention" not in kinds(result)
    assert op["inputs"][:3] == ["q", "k", "v"]
    assert op["is_causal"] == int("causal" in name)
    inputs = feeds(proto, rows=3, keys=6)
    inputs |= {"all_mask": np.zeros((BATCH, 1, 3, 6 + PAST), F32)} if "all_mask" in inputs else {}
    check_same(proto, inputs)


def test_a_cache_in_front_of_a_causal_op_stays_there() -> None:
    """Behind its own past, the op's last row sees the last key; behind a Concat, row 0 sees key 0 alone."""
    k, v = (f"{heads(name).replace('2|', 'n|')}; Concat past_{name} {name}n>{name}2|axis=2" for name in "kv")
    past = {f"past_{name}": ["batch", HEADS, "past", SIZE] for name in "kv"}
    values = "Attention q2 k2 v2>heads|is_causal=1"
    empty = dict.fromkeys(("scores", "scale", "mask", "softmax"), "")
    proto = attention(k=k, v=v, values=values, inputs=past, opset=23, **empty)
    _, (op,) = fused(proto)
    assert op["outputs"][1:] == ["", ""]
    check_same(proto, feeds(proto))


@looped("turned", [False, True])
def test_a_fused_matmul_of_onnx_runtime_is_part_of_attention(turned: bool) -> None:
    """Its optimizer puts scales and transposes into products."""
    k = heads("k", "[0,2,1,3]" if turned else "[0,2,3,1]")
    proto = attention(k=k, scale="", mask="Add scores mask>masked")
    product = next(each for each in proto.graph.node if each.output[0] == "scores")
    product.op_type, product.domain = "FusedMatMul", "com.microsoft"
    product.attribute.extend(onnx.helper.make_attribute(*each) for each in (("alpha", 0.3), ("transB", int(turned))))
    proto.opset_import.add(domain="com.microsoft", version=1)
    _, (op,) = fused(proto)
    assert op["scale"] == pytest.approx(0.3)
    check_same(proto, feeds(proto, rows=3, keys=6))
    product.attribute.append(onnx.helper.make_attribute("transA", 1))
    assert not fused(proto)[1]


SCORES = ["batch", HEADS, "rows", "keys"]
NEAR_MISSES: dict[str, onnx.ModelProto] = {
    "another axis of the softmax": attention(softmax="Softmax masked>weights|axis=2"),
    "another order of the result's axes": attention(
        merge="Transpose heads>apart|perm=[0,2,3,1]; Reshape apart merged>a"
    ),
    "the result stays in heads": attention(
        merge="Reshape heads merged>a", inputs=STATIC, constants={"merged": [BATCH, ROWS, HIDDEN]}
    ),
    "keys that are not turned": attention(
        k=heads("k"), inputs={key: [BATCH, SIZE, HIDDEN] for key in "qkv"},
        constants={"split": [BATCH, SIZE, HEADS, SIZE]},
    ),
    "a soft cap": attention(scale="Tanh scores>t; Div t root>scaled"),
    "scaled after the mask": attention(scale="Add scores mask>s", mask="Div s root>masked"),
    "a scale that is computed": attention(scale="Mul scores scale>scaled", inputs={"scale": []}),
    "a scale per head": attention(constants={"root": np.full((HEADS, 1, 1), 4, F32)}),
    "divided by zero": attention(constants={"root": np.array(0, F32)}),
    "a mask after the softmax": attention(softmax="Softmax scaled>w; Mul w mask>weights", mask=""),
    "a condition and a number that counts": attention(
        mask="Where seen scaled low>masked", constants={"low": np.array(-1e4, F32)}
    ),
    "a guard that puts 1": attention(softmax=GUARDED, constants={"zero": np.array(1, F32)}),
    "a guard of something else": attention(softmax="Softmax masked>w; IsNaN scaled>n; Where n zero w>weights"),
    "scores that are returned": attention(outputs={"scores": SCORES}),
    "weights that are returned": attention(outputs={"weights": SCORES}),
    "weights that something else needs": attention(after="Abs weights>z", outputs={"z": SCORES}),
    "heads that something else needs": attention(
        after="Abs heads>z", outputs={"z": ["batch", HEADS, "rows", SIZE]}
    ),
    "a batch of its own": attention(inputs={key: ["other", "keys", HIDDEN] for key in "kv"}),
    "heads of unknown number": attention(
        q="", k=TURNED_KEYS, v="", inputs={key: ["batch", "heads", "keys", SIZE] for key in ("q2", "kh", "v2")}
    ),
    "a mask that makes more of one batch": attention(
        inputs={key: [1, "rows", HIDDEN] for key in "qkv"} | {"mask": ["batch", 1, "rows", "rows"]}
    ),
    "the standard op's mask of one key": models.standard("q k v key_mask", shapes={"key_mask": [1, 1, "rows", 1]}),
    "the standard op's mask of integers": models.standard(
        "q k v int_mask", shapes={"int_mask": (np.int32, ["batch", 1, "rows", "keys"])}
    ),
    "a soft cap of the standard op": models.standard(softcap=2.0),
    "another number for causal": models.standard(is_causal=17),
    "a window of keys": models.standard(opset=25, left_window_size=2),
    "no number as scale": models.standard(scale=float("nan")),
    "the standard op's scores": models.standard(outputs="a pk pv scores"),
}  # fmt: skip


@looped("name", NEAR_MISSES)
def test_nodes_that_only_look_like_attention_are_left_alone(name: str) -> None:
    proto = NEAR_MISSES[name]
    result, ops = fused(proto)
    assert not ops
    kept = ("Softmax", "IsNaN", "MatMul", "Attention", "Transpose")
    before, after = kinds(proto), kinds(result)
    assert [after.get(op, 0) + (op == "MatMul") * after["MXFP8WeightGemm"] for op in kept] == [
        before.get(op, 0) for op in kept
    ]


@looped(
    "name, reason",
    [
        ("another axis of the softmax", "its softmax is not over the keys"),
        ("the result stays in heads", "no Transpose and Reshape put its heads side by side"),
        ("a soft cap", "its scores are not Q times K, scaled by a constant and masked in a known way"),
        ("weights that are returned", "other nodes need its scores or its weights, or a product of it is quantized"),
        ("a batch of its own", "the batches of Q, K and V differ, or one is unknown"),
        ("a window of keys", "it has a window, a soft cap or another setting that MXFP8Attention lacks"),
        ("the standard op's scores", "it takes lengths of keys, or returns its scores"),
    ],
)
def test_the_report_says_why_an_attention_stays(name: str, reason: str) -> None:
    _, report = rewrite(NEAR_MISSES[name], EXACT, fuse=True)
    assert [each.reason for each in report.unfused] == [reason]
    assert rewrite(attention(), EXACT, fuse=True)[1].unfused == ()


@looped("products", [{"attention_scores": True}, {"attention_values": True}, {"fp8_dpa": True}])
def test_products_that_are_quantized_stay_gemms(products: dict[str, bool]) -> None:
    result, ops = fused(attention(), Recipe(min_dim=0, **products))
    assert not ops
    assert kinds(result)["MXFP8Gemm"] == 1 + (2 if "fp8_dpa" in products else 1)


@looped("recipe, how", [("mxfp8", "rounded to bfloat16"), ("mxfp8-weight-only", "not rounded")])
def test_the_reason_of_a_fused_product_says_how_it_is_rounded(recipe: str, how: str) -> None:
    report = mxfp8_graph.rewrite(attention(), load_recipe(recipe).setting(["min_dim=0"]))[1]
    assert [site.decision.reason for site in report.kept] == [
        f"attention scores, fused, {how}; set attention_scores: true to quantize it",
        f"attention values, fused, {how}; set attention_values: true to quantize it",
    ]
