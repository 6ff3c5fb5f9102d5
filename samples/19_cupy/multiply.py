"""Quantizes and multiplies CuPy arrays on a GPU, and compares the product with float64: python multiply.py."""

from __future__ import annotations

import cupy
import numpy as np

from mxfp8_ops import cuda

generator = np.random.default_rng(0)
x = generator.standard_normal((512, 1024), np.float32)  # activations [M, K]
w = generator.standard_normal((256, 1024), np.float32)  # a weight [N, K]
bias = generator.standard_normal(256, np.float32)

weight = cuda.quantize(cupy.asarray(w))  # elements uint8 [N, K], scales uint8 [N, K / 32]; once
rows = cuda.quantize(cupy.asarray(x))
y = cuda.gemm(*rows, *weight, cupy.asarray(bias))  # both quantized: MXFP8 tensor cores, on Blackwell
z = cuda.weight_gemm(cupy.asarray(x), *weight, cupy.asarray(bias), activation_dtype="bfloat16")  # the weight alone

exact = x.astype(np.float64) @ w.astype(np.float64).T + bias
for name, result in (("gemm", y), ("weight_gemm", z)):
    error = np.linalg.norm(cupy.asnumpy(result) - exact) / np.linalg.norm(exact)
    print(f"{name:12} relative L2 error {error:.4f}")
