"""Launches one kernel at the size that its targets are for, under a profiler.

    ncu --set full --launch-skip 2 --launch-count 1 --kernel-name regex:gemm_skinny python benchmarks/gpu_once.py skinny

Needs torch with CUDA, CuPy and the native library; PYTHONPATH as `make gpu-bench` has it.
"""

from __future__ import annotations

import argparse
from typing import Any

CASES = {"skinny": "gemm_skinny", "columns": "quantize_columns"}
"""Name of a case -> kernel that it launches."""


def launch(cases: Any, case: str, size: int, times: int = 4) -> None:
    """Does one case a few times: the first time loads the kernel.

    Args:
        cases: the module gpu_cases.
        case: a name of CASES.
        size: N and K of products, and both sides of what is quantized.
        times: how often.
    """
    if case == "columns":
        x = cases.torch.randn(size, size, device="cuda", dtype=cases.torch.bfloat16)
        calls = [lambda: cases.ops.quantize(x.t())]
    else:
        layers = cases.Layers(16, size, size)
        calls = layers.weight_only(case)
    for i in range(times):
        calls[i % len(calls)]()


def main() -> None:
    """Runs a case on the current GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--dry-run", action="store_true", help="only read the arguments")
    arguments = parser.parse_args()
    if arguments.dry_run:
        return
    import gpu_cases
    import torch

    with torch.inference_mode():
        launch(gpu_cases, arguments.case, arguments.size)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
