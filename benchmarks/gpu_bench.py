"""Claim: the CUDA kernels against copy bandwidth and cuBLAS bfloat16, on one GPU, with the targets beside the numbers.

Needs torch with CUDA, CuPy and the native library; no network: `make gpu-bench`. Each section of the table runs in a
process of its own, so that a crash or a hang costs no other section, and the table is written anew after each.
gpu_cases.py says what is measured, gpu_timing.py how.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mxfp8_ops.cuda import planner

RESULTS = Path(__file__).parent / "results"
SECTION_SECONDS = 150
"""The most seconds that a section may take."""


def memory(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """The operations that the speed of memory bounds: quantize, dequantize."""
    yield cases.memory_bound(rounds, 2 * size, size)


def few_rows(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """gemm_skinny, for which its weight has to be read."""
    targets = {"copy": (0.78, 0.87), "weight-only": (1.6, 1.9)}
    for m in (1, 4, 8, 16):
        yield cases.few_rows(rounds, (m, size, size), targets)
    yield cases.few_rows(rounds, (32, size, size), {"weight-only": (1.5,)})
    yield cases.few_rows(rounds, (64, size, size), {"weight-only": (1.3,)})
    yield cases.eager(rounds, (1, size // 8, size // 8))


def many_rows(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """Products on cuBLASLt."""
    for m in (65, 96):  # gemm_skinny in slices may win below the rows of the targets
        yield cases.many_rows(rounds, (m, size, size), {})
    yield cases.many_rows(rounds, (128, size, size), {"weight-only": (1.1,)})
    for m in (256, 1024):
        yield cases.many_rows(rounds, (m, size, size), {"with quantize": (0.75, 0.9)})
    yield cases.many_rows(rounds, (2048, size, size), {"with quantize": (0.80,)})
    targets = {
        "with quantize": (0.88,),
        # Arithmetic allows .93: 1395 us of product, 2 x 47 us to quantize and dequantize x, 7 us of small launches.
        "with quantize, weight kept": (0.90, 0.925),
    }
    yield cases.many_rows(rounds, (8192, size, size), targets)


def small_weights(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """Weights of few rows, for which gemm_skinny splits K."""
    for n, m in itertools.product((size // 8, size // 4, size // 2), (1, 16, 64)):
        yield cases.few_rows(rounds, (m, n, size), {})


def wide_activations(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """float32 and float16 activations."""
    for m in (1, 16, 256, 2048):
        yield cases.wide_activations(rounds, (m, size, size))


def training(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """The products of a training step."""
    yield cases.training(rounds, size, size // 2, size // 2)


def cuts(cases: Any, rounds: int, size: int) -> Iterator[Any]:
    """gemm_skinny, cut up in other ways than the planner does (src/cuda_host/cuts.cpp)."""
    for m, warps in ((8, (2, 1)), (16, (4, 2)), (32, (4, 2)), (64, (4, 2))):
        yield cases.cuts(rounds, (m, size, size), [{"warps": count} for count in warps])
    for n, m in itertools.product((size // 8, size // 4, size // 2), (1, 16, 64)):
        yield cases.cuts(rounds, (m, n, size), [{"splits": count} for count in (1, 2, 4, 8)])


SECTIONS: dict[str, Callable[[Any, int, int], Iterator[Any]]] = {
    section.__name__: section
    for section in (
        memory, few_rows, many_rows, small_weights, wide_activations, training, cuts,
    )
}  # fmt: skip
"""In the order in which they run: those with targets first."""


def measure(section: str, rounds: int, size: int, rows: Path) -> None:
    """Appends the rows of one section to a file, a line of JSON each, as they come."""
    import gpu_cases as cases
    import torch

    with torch.inference_mode(), rows.open("a", encoding="utf-8") as file:
        for batch in SECTIONS[section](cases, rounds, size):
            for row in batch:
                file.write(json.dumps(vars(row) | {"verdict": row.verdict}) + "\n")
                file.flush()


def prepare() -> tuple[str, int]:
    """Compiles every kernel that is measured; returns the GPU's name and how many there are.

    Raises:
        BackendError: no GPU, no CuPy or no NVRTC.
    """
    from mxfp8_ops.cuda import build, device

    gpu = device.device(0)
    arch = build.target(gpu.capability)
    kernels = [(kernel.partition("<")[0], kernel) for kernel in planner.kernels()]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # into the cache on disk
        return gpu.name, len([*pool.map(lambda kernel: len(build.cubin(*kernel, arch)), kernels)])


def run(command: list[str], seconds: float) -> str:
    """Runs a section; returns what went wrong, or ""."""
    try:
        done = subprocess.run(
            command, stdout=sys.stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["no message"]
    print("\n".join(lines[-20:]), file=sys.stderr, flush=True)
    return f"exit code {done.returncode}: {lines[-1]}"


def driver() -> str:
    """Returns the version of the driver, as nvidia-smi says it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def versions() -> str:
    """Returns the versions of what was measured with."""
    numbers = {"driver": driver()}
    for package in ("torch", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            numbers[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in numbers.items())


def publish(head: str, rows: list[dict[str, Any]], failures: dict[str, str], folder: Path) -> list[str]:
    """Writes gpu.md and gpu.json of the rows so far; returns the lines of the table."""
    lines = [head, "", "| what | us | value | of | must | stretch | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        bounds = " | ".join("" if bound is None else f"{bound:.2f}" for bound in (row["must"], row["stretch"]))
        lines.append(
            f"| {row['name']} | {row['microseconds']:.1f} | {row['value']:.3g} | {row['peer']} | {bounds} | "
            f"{row['verdict']} |"
        )
    verdicts = [row["verdict"] for row in rows if row["verdict"]]
    lines += [
        "",
        "eager: the processor's time for a call without a CUDA graph; all else is the GPU's, in one.",
        "x copy: against a copy that moves as many bytes. M <= 64 is gemm_skinny; more rows are dequantize and",
        "cuBLASLt, on Blackwell its MXFP8 product.",
        "",
        f"{len(verdicts)} targets: " + ", ".join(f"{verdicts.count(v)} {v}" for v in ("stretch", "ok", "MISSED")) + ".",
        *(f"Section {name} is incomplete: {why}." for name, why in failures.items()),
    ]
    (folder / "gpu.md").write_text("# CUDA kernels on one GPU\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    content = {"gpu": head, "rows": rows, "failures": failures}
    (folder / "gpu.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return lines


def main() -> None:
    """Runs the sections one after the other, or one of them for itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--size", type=int, default=8192, help="N and K of the products")
    parser.add_argument("--seconds", type=float, default=450, help="what all sections together may take")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.md and gpu.json")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; all by default")
    parser.add_argument("--dry-run", action="store_true", help="only say which sections there are; needs no GPU")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dry_run:
        print(*(arguments.only or SECTIONS), sep="\n")
        return
    if arguments.rows:
        measure(arguments.only[0], arguments.rounds, arguments.size, arguments.rows)
        return
    start = time.monotonic()
    try:
        gpu, count = prepare()
    except ValueError as error:  # Mxfp8Error is one
        sys.exit(str(error))
    print(f"{count} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, failures = arguments.out / "gpu.jsonl", {}
    path.write_text("", encoding="utf-8")
    head, lines = f"{datetime.date.today().isoformat()}, {gpu}, {versions()}", []
    for section in arguments.only or SECTIONS:
        begun = time.monotonic()
        left = arguments.seconds - (begun - start)
        command = [sys.executable, __file__, "--only", section, "--rows", str(path)]
        command += ["--rounds", str(arguments.rounds), "--size", str(arguments.size)]
        why = run(command, min(left, SECTION_SECONDS)) if left > 0 else "no time was left"
        if why:
            failures[section] = why
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]  # a section may end amid a line
        rows = [json.loads(line) for line in whole.splitlines()]
        lines = publish(head, rows, failures, arguments.out)
        print(f"{section}: {time.monotonic() - begun:.0f} s{', ' + why if why else ''}", flush=True)
    print("\n".join(lines))
    path.unlink()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
