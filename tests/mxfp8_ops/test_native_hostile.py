"""Hostile arguments to the native library: the C ABI refuses them in words, and so do the functions on NumPy arrays.

`make sanitize` runs this file under sanitizers, with HOSTILE_CALLS random combinations of arguments.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import (
    CDLL,
    CFUNCTYPE,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_void_p,
    cast,
    create_string_buffer,
    sizeof,
)
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import mxfp8_ops
from mxfp8_ops import cpu, native
from mxfp8_ops.cuda import planner
from mxfp8_ops.errors import BackendError, ShapeError
from mxfp8_ops.native import AttentionArguments

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "custom_ops/mxfp8_ops/src/mxfp8_ops.h"
RANDOM_CALLS = int(os.environ.get("HOSTILE_CALLS", "4000"))
THREADS = 4

if "HOSTILE_LIBRARY" in os.environ:
    mxfp8_ops.__path__.insert(0, os.environ["HOSTILE_LIBRARY"])  # where native.library_path looks first
    native.load.cache_clear()
LIBRARY = CDLL(str(native.library_path()))
"""Not native.load(), which converts and refuses arguments by their types."""
LIBRARY.mxfp8_last_error.restype = c_char_p

CODES = [0, 2, 18, 99, -1, 2**31 - 1]
LARGE = [2**63 - 1, 2**62, 2**58, 2**49]
"""Each is too large whatever the other sizes are, if none of them is 0."""
FLOAT32, E4M3 = 1, 17
FORMATS, VALUES, BYTES = (E4M3, 19, 3), (FLOAT32, 16, 10), {1: 4, 10: 2, 16: 2, 6: 4, 7: 8, 9: 1}


def same(names: str, right: Iterable[Any], wrong: Iterable[Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    return dict.fromkeys(names.split(), ([*right], [*wrong]))


SIZES = {
    **same("outer inner m n k v d dv rows count", (2, 1, 3, 16, 31, 33, 64, 70), [-1, -(2**63), *LARGE]),
    **same("batch keys past", (2, 1, 5, 33), [-1, -(2**63), 2**63 - 1, 2**62, 2**49]),
    **same("kv_heads q_heads", (2, 1), [-1, 2**62, 0]),
}
STRIDES = same("x_stride y_stride w_stride", [0, 3, 1], [0, -1, -(2**63)])
"""The right ones are added to the values of a row."""
POINTERS = {
    **same("elements scales a a_scales b b_scales", ["there"], [None]),
    **same("x y w indices experts stats q k_ v_ past_key past_value", ["there"], [None, "odd"]),
    **same("bias factor mask present_key present_value", ["there", None], ["odd"]),
}
FREED = c_int64()
LIBRARY.mxfp8_weight_new(byref(FREED))
LIBRARY.mxfp8_weight_free(FREED)
ARGUMENTS = {
    **same("element_format a_format b_format", FORMATS, [*CODES, 1, 10, 16]),
    **same("value_dtype x_dtype y_dtype factor_dtype dtype", VALUES, [*CODES, 3, 17, 19]),
    **same("activation_dtype", (1, 16), [*CODES, 10]), **same("mask_dtype", (1, 9), [0, 2, 17, -1]),
    **same("index_dtype", (7, 6), CODES), **same("scale_rounding", (0, 1, 2), [3, 99, -1]),
    **same("epilogue", (2, 0, 1, 3, 4), [5, 99, -1]), **same("transposed causal nan_guard", (0, 1), []),
    **same("scale", (0.0, -1.5), []), **same("threads", (1, 2, 0, 100_000), [-1, -(2**31)]),
    **same("weight", [0], [-1, 2**62, FREED.value]), **SIZES, **STRIDES, **POINTERS,
    **same("mask_sizes", [None], [(2, 1, 3, 9), (-1, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2**62, 1), (0, 1, 1, 1)]),
}  # fmt: skip
"""Name of the argument: values that are right, the first of them by default, and values that are not."""

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
    # The fields of the struct, with other names for the arrays k and v.
    "attention": "dtype mask_dtype activation_dtype causal nan_guard scale batch rows keys past q_heads kv_heads d dv "
    "mask_sizes q k_ v_ mask past_key past_value y present_key present_value threads",
}
RESULTS = {"quantize": ("elements", "scales"), "pack": ("elements", "scales", "stats")}
"""Of the others, y and what is present."""
EMPTY: dict[str, list[dict[str, int]]] = {
    "quantize": [{"outer": 0, "k": 2**62, "inner": 2**62}, {"outer": 2**63 - 1, "k": 0}],
    "dequantize": [{"inner": 0, "outer": 2**62}],
    "embedding": [{"count": 0, "v": 2**62, "d": 2**62}, {"count": 0, "v": 0}],
    "pack": [{"n": 0, "k": 2**62, "w_stride": 2**62}, {"n": 2**62, "k": 0}],
    "attention": [
        {"rows": 2**62, "d": 2**62, "dv": 2**62, "keys": 2**40, "past": 2**40, "batch": 0},
        {"batch": 2**60, "rows": 0, "keys": 0, "past": 0},
        {"batch": 2**60, "d": 0, "dv": 0, "keys": 2**40},
    ],
}
"""Sizes of nothing, which need no memory. A gemm has other ones."""


# --- the C ABI -------------------------------------------------------------------------------------------------------

UNTOUCHED = 0xA5


def right(entry: str, random: Random | None = None, **fixed: int) -> dict[str, Any]:
    """Returns arguments that are right: the first ones of `ARGUMENTS`, or random ones."""
    choose = random.choice if random else lambda some: some[0]
    v = {name: choose(ARGUMENTS[name][0]) for name in ENTRIES[entry].split()} | fixed
    columns = {"x_stride": "k", "y_stride": "n", "w_stride": "n" if v.get("transposed") else "k"}
    v |= {name: v[columns[name]] + v[name] for name in columns if name in v}
    if entry == "attention":
        v["q_heads"] *= v["kv_heads"]
        full = v["batch"], v["q_heads"], v["rows"], v["past"] + v["keys"]
        v["mask_sizes"] = tuple(choose((size, 1)) for size in full)
    return v


def rows(count: int, columns: int, stride: int) -> int:
    return (count - 1) * stride + columns if count and columns else 0


def bytes_of(v: dict[str, Any]) -> dict[str, int]:
    """Returns the bytes of the arrays of a call."""
    if "q" in v:
        values, past = BYTES[v["dtype"]] * v["batch"], v["past"] * v["kv_heads"]
        queries, keys = v["rows"] * v["q_heads"], v["keys"] * v["kv_heads"]
        counts = {"q": queries * v["d"], "k_": keys * v["d"], "v_": keys * v["dv"], "y": queries * v["dv"]}
        counts |= {"past_key": past * v["d"], "present_key": (past + keys) * v["d"]}
        counts |= {"past_value": past * v["dv"], "present_value": (past + keys) * v["dv"]}
        return {
            **{name: values * n for name, n in counts.items()},
            "mask": BYTES[v["mask_dtype"]] * prod(v["mask_sizes"]),
        }
    k = v["d"] if "d" in v else v["k"]
    blocks, (m, n) = -(-k // 32), (v.get(name, 1) for name in "mn")
    if "outer" in v:
        vectors = v["outer"] * v["inner"]
        values = BYTES[v["value_dtype"]] * vectors * k
        return {"x": values, "y": values, "elements": vectors * k, "scales": vectors * blocks}
    if "w" in v:
        w = rows(*((k, n) if v["transposed"] else (n, k)), v["w_stride"])
        return {"w": BYTES[v["value_dtype"]] * w, "elements": n * k, "scales": n * blocks, "stats": 24}
    if "indices" in v:
        m, stored, n = v["count"], v["v"], k
    else:
        stored = n * v.get("count", 1)
    return {
        "a": m * k, "a_scales": m * blocks, "b": stored * k, "b_scales": stored * blocks, "bias": 4 * n,
        "x": BYTES[v.get("x_dtype", 1)] * rows(m, k, v.get("x_stride", k)),
        "y": BYTES[v["y_dtype"]] * rows(m, n, v.get("y_stride", n)),
        "factor": BYTES[v.get("factor_dtype", 1)] * m * n,
        "experts": 8 * m, "indices": BYTES[v.get("index_dtype", 7)] * m,
    }  # fmt: skip


def memory(name: str, size: int, v: dict[str, Any], random: Random) -> np.ndarray:
    """Returns an array of that many bytes, so that a sanitizer notices the next one: numbers of rows, or any values."""
    if name == "indices":
        dtype = np.int32 if v["index_dtype"] == 6 else np.int64
        return np.array([random.randrange(-v["v"], v["v"]) for _ in range(v["count"])], dtype)
    if name == "experts":
        return np.array([random.randint(-v["count"], v["count"]) for _ in range(v["m"])], np.int64)
    values = np.frombuffer(random.randbytes(size), np.uint8)
    return (
        values & 0xBF | 0x30 if random.random() < 0.5 else values.copy()
    )  # without small elements: gemm_int16 takes them


def call(
    entry: str, v: dict[str, Any], wrong: dict[str, Any] | None = None, random: Random | None = None
) -> tuple[int, str]:
    """Calls an entry point with arguments `v` but for the `wrong` ones; returns its status and text.

    Fails if a refused call writes a result, and if another one writes between the rows of y.
    """
    wrong, random = dict(wrong or {}), random or Random(0)
    results = RESULTS.get(entry, ("y", "present_key", "present_value"))
    sizes = {name: size for name, size in bytes_of(v).items() if v.get(name)}
    arrays = {name: memory(name, size, v, random) for name, size in sizes.items() if name not in results}
    arrays |= {name: np.full(size, UNTOUCHED, np.uint8) for name, size in sizes.items() if name in results}
    if wrong.pop("a row", None):
        some = arrays.get("indices", arrays.get("experts"))
        count = v["v"] - 1 if "indices" in v else v["count"]
        some[random.randrange(len(some))] = random.choice((count + 1, -v.get("v", count) - 1))
    addresses = {name: array.ctypes.data for name, array in arrays.items()}
    odd = {name: addresses.get(name, 1 << 20) + 1 for name, value in wrong.items() if value == "odd"}
    status, text = perform(entry, {**v, **addresses, **wrong, **odd})
    if status:
        assert all((arrays[name] == UNTOUCHED).all() for name in results if name in arrays), (entry, v, wrong)
    elif "y_stride" in v and len(arrays["y"]):
        gap = BYTES[v["y_dtype"]] * (v["y_stride"] - v["n"])
        y = np.append(arrays["y"], np.full(gap, UNTOUCHED, np.uint8)).reshape(v["m"], -1)
        assert (y[:, y.shape[1] - gap :] == UNTOUCHED).all(), (entry, v)
    return status, text


def perform(entry: str, values: dict[str, Any]) -> tuple[int, str]:
    if entry == "attention":
        fields = {name.rstrip("_"): value for name, value in values.items() if name not in ("threads", "mask_sizes")}
        struct = AttentionArguments(**fields)
        struct.mask_sizes[:] = values["mask_sizes"]
        status = LIBRARY.mxfp8_attention(byref(struct), values["threads"])
    else:
        kinds = {**dict.fromkeys(POINTERS, c_void_p), **dict.fromkeys((*SIZES, *STRIDES, "weight"), c_int64)}
        arguments = [kinds.get(name, c_int)(values[name]) for name in ENTRIES[entry].split()]
        status = getattr(LIBRARY, f"mxfp8_{entry}")(*arguments)
    return status, LIBRARY.mxfp8_last_error(0).decode(errors="replace")


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_wrong_argument_is_refused_with_its_name(entry):
    v = right(entry)
    assert call(entry, v)[0] == 0
    for name, value in [(each, wrong) for each in v for wrong in ARGUMENTS[each][1]]:
        status, text = call(entry, v, {name: value})
        # A size that is too large shows in an array or a stride, a number of heads in the size of an array.
        is_named = name.rstrip("_") in text or "heads" in name or (isinstance(value, int) and value > 0)
        assert (status, is_named, "; expected " in text) == (-1, True, True), (name, value, status, text)


@pytest.mark.parametrize("entry", ENTRIES)
def test_empty_arrays_of_any_size_may_be_null(entry):
    v, stats = right(entry), np.zeros(3)
    null = dict.fromkeys(POINTERS.keys() & v.keys()) | {"stats": stats.ctypes.data}
    huge = dict.fromkeys([name for name in v if name in SIZES or name in STRIDES], 2**62)
    for sizes in EMPTY.get(entry, [{"m": 2**40, "n": 0}, {**huge, "m": 0}]):
        assert perform(entry, v | null | sizes)[0] == 0, sizes


KNOWN = [name.encode() for name in native.available_isas()]
ISAS = [None, b"", b"avx", b"\xff\xfe", b"portable ", *KNOWN]


def random_call(random: Random) -> None:
    """Calls a function with up to three arguments that are wrong, or with a size of 0."""
    name, entry = random.choice(ISAS), random.choice([*ENTRIES])
    if random.random() < 0.05:
        assert LIBRARY.mxfp8_isa_force(name) == (
            0 if name and name.decode(errors="ignore") in native.available_isas() else -3
        )
    v = right(entry, random)
    names = [name for name in v if ARGUMENTS[name][1]] + ["a row"] * bool({"indices", "experts"} & v.keys())
    wrong = {
        name: random.choice(ARGUMENTS.get(name, ([], [1]))[1]) for name in random.sample(names, random.randrange(4))
    }
    if any("mask" in name for name in wrong):
        v |= {"mask": "there", "mask_dtype": FLOAT32}
    if not wrong and random.random() < 0.3:
        size = random.choice([name for name in v if name in SIZES and "heads" not in name])
        v = right(entry, random, **{size: 0}, **({"count": 0} if size == "v" else {}))
    number = c_int64()
    if "weight" in v and random.random() < 0.5:
        assert LIBRARY.mxfp8_weight_new(byref(number)) == 0
        v["weight"] = number.value
    status, text = call(entry, v, wrong, random)
    assert (status, not wrong or "; expected " in text) == (-1 if wrong else 0, True), (entry, v, wrong, text)
    LIBRARY.mxfp8_weight_free(number)


def test_threads_that_call_at_once_get_results_or_words():
    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(RANDOM_CALLS // THREADS):
            random_call(random)

    with cpu.forced_isa(cpu.isa()), ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_no_struct_no_heads_that_fit_and_no_address_of_a_weight_are_refused():
    assert LIBRARY.mxfp8_attention(None, 1) == -1
    assert call("attention", right("attention"), {"q_heads": 3})[0] == -1
    assert LIBRARY.mxfp8_weight_new(None) == -1


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

PLACE = planner.Place(90, 132, planner.BFLOAT16_PRODUCTS)
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


def test_the_planner_takes_no_null_for_a_struct_and_no_size_that_cannot_be():
    library, plan = native.load(), planner.Plan()
    for entry in ("quantize", "embedding"):
        assert getattr(library, f"mxfp8_cuda_plan_{entry}")(None, None, byref(plan)) == -1
        assert library.mxfp8_last_error(0).decode().startswith(f"{entry} is NULL; expected the address of a struct")
    assert library.mxfp8_cuda_plan_embedding(bytes(80), None, None) == library.mxfp8_cuda_run(None, byref(plan)) == -1
    for rows, k in ((1, -1), (2**62, 2**62)):
        with pytest.raises(ShapeError, match="swizzled_bytes: "):
            planner.swizzled_bytes(rows, k)
    beyond = len(planner.routes()), len(planner.kernels())
    assert not any(library.mxfp8_cuda_route_at(i) or library.mxfp8_cuda_kernel(i) for i in (-1, -(2**31), max(beyond)))


AT, SIZE = 2**32, 64
Grouped = namedtuple("Grouped", [f"field{i}" for i in range(24)])
REQUESTS = (
    planner.Quantize(FLOAT32, E4M3, 0, 0, AT, SIZE, SIZE, SIZE, AT, AT),
    planner.Dequantize(E4M3, FLOAT32, AT, AT, SIZE, SIZE, SIZE, AT),
    planner.Embedding(7, E4M3, FLOAT32, AT, AT, AT, SIZE, SIZE, SIZE, AT),
    Grouped(E4M3, E4M3, FLOAT32, 0, *[AT] * 6, *[SIZE] * 5, 1, 1, SIZE, 0, 0, 1, 0, 0, 1),
    *(planner.Gemm(kind, E4M3, FLOAT32, *[AT] * 6, SIZE, SIZE, SIZE) for kind in (FLOAT32, E4M3)),
)


def varied(random: Random, fields: Any) -> Any:
    """Returns a request of other sizes, formats and dtypes, now and then with a hostile number."""
    usual = {SIZE: (0, 1, 2, 16, 33, 70, 300), E4M3: FORMATS, FLOAT32: VALUES}
    hostile = [-1, -(2**63), 2**63 - 1, 2**31, *range(20), *(2**i + random.randrange(-1, 2) for i in range(33, 63))]
    some = [random.choice(hostile if random.random() < 1 / 30 else usual.get(field, (field,))) for field in fields]
    return fields._replace(**dict(zip(fields._fields, some, strict=True)))


def test_a_random_request_is_refused_or_planned_inside_of_its_memory():
    random, planned = Random(0), 0
    for _ in range(RANDOM_CALLS):
        request, capability = varied(random, random.choice(REQUESTS)), random.choice((0, 70, 80, 89, 90, 100, 120))
        place = varied(
            random, planner.Place(capability, 132, random.randrange(8), random.choice((0, 0, random.randrange(7))))
        )
        try:
            plan = planner.gemm(place, request) if isinstance(request, planner.Gemm) else planner.plan(request)
        except (ShapeError, BackendError):
            continue
        planned += 1
        for step in plan.steps():
            assert step.what != planner.LAUNCH or (step.grid >= 1 and 0 <= step.kernel < len(planner.kernels())), (
                request
            )
            scratch = [argument for i, argument in enumerate(step.arguments) if step.in_scratch >> i & 1]
            assert all(0 <= argument < plan.scratch_bytes for argument in scratch), request
    assert 0.2 * RANDOM_CALLS < planned < 0.9 * RANDOM_CALLS


def test_a_driver_that_is_none_is_not_opened():
    fails = [CFUNCTYPE(c_int, *[c_void_p] * count)(lambda *_: 1) for count in (4, 6)]
    functions = [
        (c_void_p * 2)(*(cast(f, c_void_p).value if i < n else None for i, f in enumerate(fails))) for n in range(3)
    ]
    message = create_string_buffer(1000)
    for driver in (None, b"", b"no such library.so", b"/", b"libc.so.6"):
        for loader in (None, *map(byref, functions)):
            for room in (0, 1, 2, 1000):
                assert LIBRARY.mxfp8_cuda_open(driver, loader, message if room else None, c_size_t(room)) == -1


# --- under sanitizers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("cmake") is None, reason="needs g++ and cmake")
def test_no_hostile_argument_makes_a_sanitizer_complain(tmp_path):
    cmake = ["cmake", "-S", ROOT / "custom_ops", "-B", tmp_path, "-DMXFP8_SANITIZE=address;undefined"]
    subprocess.run(cmake, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "2"], check=True, capture_output=True)
    preload = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    environment = {"LD_PRELOAD": preload.strip(), "ASAN_OPTIONS": "detect_leaks=0", "HOSTILE_LIBRARY": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-s", "-m", "not slow", __file__]  # the words of a sanitizer, too
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
