"""Lets gradients pass through the weights of a packed program, and reverts that.

    gemm(quantize(x), packed w, b)  <->  linear_packed(x, packed w, b)
    gemm(quantize(a), quantize(b))  <->  product(a, b)
    weight_gemm, embedding               unchanged: weight_gemm passes gradients on, and ids have none
    grouped_gemm(quantize(x), ...)       refused
    conv(x, packed w, b)                 refused

Forward passes stay the same bit for bit. Packed weights are frozen, other parameters are trained: a linear that the
recipe kept stays in high precision.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mxfp8_graph.options import Options
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass import internals, record, training_mode
from mxfp8_graph.torch_pass.build import Builder, Shared
from mxfp8_graph.torch_pass.find import find_sites
from mxfp8_graph.torch_pass.program import Program
from mxfp8_graph.torch_pass.replace import prune
from mxfp8_ops import contract
from mxfp8_ops.checks import dtype_name
from mxfp8_ops.errors import ContractError

_MXFP8: Final = torch.ops.mxfp8
_TRAINED: Final = (_MXFP8.linear_packed.default, _MXFP8.product.default)

_NOTE: Final = (
    "packed weights stay as they are, since MXFP8 values are too far apart for an optimizer's steps; to train them, "
    "rewrite the original program with training=True"
)


def switched(source: ExportedProgram, recipe: Recipe, options: Options) -> tuple[Program, list[SiteReport], list[str]]:
    """Returns (a copy of a packed program, prepared for training or for inference; a report of each site; notes).

    Raises:
        ContractError: there is nothing to train, or experts are chosen at run time for quantized activations.
    """
    program = Program(source)
    if not options.training:
        training_mode.evaluate(program.module)
    # The packing recipe left these matmuls in high precision, and this recipe does not apply to them.
    reason = "not packed; it stays in high precision"
    others = [Decision(site=s.matmul, kind="packed", rule="packed", reason=reason) for s in find_sites(program)]
    reports = _to_training(program, recipe, options.name) if options.training else _to_inference(program, recipe)
    return program, [*reports, *(SiteReport(decision=each) for each in others)], [_NOTE] if options.training else []


def _to_training(program: Program, recipe: Recipe, where: str) -> list[SiteReport]:
    """Makes every parameter that is not packed trainable; returns a report of each packed matmul.

    `program` may be a result of this function, for another format of gradients, which is the recipe's `fp8_format`.
    """
    reports: list[SiteReport] = []
    suspects: list[Node] = []
    for node in list(program.module.graph.nodes):
        call = internals.arguments(node)
        # No op both quantizes the rows of grouped experts and passes gradients to them. With unquantized rows,
        # grouped_gemm passes gradients itself.
        if node.target is _MXFP8.grouped_gemm.default and call["a_scales"] is not None:
            what = f"node {node.name!r}: experts are chosen at run time for quantized activations"
            expected = "experts whose weights alone are quantized, to pass gradients on"
            advice = "pack the original with activations: unchanged for them, or with training=True"
            raise ContractError(where, what, expected=expected, advice=advice)
        if node.target is _MXFP8.conv.default:
            what = f"node {node.name!r}: a packed convolution passes no gradients on"
            advice = "pack the original with convolutions: false, or with training=True"
            raise ContractError(where, what, expected="convolutions in high precision", advice=advice)
        if node.target is _MXFP8.gemm.default and (a := _quantized(call["a"])) is not None:
            suspects += node.all_input_nodes
            _pass_gradients(node, call, internals.arguments(a))
        if node.target in _TRAINED:
            settings = {**node.kwargs, "fp8_format": recipe.fp8_format}
            if node.target is _TRAINED[1]:
                settings = {**node.kwargs, "grad_format": "e5m2" if recipe.fp8_format == "HYBRID" else "e4m3"}
            node.kwargs = internals.unusual(node.target, settings)
            record.mark(node, recipe)
        reports += _report(node, call, "its packed weight is frozen, gradients pass through it")
    prune(program, suspects, set())
    # A training run without a parameter would fail much later, in the optimizer.
    program.ask_for_gradients(True)
    used = {program.stored_name(node) for node in program.scopes[0].placeholders if node.users}
    if not any(isinstance(program.state.get(name or ""), torch.nn.Parameter) for name in used):
        what = "there is nothing to train: every weight is kept in MXFP8 only"
        expected = "parameters beside the packed weights, such as adapters, normalizations or biases"
        advice = "rewrite the original program with training=True, or add adapters before exporting it"
        raise ContractError(where, what, expected=expected, advice=advice)
    return reports


def _to_inference(program: Program, recipe: Recipe) -> list[SiteReport]:
    """Reverts `_to_training`, with the trained values; returns a report of each packed matmul."""
    shared: Shared = {}
    writes = 0
    reports: list[SiteReport] = []
    for node in list(program.module.graph.nodes):
        if node.target in _TRAINED:
            _quantize_operands(node, internals.arguments(node), Builder(program, node, shared), writes)
            record.mark(node, recipe)
        reports += _report(node, internals.arguments(node), "its weight was packed before")
        # An in-place op may change an activation, so a quantize before it cannot be shared with matmuls after it.
        writes += bool(internals.written(node))
    program.ask_for_gradients(False)
    return reports


def _quantized(operand: Any) -> Node | None:
    """Returns the quantize node that made an operand of a gemm, or None."""
    source = operand.args[0] if isinstance(operand, Node) and operand.target is operator.getitem else None
    return source if isinstance(source, Node) and source.target is _MXFP8.quantize.default else None


def _pass_gradients(node: Node, call: Mapping[str, Any], a: Mapping[str, Any]) -> None:
    """Replaces a gemm of quantized operands by the op that quantizes them itself and passes gradients to them."""
    # A quantized b is an activation too: the gemm is a product of attention and has no weight.
    x, b = a["x"], _quantized(call["b"])
    settings = {"a_format": call["a_format"], "b_format": call["b_format"], "scale_rounding": a["scale_rounding"]}
    dtype = call["dtype"] or torch.float32
    # The training ops give the dtype of x by default, gemm gives float32.
    if dtype != x.meta["val"].dtype:
        settings["dtype"] = dtype
    node.target = _TRAINED[0] if b is None else _TRAINED[1]
    node.args = (x, call["b"], call["b_scales"], call["bias"]) if b is None else (x, internals.argument(b, "x"))
    node.kwargs = internals.unusual(node.target, settings)


def _quantize_operands(node: Node, call: Mapping[str, Any], build: Builder, epoch: int) -> None:
    """Replaces a `linear_packed` or a `product` by a gemm behind nodes that quantize its operands."""
    rounding, packed = call["scale_rounding"], node.target is _TRAINED[0]
    x = call["x" if packed else "a"]
    dtype = call["dtype"] or x.meta["val"].dtype
    operands = build.quantize(x, call["a_format"], rounding, epoch)
    if packed:
        operands += [call["b"], call["b_scales"], call["bias"]]
    else:
        operands += build.quantize(call["b"], call["b_format"], rounding, epoch)
    settings = {"a_format": call["a_format"], "b_format": call["b_format"]}
    node.target = _MXFP8.gemm.default
    node.args = tuple(operands)
    node.kwargs = internals.unusual(node.target, {**settings, "dtype": None if dtype == torch.float32 else dtype})


def _report(node: Node, call: Mapping[str, Any], reason: str) -> list[SiteReport]:
    """Returns the report of a packed matmul, or an empty list for other nodes."""
    op = contract.TORCH_OPS.get(internals.op_name(node))
    if op is None or not op.multiplies or op.weight is None or _quantized(call["b"]) is not None:
        return []
    x, b = node.all_input_nodes[0], call["b"]
    m, n, k = eligibility.sizes(x.meta["val"].shape, b.meta["val"].shape)
    site = MatMulSite(
        name=node.name,
        op=op.full_name,
        module=internals.module_path(node),
        m=m,
        n=n,
        k=k,
        dtype=dtype_name(node.meta["val"].dtype),
        has_bias=call.get("bias") is not None,
    )
    return [
        SiteReport(decision=Decision(site=site, kind="quantized", rule="packed", reason=reason), nodes=(node.name,))
    ]
