"""A model that holds every rewritten site twice: as it was and in MXFP8, and a switch that chooses while it runs.

    y = MatMul(X, w)   ->   y = If(switches[i]) { MXFP8Gemm(MXFP8Quantize(X), packed w) } else { MatMul(X, w) }

ONNX Runtime computes the branch that is taken, and nothing of the other. One session thus measures any mix of sites,
with the very nodes and packed weights that a rewrite without fusion writes. What goes into the sites can be looked at:

    observed = If(observe[j]) { Identity(X) } else { nothing, as an empty tensor }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from mxfp8_graph.onnx_model import record
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.write import Target, open_target
from mxfp8_graph.onnx_pass.build import ScopeEdit
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.matmul_forms import Operand
from mxfp8_graph.onnx_pass.replace import Editor
from mxfp8_graph.onnx_pass.run import WANTED, find_and_plan, prepare
from mxfp8_graph.options import Options, Progress
from mxfp8_graph.pass_steps import replace_each, require_eligible
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.account import Account
from mxfp8_graph.report.data import SiteReport
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
    """What to say of its dtypes."""


def write_switched(
    opened: OpenedModel, recipe: Recipe, path: Path, *, allow_nonfinite: bool, progress: Progress | None
) -> SwitchedModel:
    """Writes `opened`, which is edited, with a switch per site that `recipe` rewrites, and its data beside it.

    Raises:
        ContractError: it is rewritten already, or as `mxfp8_graph.rewrite`.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
    """
    if record.find(opened.proto) is not None:
        advice = "name the model it was made from"
        raise ContractError(opened.name, "is rewritten already", expected="the original model", advice=advice)
    note = prepare(opened, recipe)
    sites, decisions = find_and_plan(opened, recipe)
    require_eligible(decisions, Options(name=opened.name), wanted=WANTED, account=Account)
    with open_target(opened, path, external=True, overwrite=False) as target:
        editor = _SwitchEditor(opened, target, allow_nonfinite=allow_nonfinite)
        reports = replace_each(sites, decisions, editor.apply, progress=progress)
        editor.finish()
        switched = [site for site, decision in zip(sites, decisions, strict=True) if decision.quantize]
        observed, observed_by = editor.observe(switched)
        editor.add_inputs(len(switched), len(observed))
        record.complete(opened.proto, opened.opset, recipe.to_record())
        target.finish()
    return SwitchedModel(
        path=path,
        sites=tuple(reports),
        switches=editor.switches,
        observe=editor.observe_input,
        observed=tuple(observed),
        observed_by=tuple(observed_by),
        note=note,
    )


class _SwitchEditor(Editor):
    """Puts what a site was, and what it becomes, into the branches of an If."""

    def __init__(self, opened: OpenedModel, target: Target, *, allow_nonfinite: bool) -> None:
        super().__init__(opened, target, allow_nonfinite=allow_nonfinite)
        self._graph = opened.proto.graph
        self.switches = self.fresh("mxfp8_switches")
        self.observe_input = self.fresh("mxfp8_observe")
        self._count = 0

    def apply(self, site: OnnxSite, decision: Decision) -> SiteReport:
        """Plans an If with the site's old and new nodes, and returns what the rewrite says of it; errors as `pack`."""
        edit = self._edits.setdefault(site.scope.path, ScopeEdit(site.scope))
        edit.shared.clear()  # what one branch computes, another cannot use
        report = super().apply(site, decision)
        self._suspects.clear()  # both ways stay
        old = [site.index] if site.added.index is None else sorted({site.index, site.added.index})
        result = site.added.output
        branches = {
            "then_branch": self._branch(edit.new.pop(site.index), result, site.dtype),
            "else_branch": self._branch([site.scope.proto.node[index] for index in old], result, site.dtype),
        }
        place = edit.new.setdefault(old[-1], [])  # where all that either branch reads is computed
        place.extend(self._if(self.switches, self._count, result, branches))
        self._count += 1
        return report

    def observe(self, sites: Sequence[OnnxSite]) -> tuple[list[Observed], list[int | None]]:
        """Makes the activations of `sites` outputs; returns them, and which of them each site reads."""
        found: dict[tuple[object, ...], int] = {}
        observed: list[Observed] = []
        read_by: list[int | None] = []
        for site in sites:
            if site.lookup or site.scope.depth:
                read_by.append(None)
                continue
            key = (site.x.name, site.x.perm, site.x.merged)
            if key not in found:
                found[key] = len(observed)
                observed.append(self._observe(site.x, site.dtype, len(observed)))
            read_by.append(found[key])
        return observed, read_by

    def add_inputs(self, switches: int, observed: int) -> None:
        """Adds the inputs that say which switches are on and what is observed."""
        for name, count in ((self.switches, switches), (self.observe_input, observed)):
            self._graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, [count]))

    def _observe(self, x: Operand, dtype: int, index: int) -> Observed:
        name = self.fresh(f"{x.name}_observed")
        nothing = onnx.TensorProto(data_type=dtype, dims=[0])
        branches = {
            "then_branch": self._branch([helper.make_node("Identity", [x.name], [name])], name, dtype),
            "else_branch": self._branch([helper.make_node("Constant", [], [name], value=nothing)], name, dtype),
        }
        self._graph.node.extend(self._if(self.observe_input, index, name, branches))
        self._graph.output.append(helper.make_tensor_value_info(name, dtype, None))
        return Observed(output=name, perm=x.perm, merged=x.merged)

    def _branch(self, nodes: Sequence[onnx.NodeProto], result: str, dtype: int) -> onnx.GraphProto:
        """Returns a graph of copies of `nodes`, with another name for `result`, which is that of the If."""
        name = self.fresh(f"{result}_branch")
        graph = onnx.GraphProto(name=name)
        for node in nodes:
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.output[:] = [name if output == result else output for output in copy.output]
        graph.output.append(helper.make_tensor_value_info(name, dtype, None))
        return graph

    def _if(self, switches: str, index: int, result: str, branches: dict[str, Any]) -> list[onnx.NodeProto]:
        """Returns the nodes that choose a branch by one of the switches."""
        number, chosen = self.fresh(f"{result}_index"), self.fresh(f"{result}_switch")
        value = onnx.numpy_helper.from_array(np.array(index, np.int64), number)
        return [
            helper.make_node("Constant", [], [number], name=number, value=value),
            helper.make_node("Gather", [switches, number], [chosen], name=chosen),
            helper.make_node("If", [chosen], [result], name=self.fresh(f"{result}_if"), **branches),
        ]
