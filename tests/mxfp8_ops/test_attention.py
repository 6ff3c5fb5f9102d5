"""MXFP8Attention: the reference against ONNX's own; the body, the node and the kernels against the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import one_node
import onnx
import onnx.reference
import pytest
from attention_cases import CASES, Case, Operands, feeds, node_model, widened
from compare import assert_same, assert_within
from grids import looped, pairwise
from releases import release

from mxfp8_ops import cpu, ort
from mxfp8_ops.nodes import attention as reference

ROUNDINGS = (None, "bfloat16")
Results = list[np.ndarray]
NARROW = Case("narrow", rows=5, keys=7, past=3, mask=(5, 10))


@functools.cache
def expected_of(
    case: Case, dtype: str, size: float, activation_dtype: str | None, *, nan_guard: bool
) -> tuple[Any, ...]:
    """Returns operands, Q times `size`; the settings; the exact result; its bound; the presents."""
    q, *rest = case.operands(dtype)
    operands = (q * q.dtype.type(size), *rest)
    settings = {**case.settings, "activation_dtype": activation_dtype, "nan_guard": nan_guard}
    y, *presents = reference.attention(*widened(operands), **settings)
    return operands, settings, y, reference.attention_error_bound(*operands, **settings), presents


def check(
    run: Callable[[Operands, dict[str, Any]], Any],
    case: Case,
    activation_dtype: str | None = None,
    *,
    dtype: str = "float32",
    size: float = 1.0,
    nan_guard: bool = False,
) -> None:
    """Fails unless `run` gives y within the bound of the reference, and the reference's presents."""
    operands, settings, y, bound, presents = expected_of(case, dtype, size, activation_dtype, nan_guard=nan_guard)
    got = run(operands, settings)
    assert_within(got[0].astype(np.float32), y, bound)
    for present, other in zip(got[1:], presents, strict=True):
        assert_same(present.astype(np.float32), other, "present")


def in_session(case: Case, operands: Operands, settings: dict[str, Any], opset: int = 0, **model: Any) -> Results:
    """Returns the results of a node by its body at an opset, or by the kernel."""
    more = {name: settings[name] for name in ("activation_dtype", "nan_guard")}
    proto = node_model(case, opset or 21, operands=operands, **more, **model)
    if not opset:
        del proto.functions[:]  # without a body, the kernel runs
    return one_node.run(proto, feeds(operands), kernels=not opset)


# --- The reference ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(release("onnx") < (1, 20), reason="onnx 1.19 itself mixes up grouped heads and the past")
@looped("case", [case for case in CASES if case.is_usual])  # ONNX pads a short mask, and fails on empty operands
def test_the_reference_gives_the_results_of_onnx(case: Case) -> None:
    *operands, past = case.operands()
    results = reference.attention(*operands, past, **case.settings)
    wide = [
        x if x is None or x.dtype == np.bool_ else x.astype(np.float64) for x in (*operands, *(past or (None, None)))
    ]
    settings = {**case.settings, "is_causal": int(case.causal)}
    if not case.scale:
        del settings["scale"]
    names = [name if x is not None else "" for name, x in zip("qkvmxy", wide, strict=True)]
    node = onnx.helper.make_node("Attention", names, ["Y", "present_key", "present_value"], **settings)
    given = {name: x for name, x in zip(names, wide, strict=True) if name}
    expected = onnx.reference.ReferenceEvaluator(node).run(None, given)
    np.testing.assert_allclose(results[0], expected[0], rtol=2e-7, atol=1e-12)
    for present, other in zip(results[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(present, other)


def test_the_bound_refuses_activations_that_are_rounded_to_bfloat16() -> None:
    operands, settings = CASES[0].operands(), CASES[0].settings
    y = reference.attention(*operands, **settings)[0]
    bound = reference.attention_error_bound(*operands, **settings)
    assert np.median(bound / np.abs(y).mean()) < 1e-4
    rounded = reference.attention(*operands, **settings, activation_dtype="bfloat16")[0]
    assert (np.abs(rounded - y) > bound).mean() > 0.9


@pytest.mark.parametrize(("nan_guard", "empty"), [(False, np.nan), (True, 0.0)])
def test_a_row_without_a_visible_key_is_nan_or_zero(nan_guard: bool, empty: float) -> None:
    q, mask = np.ones((1, 2, 16), np.float32), np.array([[True, False], [False, False]])
    y = reference.attention(q, q, q, mask, q_num_heads=1, kv_num_heads=1, nan_guard=nan_guard)[0]
    np.testing.assert_array_equal(y, np.stack([np.ones(16), np.full(16, empty)])[None].astype(np.float32))


# --- The body and the node --------------------------------------------------------------------------------------------


@looped("case, opset, activation_dtype", pairwise(c=CASES, opset=[0, *one_node.OPSETS], a=ROUNDINGS))
def test_the_body_and_the_node_give_the_reference(case: Case, opset: int, activation_dtype: str | None) -> None:
    check(lambda *given: in_session(case, *given, opset), case, activation_dtype, nan_guard=True)


@looped("opset, dtype", pairwise(opset=[0, 21], dtype=["float16", "bfloat16"]))
def test_the_body_and_the_node_take_every_dtype(opset: int, dtype: str) -> None:
    check(lambda *given: in_session(NARROW, *given, opset), NARROW, dtype=dtype)


@looped("opset", [0, 21])
def test_the_presents_may_be_left_out(opset: int) -> None:
    operands, settings, *_ = expected_of(NARROW, "float32", 1.0, None, nan_guard=False)
    (y,) = in_session(NARROW, operands, settings, opset, presents=False)
    assert_same(y, in_session(NARROW, operands, settings, opset)[0])


@pytest.mark.parametrize("nan_guard", [False, True])
def test_the_body_treats_rows_without_a_softmax_as_the_reference(nan_guard: bool) -> None:
    case = Case("bad rows", rows=5, keys=3, mask=(5, 3))
    q, k, v, mask, _ = case.operands()
    assert mask is not None
    mask[:] = 0
    mask[1] = mask[4, 1] = -np.inf
    q[0, 2, :4] = np.nan
    mask[3, 1] = np.inf
    settings = {**case.settings, "nan_guard": nan_guard}
    expected = reference.attention(q, k, v, mask, **settings)[0]
    assert np.isnan(expected).any() != nan_guard
    got = in_session(case, (q, k, v, mask, None), {**settings, "activation_dtype": None}, 21)[0]
    assert_within(got, expected, np.full(got.shape, 1e-5))


def test_a_session_infers_the_shapes() -> None:
    model = node_model(Case("shapes", rows=5, keys=7, past=3, d=16, dv=24, kv_heads=2), 21)
    del model.functions[:]
    for value, shape in zip(model.graph.input, (["b", "s", 64], ["b", "t", 32], ["b", "t", 48]), strict=False):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, 1, shape))
    y, *presents = (output.shape for output in ort.session(model.SerializeToString()).get_outputs())
    assert y == ["b", "s", 96]
    assert [(shape[1], shape[3]) for shape in presents] == [(2, 16), (2, 24)]


@pytest.mark.parametrize(
    ("changes", "cut", "message"),
    [
        ({"q_heads": 3}, None, "3 heads of Q and 4 of K and V; expected 1 or more of each"),
        ({"mask": (1, 1, 3, 9)}, None, r"attn_mask has shape \(1, 1, 3, 9\); expected one that broadcasts to \(2, 4,"),
        ({"past": 3}, slice(1, None), r"past_value \(2, 4, 2, 16\); expected .* or both \[0\] for no past"),
    ],
    ids=["heads", "mask", "past"],
)
def test_the_node_refuses_what_does_not_fit(changes: dict[str, Any], cut: slice | None, message: str) -> None:
    case = Case("refused", **changes)
    *operands, past = case.operands()
    past = past if cut is None else (past[0], past[1][:, :, cut])
    with pytest.raises(Exception, match=f"MXFP8Attention '.*': .*{message}"):
        in_session(case, (*operands, past), {"activation_dtype": None, "nan_guard": False})


# --- The kernel -------------------------------------------------------------------------------------------------------


def kernel(operands: Operands, settings: dict[str, Any]) -> Any:
    return cpu.attention(*operands, **settings)


KERNEL_CASES = [
    *CASES,
    Case("blocks", batch=1, rows=180, keys=180, q_heads=6, kv_heads=2, d=32, dv=48, mask=(180, 180), causal=True),
]
"""The last one's rows are split into blocks of several heads."""


@looped("case, activation_dtype", pairwise(case=KERNEL_CASES, activation_dtype=ROUNDINGS))
def test_the_kernel_gives_the_reference(case: Case, activation_dtype: str | None, isa: str) -> None:
    check(kernel, case, activation_dtype)


@looped("rows, dtype, activation_dtype", pairwise(r=[3, 20], d=["float16", "bfloat16"], a=ROUNDINGS))
def test_the_kernel_takes_every_dtype(rows: int, dtype: str, activation_dtype: str | None, isa: str) -> None:
    for case in (
        Case("narrow", rows=rows, keys=rows, past=50, d=40, dv=33, mask=(rows, rows + 50), causal=True),
        Case("narrow, bool", rows=rows, keys=rows, d=64, dv=64, mask=(2, 1, 1, rows), boolean=True),
    ):
        check(kernel, case, activation_dtype, dtype=dtype)


@looped("rows, activation_dtype", pairwise(rows=[1, 33], activation_dtype=ROUNDINGS))
def test_threads_and_other_batches_change_no_bits(rows: int, activation_dtype: str | None, isa: str) -> None:
    keys = rows + 3000  # several parts, which are tasks of their own with 8 threads
    sizes = {"q_heads": 2, "kv_heads": 1, "d": 64, "dv": 64}
    case = Case("split", rows=rows, keys=rows, past=3000, **sizes, mask=(2, 1, 1, keys), boolean=True, causal=True)
    *operands, past = case.operands()
    operands[3][0] = True
    settings = {**case.settings, "activation_dtype": activation_dtype}
    y = cpu.attention(*operands, past, threads=1, **settings)[0]
    expected, bound = (f(*operands, past, **settings) for f in (reference.attention, reference.attention_error_bound))
    assert_within(y, expected[0], bound)
    for threads in (3, 8):
        assert_same(cpu.attention(*operands, past, threads=threads, **settings)[0], y)
    first = [x[:1] for x in operands[:3]]
    assert_same(cpu.attention(*first, None, tuple(x[:1] for x in past), **settings)[0], y[:1])


@looped("activation_dtype, size", pairwise(activation_dtype=ROUNDINGS, size=[1e-30, 1e-3, 30.0, 1e4]))
def test_the_kernel_takes_scores_of_every_size(activation_dtype: str | None, size: float, isa: str) -> None:
    check(kernel, Case(f"size {size}", rows=12, keys=200, d=32), activation_dtype, size=size)


@looped("nan_guard, rows, activation_dtype", pairwise(nan_guard=[False, True], rows=[4, 20], a=ROUNDINGS))
def test_the_kernel_treats_rows_without_a_softmax_as_the_reference(
    nan_guard: bool, rows: int, activation_dtype: str | None, isa: str
) -> None:
    case = Case("bad rows", rows=rows, keys=300, mask=(rows, 300))
    q, k, v, mask, _ = case.operands()
    mask[0] = mask[3] = -np.inf
    q[0, 1, :4] = np.nan
    mask[2, 170] = np.inf
    mask[3, 299] = 0  # the last key alone
    settings = {**case.settings, "activation_dtype": activation_dtype, "nan_guard": nan_guard}
    got, expected = (attention(q, k, v, mask, **settings)[0] for attention in (cpu.attention, reference.attention))
    assert np.isnan(expected).any() != nan_guard
    bad = np.isnan(reference.attention(q, k, v, mask, **case.settings)[0])
    np.testing.assert_array_equal(got[bad], expected[bad])
    np.testing.assert_allclose(got[~bad], expected[~bad], rtol=0.02, atol=0.02)


def test_a_row_hidden_with_the_lowest_number_is_a_mean(isa: str) -> None:
    case = Case("lowest", rows=10, keys=40, mask=(40,))
    q, k, v, mask, _ = case.operands()
    mask[:] = np.finfo(np.float32).min
    y = cpu.attention(q, k, v, mask, **case.settings)[0]
    np.testing.assert_allclose(y, np.broadcast_to(v.mean(1, keepdims=True), y.shape), rtol=1e-5, atol=1e-6)


@looped("differs", ["nothing", "the last row", "rows of the last batch", "the last batch"])
def test_the_kernel_takes_masks_whose_rows_are_equal(differs: str, isa: str) -> None:
    case = Case("equal rows", rows=9, keys=40, mask=(2, 1, 9, 40), boolean=True)
    q, k, v, mask, _ = case.operands()
    if differs == "the last batch":
        mask[0] = True
    if differs != "rows of the last batch":
        mask[1] = mask[1, :, :1]  # as an exporter expands a mask of keys
    mask[0] = mask[0, :, :1]
    if differs == "the last row":
        mask[1, :, -1, 1:] ^= True
    y, expected = (attention(q, k, v, mask, **case.settings)[0] for attention in (cpu.attention, reference.attention))
    assert_within(y, expected, reference.attention_error_bound(q, k, v, mask, **case.settings))


def test_operands_may_lie_in_memory_in_any_way(isa: str) -> None:
    case = Case("strided", rows=10, keys=12, past=5, mask=(2, 4, 10, 17))
    q, k, v, mask, past = case.operands()
    scattered = tuple(np.asfortranarray(x) for x in (q, k, v, mask))
    y = cpu.attention(*scattered, tuple(np.asfortranarray(x) for x in past), **case.settings)[0]
    assert_same(y, cpu.attention(q, k, v, mask, past, **case.settings)[0])
