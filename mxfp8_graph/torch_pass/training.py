"""Applies decisions for training: linears become `mxfp8::linear_train`, their weights stay parameters.

linear(x, w [N, K], b)      -> linear_train(x, w, b)
addmm(b, x, w [K, N])       -> linear_train(x, transpose(w), b)
bmm(x, w [B, K, N])         -> linear_train(x, transpose(w))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.provenance import Made
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.matmul_forms import LINEAR_TRAIN
from mxfp8_graph.torch_pass.site import TorchSite
from mxfp8_graph.torch_program import internals, record
from mxfp8_graph.torch_program.program import Program
from mxfp8_ops.errors import RecipeError

_ATEN: Final = torch.ops.aten


def obstacle(site: TorchSite) -> str | None:
    """Returns why a site cannot be trained in MXFP8, or None."""
    if site.w is None or site.w.static is None:
        return "training rewrites linears only; expected one static operand"
    if site.packed:
        return "torchao packed this weight; expected one in high precision, to train it"
    if site.offs is not None or site.w.static.gather is not None:
        return "training has no form for experts that are chosen at run time; they stay in high precision"
    if site.swapped or site.alpha != 1.0 or site.addend is not None or site.beta != 1.0 or not _fits(site):
        return (
            "training rewrites y = x @ w + b with a weight [N, K], or y = x @ w with a stack [B, N, K] for x [B, M, K]"
            f"; this {site.site.op} is another form"
        )
    if site.bias is not None and site.bias.meta["val"].dim() != 1:
        return "training rewrites biases of one dimension only; expected [N]"
    if site.output.meta["val"].dtype != (site.x or site.w).node.meta["val"].dtype:
        return "the result has another dtype than the activation (autocast); export without autocast to train"
    return None


def _fits(site: TorchSite) -> bool:
    """Whether the weight is one that `linear_train` takes: a matrix, or a stack with one matrix for each of x."""
    x, w = site.x, site.w
    assert x is not None
    assert w is not None
    assert w.static is not None
    seen = w.static.node.meta["val"].shape
    if len(seen) != w.rank or w.rank == 2:
        return w.rank == len(seen) == 2
    first = x.perm[0] if x.perm else 0
    return w.rank == x.rank == 3 and site.bias is None and str(x.node.meta["val"].shape[first]) == str(seen[0])


def check(recipe: Recipe, decisions: Sequence[Decision]) -> None:
    """Raises RecipeError if a decision asks for what training does not have."""
    for decision in decisions:
        if decision.quantize and decision.weight_only:
            raise RecipeError(
                f"recipe {recipe.name!r}",
                f"weight_only for {decision.site.name!r}",
                expected="activations in MXFP8 too, since training quantizes both operands of every product",
                advice="remove weight_only",
            )
        if decision.quantize and "e5m2" in {decision.activation_format, decision.weight_format}:
            raise RecipeError(
                f"recipe {recipe.name!r}",
                f"e5m2 for {decision.site.name!r}",
                expected="e4m3, since training takes its formats from fp8_format (HYBRID: E5M2 gradients)",
                advice="set that instead",
            )


def apply(program: Program, site: TorchSite, decision: Decision, recipe: Recipe, made: Made) -> SiteReport:
    """Makes the site a `linear_train` of its parameters, and returns what became of it."""
    assert site.x is not None
    assert site.w is not None
    assert site.w.static is not None
    build = Builder(program, site.node, {})
    weight = _weight(site.w.static.node, site.w.transposed, build)
    arguments = (build.permute(site.x.node, site.x.perm), weight, site.bias)
    keywords: dict[str, Any] = {"fp8_format": recipe.fp8_format, "scale_rounding": decision.scale_rounding}
    node = site.output
    node.target, node.args, node.kwargs = torch.ops.mxfp8.linear_train.default, arguments, keywords
    record.mark(node, made)
    if node is not site.node:
        site.node.graph.erase_node(site.node)
    size = site.w.static.byte_size
    return SiteReport(
        decision=decision, nodes=(*(new.name for new in build.new), node.name), bytes_before=size, bytes_after=size
    )


def undo(program: Program, site: TorchSite) -> None:
    """Makes a `linear_train` the linear it stands for, or the bmm."""
    node = site.node
    if internals.op_name(node) == LINEAR_TRAIN:
        x, weight, bias = (internals.argument(node, name) for name in ("x", "weight", "bias"))
        if weight.meta["val"].dim() == 2:
            node.target, node.args, node.kwargs = _ATEN.linear.default, (x, weight, bias), {}
        else:
            turned = Builder(program, node, {}).permute(weight, (0, 2, 1))
            node.target, node.args, node.kwargs = _ATEN.bmm.default, (x, turned), {}
        record.unmark(node)


def kept(decision: Decision, reason: str) -> Decision:
    """Returns `decision` turned down for a structural reason."""
    return replace(decision, quantize=False, rule="structure", reason=reason)


def _weight(node: Node, transposed: bool, build: Builder) -> Node:
    """Returns the weight as [N, K]; a transpose in front of it and the one it needs cancel out."""
    if not transposed:
        return node
    if internals.op_name(node) == "t":
        source = node.args[0]
        assert isinstance(source, Node)
        return source
    rank = node.meta["val"].dim()
    return build.permute(node, (*range(rank - 2), rank - 1, rank - 2))
