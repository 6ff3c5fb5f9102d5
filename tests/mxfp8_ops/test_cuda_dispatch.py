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


def chosen(capability=(9, 0), kind="bfloat16", m=1, k=64, n=16, b_kind="e4m3", **options):  # noqa: PLR0917
    return route((kind, b_kind), (m, n, k), capability=capability, **options)


def test_routes():
    assert chosen() == chosen(m=64) == chosen(kind="e4m3") == "skinny"
    assert chosen(m=65) == chosen(k=40) == chosen(address=8) == "large"
    assert chosen(kind="float16", m=32) == chosen(kind="float32", m=21) == "skinny"
    assert chosen(kind="float16", m=33) == chosen(kind="float32", m=22) == chosen(kind="float32", k=40) == "parts"
    with dispatch.forced_route("float32"):
        assert chosen() == "float32"
        assert chosen(forced=False) == "skinny"
    with pytest.raises(BackendError, match=r"compute capability 7\.5; expected compute capability 8\.0"):
        chosen((7, 5))


def test_without_cublas_products_go_in_slices_where_they_can():
    none = {"libraries": 0}
    assert chosen(m=65, **none) == chosen(kind="e5m2", m=1000, **none) == "slices"
    assert chosen(m=64, **none) == "skinny"
    assert chosen(kind="float32", m=22, **none) == "parts"
    for other in ({"k": 40}, {"address": 8}):
        assert chosen(m=65, **none, **other) == chosen(kind="float16", m=65, k=40, **none) == "float32"


def test_library_routes_are_taken_only_by_those_who_bring_the_library():
    for library in (planner.CUBLASLT, planner.SCALED_MM):
        both = {"kind": "e4m3", "m": 100, "n": 64, "libraries": planner.CUBLAS | library}
        assert chosen((10, 0), **both) == chosen((12, 0), **both | {"kind": "e5m2"}) == "block_scaled"
        assert chosen((9, 0), **both) == "large"
        for other in ({"n": 40}, {"b_kind": "e5m2"}, {"kind": "bfloat16"}, {"k": 40}, {"address": 8}):
            assert chosen((10, 0), **both | other) == "large"
        assert chosen((10, 0), **both | {"libraries": planner.CUBLAS}) == "large"
        assert chosen((10, 0), **both | {"m": 64}) == "skinny"


def test_int8_takes_the_routes_that_multiply_bfloat16():
    libraries = planner.CUBLAS | planner.CUBLASLT | planner.SCALED_MM
    for kind in ("int8", "bfloat16"):
        assert chosen(kind=kind, b_kind="int8") == "skinny"
        for capability in ((8, 0), (9, 0), (10, 0)):
            many = {"kind": kind, "m": 100, "n": 64, "b_kind": "int8"}
            assert chosen(capability, **many, libraries=libraries) == "large"
            assert chosen(capability, **many, libraries=0) == "slices"
        with dispatch.forced_route("block_scaled"), pytest.raises(BackendError, match=r"no route for .* times int8"):
            chosen((10, 0), **many, libraries=libraries)
    assert chosen(kind="float32", m=100, b_kind="int8") == "parts"


@pytest.mark.parametrize("kinds", [("int8", "e4m3"), ("e5m2", "int8")])
def test_int8_is_not_multiplied_with_float8(kinds):
    """By any route: no kernel is made for it."""
    names = f"{kinds[0].upper()} times {kinds[1].upper()}"
    for m in (1, 100):
        with pytest.raises(ShapeError, match=f"{names} on CUDA; expected INT8 with INT8, or with values"):
            chosen(kind=kinds[0], b_kind=kinds[1], m=m)


def test_a_forced_route_is_used_or_refused():
    with dispatch.forced_route("large"):
        assert chosen() == "large"
        with pytest.raises(BackendError, match="forced route 'large'"):
            chosen(kind="float32")
    rows = "skinny, block_scaled, large, slices, parts, float32"
    with pytest.raises(BackendError, match=f"expected one of {rows}"), dispatch.forced_route("fast"):
        pass


def test_nothing_is_planned_for_what_is_empty():
    for sizes in ((0, 5, 64), (5, 0, 64)):
        plan = plan_gemm(("bfloat16", "e4m3", "float32"), sizes)
        assert (plan.steps(), plan.scratch_bytes, plan.route) == ([], 0, -1)


@pytest.mark.parametrize("field", ["x_kind", "b_kind", "y_dtype"])
def test_an_unknown_code_is_refused_and_never_taken_for_another(field):
    codes = {"x_kind": planner.CODES["e4m3"], "b_kind": planner.CODES["e5m2"], "y_dtype": planner.CODES["float32"]}
    product = planner.Gemm(**codes, x=16, x_scales=16, b=16, b_scales=16, bias=0, y=16, m=3, n=16, k=64)
    place = planner.Place(90, 132, planner.CUBLAS)
    assert planner.gemm(place, product).route == 0
    wrong = {0, 2, 18, 20, -1, *({1, 10, 16} if field == "b_kind" else {17, 19} if field == "y_dtype" else ())}
    for code in wrong:
        with pytest.raises(ShapeError, match=f"gemm: .*{code}( on CUDA)?; expected"):
            planner.gemm(place, product._replace(**{field: code}))
    for plan in (
        lambda dtype, fmt: planner.plan(planner.Quantize(dtype, fmt, 0, planner.PLAIN, 16, 1, 32, 1, 16, 16)),
        lambda dtype, fmt: planner.plan(planner.Dequantize(fmt, dtype, 16, 16, 1, 32, 1, 16)),
    ):
        assert plan(1, 17).steps()
        for dtype, fmt in ((1, 18), (2, 17), (17, 17), (1, 1)):
            with pytest.raises(ShapeError, match=r"quantize: .* is \d+; expected one of"):
                plan(dtype, fmt)


def test_what_needs_more_thread_blocks_than_a_gpu_has_is_refused():
    with pytest.raises(ShapeError, match=r"quantize: a product or tensor needs 2\^31 thread blocks or more"):
        planner.plan(planner.Quantize(1, 17, 0, planner.PLAIN, 16, 2**40, 32, 1, 16, 16))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((-1, 32, 1), "outer is -1"), ((2**40, 2**40, 1), "would have more than 281474976710656 bytes")],
)
def test_sizes_of_no_tensor_are_refused(sizes, message):
    with pytest.raises(ShapeError, match=message):
        planner.plan(planner.Quantize(1, 17, 0, planner.PLAIN, 16, *sizes, 16, 16))
    with pytest.raises(ShapeError, match=message):
        planner.plan(planner.Dequantize(17, 1, 16, 16, *sizes, 16, 0))


def test_a_weight_that_bfloat16_is_known_to_hold_needs_no_repair():
    plan = plan_gemm(("bfloat16", "e4m3", "float32"), (100, 64, 64), kept=True, inexact=0)
    assert [step.what for step in plan.steps()] == [planner.MATMUL]


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


@pytest.mark.parametrize(
    "request_", [*(planner.Gemm, planner.Quantize, planner.Dequantize, planner.Embedding), Grouped]
)
def test_requests_are_those_of_the_header(request_):
    """The library reads a packed tuple: fields in another order would be other fields."""
    header = (Path(native.__file__).parent / "src/cuda_host/mxfp8_cuda_plan.h").read_text()
    (fields,) = re.findall(rf"struct {{\n([^}}]*)}} mxfp8_cuda_{request_.__name__.lower()};", header)
    assert tuple(re.findall(r"\w+(?=[,;])", re.sub("//.*", "", fields))) == request_._fields
