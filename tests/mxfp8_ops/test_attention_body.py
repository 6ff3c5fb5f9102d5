"""MXFP8Attention: the reference against ONNX's own and torch's, and the portable body against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from attention_cases import CASES, Case, assert_within, run_stock, widened
from releases import release

from mxfp8_ops import attention as reference
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, ShapeError

OPSETS = pytest.mark.parametrize("opset", [21, 23, 26])
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
# ONNX pads a mask that ends early, which is none of ours; and neither it nor torch is at home where there is nothing.
ONNX_CASES = pytest.mark.parametrize("case", [case for case in CASES if case.is_usual], ids=str)


# --- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(release("onnx") < (1, 20), reason="onnx 1.19 itself mixes up grouped heads and the past")
@ONNX_CASES
def test_the_reference_is_what_onnx_says(case: Case) -> None:
    *operands, past = case.operands()
    y, *presents = reference.attention(*operands, past, **case.settings)
    given = [*operands, *(past or (None, None))]
    wide = [x if x is None or x.dtype == np.bool_ else x.astype(np.float64) for x in given]
    settings = {**case.settings, "is_causal": int(case.causal)}
    if not case.scale:
        del settings["scale"]
    names = [name if x is not None else "" for name, x in zip("qkvmxy", wide, strict=True)]
    node = onnx.helper.make_node("Attention", names, ["Y", "present_key", "present_value"], **settings)
    feeds = {name: x for name, x in zip(names, wide, strict=True) if name}
    expected = onnx.reference.ReferenceEvaluator(node).run(None, feeds)
    np.testing.assert_allclose(y, expected[0], rtol=2e-7, atol=1e-12)
    for present, other in zip(presents, expected[1:], strict=True):
        np.testing.assert_array_equal(present, other)


@ONNX_CASES
def test_torch_is_within_the_bound(case: Case) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, mask, past = case.operands()
    y, keys, values = reference.attention(q, k, v, mask, past, **case.settings)
    heads, shape = case.settings["q_num_heads"], y.shape
    split = torch.from_numpy(q).reshape(*q.shape[:2], heads, -1).transpose(1, 2)
    added = torch.zeros(1) if mask is None else torch.from_numpy(mask)
    if added.dtype == torch.bool:
        added = torch.where(added, 0.0, -torch.inf)
    if case.settings["is_causal"]:
        seen = torch.arange(keys.shape[2]) <= keys.shape[2] - k.shape[1] + torch.arange(q.shape[1])[:, None]
        added = added + torch.where(seen, 0.0, -torch.inf)
    got = torch.nn.functional.scaled_dot_product_attention(
        split, torch.from_numpy(keys), torch.from_numpy(values), added.broadcast_to(*split.shape[:3], keys.shape[2]),
        scale=case.settings["scale"] or None, enable_gqa=True,
    )  # fmt: skip
    bound = reference.attention_error_bound(q, k, v, mask, past, **case.settings)
    assert_within(got.transpose(1, 2).reshape(shape).numpy(), y, bound)


def test_the_bound_is_not_for_show() -> None:
    case = CASES[0]
    operands = case.operands()
    y, _, _ = reference.attention(*operands, **case.settings)
    bound = reference.attention_error_bound(*operands, **case.settings)
    assert np.median(bound / np.abs(y).mean()) < 1e-4
    rounded = reference.attention(*operands, **case.settings, activation_dtype="bfloat16")[0]
    assert (np.abs(rounded - y) > bound).mean() > 0.9


def test_rows_that_see_nothing_are_nan_or_zero() -> None:
    q = np.ones((1, 2, 16), np.float32)
    mask = np.array([[True, False], [False, False]])
    for guard, empty in ((False, np.nan), (True, 0.0)):
        y, _, _ = reference.attention(q, q, q, mask, q_num_heads=1, kv_num_heads=1, nan_guard=guard)
        np.testing.assert_array_equal(y, np.stack([np.ones(16), np.full(16, empty)])[None].astype(np.float32))


# --- the body -----------------------------------------------------------------------------------------------------


@OPSETS
@EVERY_CASE
def test_the_body_is_within_the_bound(case: Case, opset: int) -> None:
    for activation_dtype in (None, "bfloat16"):
        got = run_stock(case, opset, activation_dtype=activation_dtype, nan_guard=True)
        settings = {**case.settings, "activation_dtype": activation_dtype}
        operands = case.operands()
        expected = reference.attention(*operands, **settings, nan_guard=True)
        assert_within(got[0], expected[0], reference.attention_error_bound(*operands, **settings))
        for present, other in zip(got[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(present, other)


@pytest.mark.parametrize("nan_guard", [False, True])
def test_the_body_treats_rows_without_a_softmax_as_the_reference(nan_guard: bool) -> None:
    case = Case("bad rows", rows=5, keys=3, mask=(5, 3))
    q, k, v, mask, _ = case.operands()
    assert mask is not None
    mask[:] = 0
    mask[1] = -np.inf
    q[0, 2, :4] = np.nan
    mask[3, 1] = np.inf
    mask[4, 1] = -np.inf
    expected = reference.attention(q, k, v, mask, **case.settings, nan_guard=nan_guard)[0]
    assert np.isnan(expected).any() != nan_guard
    got = run_stock(case, 21, operands=(q, k, v, mask, None), nan_guard=nan_guard)[0]
    assert_within(got, expected, np.full(got.shape, 1e-5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_body_takes_every_dtype(dtype: str) -> None:
    case = Case("narrow", rows=5, keys=7, past=3, mask=(5, 10))
    operands = case.operands(dtype)
    got = run_stock(case, 21, operands=operands)
    expected = reference.attention(*widened(operands), **case.settings)
    bound = reference.attention_error_bound(*operands, **case.settings)
    assert_within(got[0].astype(np.float32), expected[0], bound)
    np.testing.assert_array_equal(got[1].astype(np.float32), expected[1])


def test_the_presents_may_be_left_out() -> None:
    case = Case("one output", rows=4, keys=4)
    (y,) = run_stock(case, 21, presents=False)
    np.testing.assert_array_equal(y, run_stock(case, 21)[0])


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_num_heads": 3}, "3 heads of Q and 2 of K and V; expected 1 or more of each"),
        ({"kv_num_heads": 0}, "4 heads of Q and 0 of K and V; expected"),
        ({"k": (2, 7, 20)}, r"K \(2, 7, 20\) .*; expected \[B, S, Hq \* D\]"),
        ({"v": (2, 6, 32)}, r"V \(2, 6, 32\) .*; expected"),
        ({"q": (64,)}, r"Q \(64,\), .*; expected"),
        ({"mask": (2, 1, 3, 7)}, r"attn_mask has shape \(2, 1, 3, 7\); expected one that broadcasts to \(2, 4, 5, 7\)"),
        ({"mask": (1, 1, 1, 1, 7)}, r"attn_mask has shape \(1, 1, 1, 1, 7\)"),
        ({"past": ((2, 2, 3, 16), (2, 2, 4, 16))}, r"past_value \(2, 2, 4, 16\); expected .* or both \[0\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    shapes: dict[str, Any] = {"q": (2, 5, 64), "k": (2, 7, 32), "v": (2, 7, 32)}
    settings = {"q_num_heads": 4, "kv_num_heads": 2}
    settings |= {name: value for name, value in changes.items() if name in settings}
    shapes |= {name: value for name, value in changes.items() if name not in settings}
    arrays: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name != "past"}
    if "past" in shapes:
        arrays["past"] = tuple(np.zeros(shape, np.float32) for shape in shapes["past"])
    with pytest.raises(ShapeError, match=f"attention: .*{message}"):
        reference.attention(**arrays, **settings)


def test_dtypes_that_do_not_fit_are_refused() -> None:
    x, half = np.zeros((1, 2, 16), np.float32), np.zeros((1, 2, 16), np.float16)
    with pytest.raises(ShapeError, match="k has dtype float16; expected float32, that of q"):
        reference.attention(x, half, x, q_num_heads=1, kv_num_heads=1)
    with pytest.raises(ShapeError, match="dtype int64"):
        reference.attention(x, x, x, np.zeros(1, np.int64), q_num_heads=1, kv_num_heads=1)
    with pytest.raises(ContractError, match="activation_dtype: 'float16'"):
        reference.attention(x, x, x, q_num_heads=1, kv_num_heads=1, activation_dtype="float16")


def test_the_contract_names_the_inputs_of_onnx() -> None:
    ours = contract.ATTENTION
    schema = onnx.defs.get_schema("Attention", 23)
    assert [port.name for port in ours.inputs] == [formal.name for formal in schema.inputs]
    assert [port.name for port in ours.outputs] == [formal.name for formal in schema.outputs][:3]
    assert {"q_num_heads", "kv_num_heads", "is_causal", "scale"} <= set(schema.attributes) & set(ours.attributes)
