"""Applies decisions for inference: packs the weights and puts the new nodes where the matmuls were.

linear(x, w, b)     -> gemm(quantize(x), packed w, b)         one quantize per activation, shared
linear(x, w, b)     -> weight_gemm(x, packed w, b)            activations bfloat16 or unchanged
matmul(q, k^T)      -> gemm(quantize(q), quantize(k))
matmul(w, x)        -> clone(transpose(gemm(quantize(transpose(x)), packed w)))
bmm(x, w[ids])      -> gemm(quantize(x), packed w[ids])       a quarter of the bytes to move
grouped_mm(x, w, e) -> grouped_gemm(quantize(x), packed w, e)
embedding(w, ids)   -> mxfp8.embedding(ids, packed w)
conv2d(x, w, b)     -> mxfp8.conv(x, packed w, b)             activations quantized
conv2d(x, w, b)     -> conv2d(x, permute(dequantize(packed w)), b)

A matmul's node is retargeted in place, so its name, users, metadata and entries in the program's signature stay valid.
After that, weights, biases and views of them without a user are removed, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch.fx import Node

from mxfp8_graph.options import Options, Progress
from mxfp8_graph.packing import Rows, checked_codes, pack
from mxfp8_graph.policy.checkpoint_weights import StoredWeight
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.torch_pass import internals, record, torchao_weights
from mxfp8_graph.torch_pass.build import Builder, Shared
from mxfp8_graph.torch_pass.convolutions import Convolution
from mxfp8_graph.torch_pass.find import TorchSite
from mxfp8_graph.torch_pass.operands import GATHERS, VIEW_OPS, Static, identity, layout_of, rows_of
from mxfp8_graph.torch_pass.program import Program, storage_of
from mxfp8_ops.errors import ContractError

_ATEN: Final = torch.ops.aten
AnySite = TypeVar("AnySite")


class PackedNames(NamedTuple):
    """A packed weight in the rewritten program: names and bytes of its buffers, and its rounding error if known."""

    elements: str
    scales: str
    byte_size: int
    relative_l2: float | None


class Editor:
    """Rewrites one program: `apply` each site in graph order, then `finish` once."""

    def __init__(
        self, program: Program, recipe: Recipe, options: Options, weights: Mapping[str, StoredWeight] | None = None
    ) -> None:
        """Makes an editor of `program` for one rewrite.

        On a dry run nothing is packed: new weights have a shape and no values. `weights` are the packed weights of a
        checkpoint, by the name of the site.
        """
        self._program = program
        self._recipe = recipe
        self._options = options
        self._stored_weights = weights or {}
        self._packed: dict[tuple[object, ...], PackedNames] = {}
        self._biases: dict[tuple[object, ...], str] = {}
        self._shared: Shared = {}
        nodes = list(program.module.graph.nodes)
        writes = itertools.accumulate((bool(internals.written(node)) for node in nodes), initial=0)
        self._epochs = dict(zip(nodes, writes, strict=False))
        """The number of in-place ops before each node."""
        self._suspects: list[Node] = []
        """Nodes that replaced nodes use; they may have no other user."""
        self._sources: set[object] = set()
        """Storages of the tensors that were packed."""

    def apply(self, site: TorchSite, decision: Decision) -> SiteReport:
        """Packs the site's weight, adds the new nodes, and returns the report of the site; raises as `pack`."""
        build = Builder(self._program, site.node, self._shared)
        self._suspects += [source for node in site.nodes for source in node.all_input_nodes if source not in site.nodes]
        epoch = self._epochs[site.node]
        inputs = [build.k_last(site.x) if site.affine is None else site.x.node]
        if decision.activation_format is not None and site.lookup is None and site.affine is None:
            inputs = build.quantize(inputs[0], decision.activation_format, decision.scale_rounding, epoch)
        elif decision.activation_dtype is not None and site.form.offs is not None:
            # grouped_gemm has no argument for the dtype of activations.
            inputs = [build.cast(inputs[0], getattr(torch, decision.activation_dtype))]
        packed = None
        if (static := site.w.static) is not None:
            packed = self._pack(site, static, decision)
            stored = [self._program.weight(name) for name in (packed.elements, packed.scales)]
            if static.gather is not None:
                # At the original pick, since a later op may write to its indices.
                picking = Builder(self._program, static.gather, self._shared)
                stored = [picking.pick(node, static.gather) for node in stored]
            inputs += stored
        else:
            inputs += build.quantize(build.k_last(site.w), decision.weight_format, decision.scale_rounding, epoch)
        if site.affine is not None and decision.weight_only and site.added.bias is not None:
            inputs.append(site.added.bias)  # the op stays, and takes its own bias
        else:
            inputs += self._bias(site, build)
        call = (
            _gemm(site, decision, inputs) if site.affine is None else self._convolution(site, decision, inputs, build)
        )
        retarget(site, call, build, self._recipe)
        nodes = tuple(node.name for node in [*build.new, site.added.output])
        if packed is None:
            return SiteReport(decision=decision, nodes=nodes)
        name, _, size, error = packed
        return SiteReport(decision=decision, nodes=nodes, packed=name, bytes_after=size, relative_l2=error)

    def finish(self) -> None:
        """Removes the nodes and tensors that have no user any more."""
        prune(self._program, self._suspects, self._sources)

    def _pack(self, site: TorchSite, static: Static, decision: Decision) -> PackedNames:
        """Returns the site's packed weight; packs each weight once."""
        stored_weight = self._stored_weights.get(site.matmul.name)
        factor = site.factor  # before rounding: alpha need not be a power of two
        # The key has all settings that change the bytes: sites that share a weight share its packed form only if these
        # are equal.
        settings = (
            decision.weight_format,
            decision.scale_rounding,
            factor if isinstance(factor, float) else factor.tobytes(),
            stored_weight and stored_weight.name,
        )
        stored = self._program.tensor(static.name)
        key = (*identity(self._program, static), *layout_of(static, stored, site.w.transposed), *settings)
        if key not in self._packed:
            elements, scales, error = self._codes(site, static, decision)
            if site.affine is not None:
                shape = site.matmul.weight_shape
                elements, scales = elements.reshape(shape), scales.reshape(*shape[:-1], -1)
            self._packed[key] = self._store(static.name, stored, (elements, scales, error))
        return self._packed[key]

    def _codes(self, site: TorchSite, static: Static, decision: Decision) -> tuple[Any, Any, float | None]:
        """Returns (elements, scales, the rounding error where it is known)."""
        stored, stored_weight = self._program.tensor(static.name), self._stored_weights.get(site.matmul.name)
        if site.packed:  # torchao kept no original weight, so the rounding error is unknown
            return *torchao_weights.unpacked(stored), None
        self._sources.add(storage_of(stored))
        if stored_weight is not None and not self._options.dry_run:
            codes = checked_codes(stored_weight, allow_nonfinite=self._options.allow_nonfinite)
            return np.array(codes.elements), np.array(codes.scales), None
        rows, flipped = (Rows(shape=static.shape), False) if self._options.dry_run else rows_of(static, stored)
        result = pack(
            replace(rows, name=static.name),
            # `rows_of` may have swapped the axes, to read rows that are contiguous in memory.
            transposed=site.w.transposed != flipped,
            factor=site.factor,
            element_format=decision.weight_format,
            scale_rounding=decision.scale_rounding,
            allow_nonfinite=self._options.allow_nonfinite,
        )
        return result.elements, result.scales, None if stored_weight else result.relative_l2

    def _store(self, name: str, weight: torch.Tensor, codes: tuple[Any, Any, float | None]) -> PackedNames:
        """Returns the names of two new buffers of the program, elements and scales of a packed weight."""
        # On the weight's own device, so that a program on a GPU runs without transfers.
        elements, scales = (torch.as_tensor(each).to(weight.device) for each in codes[:2])
        names = self._program.fresh(f"{name}_mxfp8"), self._program.fresh(f"{name}_mxfp8_scales")
        self._program.state |= dict(zip(names, (elements, scales), strict=True))
        return PackedNames(*names, elements.nbytes + scales.nbytes, codes[2])

    def _bias(self, site: TorchSite, build: Builder) -> list[Node]:
        """Returns the node of the float32 [N] bias times beta, if there is one."""
        node, static = site.added.bias, site.added.bias_static
        if node is None and site.affine is not None and site.affine.numbers is not None:
            module, dot, _ = str(site.matmul.weight).rpartition(".")
            name = self._program.fresh(f"{module}{dot}bias_f32")
            device = site.w.node.meta["val"].device
            self._program.state[name] = torch.from_numpy(site.affine.numbers).to(device)
            return [self._program.weight(name)]
        if node is None:
            return []
        value, n, beta = node.meta["val"], site.matmul.n, site.form.beta
        # A bias that already is as the gemm takes it stays a parameter under its name.
        if value.dtype == torch.float32 and value.dim() == 1 and value.shape[0] == n and beta == 1.0:
            return [node]
        # A bias that is computed at run time is converted in the program.
        if static is None:
            return [build.cast(node, torch.float32)]
        key = (*identity(self._program, static), repr(static.steps), beta, n)
        if key not in self._biases:
            name = self._program.fresh(f"{static.name}_f32")
            stored = self._program.tensor(static.name)
            # Converted once, here, and not in each run of the program.
            values = static.apply(stored).float().reshape(-1) * np.float32(beta).item()
            self._program.state[name] = values.expand(int(n or 0)).contiguous()
            self._biases[key] = name
        return [self._program.weight(self._biases[key])]

    def _convolution(self, site: TorchSite, decision: Decision, inputs: list[Node], build: Builder) -> Call:
        """Returns the call that convolves `inputs`: activation, elements, scales and perhaps a float32 bias."""
        form, dtype = site.form, site.added.output.meta["val"].dtype
        assert isinstance(form, Convolution)
        x, elements, scales, *bias = inputs
        if decision.activation_format is not None:
            settings: dict[str, Any] = {
                "b_format": decision.weight_format,
                "dtype": None if dtype == torch.float32 else dtype,
                # A single number stands for all, and may be the default.
                **{name: list(getattr(form, name)) for name in ("strides", "pads", "dilations")},
                "group": form.group,
                "x_format": decision.activation_format,
                "scale_rounding": decision.scale_rounding,
            }
            settings |= {k: v[:1] for k, v in settings.items() if isinstance(v, list) and len({*v}) == 1}
            op = torch.ops.mxfp8.conv.default
            return Call("conv", op, tuple(inputs), internals.unusual(op, settings))
        weight = build.dequantize(elements, scales, decision.weight_format, dtype)
        record.mark(weight, self._recipe)
        rank = len(site.matmul.weight_shape)
        arguments = {**internals.arguments(site.node), "input": x, "bias": build.cast(bias[0], dtype) if bias else None}
        arguments["weight"] = build.permute(weight, (0, rank - 1, *range(1, rank - 1)))
        return Call("conv", site.node.target, tuple(arguments.values()))


def _gemm(site: TorchSite, decision: Decision, inputs: list[Node]) -> Call:
    """Returns the call that multiplies `inputs`: activation, weight and bias, in the gemm's order and dtypes."""
    settings: dict[str, Any] = {"b_format": decision.weight_format}
    arguments: tuple[Any, ...] = tuple(inputs)
    if site.lookup:
        op, default_dtype = torch.ops.mxfp8.embedding.default, torch.float32
    elif decision.weight_only:
        op, default_dtype = torch.ops.mxfp8.weight_gemm.default, inputs[0].meta["val"].dtype
        if decision.activation_dtype is not None and site.form.offs is None:
            settings["activation_dtype"] = getattr(torch, decision.activation_dtype)
    else:
        op, default_dtype = torch.ops.mxfp8.gemm.default, torch.float32
        settings["a_format"] = decision.activation_format
    if site.form.offs is not None:
        op = torch.ops.mxfp8.grouped_gemm.default
        arguments = (inputs[0], None if decision.weight_only else inputs[1], *inputs[-2:], site.form.offs)
    dtype = site.added.output.meta["val"].dtype
    # Only what differs from the op's defaults: each keyword costs a call time, see `internals.unusual`.
    if dtype != default_dtype:
        settings["dtype"] = dtype
    return Call("gemm", op, arguments, internals.unusual(op, settings))


@dataclass(frozen=True)
class Call:
    """A call of an op, whose first argument is the result of the call before it."""

    name: str
    """Ending of the node's name."""
    op: Any
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


def retarget(site: TorchSite, gemm: Call, build: Builder, recipe: Recipe) -> None:
    """Turns the site's output node into the gemm, or into the last of the calls that must follow it."""
    output = site.added.output
    *calls, last = gemm, *_epilogue(site, build)
    added: list[Node] = []
    for call in calls:
        name = f"{site.node.name}_{call.name}"
        added.append(build.add(name, call.op, *added[-1:], *call.arguments, **call.keywords))
    arguments = (*added[-1:], *last.arguments)
    record.mark(added[0] if added else output, recipe)
    # A last check, before the edit: every user of the node was traced with this dtype and rank.
    value, expected = build.evaluate(last.op, arguments, last.keywords), output.meta["val"]
    if value.dtype != expected.dtype or value.dim() != expected.dim():
        what = f"its new form gives {value.dtype} {list(value.shape)}"
        advice = "exclude this node in the recipe and report it as a bug"
        raise ContractError(output.name, what, expected=f"{expected.dtype} {list(expected.shape)}", advice=advice)
    output.target, output.args, output.kwargs = last.op, arguments, last.keywords
    if site.affine is not None and (stack := site.node.meta.get("nn_module_stack")):
        output.meta["nn_module_stack"] = stack  # the weight belongs to the convolution, and not to a norm behind it
    # The new call replaces what is behind the matmul, which has no user any more.
    for node in reversed(site.nodes[:-1]):
        node.graph.erase_node(node)


def _epilogue(site: TorchSite, build: Builder) -> list[Call]:
    """Returns the calls that follow the gemm for a transpose, alpha or an addend that it cannot absorb."""
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


def prune(program: Program, suspects: Sequence[Node], sources: Set[object]) -> None:
    """Removes the nodes in `suspects` that nothing uses, and in turn what only they used.

    Dead code that was in the program before stays: only `suspects`, their inputs, and other names of the storages in
    `sources` may go. User inputs stay.
    """
    stack = list(suspects)
    gone: set[Node] = set()
    while stack:
        node = stack.pop()
        # A node is met again when its last user goes, since that pushes its inputs.
        if node in gone or node.users:
            continue
        gone.add(node)
        if node.op == "placeholder":
            if program.stored_name(node) is not None:
                program.forget(node)
        elif internals.op_name(node) in VIEW_OPS | GATHERS | {"mxfp8::quantize"}:
            stack += node.all_input_nodes
            node.graph.erase_node(node)
    for node in program.scopes[0].placeholders:  # export leaves one of a tied weight's two names unused
        name = None if node.users else program.stored_name(node)
        if name is not None and storage_of(program.tensor(name)) in sources:
            program.forget(node)


def replace_each(
    sites: Sequence[AnySite],
    decisions: Sequence[Decision],
    change: Callable[[AnySite, Decision], SiteReport],
    *,
    keep: Callable[[AnySite], None] | None = None,
    progress: Progress | None = None,
) -> list[SiteReport]:
    """Returns a report of each site: `change` is called for those that are rewritten, `keep` for the others."""
    total = sum(decision.site.weight_bytes for decision in decisions if decision.quantize)
    bytes_done = 0
    reports = []
    for site, decision in zip(sites, decisions, strict=True):
        if decision.quantize:
            reports.append(change(site, decision))
            bytes_done += decision.site.weight_bytes
            if progress is not None:
                progress(decision.site.name, bytes_done, total)
        else:
            if keep is not None:
                keep(site)
            reports.append(SiteReport(decision=decision))
    return reports
