"""Which variant of a kernel runs: the table of measurements, what gpu_bench.py makes of it, what the planner does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation import plan_gemm

from mxfp8_ops.cuda import dispatch, planner
from mxfp8_ops.cuda.planner import CODES
from mxfp8_ops.errors import BackendError

ROOT = Path(__file__).parents[2]
HOST = ROOT / "custom_ops" / "mxfp8_ops" / "src" / "cuda_host" / "experimental"


@pytest.fixture
def variants(monkeypatch):
    """The module that reads and writes the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_variants

    return gpu_variants


def plain(row: planner.Measurement) -> bool:
    return planner.variants()[row.variant].name == "plain"


def test_the_table_is_what_the_benchmark_would_write_of_it(variants):
    rows = planner.measurements()
    assert variants.header(variants.merged(rows, [])) == (HOST / "measured.h").read_text()


def test_every_variant_is_to_be_measured_beside_the_plain_one(variants):
    for kernel in {row.kernel for row in planner.variants()}:
        names = [row.name for row in planner.variants() if row.kernel == kernel]
        assert names[0] == "plain"
        for rows in variants.wanted(kernel):
            assert [planner.variants()[row.variant].name for row in rows] == names
            assert all(row.least_m <= row.m <= row.most_m and row.least_n <= row.n <= row.most_n for row in rows)


def test_times_are_of_a_card_and_a_day():
    for row in planner.measurements():
        measured = (row.card, row.date, row.capability, row.processors, row.nanoseconds)
        assert all(measured) or not any(measured), row
        assert not row.date or re.fullmatch(r"20\d\d-\d\d-\d\d", row.date)


# --- what the planner makes of it ------------------------------------------------------------------------------------


def steps(m, n, k=8192, kind="bfloat16", **options):
    plan = plan_gemm((kind, "e4m3", "bfloat16"), (m, n, k), **options)
    return [(planner.kernels()[step.kernel], step.grid) for step in plan.steps()]


def request(**options):
    kinds = CODES["bfloat16"], CODES["e4m3"], 0x1FFFFF
    return planner.Quantize(*kinds, planner.TRANSPOSED, 256, 1, 256, 256, 256, 256)._replace(**options)


def test_where_nothing_was_measured_the_plain_variants_run():
    """On a card that no row names: what the planner does there must not depend on the table."""
    for m, n in ((9, 1024), (16, 8192), (12, 20000)):
        with dispatch.forced_variant("gemm_skinny", "plain"):
            expected = steps(m, n, processors=1000)
        assert steps(m, n, processors=1000) == expected
    with dispatch.forced_route("fused"):
        for m in (100, 300, 2048):
            with dispatch.forced_variant("gemm_fused", "plain"):
                expected = steps(m, 8192, processors=1000)
            assert steps(m, 8192, processors=1000) == expected
    for rows in (0, 256):
        plan = planner.quantize(request(row_elements=rows, row_scales=rows, capability=90, processors=1000))
        assert planner.kernels()[plan.steps()[0].kernel].startswith("quantize_columns")


@pytest.mark.parametrize("kind", ["bfloat16", "e4m3"])
def test_a_multiprocessor_gets_the_two_blocks_that_fit_it(kind):
    for m, tiles in ((8, 1), (16, 2)):
        (_, grid), *_ = steps(m, 8192, kind=kind, processors=132)
        assert grid >= 2 * 128, f"{m} rows, {tiles} tiles: {grid} blocks"


def test_a_forced_variant_is_used_for_its_kernel_alone():
    with dispatch.forced_variant("gemm_skinny", "four_ahead"):
        assert steps(16, 8192)[0][0] == "gemm_skinny<BF16, E4M3, 2, 4, 4>"
        assert steps(4, 8192)[0][0] == "gemm_skinny<BF16, E4M3, 1, 2>"
        with dispatch.forced_route("fused"):
            assert "gemm_fused<E4M3, 2>" in dict(steps(512, 8192))
    with dispatch.forced_variant("gemm_skinny", "two_warps"):
        assert steps(16, 8192)[0] == ("gemm_skinny<BF16, E4M3, 2, 2>", 256)
    with dispatch.forced_variant("gemm_skinny", "two_splits"):
        assert [name.partition("<")[0] for name, _ in steps(16, 8192)] == ["gemm_skinny", "finish"]
    known = "expected one of gemm_skinny plain, gemm_skinny two_warps, "
    with pytest.raises(BackendError, match=known), dispatch.forced_variant("gemm_skinny", "fastest"):
        pass


def test_quantizing_takes_a_forced_variant_on_any_device():
    gpu = type("Gpu", (), {"capability": (9, 0), "processors": 132})()
    for rows, kernel in ((0, "quantize_columns"), (256, "quantize_both")):
        with dispatch.forced_variant(kernel, "bands"):
            plan = planner.quantize(dispatch.placed(gpu, request(row_elements=rows, row_scales=rows)))
        assert planner.kernels()[plan.steps()[0].kernel].startswith("quantize_bands<BF16, E4M3, ")


# --- measured rows, in a planner that is built with them -------------------------------------------------------------

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "variants.h"
using namespace mxfp8::cuda;
int main(int, char** a) {
  const Sizes sizes = {atoll(a[2]), atoll(a[3]), atoll(a[4]), atoll(a[5]), atoll(a[6])};
  std::puts(mxfp8_cuda_variant_at(variant(Variant(atoi(a[1])), sizes, atoll(a[7])))->name);
}
"""


@pytest.fixture
def choose(variants, tmp_path):
    """Builds variants.cpp with other rows; returns a function of (kernel, m, n, ...) that says what is taken."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")

    def build(rows):
        source = tmp_path / "cuda_host" / "experimental"
        source.mkdir(parents=True)
        shutil.copy(HOST.parent / "mxfp8_cuda_plan.h", source.parent)
        for name in ("variants.h", "variants.cpp"):
            shutil.copy(HOST / name, source)
        (source / "measured.h").write_text(variants.header(variants.merged(rows, [])))
        (source / "main.cpp").write_text(PROGRAM)
        files = [str(source / name) for name in ("main.cpp", "variants.cpp")]
        (tmp_path / "mxfp8_ops.h").symlink_to(HOST.parents[1] / "mxfp8_ops.h")
        subprocess.run([compiler, "-std=c++17", *files, "-o", str(tmp_path / "choose")], check=True)

        def chosen(kernel, m, n, *, card=(90, 132), dtype="bfloat16", forced=0):
            number = planner.variants().index(planner.Variant(kernel, "plain"))
            arguments = [number, *card, CODES[dtype], m, n, forced]
            command = [str(tmp_path / "choose"), *map(str, arguments)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

        return chosen

    return build


def measured(variants, kernel, times, *, card=("H", "2026-11-23", 90, 132), size=0):
    """Returns the rows of one size of a kernel, with these nanoseconds by variant."""
    names = planner.variants()
    rows = variants.wanted(kernel)[size]
    return [
        planner.Measurement(*card, *row[4:-1], times[names[row.variant].name])
        for row in rows
        if names[row.variant].name in times
    ]


def test_the_fastest_that_was_measured_is_taken_on_its_card_and_sizes(variants, choose):
    times = {"plain": 25000, "two_warps": 22000, "four_ahead": 21000, "two_splits": 30000}
    rows = [*planner.measurements(), *measured(variants, "gemm_skinny", times)]
    taken, least, most = choose(rows), rows[-1].least_n, rows[-1].most_n
    assert taken("gemm_skinny", 9, least) == taken("gemm_skinny", 16, most) == "four_ahead"
    assert taken("gemm_skinny", 8, least) == taken("gemm_skinny", 17, most) == "plain"
    assert taken("gemm_skinny", 16, most + 1) == "plain"
    assert taken("gemm_skinny", 16, most, card=(90, 114)) == taken("gemm_skinny", 16, most, card=(80, 132)) == "plain"
    assert taken("gemm_skinny", 16, most, dtype="float32") == taken("gemm_fused", 16, most) == "plain"
    assert taken("gemm_skinny", 16, most, forced=2) == "two_warps"
    assert taken("gemm_fused", 100, 8192, forced=2) == "plain"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"plain": 25000, "paired": 24600}, "plain"),  # noise
        ({"plain": 25000, "paired": 24400}, "paired"),
        ({"plain": 25000, "paired": 26000}, "plain"),
        ({"paired": 20000}, "plain"),  # there is nothing to compare it with
        ({"plain": 25000, "paired": 20000, "two_blocks": 19000}, "two_blocks"),
    ],
)
def test_a_variant_has_to_be_faster_than_the_plain_one(variants, choose, times, expected):
    taken = choose([*planner.measurements(), *measured(variants, "gemm_fused", times, size=1)])
    sizes = variants.wanted("gemm_fused")[1][0]
    assert taken("gemm_fused", sizes.m, sizes.n) == expected


def test_new_times_replace_those_of_the_same_card_only(variants):
    first = measured(variants, "quantize_both", {"plain": 5, "bands": 4})
    other = measured(variants, "quantize_both", {"plain": 7}, card=("A", "2026-11-23", 80, 108))
    again = measured(variants, "quantize_both", {"bands": 3}, card=("H", "2026-11-24", 90, 132))
    rows = variants.merged([*planner.measurements(), *first, *other], again)
    assert {(row.card, row.date, row.nanoseconds) for row in rows if row.card} == {
        ("H", "2026-11-23", 5),
        ("H", "2026-11-24", 3),
        ("A", "2026-11-23", 7),
    }
    assert len(rows) == len(planner.measurements()) + 3
    assert '{"H", "2026-11-24", 90, 132, number("quantize_both", "bands"), 16, 1, kAny, ' in variants.header(rows)
