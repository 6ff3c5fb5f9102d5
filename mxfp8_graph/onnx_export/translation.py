"""The ONNX node of each mxfp8 op, for torch's exporter: `contract.TORCH_OPS` pairs them.

Two are more than a node: weight_gemm is Cast(MXFP8WeightGemm) where it gives float16, and grouped_gemm, whose arguments
are not those of its nodes, finds the expert of each row, which is the number of groups that end before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import onnx
import torch
from onnxscript import opset18, values

from mxfp8_graph.onnx_export import attention
from mxfp8_ops import contract, formats, onnx_functions, torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.nodes.gemm import weight_gemm_dtype
from mxfp8_ops.torch_ops import schemas

_OPS: Final[Any] = opset18
"""The standard ops. `Any`, since their stubs are typed for tensors of one dtype."""

FORMATS: Final = "element_formats"
"""Attribute that carries the formats of a node's element inputs from here to `float8.py`, which removes it: in ONNX
the format is the type of the tensor, and until then all elements are uint8."""


def table(opset: int) -> dict[Any, Callable[..., Any]]:
    """Returns the function that builds the nodes of each op at an opset, for `torch.onnx.export`."""
    functions = {op.name: translation(op.node) for op in contract.TORCH_OPS.values() if op.node is not None}
    # Its arguments are not the inputs of its nodes.
    functions["grouped_gemm"] = _grouped_gemm
    built = {getattr(torch.ops.mxfp8, name).default: function for name, function in functions.items()}
    return {**built, torch.ops.aten.scaled_dot_product_attention.default: attention.translation(opset)}


def translation(node: contract.Op) -> Callable[..., Any]:
    """Returns the function that builds `node` from the arguments of its torch op, which `schemas.arguments` lists."""
    rows = schemas.arguments(node)

    def translate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs, element_formats = [], []
        attributes: dict[str, Any] = {}
        for row, value in zip(rows, bound.args, strict=True):
            if row.type in {"Tensor", "Tensor?"}:
                inputs.append(value)
            elif not row.attribute:
                element_formats.append(value)
            elif row.name == "element_format":
                attributes[row.attribute] = formats.element_format(value).onnx_dtype
            else:
                attributes[row.attribute] = _value_dtype(value) if row.type == "ScalarType?" else value
        if element_formats:
            attributes[FORMATS] = " ".join(element_formats)
        if not node.weight_only:
            return _node(node, *inputs, **attributes)
        # Without a dtype, a weight-only gemm gives that of its x. float32 stands for float16 in the node, see
        # `weight_gemm_dtype`; the Cast gives the dtype that was asked for.
        wanted = _value_dtype(bound.arguments["dtype"], inputs[0].dtype)
        attributes["output_dtype"] = weight_gemm_dtype(wanted)
        y = _node(node, *inputs, **attributes)
        return y if attributes["output_dtype"] == wanted else _OPS.Cast(y, to=wanted)

    # The exporter reads which arguments are inputs, and which are attributes, from the signature and its types.
    translate.__name__ = node.name
    translate.__annotations__ = {row.name: _PYTHON_TYPES[row.type] for row in rows}
    signature = inspect.Signature([_parameter(row) for row in rows])
    setattr(translate, "__signature__", signature)  # noqa: B010 - mypy knows no such attribute of a function
    return translate


_PYTHON_TYPES: Final = {
    "Tensor": Any,
    "Tensor?": Any,
    "int": int,
    "float": float,
    "str": str,
    "ScalarType?": int | None,
}


def _parameter(row: schemas.Argument) -> inspect.Parameter:
    default = inspect.Parameter.empty if row.type == "Tensor" else row.default
    return inspect.Parameter(row.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _grouped_gemm(  # noqa: PLR0917 - the signature of the op
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
        y = _node(contract.GROUPED_WEIGHT_GEMM, _matrix_per_row(a), *weights, **settings)
    else:
        wanted = _value_dtype(dtype)
        settings = {"output_dtype": wanted, FORMATS: f"{a_format} {b_format}"}
        y = _node(contract.GROUPED_GEMM, _matrix_per_row(a), _matrix_per_row(a_scales), *weights, **settings)
    # The grouped nodes multiply a stack of matrices with one row each.
    y = _OPS.Squeeze(y, _OPS.Constant(value_ints=[1]))
    return y if settings["output_dtype"] == wanted else _OPS.Cast(y, to=wanted)


def _node(op: contract.Op, *inputs: Any, **attributes: Any) -> Any:
    """Returns the result of a node of `op`, with every attribute written out."""
    domain = values.Opset(contract.DOMAIN, contract.VERSION)
    return values.Op(domain, op.name, _schema(op))(*inputs, **{**op.attributes, **attributes})


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
