"""MXFP8Attention: the reference against ONNX's own and torch's, and the portable body against the reference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest
from attention_cases import CASES, Case, run_stock, widened
from compare import assert_within
from grids import looped, pairwise
from one_node import OPSETS
from releases import release

from mxfp8_ops import contract
from mxfp8_ops.nodes import attention as reference

# ONNX pads a mask that ends early, which is none of ours; and neither it nor torch is at home where there is nothing.
ONNX_CASES = [case for case in CASES if case.is_usual]


# --- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(release("onnx") < (1, 20), reason="onnx 1.19 itself mixes up grouped heads and the past")
@looped("case", ONNX_CASES)
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


@looped("case", ONNX_CASES)
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


@looped("case, opset, activation_dtype", pairwise(c=CASES, opset=OPSETS, a=[None, "bfloat16"]))
def test_the_body_is_within_the_bound(case: Case, opset: int, activation_dtype: str | None) -> None:
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


def test_the_contract_names_the_inputs_of_onnx() -> None:
    ours = contract.ATTENTION
    schema = onnx.defs.get_schema("Attention", 23)
    assert [port.name for port in ours.inputs] == [formal.name for formal in schema.inputs]
    assert [port.name for port in ours.outputs] == [formal.name for formal in schema.outputs][:3]
    assert {"q_num_heads", "kv_num_heads", "is_causal", "scale"} <= set(schema.attributes) & set(ours.attributes)
