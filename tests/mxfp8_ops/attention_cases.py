"""Shared by the tests of MXFP8Attention: shapes that differ in one thing each, and models of one node."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from one_node import NUMPY, one_node_model
from onnx import TensorProto

from mxfp8_ops import contract, numerics
from mxfp8_ops.nodes.attention import NO_MASK, NO_PAST

Operands = tuple[Any, ...]
"""q, k, v, mask or None, past or None."""


@dataclass(frozen=True)
class Case:
    """One attention with random float32 operands; `str` of it is its name."""

    name: str
    batch: int = 2
    rows: int = 9
    keys: int = 9
    past: int = 0
    q_heads: int = 4
    kv_heads: int = 4
    d: int = 16
    dv: int = 16
    mask: tuple[int, ...] | None = None
    boolean: bool = False
    causal: bool = False
    scale: float = 0.0

    def __str__(self) -> str:
        """Returns the name."""
        return self.name

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of `attention`."""
        return {
            "q_num_heads": self.q_heads,
            "kv_num_heads": self.kv_heads,
            "is_causal": self.causal,
            "scale": self.scale,
        }

    @property
    def is_usual(self) -> bool:
        """Whether there is something to compute, and the mask has a value for every key."""
        total = self.past + self.keys
        return bool(self.batch and self.rows and total) and (self.mask is None or self.mask[-1] == total)

    def operands(self, dtype: str = "float32") -> Operands:
        """Returns q, k, v, mask, past; the mask sees the first key, and half of the others."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def values(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(numerics.value_dtype(dtype))

        q, k, v = (
            values(self.batch, length, size)
            for length, size in (
                (self.rows, self.q_heads * self.d),
                (self.keys, self.kv_heads * self.d),
                (self.keys, self.kv_heads * self.dv),
            )
        )
        mask = None
        if self.mask is not None:
            hidden = rng.random(self.mask) < 0.5
            hidden[..., 0] = False
            added = values(*self.mask)
            mask = ~hidden if self.boolean else np.where(hidden, added.dtype.type(-np.inf), added)
        past = None
        if self.past:
            past = tuple(values(self.batch, self.kv_heads, self.past, d) for d in (self.d, self.dv))
        return q, k, v, mask, past


CASES = [
    Case("plain"),
    Case("minilm", batch=2, rows=33, keys=33, q_heads=3, kv_heads=3, d=32, dv=32, mask=(2, 1, 1, 33)),
    Case("odd sizes", rows=5, keys=21, d=19, dv=7),
    Case("one row", rows=1, keys=70, d=64, dv=64),
    Case("long", batch=1, rows=70, keys=301, q_heads=2, kv_heads=2, d=48, dv=32),
    Case("causal", causal=True),
    Case("causal, more keys", rows=7, keys=40, causal=True),
    Case("causal, more rows", rows=40, keys=7, causal=True),
    Case("past", rows=3, keys=3, past=66),
    Case("causal with past", rows=20, keys=20, past=50, causal=True),
    Case("decode", batch=1, rows=1, keys=1, past=150, q_heads=6, kv_heads=2, d=64, dv=64, causal=True),
    Case("grouped", q_heads=8, kv_heads=2, d=24, causal=True),
    Case("one head of keys", q_heads=5, kv_heads=1),
    Case("scaled", scale=0.25),
    Case("mask of keys", mask=(9,)),
    Case("mask of rows and keys", mask=(9, 9)),
    Case("mask of heads", mask=(1, 4, 1, 9)),
    Case("mask of batches and rows", mask=(2, 1, 9, 9), boolean=True),
    Case("mask of all", mask=(2, 4, 9, 9)),
    Case("mask of rows", mask=(9, 1)),
    Case("mask of keys, bool", mask=(2, 1, 1, 9), boolean=True),
    Case("mask with causal and past", rows=20, keys=20, past=50, mask=(2, 1, 20, 70), causal=True),
    Case("no keys", rows=3, keys=0),
    Case("no rows", rows=0, keys=3),
    Case("no batch", batch=0, rows=3, keys=3),
    Case("no size of values", rows=3, keys=3, past=2, dv=0),
]


def widened(operands: Operands) -> Operands:
    """Returns the operands as float32."""
    q, k, v, mask, past = operands
    added = mask if mask is None or mask.dtype == np.bool_ else mask.astype(np.float32)
    pasts = None if past is None else tuple(x.astype(np.float32) for x in past)
    return (*(x.astype(np.float32) for x in (q, k, v)), added, pasts)


def feeds(operands: Operands) -> dict[str, tuple[np.ndarray, int]]:
    """Returns the inputs of a node, with what stands for no mask and no past, and their ONNX dtypes."""
    q, k, v, mask, past = operands
    codes = {np.dtype(numpy): code for code, numpy in NUMPY.items() if code in contract.VALUES}
    codes[np.dtype(np.bool_)] = TensorProto.BOOL
    none = np.zeros(NO_PAST, q.dtype)
    given = (q, k, v, NO_MASK if mask is None else mask, *(past or (none, none)))
    return {port.name: (x, codes[x.dtype]) for port, x in zip(contract.ATTENTION.inputs, given, strict=True)}


def attributes(case: Case, *, activation_dtype: str | None = None, nan_guard: bool = False) -> dict[str, Any]:
    """Returns the attributes of a node."""
    values = {**case.settings, "is_causal": int(case.causal), "nan_guard": int(nan_guard)}
    values["activation_dtype"] = contract.BFLOAT16 if activation_dtype else contract.FLOAT
    return {**contract.ATTENTION.attributes, **values}


def node_model(
    case: Case, opset: int, *, operands: Operands | None = None, presents: bool = True, **settings: Any
) -> onnx.ModelProto:
    """Returns a model of one node with its body; what stands for no mask or no past is an initializer."""
    given = case.operands() if operands is None else operands
    inputs = feeds(given)
    absent = ["attn_mask"] * (given[3] is None) + ["past_key", "past_value"] * (given[4] is None)
    outputs = {port.name: inputs["Q"][1] for port in contract.ATTENTION.outputs}
    model = one_node_model("MXFP8Attention", inputs, outputs, opset, attributes(case, **settings), constants=absent)
    if not presents:
        model.graph.node[0].output[1:] = ["", ""]
        del model.graph.output[1:]
    return model
