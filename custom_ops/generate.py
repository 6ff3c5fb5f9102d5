"""Writes four files from the rows of the nodes and formats and from the C headers: `python custom_ops/generate.py`.

    src/contract.h          the rows, for C++
    src/formats.h           what kernels need of them
    c_abi.py                the types of the C functions of mxfp8_ops.h and of the two CUDA headers, for ctypes
    docs/node_contract.md   the section of each node, between two marks

The files are in git, so that the library builds without Python. test_contract.py fails if one is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from onnx import TensorProto

from mxfp8_ops import contract, formats
from mxfp8_ops.contract import Op, Port
from mxfp8_ops.formats import Dtype, ElementFormat
from mxfp8_ops.node import KINDS, Setting

HERE = Path(__file__).parent
HEADER = HERE / "mxfp8_ops/src/contract.h"
FORMATS = HERE / "mxfp8_ops/src/formats.h"
BEGIN_ROWS, END_ROWS = "// clang-format off\n", "}  // namespace mxfp8\n"
C_ABI = HERE / "mxfp8_ops/c_abi.py"
BEGIN_SIGNATURES = "    {\n"
PAGE = HERE.parent / "docs/node_contract.md"
BEGIN_NODES, END_NODES = "<!-- Written by custom_ops/generate.py -->\n", "<!-- To here -->\n"

# --- src/contract.h and src/formats.h ---------------------------------------------------------------------------------


def header() -> str:
    """Returns the text of src/contract.h: the handwritten part, then the rows."""
    values, elements = formats.VALUE_DTYPES.values(), formats.ELEMENT_FORMATS.values()
    codes = [f"{_code(row)} == {row.onnx_dtype}" for row in (*values, *elements)]
    for names in (formats.SCALE_ROUNDINGS, contract.EPILOGUES):
        codes += [f"MXFP8_{name.upper()} == {index}" for index, name in enumerate(names)]
    codes += [f"MXFP8_INT32 == {contract.INT32}", f"MXFP8_INT64 == {contract.INT64}"]
    codes += [f"MXFP8_BOOL == {contract.BOOL}"]
    codes += [f"MXFP8_CONTRACT_VERSION == {contract.VERSION}"]
    lines = [
        "#define MXFP8_ATTRIBUTES(ROW) \\",
        *_attributes(),
        "",
        *(f'static_assert({code}, "mxfp8_ops.h says otherwise");' for code in codes),
        "",
        f'inline constexpr const char* kDomain = "{contract.DOMAIN}";',
        f"enum class Op {{{', '.join('k' + name.removeprefix('MXFP8') for name in contract.OPS)}}};",
        *_array("const char*", "kScaleRoundings", (f'"{name}"' for name in formats.SCALE_ROUNDINGS)),
        *_array("const char*", "kEpilogues", (f'"{name}"' for name in contract.EPILOGUES)),
        *_array("Dtype", "kValueDtypes", map(_dtype, values)),
        *_array("Dtype", "kElementFormats", map(_dtype, elements)),
        *_array("Dtype", "kActivationDtypes", map(_dtype, (d for d in values if d.onnx_dtype in contract.ACTIVATIONS))),
        *_array("Node", "kNodes", map(_node, contract.OPS.values())),
        "",
    ]
    return _with_rows(HEADER, lines)


def element_formats() -> str:
    """Returns the text of src/formats.h, likewise."""
    rows = [
        f"ROW({row.name.upper()}, {row.mantissa_bits}, {row.bias}, {row.max_code:#x})"
        for row in formats.ELEMENT_FORMATS.values()
    ]
    block = f"constexpr int64_t kBlock = {formats.BLOCK_SIZE};"
    return _with_rows(FORMATS, [f"#define MXFP8_ELEMENT_FORMATS(ROW) {' '.join(rows)}", block, ""])


def _with_rows(path: Path, lines: list[str]) -> str:
    return path.read_text(encoding="utf-8").partition(BEGIN_ROWS)[0] + BEGIN_ROWS + "\n".join(lines) + "\n" + END_ROWS


def _array(kind: str, name: str, rows: Iterable[str]) -> list[str]:
    return [f"inline constexpr {kind} {name}[] = {{", *(f"    {row}," for row in rows), "};"]


def _code(row: Dtype) -> str:
    """Returns the name of a dtype's code in mxfp8_ops.h."""
    return f"MXFP8_{row.name.upper()}"


def _dtype(row: Dtype) -> str:
    roundings = formats.SCALE_ROUNDINGS if isinstance(row, ElementFormat) else ()
    increments = ", ".join(f"{formats.scale_increment(row, rounding):#x}" for rounding in roundings)
    names = f'"{row.onnx_name.lower()}", "{row.cuda_name}"'
    return f"{{{_code(row)}, {names}, {row.bytes}, {row.cuda_data_type}, {{{increments}}}}}"


def _node(op: Op) -> str:
    # The roles of a gemm are in the order of struct Node; a node that is no gemm has none of them.
    a = "A" if op.at("X") is None else "X"
    names = (a, "A_scales", "B", "B_scales", "bias", "experts", "factor") if op.is_gemm else ("",) * 7
    roles = [-1 if at is None else at for at in map(op.at, names)]
    inputs, outputs = (", ".join(_port(port, op) for port in ports) for ports in (op.inputs, op.outputs))
    settings = ", ".join(map(str, [op.attributes.get("output_dtype", 0), *roles]))
    return f'{{"{op.name}", {{{inputs}}},\n     {{{outputs}}}, {settings}}}'


def _port(port: Port, op: Op) -> str:
    like = f", {op.at(port.like)}" if port.like else ""
    return f'{{"{port.name}", {{{", ".join(map(str, port.dtypes))}}}, {str(port.optional).lower()}{like}}}'


def _attributes() -> list[str]:
    """Returns one row per attribute, over all nodes: type, name, default."""
    defaults: dict[str, Setting] = {}
    for op in contract.OPS.values():
        for name, default in op.attributes.items():
            # The default of output_dtype differs from node to node. Here it is 0, which means "the node's default".
            value = 0 if name == "output_dtype" else default
            if defaults.setdefault(name, value) != value:
                raise ValueError(
                    f"{op.name}: {name} = {default!r}; expected {defaults[name]!r}, as in other nodes; use one default"
                )
    rows = [f"  ROW({KINDS[type(value)].cpp}, {name}, {_literal(value)})" for name, value in defaults.items()]
    return [*(f"{row} \\" for row in rows[:-1]), rows[-1]]


def _literal(default: Setting) -> str:
    if isinstance(default, tuple):
        return f"{{{', '.join(map(str, default))}}}"
    if isinstance(default, str):
        return f'"{default}"'
    return f"{default!r}f" if isinstance(default, float) else str(default)


# --- c_abi.py --------------------------------------------------------------------------------------------------------

_DECLARATION = re.compile(r"^MXFP8_API (?P<result>[\w *]+?)(?P<name>mxfp8_\w+)\((?P<arguments>.*?)\);", re.M | re.S)
_TYPES = {"int": "i", "int64_t": "n", "size_t": "z", "float": "f", "const char*": "t", "void": "None"}
_HEADERS = ("mxfp8_ops.h", "cuda_host/mxfp8_cuda.h", "cuda_host/mxfp8_cuda_plan.h")


def c_abi() -> str:
    """Returns the text of c_abi.py: the handwritten part, then the functions."""
    text = "".join((HERE / "mxfp8_ops/src" / name).read_text(encoding="utf-8") for name in _HEADERS)
    lines = []
    for declaration in _DECLARATION.finditer(text):
        # A function pointer has commas of its own between its parentheses: it becomes a plain pointer first.
        arguments = re.sub(r"\(\*\w+\)\(.*\)", "*", " ".join(declaration["arguments"].split()))
        types = [_type(argument) for argument in arguments.split(", ") if argument != "void"]
        listed = ", ".join(types) + ("," if len(types) == 1 else "")
        lines.append(f'        "{declaration["name"]}": ({_type(declaration["result"])}, ({listed})),')
    head = C_ABI.read_text(encoding="utf-8").partition(BEGIN_SIGNATURES)[0]
    return head + BEGIN_SIGNATURES + "\n".join([*lines, "    }", ")", ""])


def _type(declared: str) -> str:
    """Returns the letter of c_abi.py for a declared argument, or for a result, which has no name.

    Every pointer is an address, except a pointer to text.
    """
    declared = re.sub(r"(?<=[ *])\w+$", "", declared.strip()).strip() if " " in declared.strip() else declared.strip()
    return _TYPES.get(declared.replace(" *", "*")) or "p"


# --- docs/node_contract.md -------------------------------------------------------------------------------------------


def page() -> str:
    """Returns the text of the page: its handwritten parts, with the nodes between them."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN_NODES)
    sections = "\n".join(_node_section(op) for op in contract.OPS.values())
    return f"{head}{BEGIN_NODES}\n{sections}\n{END_NODES}{rest.partition(END_NODES)[2]}"


def _node_section(op: Op) -> str:
    """Returns the section of a node; a fused node's section lists only what it adds to its base node."""
    base = contract.OPS.get(op.fuses[0])
    known = () if base is None else (*base.inputs, *base.outputs, *base.attributes.items())
    ports = [(side, port) for side, row in (("  ", op.inputs), ("->", op.outputs)) for port in row if port not in known]
    cells = [(side, f"{port.name}{'?' * port.optional}", _dtypes(port), port.shape) for side, port in ports]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    rows = ["{} {}  {}  {}".format(*map(str.ljust, row, widths), row[3]) for row in cells]
    attributes = ", ".join(
        f"{name} = {_default(value)}" for name, value in op.attributes.items() if (name, value) not in known
    )
    rows += [f"attributes: {attributes}"] if attributes else []
    more = [] if base is None else [f"As [{base.name}](#{base.name.lower()}), and:", ""]
    return "\n".join([f"### {op.name}", "", op.summary, "", *more, "```", *rows, "```", ""])


def _dtypes(port: Port) -> str:
    if port.like:
        return f"dtype of {port.like}"
    text = ", ".join(TensorProto.DataType.Name(code) for code in port.dtypes)
    # The page defines both words once, above the nodes.
    for word, dtypes in (("values", contract.VALUES), ("elements", contract.ELEMENTS)):
        text = text.replace(", ".join(TensorProto.DataType.Name(code) for code in dtypes), word)
    return text


def _default(value: Setting) -> str:
    if isinstance(value, tuple):
        return str([*value])
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    for path, text in ((HEADER, header()), (FORMATS, element_formats()), (C_ABI, c_abi()), (PAGE, page())):
        path.write_text(text, encoding="utf-8")
