"""Predicts how near the inner loops of the aarch64 library come to the bound of their instructions, by LLVM's models.

zig's compiler builds the library as the wheels have it, but with symbols. Of each kernel the loop with the most of the
instruction that multiplies is taken, as it is in machine code, and llvm-mca says how many cycles it takes on
processors whose model LLVM has, with operands in L1. The bound is the number of vector instructions that the kernel
needs for 128 multiply-adds, over the processor's vector pipes. Needs `make wheels` once, and Debian's package llvm-19.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/arm.md"
PIPES: Final = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4}
"""Vector pipes of the processors."""
MULTIPLY_ADDS: Final = {"fmul": 4, "fmla": 4, "fmlal": 4, "sdot": 16, "smmla": 32, "bfmmla": 16, "uzp2": 8}
"""Multiply-adds of an instruction on registers of 16 bytes; of UZP2, weights that it finishes."""
ITERATIONS = 200


class Kernel(NamedTuple):
    """An inner loop, and the least that it may take."""

    function: str
    """A regular expression of its name; of all that match, the loop with the most work is taken."""
    what: str
    work: str
    """The instruction that multiplies: a key of MULTIPLY_ADDS."""
    slots: int
    """Vector instructions for 128 multiply-adds, at the least."""


KERNELS: Final = (
    Kernel(r"portable::.*multiply_tile<8, 2>", "float32, 8 x 8", "fmla", 32),
    Kernel(r"neon_dot::multiply_rows<4>", "INT8, 4 x 8: 8 products, FSUB, FMLA for 4 sums", "sdot", 10),
    Kernel(r"neon_mm::multiply_rows<4>", "INT8, 4 x 8: 4 products, FSUB, FMLA for 4 sums", "smmla", 6),
    Kernel(r"neon_mm::multiply_tile<10>", "MXFP8, 10 x 8", "bfmmla", 8),
    Kernel(r"neon_mm::decode_panel<.*E4M3, false>", "MXFP8, weights to bfloat16: 16 for 16 of them", "uzp2", 128),
    Kernel(r"neon_dot::gemm_skinny_int8_multiply", "INT8, 2 x 2: 2 products, FSUB, FMLA for a sum", "sdot", 16),
    Kernel(r"neon_mm::gemm_skinny_half_multiply", "MXFP8, 4 x 1: 12, and 11 for each row", "fmlal", 56),
)


class Loop(NamedTuple):
    """The instructions of a loop."""

    lines: list[str]

    def count(self, pattern: str) -> int:
        """Returns how many of the instructions match."""
        return sum(re.match(pattern, line) is not None for line in self.lines)

    def multiply_adds(self, work: str) -> int:
        """Returns those of an iteration."""
        return self.count(rf"{work}2?\s.*\bv\d+\.") * MULTIPLY_ADDS[work]


def build(folder: Path) -> Path:
    """Returns the library for aarch64, with symbols."""
    tools = ROOT / "build/wheels/bin"
    environment = dict(os.environ, CXX=f"{tools}/python -m ziglang c++ -target aarch64-linux-gnu.2.17")
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    run(tools / "cmake", "-S", ROOT / "custom_ops", "-B", folder, *system, env=environment)
    run(tools / "cmake", "--build", folder, "--parallel", "2")
    return folder / "libmxfp8_ops.so"


def functions(library: Path, objdump: str) -> dict[str, list[tuple[int, str]]]:
    """Returns the addresses and instructions of every function, by name."""
    text = run(objdump, "--disassemble", "--demangle", "--no-show-raw-insn", library)
    found: dict[str, list[tuple[int, str]]] = {}
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            current = found.setdefault(head[1], [])
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line):
            current.append((int(instruction[1], 16), instruction[2].split("//")[0].replace("\t", " ").strip()))
    return found


def inner_loops(code: list[tuple[int, str]]) -> list[Loop]:
    """Returns the loops of a function that have no loop and no call in them."""
    ends = []
    for address, text in code:
        target = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z) .*?(?:0x)?([0-9a-f]+) <", text)
        if target and code[0][0] <= int(target[1], 16) <= address:
            ends.append((int(target[1], 16), address))
    inner = [(a, b) for a, b in ends if not any((a, b) != (c, d) and a <= c and d <= b for c, d in ends)]
    loops = [Loop([text for address, text in code if a <= address <= b]) for a, b in inner]
    return [loop for loop in loops if not loop.count(r"blr?\s")]


def cycles(loop: Loop, processor: str, mca: str) -> float | None:
    """Returns those of an iteration; None if the processor lacks an instruction."""
    # Where a branch goes is nothing to the model.
    code = "start:\n" + re.sub(r"(?:0x)?[0-9a-f]+ <.*>", "start", "\n".join(loop.lines)) + "\n"
    command = [mca, "-mtriple=aarch64", f"-mcpu={processor}", f"-iterations={ITERATIONS}"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    if "instruction requires: " in done.stderr:
        return None
    if done.returncode:
        sys.exit(f"{mca}: {done.stderr}")
    [total] = re.findall(r"Total Cycles: +(\d+)", done.stdout)
    return int(total) / ITERATIONS


def predict(kernel: Kernel, code: dict[str, list[tuple[int, str]]], mca: str) -> tuple[str, dict[str, float]]:
    """Returns the line of the table about a kernel, and its cycles for 128 multiply-adds on each processor."""
    loops = [loop for name in code if re.search(kernel.function, name) for loop in inner_loops(code[name])]
    loop = max(loops, key=lambda each: each.multiply_adds(kernel.work), default=Loop([]))
    if not (done := loop.multiply_adds(kernel.work)):
        sys.exit(f"{kernel.function}: no loop with {kernel.work}; expected a function of the library; correct KERNELS")
    spills = " / ".join(str(loop.count(rf"{way}.*\[sp")) for way in ("ld", "st"))
    cells, each = [kernel.what, kernel.work, str(done), str(len(loop.lines)), spills], {}
    for processor, pipes in PIPES.items():
        taken, least = cycles(loop, processor, mca), kernel.slots / pipes
        if taken is not None:
            each[processor] = taken * 128 / done
        cells.append("-" if taken is None else f"{each[processor]:.2f} of {least:.2f}: {least / each[processor]:.0%}")
    return f"| {' | '.join(cells)} |", each


def many_rows(by_kernel: dict[Kernel, dict[str, float]]) -> Iterator[str]:
    """Yields, for processors with all kernels, how much faster than FMLA at its limit 256 rows are multiplied."""
    by_work = {kernel.work: each for kernel, each in by_kernel.items()}
    for processor in by_work["bfmmla"]:
        limit = 128 / MULTIPLY_ADDS["fmla"] / PIPES[processor]
        mxfp8 = by_work["bfmmla"][processor] + by_work["uzp2"][processor] / 256  # weights are decoded once
        int8, fp8 = limit / by_work["smmla"][processor], limit / mxfp8
        yield f"{processor}: {int8:.1f} times as fast in MXINT8, {fp8:.1f} in MXFP8"


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """Returns what a command printed; ends the program if it fails."""
    if shutil.which(str(command[0])) is None:
        sys.exit(f"{command[0]}: not found; see the first lines of {Path(__file__).name}")
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="one that was built with symbols; else it is built")
    parser.add_argument("--llvm", default="19", help="the version of llvm-mca and llvm-objdump")
    arguments = parser.parse_args()
    mca, objdump = (f"llvm-{tool}-{arguments.llvm}" for tool in ("mca", "objdump"))
    [version] = re.findall(r"version (\S+)", run(mca, "--version"))
    code = functions(arguments.library or build(ROOT / "build/arm"), objdump)
    rows = {kernel: predict(kernel, code, mca) for kernel in KERNELS}
    head = ["inner loop", "instruction", "multiply-adds", "instructions", "loads / stores on the stack", *PIPES]
    lines = [
        f"Predicted by llvm-mca {version}, not measured: cycles for 128 multiply-adds, their bound, and its share.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(line for line, _ in rows.values()),
        "",
        "256 rows, packed, against float32 at the limit of FMLA:",
        *(f"- {line}" for line in many_rows({kernel: each for kernel, (_, each) in rows.items()})),
    ]
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
