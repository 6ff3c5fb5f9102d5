"""MXFP8Attention in ONNX Runtime: its kernel against the reference, in whole sessions."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import one_node
import onnx
import onnxruntime
import pytest
from attention_cases import CASES, Case, Operands, feeds, node_model, widened
from compare import assert_within
from grids import looped
from releases import release

from mxfp8_ops import contract, native, ort
from mxfp8_ops.nodes import attention as reference


def run(model: onnx.ModelProto, operands: Operands) -> list[np.ndarray]:
    """Returns the outputs of a model in a session that has the library; without a body, none but its kernels do."""
    del model.functions[:]
    return one_node.run(model, feeds(operands), kernels=True)


@looped("case, activation_dtype", [*itertools.product(CASES, (None, "bfloat16"))])
def test_every_case(case: Case, activation_dtype: str | None) -> None:
    operands = case.operands()
    got = run(node_model(case, 21, activation_dtype=activation_dtype), operands)
    settings = {**case.settings, "activation_dtype": activation_dtype}
    expected = reference.attention(*operands, **settings)
    assert_within(got[0], expected[0], reference.attention_error_bound(*operands, **settings))
    for present, other in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(present, other)


@looped("dtype, presents", [*itertools.product(("float32", "float16", "bfloat16"), (False, True))])
def test_every_dtype(dtype: str, presents: bool) -> None:
    case = Case("narrow", rows=5, keys=7, past=3, mask=(5, 10))
    operands = case.operands(dtype)
    y, *others = run(node_model(case, 21, operands=operands, presents=presents), operands)
    bound = reference.attention_error_bound(*operands, **case.settings)
    expected, *presents_expected = reference.attention(*widened(operands), **case.settings)
    assert_within(y.astype(np.float32), expected, bound)
    for present, other in zip(others, presents_expected, strict=False):
        np.testing.assert_array_equal(present.astype(np.float32), other)


def test_onnx_runtime_s_attention_is_within_the_bound() -> None:
    case = Case("theirs", rows=9, keys=9, mask=(9, 9))
    q, k, v, mask, _ = case.operands()
    names = ["q", "k", "v", "mask"]
    node = onnx.helper.make_node("Attention", names, ["y"], q_num_heads=case.q_heads, kv_num_heads=case.kv_heads)
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [onnx.helper.make_tensor_value_info(n, 1, x.shape) for n, x in zip(names, (q, k, v, mask), strict=True)],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    if release("onnxruntime") < (1, 23):
        pytest.skip("Attention is new in ONNX Runtime 1.23")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, dict(zip(names, (q, k, v, mask), strict=True)))
    expected = reference.attention(q, k, v, mask, **case.settings)[0]
    assert_within(y, expected, reference.attention_error_bound(q, k, v, mask, **case.settings))


def test_shapes_are_inferred() -> None:
    case = Case("shapes", rows=5, keys=7, past=3, d=16, dv=24, kv_heads=2)
    model = node_model(case, 21)
    del model.functions[:]
    for value, shape in zip(model.graph.input, (["b", "s", 64], ["b", "t", 32], ["b", "t", 48]), strict=False):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, 1, shape))
    outputs = ort.session(model.SerializeToString()).get_outputs()
    assert outputs[0].shape == ["b", "s", 96]
    assert [output.shape[1] for output in outputs[1:]] == [2, 2]
    assert [output.shape[3] for output in outputs[1:]] == [16, 24]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_heads": 3}, "3 heads of Q and 4 of K and V; expected 1 or more of each"),
        ({"mask": (1, 1, 3, 9)}, r"attn_mask has shape \(1, 1, 3, 9\); expected one that broadcasts to \(2, 4, 9, 9\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    case = Case("refused", **changes)
    operands = case.operands()
    with pytest.raises(Exception, match=f"MXFP8Attention '.*': .*{message}"):
        run(node_model(case, 21), operands)


def test_a_past_of_another_shape_is_refused() -> None:
    case = Case("refused", past=3)
    q, k, v, mask, past = case.operands()
    operands = (q, k, v, mask, (past[0], past[1][:, :, 1:]))
    with pytest.raises(Exception, match=r"past_value \(2, 4, 2, 16\); expected .* or both \[0\] for no past"):
        run(node_model(case, 21, operands=operands), operands)


def test_it_is_not_registered_where_a_gpu_runs_the_nodes() -> None:
    """ONNX Runtime then takes its body apart, whose ops the CUDA provider has."""
    case = CASES[0]
    model = node_model(case, 21)
    for device in ("cuda", "cuda-copies"):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("mxfp8.device", device)
        options.register_custom_ops_library(str(native.library_path()))
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = {contract.ATTENTION.inputs[i].name for i in range(3)}
        given = {n: x for n, (x, _) in feeds(case.operands()).items() if n in names}
        expected = reference.attention(*case.operands(), **case.settings)[0]
        bound = reference.attention_error_bound(*case.operands(), **case.settings)
        assert_within(session.run(["Y"], given)[0], expected, bound)
        del model.functions[:]
        with pytest.raises(Exception, match="MXFP8Attention"):
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        model = node_model(case, 21)


def test_the_struct_of_python_is_that_of_c() -> None:
    # Five ints and a float, then 8 sizes, 4 of the mask, 9 addresses.
    assert ctypes.sizeof(native.AttentionArguments) == 24 + 8 * (8 + 4 + 9)
