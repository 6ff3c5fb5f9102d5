"""MXFP8Embedding: rows of a packed table."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mxfp8_ops import formats
from mxfp8_ops.checks import Shape, check_scales, dtype_name
from mxfp8_ops.errors import ShapeError
from mxfp8_ops.formats import INT8
from mxfp8_ops.node import ELEMENTS, FLOAT, FLOAT16, INDICES, SCALES, VALUES, Op, Port
from mxfp8_ops.nodes.quantize import dequantize
from mxfp8_ops.numerics import Array, Codes, value_dtype

if TYPE_CHECKING:
    from mxfp8_ops.function_body import Body


def embedding(indices: Array, b: Codes, b_scales: Codes, *, b_format: str = "e4m3", dtype: str = "float32") -> Array:
    """Returns dequantize(b)[indices]: rows of a packed table, as in ONNX's Gather and torch's embedding.

    Args:
        indices: int32 or int64 [...]; a negative one counts from the last row.
        b: elements uint8 [V, D], in the layout of the second operand of a gemm with N = V and K = D. A gemm and an
            embedding may share them.
        b_scales: uint8 [V, ceil(D / 32)].
        b_format: "e4m3", "e5m2" or "int8".
        dtype: dtype of the result, "float32", "float16" or "bfloat16"; the latter two are rounded from float32.

    Returns:
        [..., D].

    Raises:
        ShapeError: shapes or dtypes do not fit, or an index names no row.
        ContractError: unknown format.
    """
    # First, as in the backends: a call with two errors raises the same one everywhere.
    formats.element_format(b_format), value_dtype(dtype)
    embedding_shape("embedding", indices, b.shape)
    check_scales("embedding", b.shape, b_scales.shape, -1)
    check_indices("embedding", indices, b.shape[0])
    return dequantize(b[indices], b_scales[indices], element_format=b_format, dtype=dtype)


INDEX_DTYPES: Final = ("int32", "int64")
"""The dtypes of indices into a table."""


def embedding_shape(where: str, indices: Any, b: Shape) -> Shape:
    """Returns [..., D], the shape of the rows of b [V, D] at `indices` [...].

    Raises:
        ShapeError: the indices are neither int32 nor int64, or the table is not a matrix.
    """
    if (name := dtype_name(indices.dtype)) not in INDEX_DTYPES:
        raise ShapeError(
            where,
            f"indices have dtype {name}",
            expected=f"one of {', '.join(INDEX_DTYPES)}",
            advice="cast the indices first",
        )
    if len(b) != 2:
        raise ShapeError(
            where, f"a table of shape {b}", expected="[V, D], one row for each index", advice="reshape the table"
        )
    return (*indices.shape, b[1])


def check_indices(where: str, indices: Any, rows: int) -> None:
    """Raises ShapeError if an index is outside -rows..rows-1; the error names the first such index."""
    # Both signs are legal: ONNX Gather counts negative indices from the end.
    wrong = np.argwhere((indices < -rows) | (indices >= rows))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ShapeError(
            where,
            f"index {int(indices[at])} at {at}",
            expected=f"{-rows} to {rows - 1}, for a table of {rows} rows" if rows else "none: the table has no rows",
            advice="pass ids that the table has",
        )


# --- The portable body


def _embedding_body(g: Body) -> None:
    """indices, B, B_scales -> Y."""
    known = g.known("B")
    b, scales = "B", g("Gather", "B_scales", "indices", axis=0)
    if known.dtype != INT8.onnx_dtype:
        # ONNX Runtime has no Gather of float8. Float16 holds every element; a constant table is widened no further.
        b = g("Cast", b, to=FLOAT16)
    rows = g("Cast", g("Gather", b, "indices", axis=0), to=FLOAT)
    blocks, back = g.blocks(rows, whole=known.whole)
    factors = g("Reshape", g.factors(scales, "B", known), g.constant([-1, 1]))
    g.result(g.cast(back(g("Mul", blocks, factors)), "output_dtype"), "Y")


# --- The contract


EMBEDDING: Final = Op(
    "MXFP8Embedding",
    (
        Port("indices", INDICES, "[...]"),
        Port("B", ELEMENTS, "[V, D]"),
        Port("B_scales", SCALES, "[V, ceil(D / 32)]"),
    ),
    (Port("Y", VALUES, "[..., D]"),),
    MappingProxyType({"output_dtype": FLOAT}),
    "Dequantizes the rows of B that `indices` names.",
    _embedding_body,
)


OPS: Final = (EMBEDDING,)
