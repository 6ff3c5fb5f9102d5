"""Claim: planning the launches of one CUDA gemm through ctypes takes at most 3 us of the processor; it needs no GPU.

Floor: a call of the same library that does nothing. `plan` is what a product costs until its plan is there; `steps`
adds taking it apart into one Python object for each kernel, which launching needs.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

from harness import noise_notes, publish, take_turns

from mxfp8_ops import native
from mxfp8_ops.cuda import dispatch, planner
from mxfp8_ops.cuda.planner import CODES, Gemm

GPU = SimpleNamespace(capability=(9, 0), processors=132)
MUST = 3.0
"""Microseconds of a plan."""
CASES = {"skinny": ("bfloat16", 1), "large": ("e4m3", 512), "parts": ("float32", 512), "float32": ("float32", 0)}
"""Row of the dispatch table -> kind of x, M."""


def plan(kind: str, m: int) -> planner.Plan:
    """Plans a product with an 8192 x 8192 weight, as the front ends do; for M = 0, one by ordinary cores."""
    k = 8192 if m else 8191
    codes = CODES[kind], CODES["e4m3"], CODES["bfloat16"]
    product = Gemm(*codes, 1 << 40, 1 << 41, 1 << 42, 1 << 43, 0, 1 << 44, m or 64, 8192, k)
    return planner.gemm(dispatch.place(GPU, planner.CUBLAS if m else 0), product)


def main() -> None:
    """Measures and writes cuda_planning.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    nothing = native.load().mxfp8_contract_version
    contenders = {"floor: an empty call": nothing}
    for row, (kind, m) in CASES.items():
        assert planner.routes()[plan(kind, m).route].kernel == row
        contenders[f"plan, {row}"] = lambda kind=kind, m=m: plan(kind, m)
        contenders[f"plan and steps, {row}"] = lambda kind=kind, m=m: plan(kind, m).steps()
    times = take_turns(contenders, rounds=arguments.rounds)
    rows = []
    for name, timing in times.items():
        spent, must = 1e6 * timing.median, name.startswith("plan,")
        verdict = ("ok" if spent <= MUST else "MISSED") if must else ""
        rows.append([name, f"{spent:.2f}", f"{timing.spread / timing.median:.0%}", MUST if must else "", verdict])
    columns = ["contender", "us", "spread", "at most", ""]
    publish("cuda_planning", "Planning one CUDA gemm, K = N = 8192", columns, rows, notes=noise_notes(times))


if __name__ == "__main__":
    main()
