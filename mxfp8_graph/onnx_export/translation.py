"""The ONNX node of each mxfp8 op, for torch's exporter.

torch.ops.mxfp8.quantize     -> MXFP8Quantize
torch.ops.mxfp8.dequantize   -> MXFP8Dequantize
torch.ops.mxfp8.gemm         -> MXFP8Gemm
torch.ops.mxfp8.weight_gemm  -> MXFP8WeightGemm, or Cast(MXFP8WeightGemm) where it gives float16
torch.ops.mxfp8.embedding    -> MXFP8Embedding
torch.ops.mxfp8.grouped_gemm -> MXFP8GroupedGemm or MXFP8GroupedWeightGemm, alike; the expert of a row is the number of
                                groups that end before it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import onnx
import torch
from onnxscript import opset18, values

from mxfp8_ops import contract, formats, onnx_functions, torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

_OPS: Final[Any] = opset18
"""The standard ops. `Any`, since their stubs are typed for tensors of one dtype."""

FORMATS: Final = "element_formats"
"""Attribute that carries the formats of a node's element inputs from here to `float8.py`, which removes it: in ONNX
the format is the type of the tensor, and until then all elements are uint8."""


def table() -> dict[Any, Callable[..., Any]]:
    """Returns the function that builds the node of each op, for `torch.onnx.export`."""
    domain = values.Opset(contract.DOMAIN, contract.VERSION)
    nodes = {op.name: values.Op(domain, op.name, _schema(op)) for op in contract.OPS.values()}

    def node(op: contract.Op, *inputs: Any, **attributes: Any) -> Any:
        return nodes[op.name](*inputs, **{**op.attributes, **attributes})

    def quantize(x: Any, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil") -> Any:
        dtype = formats.element_format(element_format).onnx_dtype
        return node(contract.QUANTIZE, x, axis=axis, output_dtype=dtype, scale_rounding=scale_rounding)

    def dequantize(
        elements: Any, scales: Any, axis: int = -1, element_format: str = "e4m3", dtype: int | None = None
    ) -> Any:
        settings = {"axis": axis, "output_dtype": _value_dtype(dtype), FORMATS: element_format}
        return node(contract.DEQUANTIZE, elements, scales, **settings)

    def gemm(  # noqa: PLR0917 - the signature of the op
        a: Any,
        a_scales: Any,
        b: Any,
        b_scales: Any,
        bias: Any = None,
        a_format: str = "e4m3",
        b_format: str = "e4m3",
        dtype: int | None = None,
    ) -> Any:
        settings = {"output_dtype": _value_dtype(dtype), FORMATS: f"{a_format} {b_format}"}
        return node(contract.GEMM, a, a_scales, b, b_scales, bias, **settings)

    def weight_gemm(  # noqa: PLR0917 - the signature of the op
        x: Any,
        b: Any,
        b_scales: Any,
        bias: Any = None,
        b_format: str = "e4m3",
        dtype: int | None = None,
        activation_dtype: int | None = None,
    ) -> Any:
        wanted = _value_dtype(dtype, x.dtype)
        # float32 stands for float16 in the node, see `weight_gemm_dtype`; the Cast below gives the dtype that was asked
        # for.
        node_dtype = weight_gemm_dtype(wanted)
        settings = {"output_dtype": node_dtype, "activation_dtype": _value_dtype(activation_dtype), FORMATS: b_format}
        result = node(contract.WEIGHT_GEMM, x, b, b_scales, bias, **settings)
        return result if node_dtype == wanted else _OPS.Cast(result, to=wanted)

    def embedding(indices: Any, b: Any, b_scales: Any, b_format: str = "e4m3", dtype: int | None = None) -> Any:
        settings = {"output_dtype": _value_dtype(dtype), FORMATS: b_format}
        return node(contract.EMBEDDING, indices, b, b_scales, **settings)

    def grouped_gemm(  # noqa: PLR0917 - the signature of the op
        a: Any,
        a_scales: Any,
        b: Any,
        b_scales: Any,
        offs: Any,
        a_format: str = "e4m3",
        b_format: str = "e4m3",
        dtype: int | None = None,
    ) -> Any:
        weights = (b, b_scales, _experts(a, offs))
        if a_scales is None:
            wanted = _value_dtype(dtype, a.dtype)
            settings = {"output_dtype": weight_gemm_dtype(wanted), FORMATS: b_format}
            y = node(contract.GROUPED_WEIGHT_GEMM, _matrix_per_row(a), *weights, **settings)
        else:
            wanted = _value_dtype(dtype)
            settings = {"output_dtype": wanted, FORMATS: f"{a_format} {b_format}"}
            y = node(contract.GROUPED_GEMM, _matrix_per_row(a), _matrix_per_row(a_scales), *weights, **settings)
        # The grouped nodes multiply a stack of matrices with one row each.
        y = _OPS.Squeeze(y, _OPS.Constant(value_ints=[1]))
        return y if settings["output_dtype"] == wanted else _OPS.Cast(y, to=wanted)

    functions = (quantize, dequantize, gemm, weight_gemm, embedding, grouped_gemm)
    return {getattr(torch.ops.mxfp8, function.__name__).default: function for function in functions}


def _matrix_per_row(rows: Any) -> Any:
    """Returns rows [S, K] as matrices [S, 1, K]. By Reshape: ONNX Runtime has no other op for that on float8."""
    one = _OPS.Constant(value_ints=[1])
    shape = _OPS.Concat(_OPS.Shape(rows, end=1), one, _OPS.Shape(rows, start=1), axis=0)
    return _OPS.Reshape(rows, shape, allowzero=1)


def _experts(a: Any, offs: Any) -> Any:
    """Returns the group of each row of `a` [S, K], int64 [S]; rows after the last group get the number of groups."""
    zero = _OPS.Constant(value_int=0)
    one = _OPS.Constant(value_int=1)
    second = _OPS.Constant(value_ints=[1])
    rows = _OPS.Squeeze(_OPS.Shape(a, start=0, end=1))
    row = _OPS.Unsqueeze(_OPS.Range(zero, rows, one), second)
    ends = _OPS.Cast(offs, to=contract.INT64)
    ended = _OPS.Cast(_OPS.LessOrEqual(ends, row), to=contract.INT64)
    # ONNX Runtime before 1.24 does not see that sums have one axis less, and takes 16-bit results for float32 then.
    return _OPS.Reshape(_OPS.ReduceSum(ended, second, keepdims=0), _OPS.Constant(value_ints=[-1]))


def _value_dtype(dtype: int | None, default: int = contract.FLOAT) -> int:
    """Returns an op's `dtype` argument, in ONNX's numbering, as an attribute."""
    return int(default if dtype is None else dtype)


def _schema(op: contract.Op) -> onnx.defs.OpSchema:
    """Returns a node's row of the contract as onnxscript wants it, with elements as torch has them, uint8."""
    schema = onnx.defs.OpSchema
    types: list[tuple[str, list[str], str]] = []

    def port(row: contract.Port, name: str) -> onnx.defs.OpSchema.FormalParameter:
        dtypes = (contract.UINT8,) if row.dtypes == contract.ELEMENTS else row.dtypes
        names = [f"tensor({onnx.TensorProto.DataType.Name(dtype).lower()})" for dtype in dtypes]
        types.append((name, names, row.shape))
        option = schema.FormalParameterOption.Optional if row.optional else schema.FormalParameterOption.Single
        return schema.FormalParameter(row.name, name, param_option=option)

    defaults = {**op.attributes, FORMATS: ""}.items()
    kinds = {str: schema.AttrType.STRING, int: schema.AttrType.INT, float: schema.AttrType.FLOAT}
    attributes = {name: kinds[type(default)] for name, default in defaults}
    return schema(
        op.name,
        contract.DOMAIN,
        contract.VERSION,
        doc=op.summary,
        inputs=[port(row, f"I{index}") for index, row in enumerate(op.inputs)],
        outputs=[port(row, f"O{index}") for index, row in enumerate(op.outputs)],
        type_constraints=types,
        attributes=[schema.Attribute(name, kind, "", required=False) for name, kind in attributes.items()],
    )
