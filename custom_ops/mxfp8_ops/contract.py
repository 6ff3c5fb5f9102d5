"""The nodes: one row each, with domain, inputs, outputs and attributes. The table in custom_ops/README.md is this file.

ONNX graphs, function bodies, the native ONNX Runtime kernels and the torch ops all implement exactly these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

DOMAIN: Final = "mxfp8"
"""ONNX domain of the nodes, and torch namespace of the ops."""

VERSION: Final = 1
"""Version of this contract: the opset version of `DOMAIN`, recorded in every rewritten file."""

MIN_OPSET: Final = 21
"""Lowest opset of the default domain that a rewritten model has; older models are converted up."""

# onnx.TensorProto.DataType, written out so that this file imports nothing.
FLOAT, UINT8, FLOAT16, BFLOAT16, FLOAT8E4M3FN, FLOAT8E5M2 = 1, 2, 10, 16, 17, 19

VALUES: Final = (FLOAT, FLOAT16, BFLOAT16)
ELEMENTS: Final = (FLOAT8E4M3FN, FLOAT8E5M2)
SCALES: Final = (UINT8,)

VALUE_NAMES: Final[Mapping[int, str]] = MappingProxyType({FLOAT: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16"})
"""Name of each value dtype, as `numerics.VALUE_DTYPES` spells it."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, the dtypes it accepts, its shape in words."""

    name: str
    dtypes: tuple[int, ...]
    shape: str
    optional: bool = False


@dataclass(frozen=True)
class Op:
    """One node type. `attributes` maps each name to its default; every attribute is always written out."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, int | str]
    summary: str


QUANTIZE: Final = Op(
    "MXFP8Quantize",
    (Port("X", VALUES, "[..., K, ...]"),),
    (Port("elements", ELEMENTS, "shape of X"), Port("scales", SCALES, "shape of X, K -> ceil(K / 32)")),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}),
    "Blocks of 32 values along `axis` -> 8-bit elements and one E8M0 scale per block.",
)
DEQUANTIZE: Final = Op(
    "MXFP8Dequantize",
    (Port("elements", ELEMENTS, "[..., K, ...]"), Port("scales", SCALES, "shape of elements, K -> ceil(K / 32)")),
    (Port("Y", VALUES, "shape of elements"),),
    MappingProxyType({"axis": -1, "block_size": 32, "output_dtype": FLOAT}),
    "The inverse of MXFP8Quantize.",
)
GEMM: Final = Op(
    "MXFP8Gemm",
    (
        Port("A", ELEMENTS, "[..., M, K] or [K]"),
        Port("A_scales", SCALES, "[..., M, ceil(K / 32)]"),
        Port("B", ELEMENTS, "[..., N, K]"),
        Port("B_scales", SCALES, "[..., N, ceil(K / 32)]"),
        Port("bias", (FLOAT,), "[N]", optional=True),
    ),
    (Port("Y", VALUES, "[..., M, N] or [..., N]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "A @ transpose(B) + bias on quantized operands, accumulated in float32.",
)
WEIGHT_GEMM: Final = Op(
    "MXFP8WeightGemm",
    (
        Port("X", VALUES, "[..., M, K] or [K]"),
        Port("B", ELEMENTS, "[..., N, K]"),
        Port("B_scales", SCALES, "[..., N, ceil(K / 32)]"),
        Port("bias", (FLOAT,), "[N]", optional=True),
    ),
    (Port("Y", VALUES, "[..., M, N] or [..., N]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "X @ transpose(B) + bias with only the weight quantized, accumulated in float32.",
)

OPS: Final[Mapping[str, Op]] = MappingProxyType({op.name: op for op in (QUANTIZE, DEQUANTIZE, GEMM, WEIGHT_GEMM)})
"""Every node of the domain, by op type."""
