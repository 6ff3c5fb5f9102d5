"""The dialects of MXFP8 in ONNX: a row each, and a file beside this one that reads and writes them.

No import here loads onnx, so that the command line can name the dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mxfp8_graph.onnx_pass.dialects import TRT, TRT_DEQUANTIZE, TRT_QUANTIZE, TRT_STATIC_QUANTIZE


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The MXFP8 nodes of one tool in an ONNX graph."""

    name: str
    """Its name on the command line and in the API."""
    help: str
    """The tool, for help texts."""
    module: str = ""
    """File in this folder, of one dialect or more; "" for ours.

    Its `read(edit, node)` returns our nodes for one of theirs. `WRITE` has the steps for each dialect: a step replaces
    our nodes, or the nodes that the step before put in their place.
    """
    ops: Mapping[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    """Its ops by (domain, name): least and greatest number of inputs, and number of outputs."""
    attributes: tuple[str, ...] = ()
    """The attributes that its ops may have. Any other is refused: it may change values in an unknown way."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Domains that a model in this dialect imports, and their versions."""
    opset: int = 0
    ir_version: int = 0
    """Lowest opset and IR version of a model in this dialect."""
    is_written: bool = True
    has_levels: bool = False
    """Whether its op has an accuracy_level."""


_ROWS: Final = (
    Dialect(name="mxfp8", help="of rewrite"),
    Dialect(
        name="qdq",
        help="standard Q/DQ",
        module="qdq",
        ops={("", "DequantizeLinear"): (2, 3, 1), ("", "QuantizeLinear"): (2, 3, 1)},
        opset=24,  # the first with FLOAT8E8M0, as its IR version is
        ir_version=12,
    ),
    Dialect(
        name="trt",
        help="TensorRT",
        module="trt",
        ops={(TRT, TRT_QUANTIZE): (1, 1, 2), (TRT, TRT_STATIC_QUANTIZE): (2, 3, 1), (TRT, TRT_DEQUANTIZE): (2, 3, 1)},
        attributes=("axis", "block_size", "output_dtype"),
        versions={TRT: 1},
    ),
    Dialect(
        name="nbits",
        help="ONNX Runtime's MatMulNBits, for MXINT8 weights",
        module="ort",
        ops={("com.microsoft", "MatMulNBits"): (3, 6, 1)},
        attributes=("K", "N", "bits", "block_size", "accuracy_level", "weight_prepacked"),
        versions={"com.microsoft": 1},
        has_levels=True,
    ),
    Dialect(name="standard", help="only standard ops", module="gemms"),
    Dialect(
        name="quark",
        help="Quark",
        module="qdq",
        ops={("com.amd.quark", "MXQuantizeDequantize"): (1, 1, 1), ("com.vai.quantize", "MXFixNeuron"): (1, 1, 1)},
        attributes=("axis", "block_size", "element_dtype", "scale_dtype", "rounding_mode"),
        is_written=False,  # it stores weights as floats
    ),
)

DIALECTS: Final[Mapping[str, Dialect]] = {row.name: row for row in _ROWS}
"""Every dialect, by name."""

WRITTEN: Final = tuple(row.name for row in _ROWS if row.is_written)
"""Names of the dialects that `convert` writes."""

OPS: Final = {key: row for row in _ROWS for key in row.ops}
"""The dialect by (domain, op)."""
