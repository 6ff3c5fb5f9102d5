"""The nodes inside ONNX Runtime with operands that are empty, absent or of a wrong rank: kernels do as bodies do.

Values are such that every sum is exact in float32, in any order: results are equal or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from one_node import NUMPY, TYPED_BY_HAND, from_ort, to_ort
from onnx import helper
from releases import release

from mxfp8_ops import contract, ort
from mxfp8_ops.contract import Op, Port
from mxfp8_ops.onnx_functions import functions

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape | None]
"""By operand; None for one that is absent."""

SIZES = {"M": 3, "N": 5, "K": 40, "E": 2, "S": 3, "T": 4, "P": 4}
"""Sizes that may be 0, under the names that contract.py has for them."""

ATTRIBUTES = {"epilogue": "relu", "q_num_heads": 2}
"""Attributes with which results are exact: no exponentials."""


class Case(NamedTuple):
    """A node and the shapes of its operands."""

    op: str
    changed: str
    """The difference from the usual case, in words."""
    shapes: Shapes
    is_legal: bool = False
    """Whether the contract has a result for it."""


def cases(op: Op) -> Iterator[Case]:
    """Yields the node as it should be, with sizes of 0, and with each operand of other shapes."""
    usual = _shapes(op, SIZES)
    yield Case(op.name, "nothing", usual, is_legal=True)
    for size in SIZES:
        if (shapes := _shapes(op, {**SIZES, size: 0})) != usual:
            yield Case(op.name, f"{size} = 0", shapes, is_legal=True)
    for name, shape in usual.items():
        if release("onnxruntime") >= (1, 27):  # older ones crash on an empty name
            yield Case(op.name, f"{name} absent", {**usual, name: None})
        for other in _others(shape):
            yield Case(op.name, f"{name} {list(other)}", {**usual, name: other})


def difference(case: Case) -> str:
    """Returns how our kernels differ from the function body: "" if both give the same bytes, or the kernel refuses.

    A body broadcasts operands of shapes that no rewritten file has. The kernels must refuse those: they read memory.
    """
    stock, ours = (_outcome(case, kernels=kernels) for kernels in (False, True))
    if isinstance(ours, str) and (isinstance(stock, str) or not case.is_legal):
        return ""
    if isinstance(stock, str) or isinstance(ours, str):
        return f"stock: {_in_words(stock)}; ours: {_in_words(ours)}"
    same = all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(stock, ours, strict=True))
    return "" if same else f"stock: {stock}; ours: {ours}"


def _shapes(op: Op, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Returns the shapes of all operands of a node."""
    m, n, k, e, s, t, p = (sizes[name] for name in "MNKESTP")
    blocks = -(-k // 32)
    rows = {"X": (m, k), "A": (m, k), "A_scales": (m, blocks), "elements": (m, k)}
    columns = {"B": (n, k), "B_scales": (n, blocks), "bias": (n,), "factor": (m, n)}
    past = dict.fromkeys(("past_key", "past_value"), (2, 1, p, 4))
    attention = {"Q": (2, s, 8), "K": (2, t, 4), "V": (2, t, 4), "attn_mask": (s, p + t), **past}
    shapes: dict[str, Shape] = {**rows, **columns, **attention, "scales": (m, blocks), "indices": (m,), "experts": (2,)}
    if op.at("experts") is not None:
        shapes |= {name: (2, *shapes[name]) for name in ("X", "A", "A_scales")}
        shapes |= {name: (e, *shapes[name]) for name in ("B", "B_scales")}
    if op.name == "MXFP8Conv":
        shapes |= {"X": (2, k, 4), "B": (n, 2, k), "B_scales": (n, 2, blocks), "residual": (2, n, 3)}
    return {port.name: shapes[port.name] for port in op.inputs}


def _others(shape: Shape) -> list[Shape]:
    """Returns shapes that an operand of `shape` should not have: empty ones, and those of other ranks."""
    empty = [(0,), (0,) * len(shape), (0, *shape), (*shape, 0)]
    empty += [(*shape[:i], 0, *shape[i + 1 :]) for i in range(len(shape))]
    ranks = [(1, *shape), (2, *shape), (*shape, 1), shape[1:], shape[:-1], (1,), ()]
    return [other for other in dict.fromkeys(empty + ranks) if other != shape]


def _values(port: Port, shape: Shape) -> np.ndarray:
    """Returns operands that differ along the last axis, of the first dtype of a port."""
    i = np.indices(shape)[-1] if shape else np.zeros((), np.int64)
    dtype = port.dtypes[0]
    if port.name == "attn_mask":
        values = np.where(i % 2, -np.inf, 0)
    elif port.name in {"Q", "K"}:
        values = np.zeros(shape)  # scores of 0: all weights are equal, and their number is a power of two
    elif dtype in contract.ELEMENTS:
        values = np.where(i % 3, 0x38, 0x40)
    elif dtype == contract.UINT8:
        values = 127 + i % 2
    elif dtype == contract.FLOAT:
        values = (1 if port.name == "X" else 2) * (-1.0) ** i
    else:
        values = i % 2
    return np.asarray(values, np.int32 if dtype == contract.INT32 else NUMPY.get(dtype, np.int64))


@cache
def _session(op_name: str, absent: str, *, kernels: bool) -> onnxruntime.InferenceSession | str:
    """Returns a session of one node, all but one of whose inputs are fed, with any rank; or why there is none."""
    op = contract.OPS[op_name]
    names = ["" if port.name == absent else port.name for port in op.inputs]
    attributes = {name: ATTRIBUTES.get(name, default) for name, default in op.attributes.items()}
    node = helper.make_node(
        op.name, names, [f"out_{port.name}" for port in op.outputs], domain=contract.DOMAIN, **attributes
    )
    ports = [helper.make_tensor_value_info(p.name, p.dtypes[0], None) for p in op.inputs if p.name in names]
    results = [helper.make_tensor_value_info(f"out_{p.name}", p.dtypes[0], None) for p in op.outputs]
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    graph = helper.make_graph([node], "one", ports, results)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if kernels:
        ort.register(options)
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's, whatever it is
        return str(error)


def _outcome(case: Case, *, kernels: bool) -> list[np.ndarray] | str:
    """Returns the outputs, or why there are none."""
    op = contract.OPS[case.op]
    absent = next((name for name, shape in case.shapes.items() if shape is None), "")
    session = _session(case.op, absent, kernels=kernels)
    if isinstance(session, str):
        return session
    feeds = {}
    for port in op.inputs:
        if (shape := case.shapes[port.name]) is None:
            continue
        values, dtype = _values(port, shape), port.dtypes[0]
        if values.size or dtype in TYPED_BY_HAND:
            feeds[port.name] = to_ort(values, dtype)
        else:  # ONNX Runtime's own empty tensors have no data; a NumPy array has an address all the same
            feeds[port.name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, values.dtype.type)
    dtypes = [port.dtypes[0] for port in op.outputs]
    try:
        outputs = session.run_with_ort_values([f"out_{port.name}" for port in op.outputs], feeds)
    except Exception as error:  # ONNX Runtime's, whatever it is
        return str(error)
    return [from_ort(output, dtype) for output, dtype in zip(outputs, dtypes, strict=True)]


def _in_words(outcome: list[np.ndarray] | str) -> str:
    return f"refused, {outcome}" if isinstance(outcome, str) else f"gives {[array.shape for array in outcome]}"


@pytest.mark.parametrize("op", contract.OPS.values(), ids=lambda op: op.name)
def test_kernels_do_as_bodies_do(op):
    told = {case.changed: difference(case) for case in cases(op)}
    differences = {changed: text for changed, text in told.items() if text and not is_broadcast_bias(changed, text)}
    assert differences == {}


def is_broadcast_bias(changed: str, text: str) -> bool:
    """Whether a body broadcasts a bias that the kernel refuses: no op tells the rank of what may be absent."""
    broadcasts = re.fullmatch(r"bias \[(1|1, \d+)?\]", changed) is not None
    return broadcasts and re.search("^stock: gives .*; ours: refused, .*: bias has shape", text) is not None
