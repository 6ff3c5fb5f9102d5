"""Applies decisions for training: matmuls become `mxfp8::linear_train`, their weights stay parameters.

linear(x, w [N, K], b)      -> linear_train(x, w, b)
addmm(b, x, w [K, N])       -> linear_train(x, transpose(w), b)
bmm(x, w [B, K, N])         -> linear_train(x, transpose(w))
matmul(q, k^T)              -> linear_train(q, k)               likewise softmax @ v, after attention is split
grouped_mm(x, w [E, K, N])  -> grouped_linear_train(x, transpose(w))
matmul(w, x)                -> clone(transpose(linear_train(transpose(x), w)))
baddbmm(c, x, w)            -> c + linear_train(x, transpose(w))

Operands with fewer leading sizes are expanded. Inside of autocast x is cast to the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.find import Site, TorchSite
from mxfp8_graph.torch_pass.ops import GROUPED_TRAIN, LINEAR_TRAIN, Operand, run_time
from mxfp8_graph.torch_pass.program import Program
from mxfp8_graph.torch_pass.replace import Call, prune, retarget
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError, RecipeError

_ATEN: Final = torch.ops.aten
_PRODUCTS: Final = {"attention_scores", "attention_values", "product"}
"""Roles that a recipe has to ask for by name."""
_ORIGINAL_KEY: Final = "mxfp8_graph.original"
"""Key in a node's custom metadata, which files keep."""
_SHOWN: Final = 5
"""Names that a note lists at most."""


def obstacle(site: Site) -> str | None:
    """Returns the reason why a site cannot be trained in MXFP8, or None."""
    if not isinstance(site, TorchSite):
        return None  # attention becomes two products, which are checked after that
    if site.packed:
        return "torchao packed this weight; expected one in high precision, to train it"
    if site.lookup:
        return "embeddings stay in high precision in training, which quantizes matmuls only"
    if site.matmul.role == "convolution":
        return "convolutions stay in high precision in training, which quantizes matmuls only"
    if site.x.rank < 2 < int(site.w.node.meta["val"].dim()):
        return "training does not support a vector times a stack of matrices; expected [..., M, K]"
    return None


def check(recipe: Recipe, decisions: Sequence[Decision]) -> None:
    """Raises RecipeError if the recipe asks for a format or a product that training does not support."""
    where = f"recipe {recipe.name!r}"
    for decision in decisions:
        name = decision.site.name
        if decision.quantize and decision.weight_only:
            what = f"activations: {decision.activations} for {name!r}"
            expected = "activations in MXFP8 too, since training quantizes both operands of every product"
            raise RecipeError(where, what, expected=expected, advice="set activations: e4m3")
        # linear_train takes all its formats from one setting, as TransformerEngine does, so a recipe cannot set the
        # format of one operand.
        others = sorted({decision.activations, decision.weight_format} - {formats.E4M3.name})
        if decision.quantize and others:
            what = f"{others[0]} for {name!r}"
            expected = "e4m3, since training takes its formats from fp8_format (HYBRID: E5M2 gradients)"
            raise RecipeError(where, what, expected=expected, advice="set that instead")
        # Products are rewritten only on request, so a request that training cannot meet is an error. A linear that
        # stays gets a note.
        in_vain = decision.kind == "unsupported" and bool(getattr(recipe, decision.site.role, False))
        if decision.site.role in _PRODUCTS and (decision.kind == "unfit" or in_vain):
            what = f"it asks for {decision.site.role.replace('_', ' ')} {name!r}, and {decision.reason}"
            raise RecipeError(where, what, expected="one that training can quantize", advice="exclude it in the recipe")


def note(decisions: Sequence[Decision]) -> str | None:
    """Returns a note on the sites that training keeps in high precision against the recipe, or None."""
    left = [decision for decision in decisions if decision.kind == "unfit"]
    if not left:
        return None
    names = ", ".join(d.site.module or d.site.name for d in left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
    reasons = "; ".join(dict.fromkeys(d.reason for d in left))
    return f"training keeps {len(left)} of the sites that the recipe asks for ({names}): {reasons}"


def apply(program: Program, site: TorchSite, decision: Decision, recipe: Recipe) -> SiteReport:
    """Replaces the site by a `linear_train` of its operands, and returns the report of the site."""
    build = Builder(program, site.node)
    x, weight = _operands(site, build)
    added = site.added
    if added.bias is not None and not _absorbed(site, added.bias, weight):
        added = replace(added, bias=None, addend=added.bias)
    # Training folds nothing into the weight, so it is an operand like any other here.
    stored = site.w.node
    site = replace(site, w=Operand(node=weight), added=added)
    settings = {"fp8_format": recipe.fp8_format, "scale_rounding": decision.scale_rounding}
    call = Call("train", torch.ops.mxfp8.linear_train.default, (x, weight, added.bias), settings)
    if site.form.offs is not None:
        call = Call("train", torch.ops.mxfp8.grouped_linear_train.default, (x, weight, site.form.offs), settings)
        _note_original(site.node)
    retarget(site, call, build, recipe)
    # An unused transpose would keep the weight in the program after packing.
    prune(program, [stored], set())
    # Training keeps the weight as it is, so before and after are equal.
    names = (*(new.name for new in build.new), added.output.name)
    return SiteReport(decision=decision, nodes=names, bytes_after=site.matmul.weight_bytes)


def _absorbed(site: TorchSite, bias: Node, weight: Node) -> bool:
    """Whether `linear_train` takes the bias; otherwise it is added to the result."""
    shape = bias.meta["val"].shape
    scaled = site.form.alpha != 1.0 or site.form.beta != 1.0
    return not scaled and len(shape) == 1 and shape[0] == site.matmul.n and weight.meta["val"].dim() == 2


def _operands(site: TorchSite, build: Builder) -> tuple[Node, Node]:
    """Returns x [..., M, K] in the dtype of the result, and w [N, K] or [..., N, K] with the leading sizes of x.

    For a grouped matmul they are x [S, K] and w [E, N, K].
    """
    x, static = build.k_last(site.x), site.w.static
    # A transpose of a parameter in the program is dropped instead of being undone.
    w = build.k_last(site.w if static is None else run_time(site.w.node, site.w.transposed))
    x = build.cast(x, site.added.output.meta["val"].dtype)  # inside of autocast, where the matmul itself would cast
    x_rank = x.meta["val"].dim()
    # A leading 1 only broadcasts: without it the weight is one matrix for all rows of x.
    while 2 < w.meta["val"].dim() <= x_rank and _is_one(w.meta["val"].shape[0]):
        w = build.add(f"{w.name}_matrix", _ATEN.select.int, w, 0, 0)
    if w.meta["val"].dim() == 2 or site.form.offs is not None:
        return x, w
    return _expanded(build, x, w), _expanded(build, w, x)


def _expanded(build: Builder, node: Node, other: Node) -> Node:
    """Returns `node` broadcast to the leading sizes of its product with `other`, as matmul does."""
    lead, other_lead = (list(n.meta["val"].shape[:-2]) for n in (node, other))
    rank = max(len(lead), len(other_lead))
    pairs = zip([1] * (rank - len(lead)) + lead, [1] * (rank - len(other_lead)) + other_lead, strict=True)
    repeated = [_is_one(size) and not _is_one(other_size) for size, other_size in pairs]
    if rank == len(lead) and not any(repeated):
        return node
    own_sizes = [1] * (rank - len(lead)) + [-1] * len(lead)
    sizes = [build.size(other, at - rank - 2) if repeats else own_sizes[at] for at, repeats in enumerate(repeated)]
    return build.add(f"{node.name}_expanded", _ATEN.expand.default, node, [*sizes, -1, -1])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def undo(program: Program, site: Site) -> None:
    """Replaces a `linear_train` by the linear, bmm or matmul that it stands for; leaves other nodes alone.

    A `grouped_linear_train` becomes the op that it replaced.
    """
    node, op = site.node, internals.op_name(site.node)
    if op not in {GROUPED_TRAIN, LINEAR_TRAIN}:
        return
    x, weight = (internals.argument(node, name) for name in ("x", "weight"))
    rank, last = weight.meta["val"].dim(), internals.argument(node, "bias" if op == LINEAR_TRAIN else "offs")
    if rank == 2:
        node.target, node.args = _ATEN.linear.default, (x, weight, last)
    else:
        transposed = Builder(program, node).permute(weight, k_last(range(rank)))
        if op == GROUPED_TRAIN:
            node.target, node.args = _original(node), (x, transposed, last)
        else:
            node.target, node.args = (_ATEN.bmm if rank == 3 else _ATEN.matmul).default, (x, transposed)
    node.kwargs = {}
    record.unmark(node)


def _note_original(node: Node) -> None:
    """Records the op of a grouped matmul: torch's takes float32 in eager mode only, transformers' takes any dtype."""
    name = internals.op_name(node)
    if name != GROUPED_TRAIN:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), _ORIGINAL_KEY: name}


def _original(node: Node) -> Any:
    """Returns the op that `_note_original` recorded, and removes the record.

    Raises:
        ContractError: its library is not loaded.
    """
    name = node.meta["custom"].pop(_ORIGINAL_KEY)
    namespace, op = name.split("::") if "::" in name else ("aten", name)
    if not hasattr(getattr(torch.ops, namespace), op):
        what = f"becomes {name} again, which is not registered"
        raise ContractError(node.name, what, expected="the library that has it", advice=f"import {namespace} first")
    return getattr(getattr(torch.ops, namespace), op).default
