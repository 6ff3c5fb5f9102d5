"""MXFP8 models of every dialect, broken like other models and in what only they have: scales, blocks, zero points.

Whatever a file holds, it is converted, or one of our errors says what is wrong with it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attention_models
import dialect_models as d
import numpy as np
import onnx
from builders import attention_model, chain_model, matmul_model
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

import mxfp8_graph
from mxfp8_graph.onnx_model.dialects import WRITTEN
from mxfp8_graph.tools.dialects.convert import LOSSES
from mxfp8_ops.errors import Mxfp8Error

from . import onnx_models
from .onnx_models import DATA, DATA_BYTES


def seeds() -> list[bytes]:
    """Returns small models of every dialect, ours and those of others."""
    return [build().SerializeToString() for build in _SEEDS]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a model with something wrong with it: half of the time with what belongs to MXFP8."""
    if rng.random() < 0.5:
        return onnx_models.mutate(data, rng)
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        return onnx_models.mutate(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            rng.choice(_MUTATIONS)(model, rng)
        except (ValueError, TypeError, IndexError):  # the model has none of what is to be changed
            continue
    return model.SerializeToString()


def check(data: bytes, folder: Path) -> None:
    """Converts a model to one dialect, and the result to ours; raises only where that fails with no error of ours."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    (folder / DATA).write_bytes(bytes(range(64)) * (DATA_BYTES // 64))
    to = WRITTEN[zlib.crc32(data) % len(WRITTEN)]
    try:
        for name in (to, "mxfp8"):
            result, report = mxfp8_graph.convert(path, name, output=folder / f"{name}.out.onnx", allow=LOSSES)
            str(report.facts()).encode()
            if to == "mxfp8":
                break
            path = Path(str(result))
    except Mxfp8Error as error:
        str(error).encode()


def _tensor(model: onnx.ModelProto, rng: random.Random) -> TensorProto:
    return rng.choice(model.graph.initializer)


def _dtype(model: onnx.ModelProto, rng: random.Random) -> None:
    _tensor(model, rng).data_type = rng.choice((1, 2, 3, 7, 10, 11, 16, 17, 18, 19, 20, 22, 23, 24, 99))


def _dims(model: onnx.ModelProto, rng: random.Random) -> None:
    """Gives a tensor other dims, most often as many values."""
    tensor = _tensor(model, rng)
    dims = [*tensor.dims]
    kind = rng.randrange(5)
    if kind == 0:
        dims[rng.randrange(len(dims))] = rng.choice((0, 1, 2, 31, 33, -1, 2**31, 2**40, 2**61))
    elif kind == 1:
        dims.reverse()
    elif kind == 2:
        dims.insert(rng.randrange(len(dims) + 1), rng.choice((1, 1, 0, 2**61)))
    elif kind == 3:
        dims = [int(np.prod(dims))]
    else:
        dims.remove(1)
    tensor.dims[:] = dims


def _codes(model: onnx.ModelProto, rng: random.Random) -> None:
    """Gives a tensor other bytes: scales that are NaN, 2^-127, or not a power of two."""
    tensor = _tensor(model, rng)
    data = bytearray(tensor.raw_data)
    for _ in range(rng.choice((1, 4, len(data)))):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
    tensor.raw_data = bytes(data)


def _outside(model: onnx.ModelProto, rng: random.Random) -> None:
    """Moves a tensor into the external file, perhaps beyond its end."""
    tensor = _tensor(model, rng)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    entries = {"location": DATA, "offset": rng.choice(("0", "1", "64", "-1", "99999")), "length": None}
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)


def _attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    """Sets, changes or removes an attribute that nodes of dialects have."""
    node = rng.choice([node for node in model.graph.node if node.op_type in _OPS or node.attribute])
    name = rng.choice(("axis", "block_size", "output_dtype", "rounding_mode", "saturate", "element_dtype", "perm"))
    name = rng.choice([*(a.name for a in node.attribute), name])
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    values: tuple[Any, ...] = (0, 1, -1, 2, 10, 16, 17, 19, 32, 31, 2**31, -(2**63), "fp8_e5m2", 1.5, [1, 0], [0, 0])
    if rng.random() < 0.8:
        node.attribute.append(helper.make_attribute(name, rng.choice(values)))


def _op(model: onnx.ModelProto, rng: random.Random) -> None:
    """Makes a node of a dialect one of another."""
    node = rng.choice([node for node in model.graph.node if node.op_type in _OPS])
    node.op_type = rng.choice([*_OPS])
    node.domain = _OPS[node.op_type]


def _input(model: onnx.ModelProto, rng: random.Random) -> None:
    """Gives a node of a dialect one input more, less or other: perhaps a zero point."""
    node = rng.choice([node for node in model.graph.node if node.op_type in _OPS])
    names = [t.name for t in model.graph.initializer] + [name for each in model.graph.node for name in each.output]
    kind = rng.randrange(3)
    if kind == 0:
        node.input.append(rng.choice([*names, ""]))
    elif kind == 1:
        node.input.pop()
    else:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)


def _mark(model: onnx.ModelProto, rng: random.Random) -> None:
    """Changes what a conversion of ours has written beside a node."""
    entry = rng.choice([entry for node in model.graph.node for entry in node.metadata_props])
    at = rng.randrange(len(entry.value))
    entry.value = (
        entry.value[:at] + rng.choice(("", "9", "-1", "[", "null", '"x"', "{", "1e999")) + entry.value[at + 1 :]
    )


def _graft(model: onnx.ModelProto, rng: random.Random) -> None:
    """Adds the nodes and tensors of another seed."""
    other = onnx.ModelProto.FromString(rng.choice(seeds())).graph
    model.graph.node.extend(other.node)
    model.graph.initializer.extend(other.initializer)


_MUTATIONS: Final = (_dtype, _dims, _dims, _codes, _outside, _attribute, _attribute, _op, _input, _mark, _graft)

_OPS: Final = {
    **dict.fromkeys(("TRT_MXFP8DynamicQuantize", "TRT_MXFP8QuantizeLinear", "TRT_MXFP8DequantizeLinear"), "trt"),
    "MatMulBlockQuantizedFp8Weight": "com.microsoft",
    "MXQuantizeDequantize": "com.amd.quark",
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear", "MatMul", "Cast", "Transpose"), ""),
    **dict.fromkeys(("MXFP8Quantize", "MXFP8Dequantize", "MXFP8Gemm", "MXFP8WeightGemm", "MXFP8Embedding"), "mxfp8"),
}
"""Ops of the dialects and of what stands around them, with their domains."""


def _ours(model: onnx.ModelProto, recipe: str = "mxfp8", to: str = "") -> onnx.ModelProto:
    """Returns a model rewritten, and converted."""
    rewritten: Any = mxfp8_graph.rewrite(model, recipe)[0]
    if to:
        rewritten = mxfp8_graph.convert(rewritten, to, allow=LOSSES)[0]
    assert isinstance(rewritten, onnx.ModelProto)
    return rewritten


def _external() -> onnx.ModelProto:
    model = d.qdq("cast")
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value=DATA)
    return model


_SEEDS: Final[tuple[Callable[[], onnx.ModelProto], ...]] = (
    *(d.modelopt, lambda: d.modelopt(norm=True), lambda: d.modelopt(dtype=np.float16)),
    *(d.transformer_engine, d.static_activation, d.ort_cuda, d.quark, _external),
    *(d.qdq, lambda: d.qdq("cast"), lambda: d.qdq("float32", rows_last=False), lambda: d.qdq("float16")),
    lambda: d.with_zero_point(d.qdq(), "w", d.stored("z", d.E4M3, np.zeros((96, 2), np.uint8))),
    *(lambda to=to: _ours(chain_model((64, 32, 64)), to=to) for to in ("", "trt", "qdq", "standard", "ort-cuda")),
    *(lambda to=to: _ours(chain_model((64, 32, 64)), "mxint8-weight-only", to) for to in ("qdq", "standard", "nbits")),
    lambda: _ours(attention_model(32, 2), "mxfp8-bf16"),
    lambda: _ours(matmul_model(64, 32, dtype=np.float16, bias=True), "mxfp8-weight-only", "ort-cuda"),
    *(lambda to=to: _ours(attention_models.decoder(), to=to) for to in ("", "standard", "trt")),
)
