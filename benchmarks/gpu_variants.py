"""The table of measurements, src/cuda_host/experimental/measured.h: which variant of a kernel is fastest where.

gpu_bench.py measures what its rows without a time name, and writes it anew with the times of the card it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable

from mxfp8_ops.cuda import planner
from mxfp8_ops.cuda.planner import Measurement

ANY = 2**63 - 1
HEAD = """\
// Measured times of kernel variants: variants.cpp takes the fastest. benchmarks/gpu_bench.py measures and writes this.
//
// Rows without a time say what there is to measure: no variant but the plain one runs for them. Cards of one compute
// capability and one number of multiprocessors share their rows. Included by variants.cpp, within its namespace.
#pragma once

constexpr int64_t kAny = INT64_MAX;

// clang-format off
constexpr mxfp8_cuda_measurement kMeasured[] = {
    // card, date, capability, processors, variant, dtype of x, M from and to, N from and to, measured at M, N, K, ns
"""
TAIL = """};
// clang-format on
"""


def wanted(kernel: str) -> list[list[Measurement]]:
    """Returns what there is to measure of a kernel: the rows of its variants, a list for each size."""
    groups: dict[tuple[int, ...], list[Measurement]] = {}
    for row in planner.measurements():
        if row.nanoseconds == 0 and planner.variants()[row.variant].kernel == kernel:
            groups.setdefault(row[5:], []).append(row)
    return [*groups.values()]


def merged(old: Iterable[Measurement], new: Iterable[Measurement]) -> list[Measurement]:
    """Returns the rows of a table in which new ones replace those of the same cards, variant and size."""
    rows = {row[2:-1]: row for row in old}
    rows.update({row[2:-1]: row for row in new})
    return sorted(rows.values(), key=lambda row: (row.capability, row.processors, row.x_dtype, row[6:13], row.variant))


def header(rows: Iterable[Measurement]) -> str:
    """Returns measured.h of these rows."""

    def number(value: int) -> str:
        return "kAny" if value == ANY else str(value)

    lines = []
    for row in rows:
        kernel, name = planner.variants()[row.variant]
        fields = [*(f'"{text}"' for text in row[:2]), *map(str, row[2:4]), f'number("{kernel}", "{name}")']
        lines.append(f"    {{{', '.join([*fields, *map(number, row[5:])])}}},\n")
    return HEAD + "".join(lines) + TAIL
