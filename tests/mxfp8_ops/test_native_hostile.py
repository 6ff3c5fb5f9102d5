"""Hostile arguments to the native library: the C ABI refuses them in words, and so do the functions on NumPy arrays.

tests/native/hostile.cpp passes a million random combinations of them under sanitizers (`make sanitize`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, addressof, byref, c_char_p, c_double, c_int, c_int64, c_void_p, create_string_buffer, sizeof
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxfp8_ops import cpu, native
from mxfp8_ops.cuda import planner
from mxfp8_ops.errors import BackendError, ShapeError
from mxfp8_ops.native import AttentionArguments

HEADER = Path(__file__).parents[2] / "custom_ops/mxfp8_ops/src/mxfp8_ops.h"

CODES = [0, 2, 18, 99, -1, 2**31 - 1]
LARGE = [2**63 - 1, 2**62, 2**58, 2**49]
"""Each is too large whatever the other sizes are, if none of them is 0."""
ROOM = 4096
FLOAT32, INT64, E4M3 = 1, 7, 17


def same(names: str, right: Any, wrong: list[Any]) -> dict[str, tuple[Any, list[Any]]]:
    return dict.fromkeys(names.split(), (right, wrong))


SIZES = same("outer inner m n k v d count", 2, [-1, -(2**63), *LARGE])
STRIDES = same("x_stride y_stride w_stride", 2, [1, -1, -(2**63)])
POINTERS = {
    **same("elements scales a a_scales b b_scales", "bytes", [None]),
    **same("x y w indices experts stats", "floats", [None, "odd"]),
    **same("bias factor", "floats", ["odd"]),
}
ARGUMENTS = {
    **same("element_format a_format b_format", E4M3, [*CODES, 1, 2, 10, 16]),
    **same("value_dtype x_dtype y_dtype factor_dtype", FLOAT32, [*CODES, 3, 17, 19]),
    **same("activation_dtype", FLOAT32, [*CODES, 10]), **same("index_dtype", INT64, CODES),
    **same("scale_rounding", 0, [3, 99, -1]), **same("epilogue", 2, [5, 99, -1]), **same("transposed", 0, []),
    **same("threads", 1, [-1, -(2**31)]), **same("weight", 0, [-1, 2**62]), **SIZES, **STRIDES, **POINTERS,
}  # fmt: skip
"""Name of the argument: a value that is right, and values that are not."""

A, B, MNK, Y = "a_format a a_scales ", "b_format b b_scales ", "m n k ", "y_dtype y "
X, ENDS, END = "x_dtype x x_stride activation_dtype ", "bias epilogue factor_dtype factor ", "y_stride weight threads"
ENTRIES = {
    "quantize": "value_dtype x outer k inner element_format scale_rounding elements scales threads",
    "dequantize": "element_format elements scales outer k inner value_dtype y threads",
    "embedding": f"index_dtype indices count {B} v d {Y} threads",
    "pack": "value_dtype w w_stride transposed n k element_format scale_rounding elements scales stats threads",
    "gemm": A + B + "bias " + MNK + Y + END,
    "weight_gemm": X + B + "bias " + MNK + Y + END,
    "fused_gemm": A + B + ENDS + MNK + Y + END,
    "fused_weight_gemm": X + B + ENDS + MNK + Y + END,
    "grouped_gemm": f"{A} {B} experts count {MNK} {Y} threads",
    "grouped_weight_gemm": f"x_dtype x activation_dtype {B} experts count {MNK} {Y} threads",
}
EMPTY: dict[str, list[dict[str, int]]] = {
    "quantize": [{"outer": 0, "k": 2**62, "inner": 2**62}, {"outer": 2**63 - 1, "k": 0}],
    "dequantize": [{"inner": 0, "outer": 2**62}],
    "embedding": [{"count": 0, "v": 2**62, "d": 2**62}, {"count": 0, "v": 0}],
    "pack": [{"n": 0, "k": 2**62, "w_stride": 2**62}, {"n": 2**62, "k": 0}],
}
"""Sizes of nothing, which need no memory. A gemm has other ones."""

LIBRARY = CDLL(str(native.library_path()))
"""Not native.load(), which converts and refuses arguments by their types."""
LIBRARY.mxfp8_last_error.restype = c_char_p
MEMORY = np.zeros(4096, np.float32)
ADDRESS, ODD = MEMORY.ctypes.data, MEMORY.ctypes.data + 1
ATTENTION_SIZES = {"batch": 2, "rows": 3, "keys": 4, "past": 1, "q_heads": 4, "kv_heads": 2, "d": 5, "dv": 6}
ATTENTION_INPUTS = ("q", "k", "v", "mask", "past_key", "past_value")
ATTENTION_OUTPUTS = ("y", "present_key", "present_value")
ATTENTION: dict[str, Sequence[Any]] = {
    "dtype": [0, 2, 9, 17, -1],
    "mask_dtype": [0, 2, 17, -1],
    "activation_dtype": [0, 10, -1],
    **dict.fromkeys(ATTENTION_SIZES, (-1, -(2**63), 2**63 - 1, 2**62, 2**49)),
    **dict.fromkeys(("q", "k", "v", "past_key", "past_value", "y"), (None, ODD)),
    **dict.fromkeys(("mask", "present_key", "present_value"), (ODD,)),
    "mask_sizes": [(2, 1, 3, 4), (-1, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2**62, 1), (0, 1, 1, 1)],
}
"""Fields of the struct, and the values that are wrong for them."""


# --- the C ABI -------------------------------------------------------------------------------------------------------


def call(entry: str, **changed: Any) -> tuple[int, str]:
    """Calls an entry point with arguments that are right but for those `changed`; returns its status and text."""
    rooms, arguments = [], []
    for name in ENTRIES[entry].split():
        value = changed.get(name, ARGUMENTS[name][0])
        if name in POINTERS and value is not None:
            rooms.append(create_string_buffer(ROOM))
            value = -(-addressof(rooms[-1]) // 16) * 16 + (value == "odd")
        kind = c_void_p if name in POINTERS else c_int64 if name in {*SIZES, *STRIDES, "weight"} else c_int
        arguments.append(kind(value))
    return getattr(LIBRARY, f"mxfp8_{entry}")(*arguments), LIBRARY.mxfp8_last_error(0).decode()


def attend(threads: int = 1, **changed: Any) -> tuple[int, str]:
    """Calls mxfp8_attention with arguments that are right but for those `changed`; returns its status and text."""
    outputs = {name: np.zeros(4096, np.float32) for name in ATTENTION_OUTPUTS}
    values = {"dtype": 1, "mask_dtype": 1, "activation_dtype": 1, **ATTENTION_SIZES}
    values |= dict.fromkeys(ATTENTION_INPUTS, ADDRESS) | {name: array.ctypes.data for name, array in outputs.items()}
    mask_sizes = changed.pop("mask_sizes", (2, 1, 3, 5))
    arguments = AttentionArguments(**(values | changed))
    arguments.mask_sizes[:] = mask_sizes
    return LIBRARY.mxfp8_attention(byref(arguments), threads), LIBRARY.mxfp8_last_error(0).decode()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_wrong_argument_is_refused_with_its_name(entry):
    assert call(entry)[0] == 0
    for name, value in [(each, wrong) for each in ENTRIES[entry].split() for wrong in ARGUMENTS[each][1]]:
        status, text = call(entry, **{name: value})
        # A size that is too large shows in an array, or in a stride that is then too small.
        is_named = name in text or (isinstance(value, int) and value > 0)
        assert (status, is_named, "; expected " in text) == (-1, True, True), (name, value, status, text)


@pytest.mark.parametrize("entry", ENTRIES)
def test_empty_arrays_of_any_size_may_be_null(entry):
    huge = dict.fromkeys([name for name in ENTRIES[entry].split() if name in SIZES or name in STRIDES], 2**62)
    for sizes in EMPTY.get(entry, [{"m": 2**40, "n": 0}, {**huge, "m": 0}]):
        assert call(entry, **dict.fromkeys(POINTERS.keys() - {"stats"}), **sizes)[0] == 0, sizes


@pytest.mark.parametrize("name", ATTENTION)
def test_every_wrong_field_of_an_attention_is_refused(name):
    assert attend()[0] == 0
    for value in ATTENTION[name]:
        status, text = attend(**{name: value})
        # A size that is too large shows in an array, and too many heads show in the size of one.
        is_named = name in text or "size" in name or name in ATTENTION_SIZES
        assert (status, is_named, "; expected " in text) == (-1, True, True), (value, status, text)


@pytest.mark.parametrize("changed", [{"q_heads": 3}, {"kv_heads": 0}, {"threads": -1}])
def test_an_attention_of_heads_or_threads_that_do_not_fit_is_refused(changed):
    assert attend(**changed)[0] == -1
    assert LIBRARY.mxfp8_attention(None, 1) == -1


def test_an_empty_attention_of_any_size_may_have_null_arrays():
    pointers = dict.fromkeys((*ATTENTION_INPUTS, *ATTENTION_OUTPUTS))
    huge = {"rows": 2**62, "d": 2**62, "dv": 2**62, "keys": 2**40, "past": 2**40}
    for sizes in ({**huge, "batch": 0}, {"batch": 2**60, "rows": 0, "keys": 0, "past": 0},
                  {"batch": 2**60, "d": 0, "dv": 0, "keys": 2**40}):  # fmt: skip
        assert attend(**pointers, **sizes)[0] == 0, sizes


def test_the_text_of_an_error_belongs_to_the_thread_that_failed():
    library = native.load()
    assert library.mxfp8_isa_force(b"none") == -3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(library.mxfp8_last_error, 0).result() == b""
    assert library.mxfp8_last_error(0).startswith(b"instruction set 'none'; expected one of ")


def test_an_error_has_fields_whatever_its_texts_hold():
    status = native.load().mxfp8_isa_force(b"a; expected b; c")
    with pytest.raises(BackendError) as caught:
        native.check("isa", status)
    error = caught.value
    assert error.what == "instruction set 'a; expected b; c'"
    assert error.expected == f"one of {','.join(native.available_isas())}"
    assert error.advice == "name an instruction set of this machine"


def test_structs_are_as_large_as_the_header_says():
    assert sizeof(native.PackStats) == 2 * sizeof(c_double) + sizeof(c_int64)
    # Five ints and a float, then 8 sizes, 4 of the mask, 9 addresses.
    assert sizeof(AttentionArguments) == 24 + 8 * (8 + 4 + 9)


# --- functions on NumPy arrays ---------------------------------------------------------------------------------------

ONES = np.ones((4, 64), np.float32)
CODES_OF_ONES = cpu.quantize(ONES)


def test_functions_return_what_the_header_says():
    library, header = native.load(), HEADER.read_text()
    kinds = {"int": c_int, "void": None, "const char*": c_char_p}
    said = {name: kinds[kind] for kind, name in re.findall(r"^MXFP8_API (.+?) (\w+)\(", header, re.MULTILINE)}
    assert {name: getattr(library, name).restype for name in said} == said


def misaligned(x: np.ndarray) -> np.ndarray:
    """Returns `x` one byte past a multiple of its item size."""
    room = np.empty(x.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16 + 1
    moved = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved


def reversed_in_memory(x: np.ndarray) -> np.ndarray:
    """Returns `x` with negative strides."""
    return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]


def read_only(x: np.ndarray) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("form", [misaligned, reversed_in_memory, np.asfortranarray, read_only])
def test_an_array_may_lie_in_memory_in_any_way(form):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    for function in (
        lambda x: cpu.quantize(x, threads=2**70)[0],
        lambda x: cpu.weight_gemm(x, *CODES_OF_ONES),
        lambda x: cpu.pack(x).elements,
    ):
        np.testing.assert_array_equal(function(form(x)), function(x))


# --- the planner -----------------------------------------------------------------------------------------------------

PLACE = planner.Place(90, 132, planner.CUBLAS)
GEMM = planner.Gemm(16, E4M3, FLOAT32, x=256, x_scales=0, b=256, b_scales=256, bias=0, y=256, m=3, n=16, k=64)


@pytest.mark.parametrize(
    ("place", "changed", "message"),
    [
        ({}, {"x": 0}, "x is NULL; expected the address of 384 bytes"),
        ({}, {"y": 258}, "y is at 0x102; expected a multiple of 4"),
        ({}, {"b": -256}, "b is at 0xffffffffffffff00 and has 1024 bytes; expected an array that ends inside"),
        ({}, {"n": -1}, "n is -1; expected 0 or more"),
        ({}, {"k": 2**62}, "x would have more than 281474976710656 bytes"),
        ({}, {"x_kind": E4M3}, "x_scales is NULL"),
        ({}, {"m": 2**29, "n": 32, "k": 32, "x_kind": FLOAT32}, "a plan of more than 1048576 steps"),
        ({"processors": 2**63 - 1}, {}, "processors is 9223372036854775807; expected 1 to 1048576"),
    ],
)
def test_the_planner_refuses_what_is_no_array_and_no_place(place, changed, message):
    with pytest.raises(ShapeError, match=f"gemm: {message}"):
        planner.gemm(PLACE._replace(**{"parts_bytes": 1, **place}), GEMM._replace(**changed))


def test_an_empty_product_is_planned_whatever_its_other_sizes():
    assert planner.gemm(PLACE, GEMM._replace(m=0, n=2**62, k=2**62)).steps() == []


def test_the_planner_takes_no_null_for_a_struct_and_no_negative_size():
    library, plan = native.load(), planner.Plan()
    for entry in ("quantize", "embedding"):
        assert getattr(library, f"mxfp8_cuda_plan_{entry}")(None, None, byref(plan)) == -1
        assert library.mxfp8_last_error(0).decode().startswith(f"{entry} is NULL; expected the address of a struct")
    assert library.mxfp8_cuda_continue(None, byref(plan)) == -1
    with pytest.raises(ShapeError, match="swizzled_bytes: k is -1"):
        planner.swizzled_bytes(1, -1)


# --- under sanitizers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("cmake") is None, reason="needs g++ and cmake")
def test_no_hostile_argument_makes_a_sanitizer_complain(tmp_path):
    options = ["-DMXFP8_TEST_PROGRAMS=ON", "-DMXFP8_SANITIZE=address;undefined"]
    for command in (
        ["cmake", "-S", Path(native.__file__).parents[1], "-B", tmp_path, *options],
        ["cmake", "--build", tmp_path, "--parallel", "2", "--target", "mxfp8_hostile"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    run = subprocess.run(
        [tmp_path / "mxfp8_hostile", "--calls", "100000"], capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert "as they should be" in run.stdout
