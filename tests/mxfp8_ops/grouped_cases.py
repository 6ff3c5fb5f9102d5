"""Operands of grouped products, and what they must give."""

from __future__ import annotations

from typing import Any

import numpy as np
from compare import random_values

from mxfp8_ops import numpy_nodes

CASES: dict[str, tuple[tuple[int, ...], int, int, Any]] = {
    # shape of A, N, E, experts
    "any order, one row each": ((7, 1, 70), 40, 4, [3, 0, 0, 2, 3, -1, -4]),
    "experts without rows": ((3, 1, 64), 33, 8, [5, 5, 2]),
    "rows without an expert": ((5, 1, 96), 40, 4, [4, 1, 4, 0, 4]),
    "no row has an expert": ((2, 1, 64), 40, 4, [4, 4]),
    "several rows each": ((3, 5, 70), 40, 4, [1, 3, 1]),
    "one expert for all": ((6, 70), 40, 4, 2),
    "no expert for all": ((6, 70), 40, 4, 4),
    "rows broadcast": ((3, 1, 2, 70), 40, 4, [[0, 1], [2, 4], [0, 0]]),
    "experts broadcast": ((2, 3, 1, 70), 40, 4, [[1], [3]]),
    "a single expert": ((3, 1, 64), 40, 1, [0, 1, 0]),
    "no rows": ((0, 1, 64), 40, 4, []),
    "no columns": ((2, 1, 64), 0, 4, [0, 1]),
    "no depth": ((2, 1, 0), 40, 4, [0, 1]),
    "many rows": ((300, 1, 96), 70, 3, [1, 2, 0] * 100),
}
"""Groups that lie together and groups that do not, K that are and are no multiple of 32."""


class Case:
    """Operands of a grouped product, and what it must give."""

    def __init__(self, name: str, a_format: str = "e4m3", b_format: str = "e4m3") -> None:
        shape, n, e, experts = CASES[name]
        self.x = random_values(1, *shape)
        self.a = numpy_nodes.quantize(self.x, element_format=a_format)
        self.b = numpy_nodes.quantize(random_values(2, e, n, shape[-1]), element_format=b_format)
        self.experts = np.asarray(experts, np.int64)
        self.weight = numpy_nodes.dequantize(*self.b, element_format=b_format)
        """float32 [E, N, K]."""

    def exact(self, a: np.ndarray) -> np.ndarray:
        """Returns what rows `a` give, one product after another, in float64."""
        lead = np.broadcast_shapes(a.shape[:-2], self.experts.shape)
        y = np.zeros((*lead, a.shape[-2], self.weight.shape[1]))
        experts, rows = np.broadcast_to(self.experts, lead), np.broadcast_to(a, (*lead, *a.shape[-2:]))
        for at in np.ndindex(*lead):
            if experts[at] != len(self.weight):
                y[at] = rows[at].astype(np.float64) @ self.weight[experts[at]].T.astype(np.float64)
        return y

    def bound(self, a: np.ndarray, dtype: str = "float32") -> np.ndarray:
        """Returns how far from `exact` float32 sums may be; not at all where there is no expert."""
        count = len(self.weight)
        bound = numpy_nodes.gemm_error_bound(a, self.weight[self.experts % count], dtype)
        return np.where((self.experts == count)[..., None, None], 0, bound)
