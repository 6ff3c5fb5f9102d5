"""How gemm_fused is cut up: the rows of the weight that a thread block takes, and the parts of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCKS: Final = (1, 2)
"""Instances of the kernel: how many 64 rows of the weight each of a thread block's two warpgroups takes."""

TOKENS: Final = 128
"""Rows of x that a thread block takes."""

SHARED: Final = 1024 + 6 * (TOKENS * 128 + 8)
"""Bytes of shared memory: stages of 64 values of K, a barrier each, and what aligning them takes."""

_LEAST_STEPS: Final = 16
"""Of 64 values of K, for each part: fewer are no more than what is on its way at the start."""

_STEP: Final = 512
"""Clocks in which a multiprocessor multiplies 128 rows by 128 rows of x for 64 values of K, at most."""

_NARROW: Final = 1.15
"""What 128 rows in a thread block instead of 256 cost: x is read twice as often. Not measured yet."""

_SECOND_LAUNCH: Final = 3500
"""Clocks for the launch that adds up the parts of K. Not measured yet."""

_CACHE_BYTES: Final = 2800
"""Bytes of sums a clock that go to the L2 cache or come from there. Not measured yet."""


@dataclass(frozen=True)
class Cut:
    """A launch of gemm_fused."""

    blocks: int
    """One of `BLOCKS`."""
    splits: int
    """Thread blocks that share the rows and each take a part of K; if several, finish.cu adds up their sums."""

    def grid(self, m: int, n: int) -> int:
        """Returns the number of thread blocks."""
        return self.splits * -(-m // TOKENS) * -(-n // (128 * self.blocks))

    def kernel(self, b: str) -> str:
        """Returns the name of the instance for a weight of format `b`."""
        return f"gemm_fused<{b}, {self.blocks}>"


def cut(sizes: tuple[int, int, int], processors: int) -> Cut:
    """Returns the cut for x [M, K] times b [N, K], sizes = (M, N, K), that should take the fewest clocks.

    A multiprocessor runs one thread block at a time, so what counts is how many each has to run one after the other.
    """
    m, n, k = sizes
    steps = -(-k // 64)

    def clocks(candidate: Cut) -> float:
        turns = -(-candidate.grid(m, n) // processors)
        each = -(-steps // candidate.splits) * candidate.blocks * _STEP * (_NARROW if candidate.blocks == 1 else 1)
        sums = 8 * candidate.splits * m * n / _CACHE_BYTES + _SECOND_LAUNCH if candidate.splits > 1 else 0
        return turns * each + sums

    splits = range(1, max(1, min(8, steps // _LEAST_STEPS)) + 1)
    return min((Cut(blocks, s) for s in splits for blocks in BLOCKS), key=clocks)


def tiles_size(m: int, k: int) -> int:
    """Returns how many bytes x [M, K] takes in the tiles that tile.cu makes."""
    return -(-m // TOKENS) * TOKENS * -(-k // 64) * 128
