"""The registry of the nodes: their rows, which the files of nodes/ define, and the torch ops that correspond to them.

Function bodies, the ONNX Runtime kernels and the torch ops implement these rows; passes and checks read them.
`custom_ops/generate.py` writes them into src/contract.h for C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mxfp8_ops.node import (
    ACTIVATIONS,
    BFLOAT16,
    BOOL,
    DOMAIN,
    ELEMENTS,
    FLOAT,
    FLOAT8E4M3FN,
    FLOAT8E5M2,
    FLOAT16,
    INDICES,
    INT32,
    INT64,
    MIN_OPSET,
    SCALES,
    UINT8,
    VALUE_NAMES,
    VALUES,
    VERSION,
    Op,
    Port,
)
from mxfp8_ops.nodes import attention, conv, embedding, fused_gemm, gemm, grouped, quantize
from mxfp8_ops.nodes.attention import ATTENTION
from mxfp8_ops.nodes.conv import CONV
from mxfp8_ops.nodes.embedding import EMBEDDING
from mxfp8_ops.nodes.fused_gemm import EPILOGUES, GATED_WEIGHT_GEMM
from mxfp8_ops.nodes.gemm import GEMM, WEIGHT_GEMM
from mxfp8_ops.nodes.grouped import GROUPED_GEMM, GROUPED_WEIGHT_GEMM
from mxfp8_ops.nodes.quantize import DEQUANTIZE, QUANTIZE

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "BFLOAT16",
    "BOOL",
    "CONV",
    "DEQUANTIZE",
    "DOMAIN",
    "ELEMENTS",
    "EMBEDDING",
    "EPILOGUES",
    "FLOAT",
    "FLOAT8E4M3FN",
    "FLOAT8E5M2",
    "FLOAT16",
    "GATED_WEIGHT_GEMM",
    "GEMM",
    "GROUPED_GEMM",
    "GROUPED_WEIGHT_GEMM",
    "INDICES",
    "INT32",
    "INT64",
    "MIN_OPSET",
    "OPS",
    "PACKED_OPS",
    "QUANTIZE",
    "SCALES",
    "TORCH_GEMMS",
    "TORCH_OPS",
    "TRAINING_OPS",
    "UINT8",
    "VALUES",
    "VALUE_NAMES",
    "VERSION",
    "WEIGHT_GEMM",
    "Op",
    "Port",
    "TorchOp",
]

OPS: Final[Mapping[str, Op]] = MappingProxyType(
    {op.name: op for file in (quantize, gemm, embedding, grouped, fused_gemm, attention, conv) for op in file.OPS}
)
"""All nodes of the domain, by op type, in the order in which the docs and the C++ enum list them."""


@dataclass(frozen=True)
class TorchOp:
    """One op of the torch namespace `DOMAIN`; its file in torch_ops/ has the schema."""

    name: str
    node: Op | None = None
    """The node that an export to ONNX writes for it; None if there is none."""
    weight: tuple[str, str, str] | None = None
    """The names of the arguments that hold a packed weight: its elements, its scales, its format."""
    multiplies: bool = False
    """Whether the op multiplies matrices."""
    trains: bool = False
    """Whether the op has gradients, so that a program that contains it can be trained."""

    @property
    def full_name(self) -> str:
        """Name with namespace, as torch writes it: "mxfp8::gemm"."""
        return f"{DOMAIN}::{self.name}"


_B: Final = ("b", "b_scales", "b_format")

TORCH_OPS: Final[Mapping[str, TorchOp]] = MappingProxyType(
    {
        op.full_name: op
        for op in (
            TorchOp("quantize", QUANTIZE),
            TorchOp("quantize_both"),
            TorchOp("quantize_groups"),
            TorchOp("dequantize", DEQUANTIZE, ("elements", "scales", "element_format")),
            TorchOp("gemm", GEMM, _B, multiplies=True),
            TorchOp("weight_gemm", WEIGHT_GEMM, _B, multiplies=True),
            TorchOp("embedding", EMBEDDING, _B),
            TorchOp("grouped_gemm", GROUPED_GEMM, _B, multiplies=True),
            TorchOp("linear_packed", None, _B, multiplies=True, trains=True),
            TorchOp("linear_train", multiplies=True, trains=True),
            TorchOp("grouped_linear_train", multiplies=True, trains=True),
            TorchOp("grouped_wgrad"),
            TorchOp("product", multiplies=True, trains=True),
        )
    }
)
"""All ops of the namespace, by full name."""

TORCH_GEMMS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.multiplies)
"""Full names of the torch ops that multiply matrices."""

TRAINING_OPS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.trains)
"""Full names of the torch ops with gradients; no ONNX node has gradients."""

PACKED_OPS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.weight == _B)
"""Full names of the torch ops to which the passes give a packed weight: the gemms and the embedding."""
