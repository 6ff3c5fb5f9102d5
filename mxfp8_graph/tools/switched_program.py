"""A program that holds every rewritten site twice: as it was and in MXFP8, and a switch that chooses while it runs.

    linear(x, w)   ->   choose(i, gemm(quantize(x), packed w), linear(x, w))

The graph is run node by node, of each site the way that is chosen, see `SwitchedProgram.steps`. `choose` stands between
a site and all users of its result; everything else is as a rewrite makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mxfp8_graph.options import Options, Progress
from mxfp8_graph.policy.plan import Decision, require_eligible
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.report.reporter import replace_each
from mxfp8_graph.running.inputs import Array, Inputs, Signature
from mxfp8_graph.running.programs import TorchProgram, unrunnable
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.torch_pass.load import load  # before torch: it says what to install where torch is missing

# isort: split
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.find import Site, TorchSite
from mxfp8_graph.torch_pass.internals import to_numpy
from mxfp8_graph.torch_pass.ops import Operand
from mxfp8_graph.torch_pass.program import Program
from mxfp8_graph.torch_pass.replace import Editor
from mxfp8_graph.torch_pass.run import WANTED, planned
from mxfp8_graph.torch_pass.training_mode import evaluated
from mxfp8_ops.errors import ContractError


def open_program(
    model: str | Path | ExportedProgram,
    recipe: Recipe,
    *,
    allow_nonfinite: bool,
    progress: Progress | None,
) -> Switchable:
    """Returns a program with switches; errors as `open_switchable`."""
    name, source = "program", model
    if not isinstance(source, ExportedProgram):
        name, source = str(model), load(source)
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
            raise unrunnable(self.signature.name, error) from None
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


@dataclass(frozen=True, kw_only=True)
class SwitchedProgram:
    """The edited program, and how to run it."""

    program: Program
    sites: tuple[SiteReport, ...]
    """Every site in graph order, the kept ones too; the rewritten ones have a switch each, in this order."""
    observed: tuple[Operand, ...]
    """The activations that sites multiply."""
    observed_by: tuple[int | None, ...]
    """Per switch, which of `observed` its site multiplies; None for an embedding."""

    def steps(self, on: Sequence[bool], observe: Sequence[int] = ()) -> list[tuple[Node, list[Node]]]:
        """Returns the nodes to run, in order, each with the nodes whose values no later one needs.

        Nodes that no result, observed activation or write needs are left out, such as the form of a site that is off.
        """
        needed = {self.observed[index].node for index in observe}
        steps: list[tuple[Node, list[Node]]] = []
        # From the end, so that each node is met after all its readers.
        for node, reads, always in reversed(self._reads):
            if not (always or node in needed):
                continue
            inputs = inputs_of(node, on) if node.target is choose else reads
            steps.append((node, [read for read in inputs if read not in needed]))
            needed.update(inputs)
        return steps[::-1]

    @cached_property
    def _reads(self) -> list[tuple[Node, list[Node], bool]]:
        """Every node, in order, what it reads, and whether it runs even if nothing reads it."""
        nodes = self.program.module.graph.nodes
        return [(node, node.all_input_nodes, node.op == "output" or bool(internals.written(node))) for node in nodes]

    @cached_property
    def written(self) -> set[str]:
        """Names of the stored tensors that a run may write to; pass copies of these to a run."""
        program = self.program
        return program.mutated | internals.written_names(program.module.graph, program.stored_name)


def choose(switch: int, rewritten: Any, original: Any) -> Any:
    """Marks a switch in the graph. A runner follows `inputs_of` and never calls it."""
    raise NotImplementedError


def inputs_of(node: Node, on: Sequence[bool]) -> list[Node]:
    """Returns the nodes that `node` reads; for a switch, the chosen one alone."""
    if node.target is not choose:
        return node.all_input_nodes
    switch, *ways = node.args
    assert isinstance(switch, int)
    chosen = ways[0 if on[switch] else 1]
    assert isinstance(chosen, Node)
    return [chosen]


def switched(
    source: ExportedProgram, recipe: Recipe, name: str, *, allow_nonfinite: bool, progress: Progress | None
) -> SwitchedProgram:
    """Returns a copy of `source` with a switch per site that `recipe` rewrites.

    Raises:
        ContractError: it is rewritten already, or as `mxfp8_graph.rewrite`.
        RecipeError: the recipe does not fit the program.
        NothingEligibleError: the recipe rewrites nothing that can be switched.
    """
    # The original form of a site is needed, and a rewritten program has it no more.
    if record.find(source) is not None:
        advice = "name the program it was made from"
        raise ContractError(name, "is rewritten already", expected="the original program", advice=advice)
    options = Options(name=name, allow_nonfinite=allow_nonfinite)
    program, sites, decisions = planned(source, recipe, options)
    require_eligible(decisions, name, wanted=WANTED)
    editor = Editor(program, recipe, options)
    originals: list[tuple[Node, Node]] = []
    chosen: list[TorchSite] = []

    def change(site: Site, decision: Decision) -> SiteReport:
        assert isinstance(site, TorchSite), "attention is taken apart before"
        originals.append((site.added.output, _copy(site)))
        chosen.append(site)
        return editor.apply(site, decision)

    reports = replace_each(sites, decisions, change, progress=progress)
    # Now that no site is looked at any more: the sites know each other's nodes.
    ways = {output: _choice(number, output, original) for number, (output, original) in enumerate(originals)}
    observed, observed_by = _observed(chosen, ways)
    return SwitchedProgram(program=program, sites=tuple(reports), observed=observed, observed_by=observed_by)


def _copy(site: TorchSite) -> Node:
    """Returns a copy of the site before it is rewritten: of the matmul, and of the add after it."""
    graph, copies = site.node.graph, dict[Node, Node]()
    for node in dict.fromkeys((site.node, site.added.output)):
        with graph.inserting_before(node):
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
    return copies[site.added.output]


def _choice(number: int, output: Node, original: Node) -> Node:
    """Returns the node that all users of `output` read from now on."""
    users = list(output.users)
    with output.graph.inserting_after(output):
        node = output.graph.call_function(choose, (number, output, original))
    for user in users:
        user.replace_input_with(output, node)
    return node


def _observed(sites: Sequence[TorchSite], ways: dict[Node, Node]) -> tuple[tuple[Operand, ...], tuple[int | None, ...]]:
    """Returns the activations of `sites`, and which of them each reads."""
    indices: dict[tuple[Node, tuple[int, ...] | None], int] = {}
    observed: list[Operand] = []
    read_by: list[int | None] = []
    for site in sites:
        if site.lookup:
            read_by.append(None)
            continue
        x = replace(site.x, node=ways.get(site.x.node, site.x.node))
        if (x.node, x.perm) not in indices:
            indices[x.node, x.perm] = len(observed)
            observed.append(x)
        read_by.append(indices[x.node, x.perm])
    return tuple(observed), tuple(read_by)
