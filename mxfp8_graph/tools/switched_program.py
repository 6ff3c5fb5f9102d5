"""A program whose sites are switched on and off while it runs: see `switches.py`.

    linear(x, w)   ->   choose(i, gemm(quantize(x), packed w), linear(x, w))

The graph runs node by node, without the nodes that only the other form of a site needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxfp8_graph.options import Options, Progress
from mxfp8_graph.policy.plan import Decision, require_eligible
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.running.inputs import Array, Inputs, Signature
from mxfp8_graph.running.programs import TorchProgram, unrunnable
from mxfp8_graph.tools.switchable import Switchable, refuse_rewritten
from mxfp8_graph.torch_pass.load import load  # before torch, since its error names the packages to install

# isort: split
import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.find import Site, TorchSite
from mxfp8_graph.torch_pass.replace import Editor, replace_each
from mxfp8_graph.torch_pass.run import WANTED, planned


def choose(switch: int, rewritten: Any, original: Any) -> Any:
    """Returns the result of the form of a site that was computed; the other one is None."""
    return original if rewritten is None else rewritten


class SwitchedProgram(Switchable):
    """A program with a switch per site; it has the rewritten form of each site, and a copy of the original nodes."""

    def __init__(
        self, model: str | Path | ExportedProgram, recipe: Recipe, *, allow_nonfinite: bool, progress: Progress | None
    ) -> None:
        """Adds the switches; raises as `open_switchable`."""
        name, source = ("program", model) if isinstance(model, ExportedProgram) else (str(model), load(model))
        refuse_rewritten(record.find(source) is not None, name)
        options = Options(name=name, allow_nonfinite=allow_nonfinite)
        self._program, sites, decisions = planned(source, recipe, options)
        require_eligible(decisions, name, wanted=WANTED)
        editor = Editor(self._program, recipe, options)
        chosen: list[tuple[TorchSite, Node]] = []

        def change(site: Site, decision: Decision) -> SiteReport:
            assert isinstance(site, TorchSite), "attention is split into matmuls before"
            # The copy comes first: `apply` turns the site's own nodes into the rewritten form.
            chosen.append((site, _copy(site)))
            return editor.apply(site, decision)

        self.sites = tuple(replace_each(sites, decisions, change, progress=progress))
        # After the last site is replaced, since sites refer to each other's nodes.
        choices = {site.added.output: _choice(i, site.added.output, copy) for i, (site, copy) in enumerate(chosen)}
        self.observed = tuple(
            None if site.lookup else (choices.get(site.x.node, site.x.node), site.x.perm) for site, _ in chosen
        )
        self._source = TorchProgram(source)
        self.signature = Signature(name, self._source.signature.specs, self._source.signature.ranges)
        graph, stored = self._program.module.graph, self._program.stored_name
        # A run writes to copies of these, so that the next one begins with the same values.
        self._written = self._program.mutated | internals.written_names(graph, stored)

    def run(self, feeds: Mapping[str, Array], on: Sequence[bool]) -> Inputs:
        """See `Switchable.run`."""
        output = next(iter(reversed(self._program.module.graph.nodes)))
        results = self._run(feeds, on, {output})[output]
        return self._source.outputs_of(results if isinstance(results, (tuple, list)) else [results])

    def observe(self, feeds: Mapping[str, Array], activations: Sequence[Any]) -> list[Array]:
        """See `Switchable.observe`."""
        values = self._run(feeds, [False] * len(self.observed), {node for node, _ in activations})
        arrays = ((internals.to_numpy(values[node].contiguous()), perm) for node, perm in activations)
        return [array if perm is None else array.transpose(perm) for array, perm in arrays]

    def _run(self, feeds: Mapping[str, Array], on: Sequence[bool], wanted: set[Node]) -> dict[Node, Any]:
        program, inputs = self._program, self._source.placeholders(feeds)
        placeholders = []
        for node in program.scopes[0].placeholders:
            stored = program.stored_name(node)
            tensor = inputs[node.name] if stored is None else program.tensor(stored)
            placeholders.append(tensor.clone() if stored in self._written else tensor)
        runner = _Runner(program.module, _needed(program.module.graph, wanted, on), wanted)
        try:
            with torch.inference_mode():
                runner.run(*placeholders, enable_io_processing=False)
        except Exception as error:  # ops may raise any class
            raise unrunnable(self.signature.name, error) from None
        return runner.results


class _Runner(Interpreter):
    """Runs the needed nodes of a graph, and keeps the values of the wanted ones."""

    def __init__(self, module: torch.fx.GraphModule, needed: set[Node], wanted: set[Node]) -> None:
        super().__init__(module)
        self._needed, self._wanted = needed, wanted
        self.results: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Returns the value of a node, or None if it is not needed."""
        value = super().run_node(n) if n in self._needed or n.op in {"placeholder", "output"} else None
        if n in self._wanted:  # a copy: nodes that follow may write to it
            self.results[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value


def _needed(graph: torch.fx.Graph, wanted: set[Node], on: Sequence[bool]) -> set[Node]:
    """Returns the nodes that compute `wanted`, with the chosen form of each site, and those that write to a tensor."""
    needed = set(wanted)
    # A node that writes to a tensor is needed even if its own result is unused.
    for node in reversed(graph.nodes):
        if node in needed or internals.written(node):
            needed.add(node)
            inputs = node.all_input_nodes
            if node.target is choose:
                switch, rewritten, original = node.args
                inputs = [rewritten if on[switch] else original]
            needed.update(inputs)
    return needed


def _copy(site: TorchSite) -> Node:
    """Returns the output of a copy of the site: of the matmul, and of the nodes after it that it takes over."""
    graph, copies = site.node.graph, dict[Node, Node]()
    for node in site.nodes:
        with graph.inserting_before(node):
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
    return copies[site.added.output]


def _choice(number: int, output: Node, original: Node) -> Node:
    """Adds a `choose` of both forms of a site, which all users of `output` now read, and returns it."""
    users = list(output.users)
    with output.graph.inserting_after(output):
        node = output.graph.call_function(choose, (number, output, original))
    for user in users:
        user.replace_input_with(output, node)
    return node
