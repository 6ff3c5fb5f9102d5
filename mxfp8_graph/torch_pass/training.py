"""Applies decisions for training: linears become `mxfp8::linear_train`, their weights stay parameters.

linear(x, w [N, K], b)      -> linear_train(x, w, b)
addmm(b, x, w [K, N])       -> linear_train(x, transpose(w), b)
bmm(x, w [B, K, N])         -> linear_train(x, transpose(w))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.provenance import Made
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.find import Site, TorchSite
from mxfp8_graph.torch_pass.matmul_forms import LINEAR_TRAIN, Operand
from mxfp8_graph.torch_program import internals, record
from mxfp8_graph.torch_program.program import Program
from mxfp8_ops.errors import RecipeError

_ATEN: Final = torch.ops.aten


def obstacle(site: Site) -> str | None:
    """Returns why a site cannot be trained in MXFP8, or None."""
    if not isinstance(site, TorchSite) or site.w.static is None:
        return "training rewrites linears only; expected one static operand"
    if site.packed:
        return "torchao packed this weight; expected one in high precision, to train it"
    if site.lookup:
        return "embeddings stay in high precision in training, which rewrites linears only"
    form, added = site.form, site.added
    if form.offs is not None or site.w.static.gather is not None:
        return "training has no form for experts that are chosen at run time; they stay in high precision"
    if site.swapped or form.alpha != 1.0 or added.addend is not None or form.beta != 1.0 or not _fits(site):
        return (
            "training rewrites y = x @ w + b with a weight [N, K], or y = x @ w with a stack [B, N, K] for x [B, M, K]"
            f"; this {site.matmul.op} is another form"
        )
    if added.bias is not None and added.bias.meta["val"].dim() != 1:
        return "training rewrites biases of one dimension only; expected [N]"
    if added.output.meta["val"].dtype != site.x.node.meta["val"].dtype:
        return "the result has another dtype than the activation (autocast); export without autocast to train"
    return None


def _fits(site: TorchSite) -> bool:
    """Whether the weight is one that `linear_train` takes: a matrix, or a stack with one matrix for each of x."""
    x, w = site.x, site.w
    seen = w.node.meta["val"].shape
    if len(seen) != w.rank or w.rank == 2:
        return w.rank == len(seen) == 2
    return w.rank == x.rank == 3 and site.added.bias is None and str(x.shape[0]) == str(seen[0])


def check(recipe: Recipe, decisions: Sequence[Decision]) -> None:
    """Raises RecipeError if a decision asks for what training does not have."""
    for decision in decisions:
        if decision.quantize and decision.weight_only:
            what = f"activations: {decision.activations} for {decision.site.name!r}"
            expected = "activations in MXFP8 too, since training quantizes both operands of every product"
            raise RecipeError(f"recipe {recipe.name!r}", what, expected=expected, advice="set activations: e4m3")
        if decision.quantize and "e5m2" in {decision.activations, decision.weight_format}:
            what = f"e5m2 for {decision.site.name!r}"
            expected = "e4m3, since training takes its formats from fp8_format (HYBRID: E5M2 gradients)"
            raise RecipeError(f"recipe {recipe.name!r}", what, expected=expected, advice="set that instead")


def apply(program: Program, site: TorchSite, decision: Decision, recipe: Recipe, made: Made) -> SiteReport:
    """Makes the site a `linear_train` of its parameters, and returns what became of it."""
    build = Builder(program, site.node)
    arguments = (build.k_last(site.x), _weight(site.w, build), site.added.bias)
    keywords: dict[str, Any] = {"fp8_format": recipe.fp8_format, "scale_rounding": decision.scale_rounding}
    node = site.added.output
    node.target, node.args, node.kwargs = torch.ops.mxfp8.linear_train.default, arguments, keywords
    record.mark(node, made)
    if node is not site.node:
        site.node.graph.erase_node(site.node)
    size = site.matmul.weight_bytes
    return SiteReport(
        decision=decision, nodes=(*(new.name for new in build.new), node.name), bytes_before=size, bytes_after=size
    )


def undo(program: Program, site: Site) -> None:
    """Makes a `linear_train` the linear or the bmm it stands for; leaves other nodes alone."""
    node = site.node
    if internals.op_name(node) == LINEAR_TRAIN:
        x, weight, bias = (internals.argument(node, name) for name in ("x", "weight", "bias"))
        if weight.meta["val"].dim() == 2:
            node.target, node.args, node.kwargs = _ATEN.linear.default, (x, weight, bias), {}
        else:
            transposed = Builder(program, node).permute(weight, (0, 2, 1))
            node.target, node.args, node.kwargs = _ATEN.bmm.default, (x, transposed), {}
        record.unmark(node)


def _weight(w: Operand, build: Builder) -> Node:
    """Returns the weight as [..., N, K]; a transpose in front of it and the one it needs cancel out."""
    node = w.node
    if not w.transposed:
        return node
    if internals.op_name(node) == "t":
        return node.all_input_nodes[0]
    return build.permute(node, k_last(range(node.meta["val"].dim())))
