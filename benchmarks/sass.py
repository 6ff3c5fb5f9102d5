"""Claim: few instructions a step and no spills in the inner loops of the CUDA kernels; it needs no GPU.

NVRTC compiles each kernel, nvdisasm shows its code. Counted is the fast path: of all ways from the head of the loop
back to it (of a kernel without a loop, from its start to its end), the one with the most tensor core instructions,
conversions or stores of 16 bytes, and of those the shortest. A step is 128 values of K for one warp and its 16 rows.

The cards' columns are predictions, not measurements: time to issue the instructions, four a clock and multiprocessor,
against time to move the bytes at the speed of a copy.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from harness import publish

from mxfp8_ops.cuda import build

ARCHITECTURES: Final = ("sm_90a", "sm_100a", "sm_120a")
CARDS: Final = {"H200": (132, 1.98e9, 4.3e12), "H100": (132, 1.98e9, 3.0e12), "B200": (148, 1.96e9, 7.0e12)}
"""Name -> multiprocessors, clock in Hz, bytes a second of a copy: about nine tenths of the memory's speed."""


class Counted(NamedTuple):
    """A kernel, and what its fast path does."""

    kernel: str
    work: str
    """The instruction that the fast path has most of."""
    loop: bool
    each: int
    """How many of them a step (16 values) has."""
    most: int
    """Instructions a step (16 values): the target."""
    step_bytes: float
    """Bytes of memory a step (16 values) moves."""
    lanes: int
    """Threads that share a step: 32, or 1 where each thread has its own 16 values."""


KERNELS: Final = (
    Counted("gemm_skinny<BF16, E4M3, 1, 2>", "HMMA", True, 8, 310, 2112, 32),
    Counted("gemm_skinny<BF16, E4M3, 2, 2>", "HMMA", True, 16, 340, 2112, 32),
    Counted("gemm_skinny<BF16, E4M3, 4>", "HMMA", True, 32, 400, 2112, 32),
    Counted("gemm_skinny<BF16, E4M3, 8>", "HMMA", True, 64, 480, 2112, 32),
    Counted("gemm_skinny<BF16, INT8, 1, 2>", "HMMA", True, 8, 310, 2112, 32),
    Counted("gemm_skinny<BF16, INT8, 8>", "HMMA", True, 64, 480, 2112, 32),
    Counted("dequantize<BF16, E4M3, true, false>", "STG.E.128", False, 2, 90, 48.5, 1),
    Counted("dequantize<BF16, E5M2, true, false>", "STG.E.128", False, 2, 90, 48.5, 1),
    Counted("dequantize<BF16, INT8, true, false>", "STG.E.128", False, 2, 90, 48.5, 1),
)


class Way(NamedTuple):
    """A way through the code: instructions of the kind that is looked for, and all of them below zero."""

    work: int
    shortness: int


def disassembler() -> str | None:
    """Returns the path of nvdisasm: of a CUDA toolkit, or of `pip install nvidia-cuda-nvdisasm`."""
    site = Path(sysconfig.get_paths()["purelib"])
    return shutil.which("nvdisasm") or next(map(str, site.glob("nvidia/cu*/bin/nvdisasm")), None)


def blocks_of(text: str) -> tuple[list[list[str]], list[list[int]]]:
    """Returns the basic blocks of a listing of nvdisasm, and which follow each."""
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            blocks[-1].append(instruction[1])
            if re.search(r"\b(BRA|EXIT)\b", instruction[1]):
                blocks.append([])
    follow: list[list[int]] = []
    for i, block in enumerate(blocks):
        last = block[-1] if block else ""
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", last)
        leaves = last.startswith("@") or not re.search(r"\b(BRA|EXIT)\b", last)
        after = [i + 1] if leaves and i + 1 < len(blocks) else []
        follow.append([*([labels[target[1]]] if target else []), *after])
    return blocks, follow


def fast_path(text: str, work: str, *, loop: bool) -> tuple[int, int]:
    """Returns how many instructions named `work` the fast path has, and how many in all."""
    blocks, follow = blocks_of(text)

    def between(start: int, end: int) -> Way | None:
        @functools.cache
        def rest(i: int) -> Way | None:
            own = Way(sum(work in each for each in blocks[i]), -len(blocks[i]))
            if i == end:
                return own
            ways = [way for j in follow[i] if i < j <= end and (way := rest(j)) is not None]
            best = max(ways, default=None)
            return None if best is None else Way(own.work + best.work, own.shortness + best.shortness)

        return rest(start)

    if loop:
        ends = [(j, i) for i, after in enumerate(follow) for j in after if j <= i]
    else:
        ends = [(0, i) for i, block in enumerate(blocks) if block and "EXIT" in block[-1]]
    best = max(way for start, end in ends if (way := between(start, end)) is not None)
    return best.work, -best.shortness


def counted(row: Counted, arch: str, nvdisasm: str) -> tuple[float, int, int]:
    """Returns instructions a step (16 values), registers, and bytes of spills of a kernel."""
    source = row.kernel.partition("<")[0]
    cubin = build.compile_kernel(source, row.kernel, arch, ("--ptxas-options=-v",))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.code)
        file.flush()
        done = subprocess.run([nvdisasm, "--print-code", file.name], capture_output=True, text=True, check=True)
    work, all_of_them = fast_path(done.stdout, row.work, loop=row.loop)
    registers = int(re.findall(r"Used (\d+) registers", cubin.log)[0])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", cubin.log)))
    return all_of_them * row.each / work, registers, spills


def bound(row: Counted, instructions: float, card: str) -> str:
    """Returns the share of a copy's speed on a card that issuing so many instructions allows."""
    processors, clock, speed = CARDS[card]
    issued = instructions * row.lanes / 32 / (4 * processors * clock)
    return f"{min(1.0, row.step_bytes / speed / issued):.2f}"


def main() -> None:
    """Counts, and writes sass.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    nvdisasm = disassembler()
    if nvdisasm is None:
        sys.exit("sass: no nvdisasm; expected a CUDA toolkit's, or pip install nvidia-cuda-nvdisasm")
    rows = []
    for row in KERNELS:
        for arch in ARCHITECTURES:
            instructions, registers, spills = counted(row, arch, nvdisasm)
            verdict = "ok" if instructions <= row.most and not spills else "MISSED"
            shares = [bound(row, instructions, card) for card in CARDS]
            rows.append([row.kernel, arch, f"{instructions:.0f}", row.most, registers, spills, *shares, verdict])
    version = ".".join(map(str, build.nvrtc_version()))
    columns = ["kernel", "architecture", "instructions", "at most", "registers", "spills", *CARDS, ""]
    notes = [
        f"NVRTC {version}. Instructions of a warp for 128 values of K and 16 rows (gemm_skinny), or for 16 values.",
        f"{', '.join(CARDS)}: the most of a copy's speed that issuing these instructions allows; predicted, on no GPU.",
    ]
    publish("sass", "Instructions of the CUDA kernels' fast paths", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
