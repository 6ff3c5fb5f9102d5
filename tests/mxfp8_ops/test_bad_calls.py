"""Calls that are refused, and the words: the same from the reference, the kernels and the torch ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_front_end import Torch

from mxfp8_ops import cpu, numpy_nodes
from mxfp8_ops.errors import BackendError, ContractError, ShapeError

FRONT_ENDS: dict[str, Any] = {"reference": numpy_nodes, "cpu": cpu, "torch": Torch()}
ALL, NUMPY, CPU = ("reference", "cpu", "torch"), ("reference", "cpu"), ("cpu",)

X = np.ones((4, 64), np.float32)
E, S = np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 120, np.uint8)
W = np.zeros((3, 64), np.uint8), np.zeros((3, 2), np.uint8)
TABLE = numpy_nodes.quantize(np.ones((7, 45), np.float32))
EXPERTS = np.zeros((4, 40, 64), np.uint8), np.zeros((4, 40, 2), np.uint8)
HUGE = np.broadcast_to(np.float32(1), (2**20, 2**20))
NOTHING = np.empty((2**40, 0), np.float32), np.empty((2**40, 0), np.uint8), np.empty((2**40, 0), np.uint8)


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(*values: Any) -> np.ndarray:
    return np.array(*values, np.int64)


def attend(f: Any, *shapes: tuple[int, ...], heads: tuple[int, int] = (4, 2), **more: Any) -> Any:
    """Calls attention on zeros of shapes Q, K, V, all three as they should be unless given."""
    q, k, v = (*shapes, *((2, 5, 64), (2, 7, 32), (2, 7, 32))[len(shapes) :])
    return f.attention(floats(*q), floats(*k), floats(*v), **more, q_num_heads=heads[0], kv_num_heads=heads[1])


Call = tuple[tuple[str, ...], Callable[[Any], Any], type[Exception], str]
CALLS: list[Call] = [
    # --- quantize and dequantize ---
    (ALL, lambda f: f.quantize(X.astype(np.float64)), ShapeError,
     "quantize: dtype float64; expected one of float32, float16, bfloat16; cast the tensor first"),
    (ALL, lambda f: f.quantize(X, axis=2), ShapeError,
     "quantize: axis 2 of a 2-D tensor; expected -2 <= axis < 2; correct the axis"),
    (ALL, lambda f: f.quantize(np.array(1, np.float32)), ShapeError, "quantize: axis -1 of a 0-D tensor"),
    (ALL, lambda f: f.quantize(X, element_format="fp8"), ContractError, "element_format: 'fp8'; expected one of e4m3,"),
    (ALL, lambda f: f.quantize(X, scale_rounding="up"), ContractError, "scale_rounding: 'up'; expected one of ceil,"),
    (CPU, lambda f: f.quantize(X.astype(">f4")), ShapeError, "quantize: x has dtype >f4, in another byte order"),
    (CPU, lambda f: f.quantize(X.tolist()), ShapeError, "quantize: x is a list; expected a NumPy array"),
    (CPU, lambda f: f.quantize(X, threads=-1), ShapeError, "quantize: threads is -1; expected 0 (all processors)"),
    (CPU, lambda f: f.quantize(X, threads="all"), ShapeError, "quantize: threads is 'all'"),
    (CPU, lambda f: f.quantize(HUGE), BackendError, "quantize: no memory for an array of shape (1048576, "),
    (ALL, lambda f: f.dequantize(E, S[:, :1]), ShapeError,
     "dequantize: scales have shape (4, 1); expected (4, 2) for elements (4, 64) in blocks of 32 along axis 1"),
    (NUMPY, lambda f: f.dequantize(E, S, dtype="float64"), ShapeError, "dtype: 'float64'; expected one of"),
    (("torch",), lambda f: f.dequantize(E, S, dtype="int8"), ShapeError, "dequantize: dtype int8"),
    (CPU, lambda f: f.dequantize(E.view(np.int8), S), ShapeError, "elements have dtype int8; expected uint8"),
    (CPU, lambda f: f.dequantize(E, S.tolist()), ShapeError, "dequantize: scales is a list"),
    (CPU, lambda f: f.pack(X[0]), ShapeError, "pack: weight has shape (64,); expected a matrix"),
    (CPU, lambda f: f.pack(HUGE), BackendError, "pack: no memory for an array of shape"),
    # --- gemms ---
    (ALL, lambda f: f.gemm(E, S, E[:, :32], S[:, :1]), ShapeError,
     "gemm: operands (4, 64) and (4, 32); expected [..., M, K] and [..., N, K] with the same K; "
     "store the second operand with K last"),
    (ALL, lambda f: f.gemm(E, S, E, S, floats(3)), ShapeError,
     "gemm: bias has shape (3,); expected (4,), one value per output column; reshape it"),
    (ALL, lambda f: f.gemm(E, S[:2], E, S), ShapeError, "scales have shape (2, 2); expected (4, 2)"),
    (ALL, lambda f: f.gemm(E.reshape(2, 2, 64), S.reshape(2, 2, 2), np.zeros((3, 2, 64), np.uint8),
                           np.zeros((3, 2, 2), np.uint8)), ShapeError,
     "gemm: operands (2, 2, 64) and (3, 2, 64); expected leading dimensions that broadcast"),
    (ALL, lambda f: f.weight_gemm(X[:, :32], E, S), ShapeError, "gemm: operands (4, 32) and (4, 64)"),
    (ALL, lambda f: f.weight_gemm(E, E, S), ShapeError, "gemm: dtype uint8; expected one of"),
    (ALL, lambda f: f.weight_gemm(X, E, S[:, :1]), ShapeError, "scales have shape (4, 1)"),
    (ALL, lambda f: f.weight_gemm(X, E, S, floats(7)), ShapeError, "gemm: bias has shape (7,); expected (4,)"),
    (("torch",), lambda f: f.weight_gemm(X, E, S, np.zeros(4, np.float16)), ShapeError,
     "weight_gemm: bias has dtype float16; expected float32; pass bias.float()"),
    (CPU, lambda f: f.weight_gemm(X, E, S, np.full(4, "a")), ShapeError, "gemm: bias has dtype <U1; expected"),
    (CPU, lambda f: f.weight_gemm(X, E, None), ShapeError, "gemm: b_scales is a NoneType; expected a NumPy array"),
    (ALL, lambda f: f.weight_gemm(X, E, S, activation_dtype="float16"), ContractError,
     "activation_dtype: 'float16'; expected one of bfloat16; did you mean bfloat16"),
    (CPU, lambda f: f.weight_gemm(*NOTHING), BackendError,
     "gemm: no memory for an array of shape (1099511627776, 1099511627776)"),
    # --- rows of a table ---
    (ALL, lambda f: f.embedding(ids([[1, 2], [7, 9]]), *TABLE), ShapeError,
     "embedding: index 7 at (1, 0); expected -7 to 6, for a table of 7 rows; "),
    (ALL, lambda f: f.embedding(np.array([[1, 2], [-8, 9]], np.int32), *TABLE), ShapeError, "index -8 at (1, 0)"),
    (ALL, lambda f: f.embedding(ids([0]), TABLE[0][:0], TABLE[1][:0]), ShapeError,
     "index 0 at (0,); expected none: the table has no rows"),
    (NUMPY, lambda f: f.embedding(np.zeros(1, np.uint8), *TABLE), ShapeError,
     "indices have dtype uint8; expected one of int32, int64; cast the indices"),
    (ALL, lambda f: f.embedding(ids([0]), TABLE[0][0], TABLE[1][0]), ShapeError,
     "a table of shape (45,); expected [V, D]"),
    (ALL, lambda f: f.embedding(ids([0]), TABLE[0], TABLE[1][:, :1]), ShapeError,
     "scales have shape (7, 1); expected (7, 2)"),
    (ALL, lambda f: f.embedding(ids([0]), *TABLE, b_format="e3m4"), ContractError, "e3m4"),
    # --- grouped gemms ---
    *((NUMPY, lambda f, i=i: f.grouped_gemm(E, S, *EXPERTS, ids([i])), ShapeError,
       f"expert {i} of 4; expected -4 to 3, or 4 for none; ") for i in (5, -5, 2**40, -(2**63))),
    (CPU, lambda f: f.grouped_gemm(E, S, *EXPERTS, np.array([1], np.int32)), ShapeError,
     "experts have dtype int32; expected int64"),
    (NUMPY, lambda f: f.grouped_gemm(E, S[:1], *EXPERTS, ids(0)), ShapeError, "scales have shape"),
    (NUMPY, lambda f: f.grouped_weight_gemm(X[:, :32], *EXPERTS, ids(0)), ShapeError,
     "operands (4, 32) and (4, 40, 64); expected [..., M, K] and [E, N, K]"),
    (NUMPY, lambda f: f.grouped_weight_gemm(X[0], *EXPERTS, ids(0)), ShapeError, "operands (64,)"),
    (NUMPY, lambda f: f.grouped_weight_gemm(X, EXPERTS[0][0], EXPERTS[1][0], ids(0)), ShapeError, "and (40, 64)"),
    (NUMPY, lambda f: f.grouped_weight_gemm(X.reshape(4, 1, 64)[:3], *EXPERTS, ids([0, 0])), ShapeError,
     "leading dimensions that broadcast"),
    # --- fused nodes ---
    (NUMPY, lambda f: f.fused_weight_gemm(X, *W, epilogue="swish"), ContractError,
     "'swish'; expected one of none, relu, gelu,"),
    (NUMPY, lambda f: f.fused_weight_gemm(X, *W, factor=X), ShapeError,
     "factor has shape (4, 64); expected (4, 3), that"),
    (NUMPY, lambda f: f.fused_weight_gemm(X, *W, factor=np.zeros((4, 3))), ShapeError,
     "dtype float64; expected one of float32"),
    # --- attention ---
    (NUMPY, lambda f: attend(f, heads=(3, 2)), ShapeError,
     "3 heads of Q and 2 of K and V; expected 1 or more of each"),
    (NUMPY, lambda f: attend(f, heads=(4, 0)), ShapeError, "4 heads of Q and 0 of K and V; expected"),
    (NUMPY, lambda f: attend(f, (2, 5, 64), (2, 7, 20)), ShapeError, "K (2, 7, 20)"),
    (NUMPY, lambda f: attend(f, (2, 5, 64), (2, 7, 32), (2, 6, 32)), ShapeError, "V (2, 6, 32)"),
    (NUMPY, lambda f: attend(f, (64,)), ShapeError, "Q (64,), "),
    (NUMPY, lambda f: attend(f, mask=floats(2, 1, 3, 7)), ShapeError,
     "attn_mask has shape (2, 1, 3, 7); expected one that broadcasts to (2, 4, 5, 7)"),
    (NUMPY, lambda f: attend(f, mask=floats(1, 1, 1, 1, 7)), ShapeError, "attn_mask has shape (1, 1, 1, 1, 7)"),
    (NUMPY, lambda f: attend(f, past=(floats(2, 2, 3, 16), floats(2, 2, 4, 16))), ShapeError,
     "past_value (2, 2, 4, 16); expected "),
    (NUMPY, lambda f: f.attention(X[None], X[None].astype(np.float16), X[None], q_num_heads=1, kv_num_heads=1),
     ShapeError, "k has dtype float16; expected float32, that of q"),
    (NUMPY, lambda f: attend(f, mask=np.zeros(7, np.int64)), ShapeError, "dtype int64"),
    (NUMPY, lambda f: attend(f, activation_dtype="float16"), ContractError, "activation_dtype: 'float16'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("front_ends", "call", "error", "words"), [pytest.param(*row, id=f"{row[3]} {i}") for i, row in enumerate(CALLS)]
)
def test_a_bad_call_is_refused_in_words(
    front_ends: tuple[str, ...], call: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    for name in front_ends:
        with pytest.raises(error) as caught:
            call(FRONT_ENDS[name])
        assert words in str(caught.value), name


# --- quantize(..., out=...) ------------------------------------------------------------------------------------------

CONTIGUOUS = "expected C-contiguous, writeable uint8 of shape"


def read_only(codes: np.ndarray) -> np.ndarray:
    codes.flags.writeable = False
    return codes


def overlapping() -> tuple[np.ndarray, np.ndarray]:
    memory = np.zeros(4 * 64, np.uint8)
    return memory.reshape(4, 64), memory[:8].reshape(4, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e, s: (e,), "out is a tuple, not a pair; expected (elements, scales); pass the pair that quantize"),
        (lambda e, s: e, "out is a ndarray, not a pair; expected (elements, scales)"),
        (lambda e, s: (e, None), f"out: scales are a NoneType; {CONTIGUOUS} (4, 2)"),
        (lambda e, s: (e[:3], s), f"out: elements are uint8 of shape (3, 64); {CONTIGUOUS} (4, 64)"),
        (lambda e, s: (e, s.T), f"out: scales are uint8 of shape (2, 4), strided or read-only; {CONTIGUOUS} (4, 2)"),
        (lambda e, s: (e, s[:, :1]), "out: scales are uint8 of shape (4, 1), strided"),
        (lambda e, s: (e.view(np.int8), s), "out: elements are int8 of shape (4, 64);"),
        (lambda e, s: (np.zeros((4, 128), np.uint8)[:, ::2], s), "out: elements are uint8 of shape (4, 64), strided"),
        (lambda e, s: (read_only(e), s), "out: elements are uint8 of shape (4, 64), strided or read-only;"),
        (lambda e, s: overlapping(), "out: elements, scales and x share memory; expected three arrays without"),
        (lambda e, s: (X.view(np.uint8)[:, :64].copy("F"), s), "out: elements are uint8 of shape (4, 64), strided"),
        (lambda e, s: (X.view(np.uint8).ravel()[:256].reshape(4, 64), s), "out: elements, scales and x share memory"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: Any, words: str) -> None:
    for name in NUMPY:
        with pytest.raises(ShapeError) as caught:
            FRONT_ENDS[name].quantize(X, out=change(E.copy(), S.copy()))
        assert str(caught.value).startswith(f"quantize: {words}"), name
    assert (X == 1).all()


@pytest.mark.parametrize("module", [numpy_nodes, cpu])
def test_a_misspelt_or_missing_option_is_a_type_error(module: Any) -> None:
    x = floats(1, 2, 8)
    with pytest.raises(TypeError, match=r"^attention\(\) missing 1 required .*argument: 'kv_num_heads'"):
        module.attention(x, x, x, q_num_heads=1)
    calls = [(module.gemm, E, S, E, S), (module.fused_gemm, E, S, E, S), (module.weight_gemm, X, E, S)]
    for function, *operands in (*calls, (module.fused_weight_gemm, X, E, S), (module.attention, x, x, x)):
        with pytest.raises(TypeError, match=r"(gemm|attention)\(\) got an unexpected keyword argument 'dtyp'"):
            function(*operands, dtyp="float16")
