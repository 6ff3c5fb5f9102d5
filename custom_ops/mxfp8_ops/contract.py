"""The registry of the nodes: one row each, with domain, inputs, outputs and attributes, and what torch calls them.

ONNX graphs, function bodies, the native ONNX Runtime kernels and the torch ops implement these rows; passes and checks
read them. For C++, `custom_ops/contract_header.py` writes them into src/contract.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mxfp8_ops import formats

DOMAIN: Final = "mxfp8"
"""ONNX domain of the nodes, and torch namespace of the ops."""

VERSION: Final = 1
"""Version of this contract: the opset version of `DOMAIN`, recorded in every rewritten file."""

MIN_OPSET: Final = 21
"""Lowest opset of the default domain that a rewritten model has; older models are converted up."""

# onnx.TensorProto.DataType.
FLOAT: Final = formats.FLOAT32.onnx_dtype
UINT8: Final = 2
INT32: Final = 6
INT64: Final = 7
BOOL: Final = 9
FLOAT16: Final = formats.FLOAT16.onnx_dtype
BFLOAT16: Final = formats.BFLOAT16.onnx_dtype
FLOAT8E4M3FN: Final = formats.E4M3.onnx_dtype
FLOAT8E5M2: Final = formats.E5M2.onnx_dtype

VALUES: Final = tuple(dtype.onnx_dtype for dtype in formats.VALUE_DTYPES.values())
ELEMENTS: Final = tuple(fmt.onnx_dtype for fmt in formats.ELEMENT_FORMATS.values())
SCALES: Final = (UINT8,)
ACTIVATIONS: Final = (FLOAT, BFLOAT16)
"""The values of `activation_dtype`: FLOAT leaves values as they are, of any dtype; BFLOAT16 rounds them to it."""
INDICES: Final = (INT32, INT64)

EPILOGUES: Final = ("none", "relu", "gelu", "gelu_tanh", "silu")
"""The functions that a fused gemm applies to its float32 sums: gelu is exact, by erf; silu is x * sigmoid(x)."""
NORMS: Final = ("layer", "rms")
"""How rows are normalized: layer subtracts the mean of a row, rms does not."""

VALUE_NAMES: Final[Mapping[int, str]] = MappingProxyType({d.onnx_dtype: d.name for d in formats.VALUE_DTYPES.values()})
"""Name of each value dtype by its ONNX code."""


@dataclass(frozen=True)
class Port:
    """One input or output: its name, the dtypes it accepts, its shape in words."""

    name: str
    dtypes: tuple[int, ...]
    shape: str
    optional: bool = False
    """A node leaves absent inputs out, the last ones; it writes an absent output as an empty name, wherever it is."""
    like: str = ""
    """The input whose dtype it always has; "" if it has one of its own."""


@dataclass(frozen=True)
class Op:
    """One node type.

    An input called B has the elements of a packed weight [..., N, K], and B_scales after it their scales, of one layout
    for every node: a table of rows and an output projection may share theirs. A gemm's other inputs are A (or X),
    A_scales, and bias, factor or experts; it is weight-only if A has no scales. Passes and checks know a node by these
    names and by the properties below, never by a list of nodes.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, int | float | str]
    """Default of each; every attribute is always written out."""
    summary: str
    is_gemm: bool = False
    """Whether it multiplies matrices."""
    fuses: tuple[str, str] = ("", "")
    """The node whose place it takes, and what it does besides, which was a node of its own."""

    def at(self, port: str) -> int | None:
        """Returns which input is called `port`, or None if there is none."""
        return next((index for index, row in enumerate(self.inputs) if row.name == port), None)

    @property
    def weight_only(self) -> bool:
        """Whether it is a gemm whose A is not quantized."""
        return self.is_gemm and self.at("A_scales") is None

    @property
    def quantizes(self) -> bool:
        """Whether it gives elements and scales: its first two outputs."""
        return self.outputs[0].name == "elements"

    @property
    def packed_at(self) -> int | None:
        """Which input holds the elements of a packed weight, if there is one; its scales are the next."""
        b = self.at("B")
        return self.at("elements") if b is None else b

    @property
    def indices_at(self) -> int | None:
        """Which input picks entries of the packed weight along its first axis, if there is one."""
        return next((index for index, row in enumerate(self.inputs) if {*row.dtypes} <= {*INDICES}), None)

    @property
    def factors_at(self) -> tuple[int, int] | None:
        """Which two inputs it multiplies first: A (or X) and B, or Q and K; None if it multiplies none."""
        second = self.packed_at if self.is_gemm else self.at("K")
        return None if second is None else (0, second)

    @property
    def is_plain(self) -> bool:
        """Whether it packs, or reads what is packed, and does nothing besides: others stand for several nodes."""
        return not self.fuses[0] and (self.quantizes or self.packed_at is not None)


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
    is_gemm=True,
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
    MappingProxyType({"activation_dtype": FLOAT, "output_dtype": FLOAT}),
    "X @ transpose(B) + bias with only the weight quantized, X perhaps rounded to bfloat16, accumulated in float32.",
    is_gemm=True,
)
EMBEDDING: Final = Op(
    "MXFP8Embedding",
    (
        Port("indices", INDICES, "[...]"),
        Port("B", ELEMENTS, "[V, D]"),
        Port("B_scales", SCALES, "[V, ceil(D / 32)]"),
    ),
    (Port("Y", VALUES, "[..., D]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "The rows of B that the indices name, dequantized; a negative index counts from the last row.",
)

GROUPED_GEMM: Final = Op(
    "MXFP8GroupedGemm",
    (
        Port("A", ELEMENTS, "[..., M, K]"),
        Port("A_scales", SCALES, "[..., M, ceil(K / 32)]"),
        Port("B", ELEMENTS, "[E, N, K]"),
        Port("B_scales", SCALES, "[E, N, ceil(K / 32)]"),
        Port("experts", (INT64,), "[...]"),
    ),
    (Port("Y", VALUES, "[..., M, N]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "A @ transpose(B[experts]) on quantized operands, accumulated in float32; the matrices of B are not copied.",
    is_gemm=True,
)
GROUPED_WEIGHT_GEMM: Final = Op(
    "MXFP8GroupedWeightGemm",
    (
        Port("X", VALUES, "[..., M, K]"),
        Port("B", ELEMENTS, "[E, N, K]"),
        Port("B_scales", SCALES, "[E, N, ceil(K / 32)]"),
        Port("experts", (INT64,), "[...]"),
    ),
    (Port("Y", VALUES, "[..., M, N]"),),
    MappingProxyType({"activation_dtype": FLOAT, "output_dtype": FLOAT}),
    "X @ transpose(B[experts]) with only the weights quantized, X perhaps rounded first, accumulated in float32.",
    is_gemm=True,
)

# Fused nodes: each is a composition of the nodes above and standard ops, which is its body. Gemms with a factor and
# norms of a sum are nodes of their own: a body cannot find out that an input of any shape is absent.
_FACTOR: Final = Port("factor", VALUES, "shape of Y")
_BIAS: Final = Port("bias", (FLOAT,), "[N]", optional=True)
_GEMM_OUTPUTS: Final = (Port("Y", VALUES, "[..., M, N] or [..., N]"),)
_EPILOGUE: Final[Mapping[str, int | float | str]] = {"epilogue": "none", "output_dtype": FLOAT}

FUSED_GEMM: Final = Op(
    "MXFP8FusedGemm",
    GEMM.inputs,
    _GEMM_OUTPUTS,
    MappingProxyType(_EPILOGUE),
    "epilogue(A @ transpose(B) + bias) on quantized operands, in float32.",
    is_gemm=True,
    fuses=(GEMM.name, "activation"),
)
FUSED_WEIGHT_GEMM: Final = Op(
    "MXFP8FusedWeightGemm",
    WEIGHT_GEMM.inputs,
    _GEMM_OUTPUTS,
    MappingProxyType({"activation_dtype": FLOAT, **_EPILOGUE}),
    "epilogue(X @ transpose(B) + bias) with only the weight quantized, X perhaps rounded first, in float32.",
    is_gemm=True,
    fuses=(WEIGHT_GEMM.name, "activation"),
)
GATED_GEMM: Final = Op(
    "MXFP8GatedGemm",
    (*GEMM.inputs[:-1], _FACTOR, _BIAS),
    _GEMM_OUTPUTS,
    MappingProxyType(_EPILOGUE),
    "epilogue(A @ transpose(B) + bias) * factor on quantized operands, in float32.",
    is_gemm=True,
    fuses=(FUSED_GEMM.name, "gate"),
)
GATED_WEIGHT_GEMM: Final = Op(
    "MXFP8GatedWeightGemm",
    (*WEIGHT_GEMM.inputs[:-1], _FACTOR, _BIAS),
    _GEMM_OUTPUTS,
    MappingProxyType({"activation_dtype": FLOAT, **_EPILOGUE}),
    "epilogue(X @ transpose(B) + bias) * factor with only the weight quantized, X perhaps rounded first, in float32.",
    is_gemm=True,
    fuses=(FUSED_WEIGHT_GEMM.name, "gate"),
)
GEMM_QUANTIZE: Final = Op(
    "MXFP8GemmQuantize",
    GEMM.inputs,
    (
        Port("elements", ELEMENTS, "[..., M, N] or [..., N]"),
        Port("scales", SCALES, "[..., M, ceil(N / 32)] or [..., ceil(N / 32)]"),
        Port("Y", (FLOAT,), "shape of elements", optional=True),
    ),
    MappingProxyType({"epilogue": "none", "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}),
    "Y = epilogue(A @ transpose(B) + bias) on quantized operands, in float32; and its rows in MXFP8.",
    is_gemm=True,
    fuses=(FUSED_GEMM.name, "quantization"),
)
_NORM_INPUTS: Final = (Port("scale", (FLOAT,), "[K]"), Port("bias", (FLOAT,), "[K]", optional=True))
_NORM_OUTPUTS: Final = (*QUANTIZE.outputs, Port("normalized", VALUES, "shape of X", optional=True, like="X"))
_NORM_ATTRIBUTES: Final[Mapping[str, int | float | str]] = MappingProxyType(
    {"norm": "layer", "epsilon": 1e-5, "output_dtype": FLOAT8E4M3FN, "scale_rounding": "ceil"}
)
NORM_QUANTIZE: Final = Op(
    "MXFP8NormQuantize",
    (Port("X", VALUES, "[..., K]"), *_NORM_INPUTS),
    _NORM_OUTPUTS,
    _NORM_ATTRIBUTES,
    "Rows normalized in float32, times scale, plus bias, rounded to the dtype of X; and that in MXFP8.",
    fuses=(QUANTIZE.name, "norm"),
)
ADD_NORM_QUANTIZE: Final = Op(
    "MXFP8AddNormQuantize",
    (Port("X", VALUES, "[..., K]"), Port("residual", VALUES, "shape of X", like="X"), *_NORM_INPUTS),
    (*_NORM_OUTPUTS, Port("sum", VALUES, "shape of X", optional=True, like="X")),
    _NORM_ATTRIBUTES,
    "MXFP8NormQuantize of sum = X + residual.",
    fuses=(NORM_QUANTIZE.name, "sum"),
)

ATTENTION: Final = Op(
    "MXFP8Attention",
    (
        Port("Q", VALUES, "[B, S, Hq * D]"),
        Port("K", VALUES, "[B, T, Hkv * D]", like="Q"),
        Port("V", VALUES, "[B, T, Hkv * Dv]", like="Q"),
        Port("attn_mask", (*VALUES, BOOL), "broadcasts to [B, Hq, S, P + T]; none: [1], 0 or True"),
        Port("past_key", VALUES, "[B, Hkv, P, D]; none: [0]", like="Q"),
        Port("past_value", VALUES, "[B, Hkv, P, Dv]; none: [0]", like="Q"),
    ),
    (
        Port("Y", VALUES, "[B, S, Hq * Dv]", like="Q"),
        Port("present_key", VALUES, "[B, Hkv, P + T, D]", optional=True, like="Q"),
        Port("present_value", VALUES, "[B, Hkv, P + T, Dv]", optional=True, like="Q"),
    ),
    MappingProxyType(
        {
            "q_num_heads": 1,
            "kv_num_heads": 1,
            "is_causal": 0,
            "scale": 0.0,
            "activation_dtype": FLOAT,
            "nan_guard": 0,
        }
    ),
    "ONNX's Attention on 3-D inputs; a mask or a past that is not there is a constant that changes nothing.",
)
"""Its six inputs and three outputs are all written: ONNX Runtime before 1.27 crashes where a node of ours leaves an
input empty, a body cannot ask whether one is there, and no ONNX Runtime loads a node that has fewer outputs than its
body."""

OPS: Final[Mapping[str, Op]] = MappingProxyType(
    {
        op.name: op
        for op in (
            *(QUANTIZE, DEQUANTIZE, GEMM, WEIGHT_GEMM, EMBEDDING, GROUPED_GEMM, GROUPED_WEIGHT_GEMM),
            *(FUSED_GEMM, FUSED_WEIGHT_GEMM, GATED_GEMM, GATED_WEIGHT_GEMM),
            *(GEMM_QUANTIZE, NORM_QUANTIZE, ADD_NORM_QUANTIZE, ATTENTION),
        )
    }
)
"""Every node of the domain, by op type."""


@dataclass(frozen=True)
class TorchOp:
    """One op of torch namespace `DOMAIN`; its file in torch_ops has its schema."""

    name: str
    node: Op | None = None
    """The node it is exported to, that of quantized activations if it takes both; None if ONNX has none."""
    weight: tuple[str, str, str] | None = None
    """Arguments with a packed weight: its elements, its scales, its format."""
    multiplies: bool = False
    trains: bool = False

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
            TorchOp("dequantize", DEQUANTIZE, ("elements", "scales", "element_format")),
            TorchOp("gemm", GEMM, _B, multiplies=True),
            TorchOp("weight_gemm", WEIGHT_GEMM, _B, multiplies=True),
            TorchOp("embedding", EMBEDDING, _B),
            TorchOp("grouped_gemm", GROUPED_GEMM, _B, multiplies=True),
            TorchOp("linear_packed", None, _B, multiplies=True, trains=True),
            TorchOp("linear_train", multiplies=True, trains=True),
            TorchOp("product", multiplies=True, trains=True),
        )
    }
)
"""Every op of the namespace, by full name."""

TORCH_GEMMS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.multiplies)
"""Full names of the torch ops that multiply matrices."""

TRAINING_OPS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.trains)
"""Those with gradients for training, which ONNX lacks."""

PACKED_OPS: Final = frozenset(name for name, op in TORCH_OPS.items() if op.weight == _B)
"""Those that the passes give a packed weight: the gemms, and the embedding."""
