"""Attention as exporters write it, step by step; each step may be written otherwise.

q [B, S, 64], k, v [B, T, 64] -> heads -> scores -> scale -> mask -> softmax -> values -> merge -> a linear -> y
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from models import model, node, steps, weight
from onnx import NodeProto
from oracle import rewrite, run

from mxfp8_graph import Recipe

BATCH, ROWS, PAST, HEADS, HIDDEN = 2, 5, 3, 4, 64
SIZE = HIDDEN // HEADS

EXACT = Recipe(activations="unchanged", min_dim=0)
"""Fused or not, values are multiplied as they are: results differ by sums in another order."""

Steps = Mapping[str, Sequence[NodeProto]]


def split(name: str, perm: Sequence[int] = (0, 2, 1, 3)) -> list[NodeProto]:
    """name -> name1 [B, S, 4, 16] -> name2, its axes permuted."""
    return [node("Reshape", f"{name} split", f"{name}1"), node("Transpose", f"{name}1", f"{name}2", perm=perm)]


STEPS: Steps = {
    "q": split("q"),
    "k": split("k", (0, 2, 3, 1)),
    "v": split("v"),
    "scores": [node("MatMul", "q2 k2", "scores")],
    "scale": [node("Div", "scores root", "scaled")],
    "mask": [node("Add", "scaled mask", "masked")],
    "softmax": [node("Softmax", "masked", "weights", axis=-1)],
    "values": [node("MatMul", "weights v2", "heads", "values")],
    "merge": [node("Transpose", "heads", "apart", perm=[0, 2, 1, 3]), node("Reshape", "apart merged", "a")],
    "after": [],
}


def nodes_of(step: str | Sequence[NodeProto]) -> list[NodeProto]:
    return (steps(step) if step else []) if isinstance(step, str) else list(step)


def attention(
    *,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    constants: Mapping[str, Any] | None = None,
    dtype: Any = np.float32,
    opset: int = 21,
    **otherwise: str | Sequence[NodeProto],
) -> onnx.ModelProto:
    """Returns the model with some steps written otherwise, more inputs and outputs, and other constants.

    Inputs and outputs map names to shapes, or to (dtype, shape); known names need no entry.
    """
    nodes = [each for step in {**STEPS, **otherwise}.values() for each in nodes_of(step)]
    nodes += steps("o:MatMul a o>projected; Neg projected>y")
    used = {name for each in nodes for name in each.input}
    seen = (np.bool_, ["batch", 1, "rows", "keys"])
    known = {
        "q": ["batch", "rows", HIDDEN], "k": ["batch", "keys", HIDDEN], "v": ["batch", "keys", HIDDEN],
        "mask": ["batch", 1, "rows", "keys"], "mask2": [1, HEADS, 1, "keys"], "seen": seen, "hidden": seen,
        **(inputs or {}),
    }  # fmt: skip
    numbers = {
        "split": [0, 0, HEADS, SIZE], "merged": [0, 0, HIDDEN], "root": np.array(SIZE**0.5, dtype),
        "o": weight(HIDDEN, HIDDEN, dtype=dtype), "half": np.array(0.5, dtype), "zero": np.array(0, dtype),
        "lowest": np.array(np.finfo(np.float32).min), **(constants or {}),
    }  # fmt: skip
    results = {"y": ["batch", "rows", HIDDEN], **(outputs or {})}
    ends = [
        {name: spec if isinstance(spec, tuple) else (dtype, spec) for name, spec in specs.items()}
        for specs in ({name: spec for name, spec in known.items() if name in used}, results)
    ]
    stored = {name: np.asarray(value) for name, value in numbers.items() if name in used}
    return model(nodes, *ends, stored, opset=opset)


def decoder(
    *,
    axis: int = 2,
    constants: Mapping[str, np.ndarray] | None = None,
    outputs: Mapping[str, Any] | None = None,
    **otherwise: str | Sequence[NodeProto],
) -> onnx.ModelProto:
    """Returns attention of 4 heads to 2 of keys and values, kc and vc, which `past` ones are in front of.

    Each of the 2 is there twice: as heads 0, 1 and 2, 3 with `axis` 2, as heads 0, 2 and 1, 3 with 1.
    """
    times = np.ones(5, np.int64)
    times[axis] = 2
    own = {"split2": [0, 0, 2, SIZE], "at": [axis], "times": times, "all_heads": [0, HEADS, -1, SIZE]}
    for name, last in (("k", "kh"), ("v", "v2")):
        otherwise[name] = steps(
            f"Reshape {name} split2>{name}1; Transpose {name}1>{name}n|perm=[0,2,1,3]; "
            f"Concat past_{name} {name}n>{name}c|axis=-2; Unsqueeze {name}c at>{name}u; "
            f"Expand {name}u times>{name}e; Reshape {name}e all_heads>{last}"
        )
    otherwise["k"] = [*otherwise["k"], *steps("Transpose kh>k2|perm=[0,1,3,2]")]
    total = ROWS + PAST
    inputs = {f"past_{name}": [BATCH, 2, PAST, SIZE] for name in "kv"}
    inputs |= {name: [BATCH, ROWS, 2 * SIZE] for name in "kv"}
    inputs |= {"q": [BATCH, ROWS, HIDDEN], "mask": [BATCH, 1, ROWS, total]}
    present = {f"{name}c": [BATCH, 2, total, SIZE] for name in "kv"}
    return attention(
        inputs=inputs, outputs={**present, **(outputs or {})}, constants={**own, **(constants or {})}, **otherwise
    )


def standard(
    inputs: str = "q k v",
    outputs: str = "a",
    *,
    shapes: Mapping[str, Any] | None = None,
    heads: bool = False,
    opset: int = 23,
    **attributes: Any,
) -> onnx.ModelProto:
    """Returns the model with ONNX's Attention, on inputs of three dimensions or on `heads`."""
    own = {} if heads else {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    names = " ".join(f"{name}2" if heads and name in "qkv" else name for name in inputs.split())
    op = node("Attention", names, "heads" if heads else outputs, "attention", **{**own, **attributes})
    written: dict[str, Any] = {**dict.fromkeys(STEPS, ()), "values": [op]}
    if heads:
        written |= {name: split(name) for name in "qkv"} | {"merge": STEPS["merge"]}
    known = {
        "bool_mask": (np.bool_, ["batch", 1, "rows", "keys"]),
        "past_key": (np.float32, ["batch", HEADS, "past", SIZE]),
        "past_value": (np.float32, ["batch", HEADS, "past", SIZE]),
        **(shapes or {}),
    }
    more = {name: (np.float32, ["batch", HEADS, None, None]) for name in outputs.split()[1:]}
    return attention(inputs=known, outputs=more, opset=opset, **written)


def feeds(proto: onnx.ModelProto, rows: int = ROWS, keys: int = ROWS, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Returns inputs of the model: soft attention, a mask that hides some keys of each row."""
    rng = np.random.default_rng(3)
    sizes = {"batch": BATCH, "rows": rows, "keys": keys, "past": PAST}
    inputs = {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if tensor.elem_type == onnx.TensorProto.BOOL:
            inputs[value.name] = rng.random(shape) < 0.7
            inputs[value.name][..., 0] = True
        elif "mask" in value.name:
            inputs[value.name] = np.where(rng.random(shape) < 0.3, -3.0, 0.5).astype(dtype)
        else:
            inputs[value.name] = rng.standard_normal(shape).astype(dtype)
    return {**inputs, **more}


def fused(proto: onnx.ModelProto, recipe: Recipe = EXACT) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    """Returns the rewritten model, checked, and the attributes, inputs and outputs of its attentions."""
    result, report = rewrite(proto, recipe, fuse=True)
    nodes = [each for each in result.graph.node if each.op_type == "MXFP8Attention"]
    assert [fusion.kind for fusion in report.fusions].count("attention") == len(nodes)
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in each.attribute} for each in nodes]
    return result, [
        {**a, "inputs": list(n.input), "outputs": list(n.output)} for a, n in zip(attributes, nodes, strict=True)
    ]


def check_near(before: list[np.ndarray], after: list[np.ndarray], error: float = 1e-5) -> None:
    """Fails if results differ by more than `error`, relative to all of an output."""
    for one, other in zip(before, after, strict=True):
        assert one.shape == other.shape
        difference = np.linalg.norm((other - one).astype(np.float32)) / np.linalg.norm(one.astype(np.float32))
        assert difference < error, f"off by {difference}"


def check_same(proto: onnx.ModelProto, inputs: dict[str, np.ndarray], error: float = 1e-5) -> None:
    """Fails if a model gives something else where attention is fused."""
    check_near(run(rewrite(proto, EXACT)[0], inputs), run(fused(proto)[0], inputs), error)
