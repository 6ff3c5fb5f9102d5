"""Replaces a matmul by a call, followed by calls for what the first one does not absorb.

A matmul's node is retargeted in place: its name, its users, its metadata and whatever the program's signature says
about it stay true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.provenance import RewriteRecord
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.find import TorchSite
from mxfp8_graph.torch_program import record
from mxfp8_ops.errors import ContractError

_ATEN: Final = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A call of an op, whose first argument is the result of the call before it."""

    name: str
    """Ending of the node's name."""
    op: Any
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


def put(site: TorchSite, gemm: Call, build: Builder, rewrite_record: RewriteRecord) -> None:
    """Turns the site's output node into the gemm, or into the last of the calls that must follow it."""
    output = site.added.output
    *calls, last = gemm, *_epilogue(site, build)
    before: tuple[Node, ...] = ()
    for call in calls:
        name = f"{site.node.name}_{call.name}"
        before = (build.add(name, call.op, *before, *call.arguments, **call.keywords),)
        if call is gemm:
            record.mark(before[0], rewrite_record)
    arguments = (*before, *last.arguments)
    # A last check, before the edit: every user of the node was traced with this dtype and rank.
    value, expected = build.evaluate(last.op, arguments, last.keywords), output.meta["val"]
    if value.dtype != expected.dtype or value.dim() != expected.dim():
        what = f"rewritten it gives {value.dtype} {list(value.shape)}"
        advice = "exclude this node in the recipe and report it as a bug"
        raise ContractError(output.name, what, expected=f"{expected.dtype} {list(expected.shape)}", advice=advice)
    output.target, output.args, output.kwargs = last.op, arguments, last.keywords
    if last is gemm:
        record.mark(output, rewrite_record)
    # The sum became the output, so the matmul itself has no user any more.
    if output is not site.node:
        site.node.graph.erase_node(site.node)


def _epilogue(site: TorchSite, build: Builder) -> list[Call]:
    """Returns the calls that must follow the gemm: a transpose, alpha and the addend where it does not absorb them."""
    calls: list[Call] = []
    form, addend = site.form, site.added.addend
    if site.swapped:
        calls.append(Call("swapped", _ATEN.transpose.int, (-2, -1)))
        # A matmul's result is contiguous, and the program may view it as such.
        calls.append(Call("contiguous", _ATEN.clone.default, (), {"memory_format": torch.contiguous_format}))
    # A static weight has alpha in its packed values already.
    if form.alpha != 1.0 and site.w.static is None:
        calls.append(Call("scaled", _ATEN.mul.Tensor, (form.alpha,)))
    if addend is not None:
        if form.beta != 1.0:
            addend = build.add(f"{site.node.name}_addend", _ATEN.mul.Tensor, addend, form.beta)
        calls.append(Call("added", _ATEN.add.Tensor, (addend,)))
    return calls
