"""The bodies of the fused nodes: the nodes they stand for, and standard ops.

They call those nodes rather than repeat their bodies: ONNX Runtime then finds the kernels of another device for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from onnx import GraphProto, TensorProto, helper

from mxfp8_ops import contract
from mxfp8_ops.contract import Op
from mxfp8_ops.function_body import Body

_Activation = Callable[[Body, str], str]


def _gemm(g: Body, gemm: Op) -> None:
    """The inputs of `gemm`, perhaps a factor, bias -> Y."""
    y = _activated(g, gemm)
    if g.op.at("factor") is not None:
        y = g("Mul", y, g("Cast", g.shaped("factor", g("Shape", y)), to=TensorProto.FLOAT))
    g("Cast", y, to=g.attribute("output_dtype"), out="Y")


def _gemm_quantize(g: Body) -> None:
    """The inputs of MXFP8Gemm -> elements, scales, Y."""
    _quantize(g, g("Identity", _activated(g, contract.GEMM), out="Y"))


def _activated(g: Body, gemm: Op) -> str:
    """Returns the epilogue of what `gemm` gives, in float32."""
    operands = [port.name for port in gemm.inputs if port.name not in g.absent]
    if g.given is None:
        # The gemm always gets a bias: ONNX Runtime before 1.27 crashes on the empty name of an absent one. It derives
        # what dtypes an input may have from the standard ops it goes to, and takes no float8 without.
        bias = g.or_zeros("bias", g("Shape", "B_scales", start=-2, end=-1))
        operands = [*(g("Identity", name) for name in operands if name != "bias"), bias]
    settings = {name: g.attribute(name) for name in gemm.attributes if name != "output_dtype"}
    (y,) = g.call(gemm, *operands, out=["sums"], **settings)
    if g.given is not None:
        return _ACTIVATIONS[g.given["epilogue"]](g, y)
    return _chosen(g, y, g.index_of("epilogue", contract.EPILOGUES), contract.EPILOGUES)


def _chosen(g: Body, x: str, index: str, names: Sequence[str]) -> str:
    """Returns the last of the activations `names` of x, or the one that `index`, counted from EPILOGUES, picks."""
    name, *others = names
    if not others:
        return _ACTIVATIONS[name](g, x)
    here, beyond = g.inner(), g.inner()
    branches = {
        "then_branch": _branch(here, _ACTIVATIONS[name](here, x)),
        "else_branch": _branch(beyond, _chosen(beyond, x, index, others)),
    }
    return g("If", g("Equal", index, g.constant(contract.EPILOGUES.index(name))), out="activated", **branches)


def _branch(g: Body, result: str) -> GraphProto:
    return helper.make_graph(g.nodes, "branch", [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)])


def _relu(g: Body, x: str) -> str:
    if g.given is not None:
        return g("Relu", x)
    zero = g.constant(np.float32(0))
    return g("Where", g("Less", x, zero), zero, x)  # ONNX Runtime's Relu may drop a NaN


def _silu(g: Body, x: str) -> str:
    return g("Mul", x, g("Sigmoid", x))


_ACTIVATIONS: Final[Mapping[str, _Activation]] = MappingProxyType(
    {
        "none": lambda g, x: g("Identity", x),
        "relu": _relu,
        "gelu": lambda g, x: g("Gelu", x),
        "gelu_tanh": lambda g, x: g("Gelu", x, approximate="tanh"),
        "silu": _silu,
    }
)


def _norm_quantize(g: Body) -> None:
    """X, scale, bias -> elements, scales, normalized."""
    _norm(g, "X")


def _add_norm_quantize(g: Body) -> None:
    """X, residual, scale, bias -> elements, scales, normalized, sum."""
    residual = g.shaped("residual", g("Shape", "X"))
    x, residual = (g("Cast", name, to=TensorProto.FLOAT) for name in ("X", residual))
    _norm(g, g("CastLike", g("Add", x, residual), "X", out="sum"))


def _norm(g: Body, x: str) -> None:
    """Rows of x -> elements, scales, normalized."""
    x = g("Cast", x, to=TensorProto.FLOAT)
    y = _normalized(g, x) if g.given is None or g.given["norm"] != "layer" else _layer_norm(g, x)
    _quantize(g, g("CastLike", y, "X", out="normalized"))


def _quantize(g: Body, y: str) -> None:
    """Rows of y -> elements, scales."""
    settings = {name: g.attribute(name) for name in ("output_dtype", "scale_rounding")}
    g.call(contract.QUANTIZE, y, out=["elements", "scales"], **settings)


def _layer_norm(g: Body, x: str) -> str:
    """Returns x normalized by the standard op, which all attributes are known for."""
    inputs = [x, "scale", *(name for name in ("bias",) if name not in g.absent)]
    return g("LayerNormalization", *inputs, axis=-1, epsilon=g.attribute("epsilon"))


def _normalized(g: Body, x: str) -> str:
    """Returns x normalized, times scale, plus bias; without its mean if the norm is that of layers."""
    last = g.constant([-1])
    centred = x
    if g.given is None:
        is_layer = g("Equal", g.index_of("norm", contract.NORMS), g.constant(contract.NORMS.index("layer")))
        mean = g("Where", is_layer, g("ReduceMean", x, last), g.constant(np.float32(0)))
        centred = g("Sub", x, mean, out="centred")
    variance = g("ReduceMean", g("Mul", centred, centred), last, out="variance")
    y = g(
        "Mul",
        g("Div", centred, g("Sqrt", g("Add", variance, g.number("epsilon")))),
        g.shaped("scale", g("Shape", x, start=-1)),
    )
    return y if "bias" in g.absent else g("Add", y, g.or_zeros("bias", g("Shape", "scale")))


BODIES: Final[Mapping[str, Callable[[Body], None]]] = MappingProxyType(
    {
        contract.FUSED_GEMM.name: partial(_gemm, gemm=contract.GEMM),
        contract.FUSED_WEIGHT_GEMM.name: partial(_gemm, gemm=contract.WEIGHT_GEMM),
        contract.GATED_GEMM.name: partial(_gemm, gemm=contract.GEMM),
        contract.GATED_WEIGHT_GEMM.name: partial(_gemm, gemm=contract.WEIGHT_GEMM),
        contract.GEMM_QUANTIZE.name: _gemm_quantize,
        contract.NORM_QUANTIZE.name: _norm_quantize,
        contract.ADD_NORM_QUANTIZE.name: _add_norm_quantize,
    }
)
"""The function that writes the body of each fused node, by op type."""
