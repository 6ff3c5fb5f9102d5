"""A model that holds every rewritten site twice: as it was and in MXFP8, and a switch that chooses while it runs.

    y = MatMul(X, w)   ->   y = If(switches[i]) { MXFP8Gemm(MXFP8Quantize(X), packed w) } else { MatMul(X, w) }

ONNX Runtime computes the branch that is taken, and nothing of the other. One session thus measures any mix of sites,
with the very nodes and packed weights that a rewrite without fusion writes. What goes into the sites can be looked at:

    observed = If(observe[j]) { Identity(X) } else { nothing, as an empty tensor }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.operands import Operand
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.onnx_pass.replace import Editor, Replaced
from mxfp8_graph.onnx_pass.run import WANTED, find_and_plan, site_report
from mxfp8_graph.onnx_pass.save import save
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.plan import Decision, require_eligible
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.running.inputs import Array, Inputs, Signature
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_ops.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The activation of some sites, as an output of the model."""

    output: str
    perm: tuple[int, ...] | None
    """What brings K to the end; None if it is there."""
    merged: tuple[int, ...] | None
    """What it is reshaped to after that; None if it is not."""


@dataclass(frozen=True, kw_only=True)
class SwitchedModel:
    """What was written, and how to run it."""

    path: Path
    sites: tuple[SiteReport, ...]
    """Every site in graph order, the kept ones too; the rewritten ones have a switch each, in this order."""
    switches: str
    """Name of the input bool [switches]."""
    observe: str
    """Name of the input bool [observed]."""
    observed: tuple[Observed, ...]
    observed_by: tuple[int | None, ...]
    """Per switch, which of `observed` its site multiplies; None for an embedding, and inside of subgraphs."""
    note: str
    """What was changed before the sites were found."""


def write_switched(
    model: ir.Model, recipe: Recipe, path: Path, *, allow_nonfinite: bool, progress: Progress | None
) -> SwitchedModel:
    """Writes `model`, which is edited, with a switch per site that `recipe` rewrites, and its data beside it.

    Raises:
        ContractError: it is rewritten already, or as `mxfp8_graph.rewrite`.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
    """
    if record.find(model) is not None:
        advice = "name the model it was made from"
        raise ContractError(name_of(model), "is rewritten already", expected="the original model", advice=advice)
    notes: list[str] = []
    model = prepare(model, recipe, notes)
    sites, decisions = find_and_plan(model, recipe)
    require_eligible(decisions, name_of(model), wanted=WANTED)
    editor = _SwitchEditor(model, allow_nonfinite=allow_nonfinite, progress=progress)
    done = [editor.apply(*pair) if pair[1].quantize else pair[1] for pair in zip(sites, decisions, strict=True)]
    switched = [site for site, decision in zip(sites, decisions, strict=True) if decision.quantize]
    observed, observed_by = editor.observe(switched)
    editor.add_inputs(len(switched), len(observed))
    record.complete(model, recipe.to_record())  # without `finish`: both ways stay, nothing is unused
    save(model, path, external=True, overwrite=False)
    return SwitchedModel(
        path=path,
        sites=tuple(map(site_report, done)),
        switches=editor.switches,
        observe=editor.observe_input,
        observed=tuple(observed),
        observed_by=tuple(observed_by),
        note="; ".join(notes),
    )


class _SwitchEditor(Editor):
    """Puts what a site was, and what it becomes, into the branches of an If."""

    def __init__(self, model: ir.Model, *, allow_nonfinite: bool, progress: Progress | None) -> None:
        super().__init__(model, allow_nonfinite=allow_nonfinite, progress=progress)
        self._graph = model.graph
        self._switches = ir.Value(name=self.fresh("mxfp8_switches"))
        self._observe = ir.Value(name=self.fresh("mxfp8_observe"))
        self.switches, self.observe_input = str(self._switches.name), str(self._observe.name)
        self._count = 0

    def apply(self, site: OnnxSite, decision: Decision) -> Replaced:
        """Puts an If with the site's old and new nodes in its place."""
        self._shared.clear()  # what one branch computes, another cannot use
        return super().apply(site, decision)

    def add_inputs(self, switches: int, observed: int) -> None:
        """Adds the inputs that say which switches are on and what is observed."""
        for value, count in ((self._switches, switches), (self._observe, observed)):
            value.type, value.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([count])
            self._graph.inputs.append(value)

    def observe(self, sites: Sequence[OnnxSite]) -> tuple[list[Observed], list[int | None]]:
        """Makes the activations of `sites` outputs; returns them, and which of them each site reads."""
        found: dict[tuple[object, ...], int] = {}
        observed: list[Observed] = []
        read_by: list[int | None] = []
        for site in sites:
            if site.form.picks_rows or site.matmul.subgraph:
                read_by.append(None)
                continue
            key = (site.x.value, site.x.perm, site.x.merged)
            if key not in found:
                found[key] = len(observed)
                observed.append(self._observed(site.x, site.dtype, len(observed)))
            read_by.append(found[key])
        return observed, read_by

    def _replace(self, site: OnnxSite, result: ir.Value, new: Sequence[ir.Node]) -> None:
        value, name = site.added.output, str(site.added.output.name)
        old = [site.node] if site.added.node is None else [site.node, site.added.node]
        chosen = ir.Value(name=name)
        # In the place of the last node, where all that either branch reads is computed.
        choice = self._if(self._switches, self._count, chosen, old[-1].prepend)
        self._stand_for(value, chosen)
        self._branch(choice, "then_branch", new, result, site.dtype)
        self._branch(choice, "else_branch", old, value, site.dtype)
        self._count += 1

    def _observed(self, x: Operand, dtype: int, index: int) -> Observed:
        value = ir.Value(name=self.fresh(f"{x.value.name}_observed"))
        value.type = ir.TensorType(ir.DataType(dtype))
        choice = self._if(self._observe, index, value, self._graph.extend)
        nothing = ir.tensor(np.empty(0, ir.DataType(dtype).numpy()), ir.DataType(dtype))
        for name, op, inputs, settings in (
            ("then_branch", "Identity", [self._results.get(x.value, x.value)], {}),
            ("else_branch", "Constant", [], {"value": nothing}),
        ):
            node = ir.node(op, inputs, settings, outputs=[ir.Value(name=value.name)])
            self._branch(choice, name, [node], node.outputs[0], dtype)
        self._graph.outputs.append(value)
        return Observed(output=str(value.name), perm=x.perm, merged=x.merged)

    def _branch(self, choice: ir.Node, name: str, nodes: Sequence[ir.Node], result: ir.Value, dtype: int) -> None:
        """Moves `nodes` into a branch of an If that returns `result`, under another name than the If's."""
        result.name = self.fresh(f"{result.name}_branch")
        result.type, result.shape, result.doc_string = ir.TensorType(ir.DataType(dtype)), None, None
        result.metadata_props.clear()
        for node in nodes:
            if isinstance(node.graph, ir.Graph):
                node.graph.remove(node)
        choice.attributes.add(ir.AttrGraph(name, ir.Graph([], [result], nodes=nodes, name=result.name)))

    def _if(
        self, switches: ir.Value, index: int, result: ir.Value, put: Callable[[Sequence[ir.Node]], None]
    ) -> ir.Node:
        """Returns an If, still without branches, that one of the switches decides; `put` puts it into the graph."""
        number, chosen = self.fresh(f"{result.name}_index"), self.fresh(f"{result.name}_switch")
        position = ir.tensor(index, ir.DataType.INT64, name=number)
        constant = ir.node("Constant", [], {"value": position}, outputs=[ir.Value(name=number)], name=number)
        inputs = [switches, *constant.outputs]
        gather = ir.node("Gather", inputs, outputs=[ir.Value(name=chosen)], name=chosen)
        choice = ir.node("If", gather.outputs, outputs=[result], name=self.fresh(f"{result.name}_if"))
        put([constant, gather, choice])
        return choice


class SwitchedSession(Switchable):
    """An ONNX model, in one session of ONNX Runtime."""

    def __init__(self, signature: Signature, model: SwitchedModel) -> None:
        self.signature = signature
        self.sites = model.sites
        self.observed_by = model.observed_by
        self.note = model.note
        self._model = model
        self._session = Session(model.path, kernels=True, where=signature.name)
        extra = {observed.output for observed in model.observed}
        self._outputs = [name for name in self._session.output_names if name not in extra]

    def run(
        self, feeds: Mapping[str, Array], on: Sequence[bool], observe: Sequence[int] = ()
    ) -> tuple[Inputs, list[Array]]:
        """See `Switchable.run`."""
        observed = [self._model.observed[index] for index in observe]
        seen = np.isin(np.arange(len(self._model.observed)), observe)
        self._session.output_names = [*self._outputs, *(one.output for one in observed)]
        found = self._session.run({**feeds, self._model.switches: np.array(on, bool), self._model.observe: seen})
        activations = []
        for one in observed:
            x = found.pop(one.output)
            x = x if one.perm is None else x.transpose(one.perm)
            activations.append(x if one.merged is None else _reshaped(x, one.merged))
        return found, activations


def _reshaped(x: Array, shape: Sequence[int]) -> Array:
    """Returns `x` reshaped as ONNX's Reshape does: a 0 is the size that is there."""
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])
