"""Writes the nodes into docs/node_contract.md; run `python custom_ops/contract_page.py` where one changed.

test_contract.py says if the page is stale.
"""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto

from mxfp8_ops import contract
from mxfp8_ops.contract import Op, Port

PATH = Path(__file__).parents[1] / "docs/node_contract.md"
BEGIN, END = "<!-- Written by custom_ops/contract_page.py -->\n", "<!-- To here -->\n"


def page() -> str:
    """Returns the text of the page: the parts written by hand, with the nodes between them."""
    head, _, rest = PATH.read_text(encoding="utf-8").partition(BEGIN)
    sections = "\n".join(_section(op) for op in contract.OPS.values())
    return f"{head}{BEGIN}\n{sections}\n{END}{rest.partition(END)[2]}"


def _section(op: Op) -> str:
    rows = [_row("input", port) for port in op.inputs] + [_row("output", port) for port in op.outputs]
    attributes = ", ".join(f"`{name}` ({_default(value)})" for name, value in op.attributes.items())
    lines = [f"### {op.name}", "", op.summary, "", "| | name | dtype | shape |", "|---|---|---|---|", *rows]
    return "\n".join([*lines, "", f"Attributes, with their defaults: {attributes}.", ""])


def _row(side: str, port: Port) -> str:
    dtypes = f"that of {port.like}" if port.like else ", ".join(TensorProto.DataType.Name(code) for code in port.dtypes)
    return f"| {side}{', optional' if port.optional else ''} | `{port.name}` | {dtypes} | {port.shape} |"


def _default(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
