"""An exported program with switches: its graph is run node by node, of each site the way that is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxfp8_graph.checking.inputs import PASS_OTHERS, Array, Inputs, Signature
from mxfp8_graph.checking.programs import TorchProgram, unrunnable
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.torch_pass.switches import SwitchedProgram, choose, inputs_of, switched
from mxfp8_graph.torch_program import load  # before torch: it says what to install where torch is missing

# isort: split
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from mxfp8_graph.torch_program.internals import to_numpy
from mxfp8_graph.torch_program.training_mode import evaluated


def open_program(
    model: str | Path | ExportedProgram,
    recipe: Recipe,
    *,
    allow_nonfinite: bool,
    trust_pickle: bool,
    progress: Progress | None,
) -> Switchable:
    """Returns a program with switches; errors as `open_switchable`."""
    name, source = "program", model
    if not isinstance(source, ExportedProgram):
        name, source = str(model), load(source, trust_pickle=trust_pickle)
    source = evaluated(source)
    program = switched(source, recipe, name, allow_nonfinite=allow_nonfinite, progress=progress)
    return _SwitchedProgram(source, program, name)


class _SwitchedProgram(Switchable):
    def __init__(self, source: ExportedProgram, switched: SwitchedProgram, name: str) -> None:
        self._source = TorchProgram(source)
        self.signature = Signature(name, self._source.specs, self._source.ranges)
        self.sites = switched.sites
        self.observed_by = switched.observed_by
        self._switched = switched

    def run(
        self, feeds: Mapping[str, Array], on: Sequence[bool], observe: Sequence[int] = ()
    ) -> tuple[Inputs, list[Array]]:
        try:
            with torch.inference_mode():
                results, seen = self._results(self._source.placeholders(feeds), on, observe)
        except Exception as error:  # whatever the ops of the program raise
            raise unrunnable(self.signature.name, error, PASS_OTHERS) from None
        activations = []
        for index in observe:
            operand = self._switched.observed[index]
            x = seen[operand.node]
            activations.append(x if operand.perm is None else x.transpose(operand.perm))
        return self._source.outputs_of(results), activations

    def _results(
        self, given: Mapping[str, Any], on: Sequence[bool], observe: Sequence[int]
    ) -> tuple[list[Any], dict[Node, Array]]:
        """Runs the graph; returns (the outputs, observed activations by their nodes)."""
        program, values, seen = self._switched.program, dict[Node, Any](), dict[Node, Array]()
        wanted = {self._switched.observed[index].node for index in observe}
        for node, last in self._switched.steps(on, observe):
            if node.op == "output":
                return [map_arg(result, values.__getitem__) for result in program.scopes[0].results], seen
            values[node] = self._value(node, values, given, on)
            if node in wanted:  # now: what follows may write to it
                seen[node] = to_numpy(values[node].contiguous()).copy()
            for read in last:
                values.pop(read, None)
        raise AssertionError("a graph ends with its output")

    def _value(self, node: Node, values: Mapping[Node, Any], given: Mapping[str, Any], on: Sequence[bool]) -> Any:
        program = self._switched.program
        if node.op == "placeholder":
            stored = program.stored_name(node)
            if stored is None:
                return given[node.name]
            tensor = program.tensor(stored)
            return tensor.clone() if stored in self._switched.written else tensor
        if node.op == "get_attr":
            return program.module.get_submodule(str(node.target))
        if node.target is choose:
            return values[inputs_of(node, on)[0]]
        target: Any = node.target
        return target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))
