"""How gemm_skinny is cut up: the rows a thread block takes, the warps that share x, and the parts of K.

src/ort/cuda_launch.cpp has these rules again; test_ort_cuda.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mxfp8_ops.formats import ELEMENT_FORMATS

WARPS: Final = {1: (2, 1), 2: (4, 2), 4: (4, 2), 8: (4, 2)}
"""Instances of the kernel: how many warps of a block may share x, by tiles of eight rows of x."""

PARTS: Final = {"float32": 3, "float16": 2}
"""How many rows of bfloat16 a row of x is (`take_part` in codec.cuh); others are one."""

_AHEAD: Final = 32 << 10
"""Bytes of the weight that a block has on their way: a split that reads less gains nothing."""

_SECOND_LAUNCH: Final = 96 << 10
"""Bytes of the weight that a block streams while the launch that adds up splits takes place. Not measured yet."""


@dataclass(frozen=True)
class Cut:
    """A launch of gemm_skinny."""

    tiles: int
    """Of eight rows of x, or of its parts: 1, 2, 4 or 8."""
    warps: int
    """Of a block's eight; each has 16 rows of the weight, and all share x. The others take other parts of K."""
    splits: int
    """Blocks that share the rows and each take a part of K; if several, finish.cu adds up their sums."""

    def grid(self, n: int) -> int:
        """Returns the number of thread blocks."""
        return self.splits * -(-n // (16 * self.warps))

    def kernel(self, x: str, b: str) -> str:
        """Returns the name of the instance; without the warps if they are the default, which suits any N."""
        warps = "" if self.warps == (1 if self.tiles == 1 else 4) else f", {self.warps}"
        return f"gemm_skinny<{x}, {b}, {self.tiles}{warps}>"


def cut(sizes: tuple[int, int, int], kind: str, processors: int) -> Cut:
    """Returns the cut for x [M, K] of a dtype or element format times b [N, K], sizes = (M, N, K), M PARTS <= 64.

    The more warps share x the better, if that leaves work for every multiprocessor; two blocks fit one when x is small,
    and then both are wanted, for what they read ahead. Where even few warps leave multiprocessors idle, K is split: see
    gemm_skinny.cu.
    """
    m, n, k = sizes
    tiles = next(t for t in WARPS if m * PARTS.get(kind, 1) <= 8 * t)
    wanted = processors * (2 if tiles * (1 if kind in ELEMENT_FORMATS else 2) <= 2 else 1)
    many, few = WARPS[tiles]
    warps = many if 10 * -(-n // (16 * many)) >= 9 * wanted else few
    streamed = 16 * warps * k
    splits = min(wanted // -(-n // (16 * warps)), streamed // _AHEAD)
    worth = splits > 1 and streamed * (splits - 1) >= _SECOND_LAUNCH * splits
    return Cut(tiles, warps, splits if worth else 1)
