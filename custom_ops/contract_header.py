"""Writes the rows of src/contract.h, for C++; run `python custom_ops/contract_header.py` where one changed.

The header is kept in git, so that the library builds without Python; test_contract.py says if it is stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mxfp8_ops import contract, formats
from mxfp8_ops.contract import Op, Port
from mxfp8_ops.formats import Dtype, ElementFormat

PATH = Path(__file__).parent / "mxfp8_ops/src/contract.h"
BEGIN, END = "// clang-format off\n", "}  // namespace mxfp8\n"


def header() -> str:
    """Returns the text of src/contract.h: the part written by hand, then the rows."""
    values, elements = formats.VALUE_DTYPES.values(), formats.ELEMENT_FORMATS.values()
    codes = [f"{_code(row)} == {row.onnx_dtype}" for row in (*values, *elements)]
    for names in (formats.SCALE_ROUNDINGS, contract.EPILOGUES, contract.NORMS):
        codes += [f"MXFP8_{name.upper()} == {index}" for index, name in enumerate(names)]
    codes += [f"MXFP8_INT32 == {contract.INT32}", f"MXFP8_INT64 == {contract.INT64}"]
    codes += [f"MXFP8_BOOL == {contract.BOOL}"]
    codes += [f"MXFP8_CONTRACT_VERSION == {contract.VERSION}"]
    cpp_formats = [f"ROW({row.name.upper()}, {row.mantissa_bits}, {row.bias}, {row.max_code:#x})" for row in elements]
    lines = [
        f"#define MXFP8_ELEMENT_FORMATS(ROW) {' '.join(cpp_formats)}",
        "",
        *(f'static_assert({code}, "mxfp8_ops.h says otherwise");' for code in codes),
        "",
        f"constexpr int64_t kBlock = {formats.BLOCK_SIZE};",
        f'inline constexpr const char* kDomain = "{contract.DOMAIN}";',
        f"enum class Op {{{', '.join('k' + name.removeprefix('MXFP8') for name in contract.OPS)}}};",
        *_array("const char*", "kScaleRoundings", (f'"{name}"' for name in formats.SCALE_ROUNDINGS)),
        *_array("const char*", "kEpilogues", (f'"{name}"' for name in contract.EPILOGUES)),
        *_array("const char*", "kNorms", (f'"{name}"' for name in contract.NORMS)),
        *_array("Dtype", "kValueDtypes", map(_dtype, values)),
        *_array("Dtype", "kElementFormats", map(_dtype, elements)),
        *_array("Dtype", "kActivationDtypes", map(_dtype, (d for d in values if d.onnx_dtype in contract.ACTIVATIONS))),
        *_array("Node", "kNodes", map(_node, contract.OPS.values())),
        "",
    ]
    return PATH.read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN + "\n".join(lines) + "\n" + END


def _array(kind: str, name: str, rows: Iterable[str]) -> list[str]:
    return [f"inline constexpr {kind} {name}[] = {{", *(f"    {row}," for row in rows), "};"]


def _code(row: Dtype) -> str:
    """Returns what mxfp8_ops.h calls the code of a dtype."""
    return f"MXFP8_{row.name.upper()}"


def _dtype(row: Dtype) -> str:
    roundings = formats.SCALE_ROUNDINGS if isinstance(row, ElementFormat) else ()
    increments = ", ".join(f"{formats.scale_increment(row, rounding):#x}" for rounding in roundings)
    return f'{{{_code(row)}, "{row.onnx_name.lower()}", "{row.cuda_name}", {row.bytes}, {{{increments}}}}}'


def _node(op: Op) -> str:
    a = "A" if op.at("X") is None else "X"
    names = (a, "A_scales", "B", "B_scales", "bias", "experts", "factor") if op.is_gemm else ("",) * 7
    roles = [-1 if at is None else at for at in map(op.at, names)]
    inputs, outputs = (", ".join(_port(port, op) for port in ports) for ports in (op.inputs, op.outputs))
    settings = ", ".join(map(str, [op.attributes.get("output_dtype", 0), *roles]))
    return f'{{"{op.name}", {{{inputs}}},\n     {{{outputs}}}, {settings}}}'


def _port(port: Port, op: Op) -> str:
    like = f", {op.at(port.like)}" if port.like else ""
    return f'{{"{port.name}", {{{", ".join(map(str, port.dtypes))}}}, {str(port.optional).lower()}{like}}}'


if __name__ == "__main__":
    PATH.write_text(header(), encoding="utf-8")
