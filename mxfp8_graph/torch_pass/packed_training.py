"""Lets gradients pass through the weights of a packed program, and reverts that.

    gemm(quantize(x), packed w, b)  <->  linear_packed(x, packed w, b)
    gemm(quantize(a), quantize(b))  <->  product(a, b)
    weight_gemm, embedding               as they are: the one passes gradients on, ids have none
    grouped_gemm(quantize(x), ...)       refused

Forward passes stay the same bit for bit. Packed weights are frozen, other parameters are trained: a linear that the
recipe kept stays in high precision.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.provenance import RewriteRecord
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.build import Builder, Shared
from mxfp8_graph.torch_pass.program import Program
from mxfp8_ops import contract
from mxfp8_ops.checks import dtype_name
from mxfp8_ops.errors import ContractError

_MXFP8: Final = torch.ops.mxfp8
_QUANTIZE, _GEMM, _GROUPED, _PACKED, _PRODUCT = (
    f"{contract.DOMAIN}::{name}" for name in ("quantize", "gemm", "grouped_gemm", "linear_packed", "product")
)

NOTE: Final = (
    "packed weights stay as they are, since MXFP8 values are too far apart for an optimizer's steps; to train them, "
    "rewrite the original program with training=True"
)


def to_training(program: Program, recipe: Recipe, where: str) -> list[SiteReport]:
    """Makes every parameter that is not packed trainable; returns a report of each packed matmul.

    Args:
        program: a packed one, or a result of this function, perhaps for another format of gradients.
        recipe: the one that packed it; its `fp8_format` sets the format of gradients.
        where: name of the program in errors.

    Raises:
        ContractError: there is nothing to train, or experts are chosen at run time for quantized activations.
    """
    rewrite_record = RewriteRecord(node="", recipe=recipe.model_dump_json())
    reports = []
    for node in list(program.module.graph.nodes):
        # There is no op that quantizes the rows of grouped experts and passes gradients to them; weight-only ones have
        # one.
        if internals.op_name(node) == _GROUPED and internals.argument(node, "a_scales") is not None:
            what = f"node {node.name!r}: experts are chosen at run time for quantized activations"
            expected = "experts whose weights alone are quantized, to pass gradients on"
            advice = "pack the original with activations: unchanged for them, or with training=True"
            raise ContractError(where, what, expected=expected, advice=advice)
        if internals.op_name(node) == _GEMM and (a := _quantized(node, "a")) is not None:
            _pass_gradients(node, a)
        if internals.op_name(node) in {_PACKED, _PRODUCT}:
            _set_format(node, recipe)
            record.mark(node, rewrite_record)
        if (report := _report(node, "its packed weight is frozen, gradients pass through it")) is not None:
            reports.append(report)
    _drop_unused(program)
    # A training run without a parameter would fail much later, in the optimizer.
    if not program.thaw():
        what = "there is nothing to train: every weight is kept in MXFP8 only"
        expected = "parameters beside the packed weights, such as adapters, normalizations or biases"
        advice = "rewrite the original program with training=True, or add adapters before exporting it"
        raise ContractError(where, what, expected=expected, advice=advice)
    return reports


def to_inference(program: Program, recipe: Recipe) -> list[SiteReport]:
    """Reverts `to_training`, with the trained values; returns a report of each packed matmul."""
    rewrite_record = RewriteRecord(node="", recipe=recipe.model_dump_json())
    shared: Shared = {}
    writes = 0
    reports = []
    for node in list(program.module.graph.nodes):
        if internals.op_name(node) in {_PACKED, _PRODUCT}:
            _quantize_operands(node, Builder(program, node, shared), writes)
            record.mark(node, rewrite_record)
        # An in-place op may change an activation, so a quantize before it cannot be shared with matmuls after it.
        writes += bool(internals.written(node))
        if (report := _report(node, "its weight was packed before")) is not None:
            reports.append(report)
    program.freeze()
    return reports


def _quantized(node: Node, name: str) -> Node | None:
    """Returns the quantize node that made an operand of a gemm, or None."""
    operand = internals.argument(node, name)
    if isinstance(operand, Node) and operand.target is operator.getitem and isinstance(operand.args[0], Node):
        return operand.args[0] if internals.op_name(operand.args[0]) == _QUANTIZE else None
    return None


def _pass_gradients(node: Node, a: Node) -> None:
    """Replaces a gemm of quantized operands by the op that quantizes them itself and passes gradients to them."""
    # A quantized b is an activation too: the gemm is a product of attention and has no weight.
    x, b = internals.argument(a, "x"), _quantized(node, "b")
    settings = {name: internals.argument(node, name) for name in ("a_format", "b_format")}
    settings["scale_rounding"] = internals.argument(a, "scale_rounding")
    dtype = internals.argument(node, "dtype") or torch.float32
    # The training ops give the dtype of x by default, gemm gives float32.
    if dtype != x.meta["val"].dtype:
        settings["dtype"] = dtype
    op = _MXFP8.linear_packed.default if b is None else _MXFP8.product.default
    packed = [internals.argument(node, name) for name in ("b", "b_scales", "bias")]
    node.args = (x, *packed) if b is None else (x, internals.argument(b, "x"))
    node.target, node.kwargs = op, internals.unusual(op, settings)


def _set_format(node: Node, recipe: Recipe) -> None:
    """Sets the format of gradients of a node to the recipe's."""
    op: Any = node.target
    packed = internals.op_name(node) == _PACKED
    grad_format = "e5m2" if recipe.fp8_format == "HYBRID" else "e4m3"
    settings = {**node.kwargs, **({"fp8_format": recipe.fp8_format} if packed else {"grad_format": grad_format})}
    node.kwargs = internals.unusual(op, settings)


def _quantize_operands(node: Node, build: Builder, epoch: int) -> None:
    """Replaces a `linear_packed` or a `product` by a gemm behind nodes that quantize its operands."""
    rounding = internals.argument(node, "scale_rounding")
    formats = {name: internals.argument(node, name) for name in ("a_format", "b_format")}
    packed = internals.op_name(node) == _PACKED
    x = internals.argument(node, "x" if packed else "a")
    dtype = internals.argument(node, "dtype") or x.meta["val"].dtype
    operands = build.quantize(x, formats["a_format"], rounding, epoch)
    if packed:
        operands += [internals.argument(node, name) for name in ("b", "b_scales", "bias")]
    else:
        operands += build.quantize(internals.argument(node, "b"), formats["b_format"], rounding, epoch)
    settings: dict[str, Any] = {**formats, "dtype": None if dtype == torch.float32 else dtype}
    node.target = _MXFP8.gemm.default
    node.args = tuple(operands)
    node.kwargs = internals.unusual(node.target, settings)


def _drop_unused(program: Program) -> None:
    """Removes quantize nodes, and the getitems of their results, that have no user left."""
    # From the end: a getitem has to go before the quantize that it reads.
    for node in reversed(program.module.graph.nodes):
        quantizes = internals.op_name(node) == _QUANTIZE
        part = node.target is operator.getitem and internals.op_name(node.args[0]) == _QUANTIZE
        if (quantizes or part) and not node.users:
            node.graph.erase_node(node)


def _report(node: Node, reason: str) -> SiteReport | None:
    """Returns the report of a packed matmul, or None if `node` is none."""
    op = contract.TORCH_OPS.get(internals.op_name(node))
    if op is None or not op.multiplies or op.weight is None or _quantized(node, "b") is not None:
        return None
    x, b = node.all_input_nodes[0], internals.argument(node, "b")
    m, n, k = eligibility.sizes(x.meta["val"].shape, b.meta["val"].shape)
    site = MatMulSite(
        name=node.name,
        op=op.full_name,
        module=internals.module_path(node),
        m=m,
        n=n,
        k=k,
        dtype=dtype_name(node.meta["val"].dtype),
        has_bias=internals.argument(node, "bias") is not None,
    )
    return SiteReport(decision=Decision(site=site, kind="quantized", rule="packed", reason=reason), nodes=(node.name,))
