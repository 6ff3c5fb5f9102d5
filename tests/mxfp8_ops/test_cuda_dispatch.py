"""Which row of the dispatch table a CUDA gemm takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda_emulation import plan_gemm, route
from grouped_request import Grouped

from mxfp8_ops import native
from mxfp8_ops.cuda import dispatch, planner
from mxfp8_ops.errors import BackendError, ShapeError


def chosen(kind="bfloat16", m=1, *, capability=(9, 0), k=64, n=16, b_kind="e4m3", **options):
    return route((kind, b_kind), (m, n, k), capability=capability, **options)


@pytest.mark.parametrize(
    ("expected", "rows"),
    {
        "skinny": [("bfloat16", 1), ("bfloat16", 64), ("e4m3", 1), ("float16", 32), ("float32", 21), ("int8", 1)],
        "large": [("bfloat16", 65), ("bfloat16", 1, "k"), ("bfloat16", 1, "address"), ("int8", 100)],
        "parts": [("float16", 33), ("float32", 22), ("float32", 1, "k")],
    }.items(),
)
def test_the_route_follows_the_kind_the_rows_and_the_alignment(expected, rows):
    unusual = {"k": {"k": 40}, "address": {"address": 8}}
    for kind, m, *rest in rows:
        options = {"b_kind": "int8"} if kind == "int8" else {}
        assert chosen(kind, m, **options, **unusual[rest[0]] if rest else {}) == expected, (kind, m, rest)


def test_without_cublaslt_products_go_in_slices_where_they_can():
    none = {"cublaslt": 0}
    assert chosen(m=65, **none) == chosen("e5m2", 1000, **none) == chosen("int8", 99, b_kind="int8", **none) == "slices"
    assert chosen(m=64, **none) == "skinny"
    assert chosen("float32", 22, **none) == "parts"
    for other in ({"k": 40}, {"address": 8}):
        assert chosen(m=65, **none, **other) == chosen("float16", 65, k=40, **none) == "float32"


def test_products_of_cublaslt_are_taken_only_if_it_may_do_them():
    products = planner.BFLOAT16_PRODUCTS | planner.BLOCK_SCALED_PRODUCTS
    both = {"kind": "e4m3", "m": 100, "n": 64, "cublaslt": products, "capability": (10, 0)}
    assert chosen(**both) == chosen(**both | {"kind": "e5m2", "capability": (12, 0)}) == "block_scaled"
    changes = [
        {"capability": (9, 0)},
        {"cublaslt": planner.BFLOAT16_PRODUCTS},
        {"n": 40},
        {"b_kind": "e5m2"},
        {"k": 40},
    ]
    changes += [{"kind": "bfloat16"}, {"address": 8}, {"kind": "int8", "b_kind": "int8"}]
    for change in changes:
        assert chosen(**both | change) == "large", change
    assert chosen(**both | {"m": 64}) == "skinny"


@pytest.mark.parametrize("kinds", [("int8", "e4m3"), ("e5m2", "int8")])
def test_int8_is_not_multiplied_with_float8(kinds):
    """By any route: no kernel is made for it."""
    names = f"{kinds[0].upper()} times {kinds[1].upper()}"
    for m in (1, 100):
        with pytest.raises(ShapeError, match=f"{names} on CUDA; expected INT8 with INT8, or with values"):
            chosen(kinds[0], m, b_kind=kinds[1])


def test_a_forced_route_is_used_or_refused():
    with dispatch.forced_route("float32"):
        assert (chosen(), chosen(forced=False)) == ("float32", "skinny")
    with dispatch.forced_route("large"), pytest.raises(BackendError, match="forced route 'large'"):
        chosen("float32")
    rows = "skinny, block_scaled, large, slices, parts, float32"
    with pytest.raises(BackendError, match=f"expected one of {rows}"), dispatch.forced_route("fast"):
        pass
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected compute capability 8\.0"):
        chosen(capability=(7, 5))


def test_what_is_empty_or_known_to_be_exact_has_fewer_steps():
    for sizes in ((0, 5, 64), (5, 0, 64)):
        plan = plan_gemm(("bfloat16", "e4m3", "float32"), sizes)
        assert (plan.steps(), plan.scratch_bytes, plan.route) == ([], 0, -1)
    plan = plan_gemm(("bfloat16", "e4m3", "float32"), (100, 64, 64), kept=True, inexact=0)
    assert [step.what for step in plan.steps()] == [planner.MATMUL], "bfloat16 holds the weight: nothing to repair"


@pytest.mark.parametrize("field", ["x_kind", "b_kind", "y_dtype"])
def test_an_unknown_code_is_refused_and_never_taken_for_another(field):
    codes = {"x_kind": planner.CODES["e4m3"], "b_kind": planner.CODES["e5m2"], "y_dtype": planner.CODES["float32"]}
    product = planner.Gemm(**codes, x=16, x_scales=16, b=16, b_scales=16, bias=0, y=16, m=3, n=16, k=64)
    place = planner.Place(90, 132, planner.BFLOAT16_PRODUCTS)
    assert planner.gemm(place, product).route == 0
    for code in {0, 2, 18, 20, -1, *({1, 10, 16} if field == "b_kind" else {17, 19} if field == "y_dtype" else ())}:
        with pytest.raises(ShapeError, match=f"gemm: .*{code}( on CUDA)?; expected"):
            planner.gemm(place, product._replace(**{field: code}))
    for dtype, fmt in ((1, 18), (2, 17), (17, 17), (1, 1)):
        for request in (
            planner.Quantize(dtype, fmt, 0, planner.PLAIN, 16, 1, 32, 1, 16, 16),
            planner.Dequantize(fmt, dtype, 16, 16, 1, 32, 1, 16),
        ):
            with pytest.raises(ShapeError, match=r"quantize: .* is \d+; expected one of"):
                planner.plan(request)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 32, 1), "outer is -1"),
        ((2**40, 2**40, 1), "would have more than 281474976710656 bytes"),
        ((2**40, 32, 1), r"a product or tensor needs 2\^31 thread blocks or more"),
    ],
)
def test_sizes_that_no_gpu_can_have_are_refused(sizes, message):
    for request in (
        planner.Quantize(1, 17, 0, planner.PLAIN, 16, *sizes, 16, 16),
        planner.Dequantize(17, 1, 16, 16, *sizes, 16, 0),
    ):
        with pytest.raises(ShapeError, match=message):
            planner.plan(request)


def test_what_makes_no_sense_is_refused():
    kinds = ("bfloat16", "e4m3", "float32")
    for sizes, processors, message in (
        ((-1, 16, 64), 132, "m is -1"),
        ((1, 16, -64), 132, "k is -64"),
        ((2**40, 2**40, 32), 132, "y would have more"),
        ((1, 16, 64), 0, "processors is 0"),
    ):
        with pytest.raises(ShapeError, match=f"gemm: {message}"):
            plan_gemm(kinds, sizes, processors=processors)
    with dispatch.fixed_cut(warps=9), pytest.raises(ShapeError, match="warps is 9"):
        plan_gemm(kinds, (100, 16, 64))


@pytest.mark.parametrize("name", ["Gemm", "Quantize", "Dequantize", "Embedding", "Grouped"])
def test_requests_are_those_of_the_header(name):
    """The library reads a packed tuple: fields in another order would be other fields."""
    header = (Path(native.__file__).parent / "src/cuda_host/mxfp8_cuda_plan.h").read_text()
    (fields,) = re.findall(rf"struct {{\n([^}}]*)}} mxfp8_cuda_{name.lower()};", header)
    known = Grouped if name == "Grouped" else getattr(planner, name)
    assert tuple(re.findall(r"\w+(?=[,;])", re.sub("//.*", "", fields))) == known._fields
