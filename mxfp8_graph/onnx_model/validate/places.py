"""How errors say where in a model something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from mxfp8_graph.onnx_model.walk import node_label
from mxfp8_ops.errors import ContractError

EXPORT_AGAIN: Final = "export the model again"


@dataclass(frozen=True)
class Place:
    """A graph, a subgraph or a function of a model."""

    model: str
    """The model's path, or what to call a model without one."""
    inside: tuple[str, ...] = ()
    """The function, and the nodes and attributes, that lead there."""
    in_function: bool = False

    def within(self, *steps: str) -> Place:
        """Returns the place that `steps` lead to from here."""
        return Place(self.model, (*self.inside, *steps), self.in_function)

    def function(self, name: str) -> Place:
        """Returns the place of a local function of the model."""
        return Place(self.model, (f"function {name!r}",), in_function=True)

    def error(self, what: str, expected: str, advice: str = EXPORT_AGAIN) -> ContractError:
        """Returns the error for something wrong with the graph as a whole."""
        where = f"{self.model}: {'/'.join(self.inside)}" if self.inside else self.model
        return ContractError(where, what, expected=expected, advice=advice)

    def node_error(self, node: onnx.NodeProto, what: str, expected: str) -> ContractError:
        """Returns the error for something wrong with one node of the graph."""
        path = "/".join((*self.inside, node_label(node)))
        return ContractError(
            f"{self.model}: node {path!r} ({node.op_type})", what, expected=expected, advice=EXPORT_AGAIN
        )

    def tensor_error(self, name: str, what: str, expected: str) -> ContractError:
        """Returns the error for something wrong with a stored tensor."""
        return ContractError(f"{self.model}: tensor {name!r}", what, expected=expected, advice=EXPORT_AGAIN)


def count(number: int, thing: str) -> str:
    """Returns "1 input", "2 inputs"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
