"""Writes src/contract.h, the formats and nodes for C++; run `python custom_ops/contract_header.py` where a row changed.

The header is kept in git, so that the library builds without Python; test_contract.py says if it is stale.
"""

from __future__ import annotations

from pathlib import Path

from mxfp8_ops import contract, formats
from mxfp8_ops.contract import Op, Port
from mxfp8_ops.formats import Dtype, ElementFormat

PATH = Path(__file__).parent / "mxfp8_ops/src/contract.h"

TEMPLATE = """\
// The rows of formats.py and contract.py. Written by custom_ops/contract_header.py; do not edit.
// clang-format off
#pragma once
#include <cstdint>

#include "cpu/mxfp8_ops.h"

// ROW(its name, mantissa bits, exponent bias, code of the largest finite magnitude) for every element format.
#define MXFP8_ELEMENT_FORMATS(ROW) {element_formats}

namespace mxfp8 {{

constexpr int64_t kBlock = {block_size};

inline constexpr const char* kScaleRoundings[] = {{{roundings}}};

struct Dtype {{
  int code;
  const char* name;  // as ONNX writes it
  const char* cuda;  // in codec.cuh
  int bytes;
  uint32_t increments[{rounding_count}];  // formats.scale_increment of each rounding; of elements only
}};
inline constexpr Dtype kValueDtypes[] = {{
{value_rows}}};
inline constexpr Dtype kElementFormats[] = {{
{element_rows}}};

static_assert({codes},
              "mxfp8_ops.h has other codes than formats.py");
static_assert(MXFP8_CONTRACT_VERSION == {version}, "mxfp8_ops.h has another version than contract.py");

struct Port {{
  const char* name;
  int dtypes[{dtype_count}];  // 0 at the end
  bool optional;
}};
struct Node {{
  const char* name;
  Port inputs[{input_count}], outputs[{output_count}];  // no name at the end
  int output_dtype;          // default of the attribute
  int a, a_scales, b, b_scales, bias;  // which input of a gemm is what; -1 if there is none
}};
inline constexpr const char* kDomain = "{domain}";
enum class Op {{ {op_names} }};  // index of kNodes
inline constexpr Node kNodes[] = {{
{nodes}}};

}}  // namespace mxfp8
"""


def header() -> str:
    """Returns the text of src/contract.h."""
    values, elements = formats.VALUE_DTYPES.values(), formats.ELEMENT_FORMATS.values()
    ops = contract.OPS.values()
    ports = [port for op in ops for port in (*op.inputs, *op.outputs)]
    codes = [f"{_code(row)} == {row.onnx_dtype}" for row in (*values, *elements)]
    codes += [f"MXFP8_{name.upper()} == {index}" for index, name in enumerate(formats.SCALE_ROUNDINGS)]
    return TEMPLATE.format(
        element_formats=" ".join(
            f"ROW({row.name.upper()}, {row.mantissa_bits}, {row.bias}, {row.max_code:#x})" for row in elements
        ),
        block_size=formats.BLOCK_SIZE,
        roundings=", ".join(f'"{name}"' for name in formats.SCALE_ROUNDINGS),
        rounding_count=len(formats.SCALE_ROUNDINGS),
        value_rows="".join(map(_dtype, values)),
        element_rows="".join(map(_dtype, elements)),
        codes=" &&\n              ".join(codes),
        version=contract.VERSION,
        dtype_count=1 + max(len(port.dtypes) for port in ports),
        input_count=1 + max(len(op.inputs) for op in ops),
        output_count=1 + max(len(op.outputs) for op in ops),
        domain=contract.DOMAIN,
        op_names=", ".join(f"k{op.name.removeprefix('MXFP8')}" for op in ops),
        nodes="".join(map(_node, ops)),
    )


def _code(row: Dtype) -> str:
    """Returns what mxfp8_ops.h calls the code of a dtype."""
    return f"MXFP8_{row.name.upper()}"


def _dtype(row: Dtype) -> str:
    increments = ""
    if isinstance(row, ElementFormat):
        increments = ", ".join(f"{formats.scale_increment(row, rounding):#x}" for rounding in formats.SCALE_ROUNDINGS)
    return f'    {{{_code(row)}, "{row.onnx_name.lower()}", "{row.cuda_name}", {row.bytes}, {{{increments}}}}},\n'


def _node(op: Op) -> str:
    roles = (op.at("A") if op.at("X") is None else op.at("X"), *map(op.at, ("A_scales", "B", "B_scales", "bias")))
    roles = ", ".join("-1" if at is None or not op.is_gemm else str(at) for at in roles)
    inputs, outputs = (",\n      ".join(map(_port, ports)) for ports in (op.inputs, op.outputs))
    settings = f"{op.attributes['output_dtype']}, {roles}"
    return f'    {{"{op.name}",\n     {{{inputs}}},\n     {{{outputs}}},\n     {settings}}},\n'


def _port(port: Port) -> str:
    dtypes = ", ".join(map(str, port.dtypes))
    return f'{{"{port.name}", {{{dtypes}}}, {str(port.optional).lower()}}}'


if __name__ == "__main__":
    PATH.write_text(header(), encoding="utf-8")
