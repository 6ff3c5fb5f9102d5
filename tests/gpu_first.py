"""The first half hour on a GPU, in calls that each end well inside ten minutes: make gpu-first, CALL=B and so on.

A asks what the machine has, whether kernels run at all, and how fast those are that memory bounds: it gives numbers
even if no call follows. B runs every GPU test and looks for bad accesses; C measures the rest and profiles one kernel
more; D looks for races. Each call stands alone. It leaves in its folder what
ran, what failed, the numbers and the next command (first-A.md), all output (first-A.txt), and what its steps write. A
step that hangs or crashes costs no other one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from process_groups import end_groups_on_sigterm, process_group

ROOT = Path(__file__).parents[1]
CALL_SECONDS = 540
"""The most seconds that a call may take."""
COMPILE = """
import sys
from mxfp8_ops.cuda import build, system
arch = sys.argv[1] if sys.argv[1:] else build.target(system.gpus()[0].capability)
code = build.compile_kernel("finish", "finish<true>", arch).code
print(f"NVRTC {build.nvrtc_version()} compiles for {arch}: {len(code)} bytes")
"""
"""For the architecture that is named, or that of the GPU."""


PROBE = """
echo "LD_LIBRARY_PATH=$LD_LIBRARY_PATH"
ldconfig -p | grep -E "libcuda.so|libnvrtc|libcublas(Lt)?.so" || echo "ldconfig knows none of CUDA's libraries"
nvidia-smi || echo "no nvidia-smi"
{python} -m pip list 2>/dev/null | grep -iE "^(torch|cupy|nvidia-cuda-nvrtc|nvidia-cublas|onnxruntime|nvmath)" || true
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
print(f"{len(codes)} kernels compiled for {arch} in {time.monotonic() - start:.1f} s")
"""
"""Fills the cache of compiled kernels, so that no later step waits for NVRTC. A dry run compiles two."""


class Step(NamedTuple):
    """One command of a call. `{out}` in it is the call's folder."""

    name: str
    seconds: float
    """The most seconds that it may take."""
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    """The command of a dry run: everything that needs no GPU."""
    numbers: str = r"$^"
    """Lines of its output that the summary repeats."""
    needed: bool = False
    """Whether the call ends if it fails."""


def _tests(name: str, seconds: float, files: tuple[str, ...], select: str = "") -> Step:
    """Returns tests of the marker `gpu`, through the runner that goes on after a lost device."""
    most = f"{min(150.0, seconds / 2):.0f}"  # seconds of one test
    command = ("{python}", "tests/run_on_gpu.py", "--log", f"{{out}}/{name}.txt", "--seconds", f"{seconds - 15:.0f}")
    command += ("--most", most, *(("-k", select) if select else ()), *(f"tests/mxfp8_ops/{file}.py" for file in files))
    return Step(name, seconds, command, (*command, "--dry-run"), r"passed|failed|skipped|relative error")


def _bench(seconds: float, *sections: str) -> Step:
    only = tuple(word for section in sections for word in ("--only", section))
    command = ("{python}", "benchmarks/gpu_bench.py", "--out", "{out}", "--seconds", f"{seconds - 10:.0f}", *only)
    return Step("bench", seconds, command, (*command, "--dry-run"), r"^\||targets:|incomplete")


def _profile(case: str, kernel: str) -> Step:
    script = ("{python}", "benchmarks/gpu_once.py", case)
    # The clocks stay as they are: the card may be someone else's next.
    profiler = ("ncu", "--clock-control", "none", "--set", "full", "--launch-skip", "2", "--launch-count", "1")
    command = (*profiler, "--kernel-name", f"regex:{kernel}", *script)
    numbers = r"Duration|Throughput|Registers Per|Achieved Occupancy|No Eligible|Bank Conflicts|Warp Cycles Per Issued"
    return Step(f"profile-{case}", 75, command, (*script, "--dry-run"), numbers)


LIBRARY = Step("library", 90, ("make", "gpu-library"), ("make", "--dry-run", "gpu-library"), needed=True)

KERNELS = Step(
    "kernels", 45, ("{python}", "-c", EVERY_KERNEL), ("{python}", "-c", EVERY_KERNEL, "--dry-run"), "compiled"
)

CALLS: dict[str, tuple[str, tuple[Step, ...]]] = {
    "A": (
        "does it run at all, and how fast where memory decides",
        (
            Step("probe", 15, ("sh", "-c", PROBE), ("sh", "-c", PROBE), "."),
            LIBRARY,
            Step("compile", 20, ("{python}", "-c", COMPILE), ("{python}", "-c", COMPILE, "sm_90a"), "NVRTC", True),
            KERNELS,
            _tests(
                "kernels-run",
                120,
                ("test_cuda_device", "test_cuda_device_fp8"),
                "every_16_bit or every_element or every_cut or swizzled",
            ),
            _tests("routes", 60, ("test_cuda_device",), "route or graph"),
            _bench(105, "memory", "few_rows"),
            _profile("skinny", "gemm_skinny"),
        ),
    ),
    "B": (
        "every GPU test, and bad accesses",
        (
            LIBRARY,
            KERNELS,
            _tests("tests", 270, ("test_cuda_device", "test_cuda_device_fp8", "test_ort_device")),
            _tests("memcheck", 115, ("test_cuda_sanitized",), "memcheck"),
        ),
    ),
    "C": (
        "the other numbers",
        (
            LIBRARY,
            _bench(370, "many_rows", "small_weights", "wide_activations", "training", "cuts"),
            _profile("columns", "quantize_columns"),
        ),
    ),
    "D": (
        "races and barriers",
        (LIBRARY, KERNELS, _tests("races", 380, ("test_cuda_sanitized",), "synccheck or racecheck")),
    ),
}


class Result(NamedTuple):
    """The outcome of a step."""

    step: Step
    why: str
    """The error, or ""."""
    seconds: float
    output: str


def run(step: Step, seconds: float, out: Path, *, dry: bool) -> Result:
    """Runs a step, at most so many seconds; nothing that it started is left."""
    words = {"python": sys.executable, "out": str(out)}
    command = [re.sub(r"\{(python|out)\}", lambda found: words[found[1]], word) for word in _of(step, dry)]
    environment = {**os.environ}
    if step.name == "compile":
        environment["LD_LIBRARY_PATH"] = without_nvrtc(os.environ.get("LD_LIBRARY_PATH", ""))
    paths = [str(ROOT), str(ROOT / "custom_ops"), str(ROOT / "build" / "gpu"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start, path, why = time.monotonic(), out / "output.part", ""
    with path.open("wb") as file:
        try:
            options = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
            with process_group(command, **options) as process:
                code = process.wait(timeout=seconds)
                why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"took more than {seconds:.0f} s"
        except OSError as error:
            why = f"cannot be run: {error}"
    output = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    return Result(step, why, time.monotonic() - start, output)


def without_nvrtc(paths: str) -> str:
    """Returns LD_LIBRARY_PATH without the folders of a toolkit: the step `compile` is about the NVRTC of pip.

    The other folders stay: in containers the driver's libcuda.so.1 is often in one of them, and nowhere else.
    """
    folders = filter(None, paths.split(os.pathsep))
    return os.pathsep.join(folder for folder in folders if not any(Path(folder).glob("libnvrtc.so*")))


def _of(step: Step, dry: bool) -> tuple[str, ...]:
    return step.rehearsal if dry else step.command


def command_of(call: str, results: list[Result]) -> str:
    """Returns what to run next: the next call, or this one again once its failures are mended."""
    letters = [*CALLS]
    failed = [result.step.name for result in results if result.why]
    if failed:
        only = f" STEP={failed[0]}" if failed != ["library"] else ""
        return f"mend {', '.join(failed)}, then: make gpu-first CALL={call}{only}"
    if call == letters[-1]:
        return "commit call C's gpu.md and gpu.json"
    return f"make gpu-first CALL={letters[letters.index(call) + 1]}"


def summary(call: str, results: list[Result], *, dry: bool) -> str:
    """Returns the Markdown of a call: what ran, what failed, the numbers, the next command."""
    lines = [f"# First half hour on a GPU, call {call}: {CALLS[call][0]}", ""]
    lines += [f"{datetime.date.today().isoformat()}, {gpu()}{', a dry run' if dry else ''}", ""]
    lines += ["| step | result | s | at most |", "|---|---|---|---|"]
    lines += [f"| {r.step.name} | {r.why or 'ok'} | {r.seconds:.0f} | {r.step.seconds:.0f} |" for r in results]
    for title, found in (("Failed", [r for r in results if r.why]), ("Numbers", [r for r in results if not r.why])):
        for result in found:
            said = result.output.splitlines()
            picked = [line for line in said if re.search(result.step.numbers, line)]
            shown = [*picked, "...", *said[-25:]] if result.why else picked
            if shown:
                lines += ["", f"## {title}: {result.step.name}", "", "```", *shown, "```"]
    return "\n".join([*lines, "", f"Next: {command_of(call, results)}", ""])


def gpu() -> str:
    """Returns the GPU and its driver, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return "nvidia-smi hangs"
    return done.stdout.strip() or "no GPU"


def main() -> int:
    """Runs the steps of one call; returns 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--step", help="only this step, after those that it needs")
    parser.add_argument("--out", type=Path, required=True, help="folder for what it writes")
    parser.add_argument("--dry-run", action="store_true", help="do what needs no GPU: find each test, section, script")
    arguments = parser.parse_args()
    call, out, steps = arguments.call, arguments.out.resolve(), CALLS[arguments.call][1]
    if arguments.step:
        if arguments.step not in [step.name for step in steps]:
            parser.error(f"call {call} has the steps {', '.join(step.name for step in steps)}")
        steps = tuple(step for step in steps if step.needed or step.name == arguments.step)
    end_groups_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    log, deadline, results = out / f"first-{call}.txt", time.monotonic() + CALL_SECONDS, list[Result]()
    log.write_text("", encoding="utf-8")
    for step in steps:
        result = run(step, max(1.0, min(step.seconds, deadline - time.monotonic())), out, dry=arguments.dry_run)
        results.append(result)
        print(f"{step.name}: {result.why or 'ok'}, {result.seconds:.0f} s", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {step.name}: {' '.join(_of(step, arguments.dry_run))}\n{result.output}\n")
        text = summary(call, results, dry=arguments.dry_run)
        (out / f"first-{call}.md").write_text(text, encoding="utf-8")
        if step.needed and result.why:
            break
    print(text)
    return int(any(result.why for result in results))


if __name__ == "__main__":
    sys.exit(main())
