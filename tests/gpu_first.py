"""The first half hour on a GPU, in calls that each end well inside ten minutes: make gpu-first, CALL=B and so on.

A asks what the machine has, whether kernels run at all, and how fast those are that memory bounds: it gives numbers
even if no call follows. B runs every GPU test and looks for bad accesses; C measures the rest and profiles one kernel
more; D looks for races. Each call stands alone. Its folder then has a table of its steps with the last lines of each
(first-A.md), all output (first-A.txt), and the files of its steps. A step that hangs or crashes costs no other one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from run_on_gpu import end_groups_on_sigterm, process_group

ROOT = Path(__file__).parents[1]
CALL_SECONDS = 540
"""The most seconds that a call may take."""
LAST_LINES = 25
"""So many lines of a step's output are beside the table: the tools that lend a machine cut long output."""

PROBE = """
echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
ldconfig -p | grep -E "libcuda.so|libnvrtc|libcublas(Lt)?.so" || echo "ldconfig knows none of CUDA's libraries"
nvidia-smi || echo "no nvidia-smi"
{python} -m pip list 2>/dev/null | grep -iE "^(torch|cupy|nvidia-cuda-nvrtc|nvidia-cublas|onnxruntime)" || true
"""
"""The machine: most of what has failed on the first call depends on it."""
EVERY_KERNEL = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from mxfp8_ops.cuda import build, planner, system
arch = "sm_90a" if sys.argv[1:] else build.target(system.gpus()[0].capability)
start = time.monotonic()
with ThreadPoolExecutor() as pool:
    some = planner.kernels()[: 2 if sys.argv[1:] else None]
    codes = [*pool.map(lambda name: build.cubin(name.partition("<")[0], name, arch), some)]
print(f"{len(codes)} kernels compiled by NVRTC {build.nvrtc_version()} for {arch} in {time.monotonic() - start:.1f} s")
"""
"""Fills the cache of compiled kernels, so that no later step waits for NVRTC. A dry run compiles two."""


class Step(NamedTuple):
    """One command of a call. `{out}` in it is the call's folder, `{python}` this Python."""

    name: str
    seconds: float
    """The most seconds that it may take."""
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    """The command of a dry run: everything that needs no GPU."""
    needed: bool = False
    """Whether the call ends if it fails."""


def _tests(name: str, seconds: float, files: str, select: str = "") -> Step:
    """Returns tests of the marker `gpu`, through the runner that goes on after a lost device."""
    most = f"{min(150.0, seconds / 2):.0f}"  # seconds of one test
    command = ("{python}", "tests/run_on_gpu.py", "--log", f"{{out}}/{name}.txt", "--seconds", f"{seconds - 15:.0f}")
    paths = (f"tests/mxfp8_ops/test_{file}.py" for file in files.split())
    command += ("--most", most, *(("-k", select) if select else ()), *paths)
    return Step(name, seconds, command, (*command, "--dry-run"))


def _bench(seconds: float, sections: str) -> Step:
    only = (word for section in sections.split() for word in ("--only", section))
    command = ("{python}", "benchmarks/gpu_bench.py", "--out", "{out}", "--seconds", f"{seconds - 10:.0f}", *only)
    return Step("bench", seconds, command, (*command, "--dry-run"))


def _profile(case: str, kernel: str) -> Step:
    script = ("{python}", "benchmarks/gpu_once.py", case)
    # The clocks stay as they are: the card may be someone else's next.
    profiler = ("ncu", "--clock-control", "none", "--set", "full", "--launch-skip", "2", "--launch-count", "1")
    return Step(f"profile-{case}", 75, (*profiler, "--kernel-name", f"regex:{kernel}", *script), (*script, "--dry-run"))


LIBRARY = Step("library", 90, ("make", "gpu-library"), ("make", "--dry-run", "gpu-library"), needed=True)
KERNELS = Step("kernels", 45, ("{python}", "-c", EVERY_KERNEL), ("{python}", "-c", EVERY_KERNEL, "--dry-run"))


def _start(check: str) -> Step:
    command = ("{python}", "tests/gpu_start.py", check)
    return Step(check, 20, command, (*command, "--dry-run"))


CALLS: dict[str, tuple[Step, ...]] = {
    "A": (
        Step("probe", 15, ("sh", "-c", PROBE), ("sh", "-c", PROBE)),
        _start("install"),
        LIBRARY,
        KERNELS,
        _start("products"),
        _start("session"),
        _tests("runs", 90, "cuda_device cuda_device_fp8", "every_16_bit or every_element or every_cut or swizzled"),
        _tests("routes", 60, "cuda_device", "route or graph"),
        _bench(105, "memory few_rows"),
        _profile("skinny", "gemm_skinny"),
    ),
    "B": (
        LIBRARY,
        KERNELS,
        _tests("tests", 270, "cuda_device cuda_device_fp8 ort_device"),
        _tests("memcheck", 115, "cuda_sanitized", "memcheck"),
    ),
    "C": (
        LIBRARY,
        _bench(370, "many_rows small_weights wide_activations training cuts"),
        _profile("columns", "quantize_columns"),
    ),
    "D": (LIBRARY, KERNELS, _tests("races", 380, "cuda_sanitized", "synccheck or racecheck")),
}


class Result(NamedTuple):
    """The outcome of a step."""

    step: Step
    error: str
    """Empty if there is none."""
    seconds: float
    output: str


def run(step: Step, seconds: float, out: Path, *, dry: bool) -> Result:
    """Runs a step, at most so many seconds; none of the processes that it starts is left."""
    words = step.rehearsal if dry else step.command
    command = [word.replace("{python}", sys.executable).replace("{out}", str(out)) for word in words]
    paths = [str(ROOT), str(ROOT / "custom_ops"), str(ROOT / "build" / "gpu"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start, path, error = time.monotonic(), out / "output.part", ""
    with path.open("wb") as file:
        try:
            with process_group(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT) as process:
                code = process.wait(timeout=seconds)
                error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"took more than {seconds:.0f} s"
        except OSError as reason:
            error = f"cannot be run: {reason}"
    output = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    return Result(step, error, time.monotonic() - start, output)


def summary(call: str, results: list[Result]) -> str:
    """Returns the table of a call in Markdown, the last lines of each step, and the next command."""
    lines = [f"# First half hour on a GPU, call {call}", "", "| step | result | s | at most |", "|---|---|---|---|"]
    lines += [f"| {r.step.name} | {r.error or 'ok'} | {r.seconds:.0f} | {r.step.seconds:.0f} |" for r in results]
    for result in results:
        lines += ["", f"## {result.step.name}", "", "```", *result.output.splitlines()[-LAST_LINES:], "```"]
    letters, failed = [*CALLS], [result.step.name for result in results if result.error]
    following = letters[letters.index(call) + 1 :][:1]
    next_step = f"make gpu-first CALL={following[0]}" if following else "commit call C's gpu.md and gpu.json"
    if failed:
        next_step = f"mend {', '.join(failed)}, then: make gpu-first CALL={call} STEP={failed[0]}"
    return "\n".join([*lines, "", f"Next: {next_step}", ""])


def main() -> int:
    """Runs the steps of one call; returns 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--step", help="only this step, after those that it needs")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--dry-run", action="store_true", help="do what needs no GPU: find each test, section, script")
    options = parser.parse_args()
    out, steps = options.out.resolve(), [s for s in CALLS[options.call] if s.needed or options.step in (None, s.name)]
    end_groups_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    log, deadline, results = out / f"first-{options.call}.txt", time.monotonic() + CALL_SECONDS, list[Result]()
    log.write_text("", encoding="utf-8")
    for step in steps:
        result = run(step, max(1.0, min(step.seconds, deadline - time.monotonic())), out, dry=options.dry_run)
        results.append(result)
        print(f"{step.name}: {result.error or 'ok'}, {result.seconds:.0f} s", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {step.name}\n{result.output}\n")
        (out / f"first-{options.call}.md").write_text(summary(options.call, results), encoding="utf-8")
        if step.needed and result.error:
            break
    print(summary(options.call, results))
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
