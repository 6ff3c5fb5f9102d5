"""Small models as other tools write them: nodes, names, dtypes and attributes are as their exporters write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from models import node, steps, value, weight
from onnx import TensorProto, helper, numpy_helper

import mxfp8_graph
from mxfp8_ops import numerics, numpy_nodes

K, N = 64, 96

E4M3, E8M0 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E8M0


def packed(*shape: int, seed: int = 0, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Returns elements and E8M0 codes, uint8."""
    return numpy_nodes.quantize(weight(*shape, seed=seed), axis=axis)


def stored(name: str, dtype: int, codes: np.ndarray) -> TensorProto:
    return helper.make_tensor(name, dtype, codes.shape, codes.tobytes(), raw=True)


def trt(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Returns a node of domain trt called like its first output."""
    name = outputs.split(maxsplit=1)[0]
    return helper.make_node(f"TRT_MXFP8{op}", inputs.split(), outputs.split(), name=name, domain="trt", **attributes)


def made(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[TensorProto],
    *,
    dtype: Any = np.float32,
    opset: int = 21,
    x: Sequence[Any] = ("batch", "seq", K),
    ir_version: int = 10,
    domain: str = "trt",
) -> onnx.ModelProto:
    """Returns a model x -> y of these nodes."""
    y = [*x[:-1], None]
    graph = helper.make_graph(list(nodes), "theirs", [value("x", dtype, x)], [value("y", dtype, y)], list(tensors))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


TAIL = "Transpose wd>wt|perm=[1,0]; MatMul xd wt>m; Relu m>y"
BLOCKS: dict[str, int] = {"axis": -1, "block_size": 32}


def modelopt(*, dtype: Any = np.float32, norm: bool = False) -> onnx.ModelProto:
    """y = gelu(x) @ w^T + b as modelopt 0.47 exports it (opset 20): DequantizeLinear gives float16 in any model."""
    elements, codes = packed(N, K)
    half = {**BLOCKS, "output_dtype": TensorProto.FLOAT16}
    nodes = [
        node("Gelu", "x", "g", approximate="tanh"),
        trt("DynamicQuantize", "g", "gq gs", **BLOCKS, output_dtype=E4M3),
        trt("DequantizeLinear", "gq gs", "gd", **half),
        trt("DequantizeLinear", "up.weight /up/weight_quantizer/scale", "wd", **half),
        node("Transpose", "wd", "wt", perm=[1, 0]),
        node("MatMul", "gd wt", "m", "/up/MatMul"),
        node("Add", "up.bias m", "s" if norm else "y"),
    ]
    tensors = [
        stored("up.weight", E4M3, elements),
        stored("/up/weight_quantizer/scale", TensorProto.UINT8, codes),
        numpy_helper.from_array(weight(N, seed=1, dtype=dtype), "up.bias"),
    ]
    if norm:  # modelopt quantizes what goes into a LayerNormalization, too
        nodes += [
            trt("DynamicQuantize", "s", "sq ss", **BLOCKS, output_dtype=E4M3),
            trt("DequantizeLinear", "sq ss", "sd", **half),
            node("LayerNormalization", "sd norm", "y", axis=-1),
        ]
        tensors.append(numpy_helper.from_array(np.ones(N, dtype), "norm"))
    return made(nodes, tensors, dtype=dtype, opset=20)


def transformer_engine() -> onnx.ModelProto:
    """y = relu(x @ w^T) as TransformerEngine exports it: no attributes, uint8 elements, scales padded to 128 x 4."""
    elements, codes = packed(N, K)
    padded = np.pad(codes, ((0, 128 - codes.shape[0]), (0, 4 - codes.shape[1])))
    nodes = [
        trt("DynamicQuantize", "x", "xq xs"),
        trt("DequantizeLinear", "xq xs", "xd"),
        trt("DequantizeLinear", "w w_scale", "wd"),
    ]
    tensors = [stored("w", TensorProto.UINT8, elements), stored("w_scale", TensorProto.UINT8, padded)]
    return made([*nodes, *steps(TAIL)], tensors)


def static_activation() -> onnx.ModelProto:
    """y = relu(x @ w^T) whose activation has stored scales: TRT_MXFP8QuantizeLinear."""
    elements, codes = packed(N, K)
    nodes = [
        trt("QuantizeLinear", "x x_scale", "xq", **BLOCKS),
        trt("DequantizeLinear", "xq x_scale", "xd", **BLOCKS, output_dtype=TensorProto.FLOAT),
        trt("DequantizeLinear", "w w_scale", "wd", **BLOCKS, output_dtype=TensorProto.FLOAT),
    ]
    scales = {"w_scale": codes, "x_scale": np.array([[120, 121]] * 3, np.uint8)}
    tensors = [stored(name, TensorProto.UINT8, array) for name, array in scales.items()]
    return made([*nodes, *steps(TAIL)], [stored("w", E4M3, elements), *tensors], x=[3, K])


def qdq(scales: str = "e8m0", *, rows_last: bool = True, block_size: int = 32, wrong: float = 1.0) -> onnx.ModelProto:
    """y = relu(x @ w) in standard Q/DQ, with scales "e8m0", "cast" (of E8M0), "float32" or "float16"."""
    elements, codes = packed(N, K)
    if not rows_last:
        elements, codes = (np.ascontiguousarray(each.T) for each in (elements, codes))
    nodes, tensors = [], [stored("w", E4M3, elements)]
    if scales in {"e8m0", "cast"}:
        tensors.append(stored("s", E8M0, codes))
        nodes += [node("Cast", "s", "sf", to=TensorProto.FLOAT)] * (scales == "cast")
    else:
        floats = (numerics.decode_scale(codes) * np.float32(wrong)).astype(scales)
        tensors.append(numpy_helper.from_array(floats, "s"))
    settings = {"output_dtype": TensorProto.FLOAT} if scales in {"e8m0", "float16"} else {}
    axis = -1 if rows_last else 0
    name = "w sf" if scales == "cast" else "w s"
    nodes.append(node("DequantizeLinear", name, "wd", axis=axis, block_size=block_size, **settings))
    nodes += [node("Transpose", "wd", "wt", perm=[1, 0])] * rows_last
    nodes += [node("MatMul", "x wt" if rows_last else "x wd", "m"), node("Relu", "m", "y")]
    return made(nodes, tensors, opset=24, ir_version=12)


def with_zero_point(model: onnx.ModelProto, elements: str, zero: TensorProto) -> onnx.ModelProto:
    """Returns a model whose node that dequantizes `elements` has a zero point."""
    next(node for node in model.graph.node if node.input[0] == elements).input.append(zero.name)
    model.graph.initializer.append(zero)
    return model


def quark(element_dtype: str = "fp8_e4m3") -> onnx.ModelProto:
    """y = relu(x @ w) as Quark 0.13 writes it: weights stay float32, and everything is quantized and dequantized."""
    settings = {"element_dtype": element_dtype, "scale_dtype": "e8m0", "block_size": 32, "rounding_mode": 2}

    def mx(x: str, y: str, axis: int) -> onnx.NodeProto:
        name = f"{x}_mx"
        return helper.make_node("MXQuantizeDequantize", [x], [y], name, domain="com.amd.quark", axis=axis, **settings)

    nodes = [mx("x", "xd", -1), mx("w", "wd", 0), node("MatMul", "xd wd", "m"), node("Relu", "m", "y")]
    return made(nodes, [numpy_helper.from_array(weight(K, N), "w")], domain="com.amd.quark")


def codes_of(model: Any) -> dict[str, tuple[bytes, bytes]]:
    """Returns the bytes of elements and scales by weight, both [..., N, K]."""
    weights = mxfp8_graph.unpack(model)
    return {name: (w.elements.tobytes(), w.scales.tobytes()) for name, w in weights.items()}


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


INT8_RECIPES, INT8_DIALECTS = ("mxint8", "mxint8-weight-only"), ("qdq", "standard", "nbits")
