"""The arguments of a node's torch op, which follow from the node's row of the contract.

1. The inputs, by their names in lower case: Tensor, or Tensor? if they may be absent.
2. `axis`, if the node has it.
3. For every input with elements their format ("b_format"), which in ONNX is the type of the tensor.
4. The type of the result: `dtype`, or `element_format` if it quantizes.
5. The other attributes, with their defaults; not `block_size`, which is 32. `x_dtype` is `x_format`, a name.

A dtype of None is the default dtype of the op.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from mxfp8_ops import contract, formats
from mxfp8_ops.node import KINDS, Setting

_E4M3 = formats.E4M3.name
_FORMATS: Final = {row.onnx_dtype: name for name, row in formats.ELEMENT_FORMATS.items()}


class Argument(NamedTuple):
    """One argument of a torch op."""

    name: str
    type: str
    """As torch writes it: "Tensor", "Tensor?", "ScalarType?" or that of `node.KINDS`."""
    default: Setting | None = None
    """Default of an argument that may be left out; a Tensor may not."""
    attribute: str = ""
    """The attribute that carries it in ONNX; "" for an input, and for the format of an input."""

    def __str__(self) -> str:
        default = self.default
        if isinstance(default, str):
            default = f'"{default}"'
        elif isinstance(default, tuple):
            default = str([*default])
        return f"{self.type} {self.name}" + ("" if self.type == "Tensor" else f"={default}")


def arguments(node: contract.Op) -> list[Argument]:
    """Returns the arguments of the torch op of `node`, in order."""
    rows = [Argument(port.name.lower(), "Tensor?" if port.optional else "Tensor") for port in node.inputs]
    attributes = dict(node.attributes)
    attributes.pop("block_size", None)
    if "axis" in attributes:
        rows.append(_argument("axis", attributes.pop("axis")))
    elements = [port.name.lower() for port in node.inputs if port.dtypes == contract.ELEMENTS]
    rows += [Argument(f"{name.removesuffix('s')}_format", "str", _E4M3) for name in elements]
    if attributes.pop("output_dtype", None) is not None:
        of_elements = Argument("element_format", "str", _E4M3, "output_dtype")
        rows.append(of_elements if node.quantizes else Argument("dtype", "ScalarType?", None, "output_dtype"))
    return rows + [_argument(*each) for each in attributes.items()]


def schema(name: str, node: contract.Op) -> str:
    """Returns the schema of torch op `name`, the op of `node`, in the syntax of torch."""
    results = ["Tensor" for port in node.outputs if not port.optional]
    returns = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{name}({', '.join(map(str, arguments(node)))}) -> {returns}"


def _argument(name: str, default: Any) -> Argument:
    if name == "x_dtype":  # an element format, which in torch is a name
        return Argument("x_format", "str", _FORMATS[default], name)
    # A ScalarType with a default other than None cannot be packaged by AOTInductor, see `torch_ops`.
    if name.endswith("_dtype"):
        return Argument(name, "ScalarType?", None, name)
    return Argument(name, KINDS[type(default)].torch, default, name)
