"""Prints a `make` target a line: the tiers of tests whose sources changed since the last commit that passed.

That commit is in the environment variable LAST_GREEN or in the file .ci/last_green, which a maintainer renews. All
tiers are printed where git does not know it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
TOOLS = ("fuzz/", "gpu_first.py", "run_on_gpu.py", "test_benchmarks.py", "mxfp8_graph/test_pages_in_browser.py")
OPS = "custom_ops/mxfp8_ops/"
PROCESSES = (
    "mxfp8_graph/distributed/",
    "mxfp8_graph/torch_pass/",
    "tests/mxfp8_graph/distributed_",
    "tests/process_pool",
    "tests/mxfp8_graph/test_distributed",
    "tests/mxfp8_graph/test_tensor_parallel",
    "tests/mxfp8_ops/test_torch_sharding",
)

TIERS = {
    "test-tools": ("benchmarks/", ".ci/", "mxfp8_graph/report/", *(f"tests/{name}" for name in TOOLS)),
    "test-processes": (*PROCESSES, f"{OPS}torch_ops/"),
    "samples": ("samples/", "mxfp8_graph/cli/"),
    "test-isas": (f"{OPS}src/cpu/", "tests/mxfp8_ops/", "custom_ops/CMakeLists.txt"),
    "test-emulation": (
        *(f"{OPS}{name}" for name in ("src/cuda", "src/ort/", "cuda/", "ort/", "torch_ops/")),
        *(f"tests/mxfp8_ops/{name}" for name in ("cuda_", "ort_emulation", "test_cuda", "test_ort")),
    ),
    "test-exports": ("tests/structures", "constraints.txt"),
}
"""The start of the paths that a tier tests and `make test` does not, or not wholly."""


def main() -> None:
    """Prints the targets."""
    paths = changed_paths()
    for target, starts in TIERS.items():
        if paths is None or any(path.startswith(starts) for path in paths):
            print(target)


def changed_paths() -> list[str] | None:
    """Returns the files that changed since the last commit that passed, or None if git does not know it."""
    last = os.environ.get("LAST_GREEN") or (FOLDER / "last_green").read_text().strip()
    command = ["git", "diff", "--name-only", "--no-renames", last, "--"]
    diff = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    return diff.stdout.splitlines() if diff.returncode == 0 else None


if __name__ == "__main__":
    main()
