"""MXFP8 checkpoints for tests: random codes, so that no quantizer could have made the bytes again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mxfp8_graph.packed.contents import PackedWeight
from mxfp8_ops import numpy_nodes

Codes = tuple[np.ndarray, np.ndarray]


def codes(n: int, k: int, seed: int = 0) -> Codes:
    """Returns finite elements [n, k] and scales [n, k / 32] near 1 / 256."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, (n, k), np.uint8)
    elements[elements & 0x7F == 0x7F] = 0
    return elements, rng.integers(117, 122, (n, -(-k // 32)), np.uint8)


def values(weight: Codes) -> np.ndarray:
    """Returns what the codes stand for, float32 [n, k]."""
    return numpy_nodes.dequantize(*weight)


def tensors(weights: Mapping[str, Codes], suffix: str = "_scale") -> dict[str, np.ndarray]:
    """Returns weights as a checkpoint stores them, by name."""
    found = {}
    for name, (elements, scales) in weights.items():
        found |= {name: elements.view(ml_dtypes.float8_e4m3fn), name + suffix: scales}
    return found


def tiles(scales: np.ndarray) -> np.ndarray:
    """Returns scales in tiles of 128 x 4, zero-padded, as cuBLAS documents their offsets, one scale at a time.

    https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """
    rows, columns = scales.shape
    across = -(-columns // 4)
    stored = np.zeros(-(-rows // 128) * across * 512, np.uint8)
    for outer in range(rows):
        for inner in range(columns):
            tile = outer // 128 * across + inner // 4
            stored[tile * 512 + outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4] = scales[outer, inner]
    return stored.reshape(-(-rows // 128) * 128, across * 4)


def save(path: Path, weights: Mapping[str, Codes], suffix: str = "_scale", **others: Any) -> Path:
    """Writes a checkpoint and returns its path."""
    save_file(tensors(weights, suffix) | others, path)
    return path


def check_bytes(found: Mapping[str, PackedWeight], weights: Mapping[str, Codes]) -> None:
    """Fails unless `found` are these weights, byte for byte."""
    assert sorted(found) == sorted(weights)
    for name, (elements, scales) in weights.items():
        np.testing.assert_array_equal(found[name].elements, elements, err_msg=name)
        np.testing.assert_array_equal(found[name].scales, scales, err_msg=name)
