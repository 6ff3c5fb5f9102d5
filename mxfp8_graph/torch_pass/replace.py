"""Applies decisions for inference: packs the weights and puts the new nodes where the matmuls were.

    linear(x, w, b)     -> gemm(quantize(x), packed w, b)         one quantize per activation, shared
    linear(x, w, b)     -> weight_gemm(x, packed w, b)            weight_only
    matmul(q, k^T)      -> gemm(quantize(q), quantize(k))
    matmul(w, x)        -> clone(transpose(gemm(quantize(transpose(x)), packed w)))
    bmm(x, w[ids])      -> gemm(quantize(x), packed w[ids])       a quarter of the bytes to move
    grouped_mm(x, w, e) -> grouped_gemm(quantize(x), packed w, e)

A matmul's node is retargeted in place: its name, its users, its metadata and whatever the program's signature says
about it stay true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Node

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.provenance import Made
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass import torchao_weights
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.prune import prune
from mxfp8_graph.torch_pass.site import Operand, TorchSite, identity
from mxfp8_graph.torch_pass.static_operands import Static
from mxfp8_graph.torch_program import internals, record
from mxfp8_graph.torch_program.program import Program, Scope
from mxfp8_graph.torch_program.values import rows_of, storage_of
from mxfp8_graph.weights import pack
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

_ATEN: Final = torch.ops.aten

Names = tuple[str, str, float | None]
"""Of the buffers with a weight's elements and scales; and the relative L2 error, where it is known."""


class Editor:
    """Rewrites one program: `apply` each site in graph order, then `finish` once."""

    def __init__(self, program: Program, made: Made, *, allow_nonfinite: bool) -> None:
        self._program = program
        self._made = made
        self._allow_nonfinite = allow_nonfinite
        self._packed: dict[tuple[object, ...], Names] = {}
        self._biases: dict[tuple[object, ...], str] = {}
        self._shared: dict[Scope, dict[tuple[object, ...], list[Node]]] = {}
        self._epochs: dict[Node, int] = {}
        self._suspects: list[Node] = []
        self._sources: set[object] = set()
        """Storages of the tensors that were packed."""

    def apply(self, site: TorchSite, decision: Decision) -> SiteReport:
        """Packs the site's weight, puts the new nodes in, and returns what became of it.

        Raises:
            ContractError: the weight cannot be read, or holds a NaN or Inf.
        """
        x, w = site.x, site.w
        assert x is not None
        assert w is not None
        build = Builder(self._program, site.node, self._shared.setdefault(site.scope, {}))
        self._suspects += [*site.node.all_input_nodes, *site.output.all_input_nodes]
        epoch = self._epoch(site.node)
        activation = build.permute(x.node, x.perm)
        inputs = [activation]
        if not decision.weight_only:
            inputs = build.quantize(activation, decision.activation_format, decision.scale_rounding, epoch)
        packed = None
        if w.static is not None:
            packed = self._pack(site, decision, w.static, w.transposed)
            inputs += [self._weight(site, name, w.static.gather) for name in packed[:2]]
        else:
            other = build.permute(w.node, w.perm)
            inputs += build.quantize(other, decision.weight_format, decision.scale_rounding, epoch)
        inputs += self._bias(site, build)
        self._put(site, decision, inputs, build)
        return SiteReport(
            decision=decision,
            nodes=tuple(node.name for node in [*build.new, site.output]),
            packed=packed[0] if packed else None,
            bytes_before=w.static.byte_size if w.static else 0,
            bytes_after=_packed_bytes(w),
            relative_l2=packed[2] if packed else None,
        )

    def finish(self) -> None:
        """Removes what nothing uses any more."""
        prune(self._program, self._suspects, self._sources)

    def _put(self, site: TorchSite, decision: Decision, inputs: Sequence[Node], build: Builder) -> None:
        """Makes the site's node the gemm, or the last of the steps that must follow it."""
        result = site.output.meta["val"]
        settings: dict[str, Any] = {"b_format": decision.weight_format}
        arguments: list[Any] = list(inputs)
        usual = torch.float32
        if decision.weight_only:
            target, usual = torch.ops.mxfp8.weight_gemm.default, inputs[0].meta["val"].dtype
        else:
            target = torch.ops.mxfp8.gemm.default
            settings["a_format"] = decision.activation_format
        if site.offs is not None:
            target = torch.ops.mxfp8.grouped_gemm.default
            arguments = [inputs[0], None if decision.weight_only else inputs[1], *inputs[-2:], site.offs]
        if result.dtype != usual:
            settings["dtype"] = result.dtype
        settings = internals.unusual(target, settings)
        steps = self._epilogue(site, build)
        if not steps:
            self._retarget(site.output, target, tuple(arguments), settings, build)
        else:
            node = build.add(f"{site.node.name}_gemm", target, *arguments, **settings)
            record.mark(node, self._made)
            for name, op, arguments, keywords in steps[:-1]:
                node = build.add(f"{site.node.name}_{name}", op, node, *arguments, **keywords)
            _, op, arguments, keywords = steps[-1]
            self._retarget(site.output, op, (node, *arguments), keywords, build)
        if site.output is not site.node:
            site.node.graph.erase_node(site.node)

    def _retarget(
        self, node: Node, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], build: Builder
    ) -> None:
        value, expected = build.evaluate(target, arguments, keywords), node.meta["val"]
        if value.dtype != expected.dtype or value.dim() != expected.dim():
            raise ContractError(
                node.name,
                f"rewritten it gives {value.dtype} {list(value.shape)}",
                expected=f"{expected.dtype} {list(expected.shape)}",
                advice="exclude this node in the recipe and report it as a bug",
            )
        node.target, node.args, node.kwargs = target, arguments, keywords
        record.mark(node, self._made)

    def _epilogue(self, site: TorchSite, build: Builder) -> list[tuple[Any, ...]]:
        """Returns (name, op, arguments, keywords) of what must follow the gemm: the swap back, alpha, the addend."""
        steps: list[tuple[Any, ...]] = []
        if site.swapped:
            steps.append(("swapped", _ATEN.transpose.int, (-2, -1), {}))
            # A matmul's result lies in one piece, and the program may view it as such.
            steps.append(("contiguous", _ATEN.clone.default, (), {"memory_format": torch.contiguous_format}))
        if site.alpha != 1.0 and site.w is not None and site.w.static is None:
            steps.append(("scaled", _ATEN.mul.Tensor, (site.alpha,), {}))
        if site.addend is not None:
            addend = site.addend
            if site.beta != 1.0:
                addend = build.add(f"{site.node.name}_addend", _ATEN.mul.Tensor, addend, site.beta)
            steps.append(("added", _ATEN.add.Tensor, (addend,), {}))
        return steps

    def _pack(
        self, site: TorchSite, decision: Decision, static: Static, transposed: bool
    ) -> tuple[str, str, float | None]:
        """Returns (elements name, scales name, relative L2 error) of the packed weight; packs each weight once."""
        settings = (decision.weight_format, decision.scale_rounding, site.alpha, transposed)
        key = (*identity(self._program, static), repr(static.steps), *settings)
        if key not in self._packed and site.packed:
            self._packed[key] = self._take_over(static)
        if key not in self._packed:
            stored = self._program.tensor(static.name)
            self._sources.add(storage_of(stored))
            seen = static.apply(stored)
            rows, flipped = rows_of(seen, static.name, lambda at: _index(static, stored, at))
            result = pack(
                rows,
                transposed=transposed != flipped,
                factor=site.alpha,
                element_format=decision.weight_format,
                scale_rounding=decision.scale_rounding,
                name=static.name,
                allow_nonfinite=self._allow_nonfinite,
            )
            data = (torch.from_numpy(array).to(stored.device) for array in (result.elements, result.scales))
            self._packed[key] = (*self._store(static.name, *data), result.relative_l2)
        return self._packed[key]

    def _take_over(self, static: Static) -> Names:
        """Returns what `_pack` does for a weight that torchao packed: its own bytes, its error unknown."""
        weight = torchao_weights.unpacked(self._program.tensor(static.name))
        return (*self._store(static.name, weight.elements, weight.scales), None)

    def _store(self, name: str, elements: torch.Tensor, scales: torch.Tensor) -> tuple[str, str]:
        names = self._program.fresh(f"{name}_mxfp8"), self._program.fresh(f"{name}_mxfp8_scales")
        for new, data in zip(names, (elements, scales), strict=True):
            self._program.add_buffer(new, data)
        return names

    def _weight(self, site: TorchSite, name: str, gather: Node | None) -> Node:
        """Returns the node of a packed buffer, or of the entries of it that `gather` picks."""
        node = self._program.weight(site.scope, name)
        if gather is None:
            return node
        # Where the original is: what it picks by may be written to later on.
        return Builder(self._program, gather, self._shared[site.scope]).pick(node, gather)

    def _bias(self, site: TorchSite, build: Builder) -> list[Node]:
        """Returns the node of the float32 [N] bias times beta, if there is one."""
        if site.bias is None:
            return []
        value, n = site.bias.meta["val"], site.site.n
        if value.dtype == torch.float32 and value.dim() == 1 and value.shape[0] == n and site.beta == 1.0:
            return [site.bias]
        static = site.bias_static
        if static is None:
            return [build.add(f"{site.node.name}_bias", _ATEN._to_copy.default, site.bias, dtype=torch.float32)]
        key = (*identity(self._program, static), repr(static.steps), site.beta, n)
        if key not in self._biases:
            name = self._program.fresh(f"{static.name}_f32")
            values = static.apply(self._program.tensor(static.name)).float().reshape(-1) * np.float32(site.beta).item()
            self._program.add_buffer(name, values.expand(int(n or 0)).contiguous())
            self._biases[key] = name
        return [self._program.weight(site.scope, self._biases[key])]

    def _epoch(self, node: Node) -> int:
        """Returns how many in-place ops come before `node` in its graph."""
        if node not in self._epochs:
            count = 0
            for other in node.graph.nodes:
                self._epochs[other] = count
                count += bool(internals.written(other))
        return self._epochs[node]


def _index(static: Static, stored: torch.Tensor, at: tuple[int, ...]) -> list[int]:
    """Returns where in the stored tensor the value at `at` of the operand is."""
    positions = torch.arange(stored.numel()).reshape(stored.shape)
    casts = (_ATEN.to.dtype, _ATEN._to_copy.default)
    views = [step for step in static.steps if step[0] not in casts]
    for target, arguments, keywords in views:
        positions = target(positions, *arguments, **dict(keywords))
    return [int(i) for i in np.unravel_index(int(positions[at]), tuple(stored.shape))]


def _packed_bytes(w: Operand) -> int:
    if w.static is None:
        return 0
    *lead, rows, columns = w.static.shape
    n, k = (columns, rows) if w.transposed else (rows, columns)
    return math.prod(lead) * n * (k + -(-k // formats.BLOCK_SIZE))
