"""Makes the replacement of each site: the packed weight, and the new nodes for the place of the matmul.

    MatMul(X, w)        -> MXFP8Gemm(MXFP8Quantize(X), packed w)      one Quantize per activation, shared
    MatMul(X, w)        -> MXFP8WeightGemm(X, packed w)               activations bfloat16 or unchanged
    MatMul(X, w)        -> Cast(MXFP8WeightGemm(X, packed w))         the same, float16: see `weight_gemm_dtype`
    MatMul(Q, K^T)      -> MXFP8Gemm(MXFP8Quantize(Q), MXFP8Quantize(K))
    MatMul(X, Gather(w, i))  -> MXFP8GroupedGemm(MXFP8Quantize(X), packed w, i)    or MXFP8GroupedWeightGemm
    MatMul(w, X)        -> Transpose(MXFP8Gemm(MXFP8Quantize(Transpose(X)), packed w))
    Gather(w, ids)      -> MXFP8Embedding(ids, packed w)
    GatherND(w, ids)    -> MXFP8Embedding(Squeeze(ids), packed w)
    Conv(X, w, b)       -> MXFP8Conv(X, packed w, b)
    Conv(X, w, b)       -> Conv(X, Transpose(Cast(packed w) * scales), b)     weight-only: ONNX Runtime folds it
    ConvTranspose(X, w) -> DepthToSpace(one of these)      Reshape, Transpose, Reshape along one axis

All other nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.convolution_nodes import dequantized_weight, interleaved
from mxfp8_graph.onnx_pass.convolutions import Convolution
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.forms import EpilogueNode, Form, Lookup
from mxfp8_graph.onnx_pass.graph import dtype_of, fresh_names
from mxfp8_graph.onnx_pass.lazy_weights import LazyWeight, PackSettings
from mxfp8_graph.onnx_pass.operands import Operand, Picked
from mxfp8_graph.onnx_pass.ops import READERS
from mxfp8_graph.onnx_pass.replacement import Fresh, NewNodes, Replacement, insert, value_replacing
from mxfp8_graph.onnx_pass.views import Static, apply, layout_of
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.checkpoint_weights import StoredWeight
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.data import SiteReport
from mxfp8_ops import contract, formats
from mxfp8_ops.nodes.gemm import weight_gemm_dtype

_GEMMS: Final = {
    (False, False): contract.GEMM,
    (True, False): contract.WEIGHT_GEMM,
    (False, True): contract.GROUPED_GEMM,
    (True, True): contract.GROUPED_WEIGHT_GEMM,
}
"""The node for a product by whether it is weight-only, and whether its weights are picked from a stack."""


@dataclass(frozen=True)
class Replaced:
    """The nodes and the packed weight that replace a site."""

    decision: Decision
    replacement: Replacement
    weight: LazyWeight | None

    def report(self) -> SiteReport:
        """Returns the report of the site, with the error of its weight, which `LazyWeight.relative_l2` may pack."""
        nodes = tuple(str(node.name) for node in self.replacement.new)
        if self.weight is None:
            return SiteReport(decision=self.decision, nodes=nodes)
        return SiteReport(
            decision=self.decision,
            nodes=nodes,
            packed=self.weight.elements.name,
            bytes_after=self.weight.byte_size,
            relative_l2=self.weight.relative_l2,
        )


def insert_all(model: ir.Model, outcomes: Iterable[Replaced | Decision]) -> None:
    """Inserts what a `Replacer` of the model returned; removes what only replaced nodes used."""
    replacements = [each.replacement for each in outcomes if isinstance(each, Replaced)]
    insert(model, replacements, lambda node: node.op_type in READERS)


class Replacer:
    """Makes the replacements of the sites of one model, in graph order; the graph gets the packed weights at once."""

    def __init__(
        self,
        model: ir.Model,
        *,
        allow_nonfinite: bool,
        checkpoint_weights: Mapping[str, StoredWeight] | None = None,
        progress: Progress | None = None,
        shares: bool = True,
    ) -> None:
        """Makes a replacer.

        Args:
            model: the model of the sites.
            allow_nonfinite: see `mxfp8_graph.rewrite`.
            checkpoint_weights: weights that are packed already, by the name of the site.
            progress: called after each weight is packed, which is when the model is saved.
            shares: whether sites share quantized activations.
        """
        self._checkpoint_weights = checkpoint_weights or {}
        self._progress = progress
        self._bytes_done = 0
        self._bytes_in_all = 0
        self._allow_nonfinite = allow_nonfinite
        self.fresh: Final = fresh_names(model)
        """Returns a name like its argument that no value or node of the model has yet."""
        self._packed: dict[tuple[object, ...], tuple[LazyWeight, list[ir.Value]]] = {}
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}
        self._graph = model.graph
        self._shared: Shared | None = {} if shares else None

    def outcome(self, site: OnnxSite, decision: Decision) -> Replaced | Decision:
        """Returns the replacement of a site, whose weight is packed when the model is saved; a decision that keeps it
        as it is.
        """
        if not decision.quantize:
            return decision
        build = Builder(site, self.fresh, {} if self._shared is None else self._shared)
        node = _NODES[type(site.form)](site, decision, build)
        inputs = node.inputs
        weight = None
        static = site.w.static
        if static is not None:
            weight, tensors = self._pack(site, static, decision)
            inputs += tensors if node.operand is None else [node.operand(tensors, constant=self._constant)]
        else:
            inputs += build.quantize(build.k_last(site.w), decision.weight_format, decision.scale_rounding)
        if site.w.picked is not None:
            inputs.append(build.experts(site.w.picked))
        if site.added.bias is not None:
            inputs.append(self._bias(site, site.added.bias))
        if static is not None and site.affine is not None and site.affine.numbers is not None:
            dtype = ir.DataType(site.dtype if node.op is None else contract.FLOAT)
            name = self.fresh(f"{site.matmul.name}_bias")
            inputs.append(
                self._initializer(static, ir.tensor(site.affine.numbers.astype(dtype.numpy()), dtype, name=name))
            )
        self._result(site, decision, node, build)
        *before, last = build.nodes
        # In place of the product, where the activation is computed: other sites may share its quantized form.
        replacement = Replacement(node=last, before=tuple(before), gone=site.nodes, place=site.node)
        return Replaced(decision, replacement, weight)

    def _result(self, site: OnnxSite, decision: Decision, new: _New, build: Builder) -> None:
        """Adds the new node and the nodes behind it, for dtype, swap, alpha, C and activations."""
        dtype = weight_gemm_dtype(site.dtype) if new.takes_values else site.dtype
        if new.op is not None and (site.x.rank is None or (site.w.picked and site.w.picked.rank == 0)):
            # ONNX Runtime takes no dtype from a node whose shape is unknown, and assumes the first it may have. To the
            # node it shows a single index as a tensor of unknown rank.
            dtype = contract.FLOAT
        steps: list[EpilogueNode] = []
        # The cast first: the others compute in the site's dtype. The transpose next: C has the layout of the result.
        # Alpha before C, since the sum is alpha * a @ b + beta * c; activations see the sum.
        if dtype != site.dtype:
            steps.append(EpilogueNode(op="Cast", attributes={"to": site.dtype}))
        if site.swapped:
            perm = k_last(range(max(site.x.rank or 2, site.w.rank or 2)))
            steps.append(EpilogueNode(op="Transpose", attributes={"perm": perm}))
        if site.form.alpha != 1.0 and site.w.static is None:
            steps.append(EpilogueNode(op="Mul", inputs=(ir.tensor(site.form.alpha, ir.DataType(site.dtype)),)))
        if site.added.addend is not None:
            steps.append(EpilogueNode(op="Add", inputs=((site.added.addend, site.form.beta),)))
        steps += [*site.form.after, *site.added.after, *new.after]
        settings: dict[str, Any] = {**new.attributes}
        if new.op is not None:
            settings["output_dtype"] = dtype
        if new.op is not None and "activation_dtype" in new.op.attributes:
            settings["activation_dtype"] = formats.activation_dtype(decision.activation_dtype).onnx_dtype
        result = value_replacing(site.added.output)
        output = self.fresh(f"{result.name}_gemm") if steps else result
        op, domain = ("Conv", "") if new.op is None else (new.op.name, contract.DOMAIN)
        outputs = build.add(op, new.inputs, [output], name=site.node.name or "", domain=domain, **settings)
        gemm = build.nodes[-1]
        gemm.metadata_props.update(site.node.metadata_props)
        gemm.doc_string = site.node.doc_string
        build.epilogue(outputs, steps, result)

    def _pack(self, site: OnnxSite, static: Static, decision: Decision) -> tuple[LazyWeight, list[ir.Value]]:
        """Returns the site's packed weight, with its elements and scales; sites with equal bytes share one."""
        stored = self._checkpoint_weights.get(site.matmul.name)
        # The key has all that decides the bytes.
        layout = layout_of(static.tensor, static.steps, site.w.transposed)
        factor = site.factor  # before rounding: alpha need not be a power of two
        key_of_factor = factor if isinstance(factor, float) else factor.tobytes()
        how_packed = (decision.weight_format, decision.scale_rounding, key_of_factor, stored and stored.name)
        key = (static.value, *layout, *how_packed)
        if key not in self._packed:
            settings = PackSettings(
                transposed=site.w.transposed,
                factor=factor,
                element_format=decision.weight_format,
                scale_rounding=decision.scale_rounding,
                allow_nonfinite=self._allow_nonfinite,
            )
            size = site.matmul.weight_bytes
            self._bytes_in_all += size
            shape = site.matmul.weight_shape
            weight = LazyWeight(static, shape, settings, stored, lambda: self._tell(site.matmul.name, size))
            # Elements first, and `save` writes them first: a weight whose scales are read first is packed twice.
            for tensor, wanted in ((weight.elements, "mxfp8"), (weight.scales, "mxfp8_scales")):
                tensor.name = self.fresh(f"{static.name}_{wanted}")
            values = [self._initializer(static, tensor) for tensor in (weight.elements, weight.scales)]
            self._packed[key] = weight, values
        return self._packed[key]

    def _tell(self, site: str, size: int) -> None:
        self._bytes_done += size
        if self._progress is not None:
            self._progress(site, self._bytes_done, self._bytes_in_all)

    def _bias(self, site: OnnxSite, static: Static) -> ir.Value:
        """Returns a float32 [N] initializer that holds beta * bias."""
        n, beta = int(site.matmul.n or 0), site.form.beta  # a bias is absorbed only where N is known
        key = (static.value, static.steps, beta, n)
        if key not in self._biases:
            value, tensor = static.value, static.tensor
            # As it is, if it is an initializer: a Constant node may come only after the place of the gemm.
            plain = value.is_initializer() and tensor.dtype == contract.FLOAT and tensor.shape.numpy() == (n,)
            if not plain or beta != 1.0 or any(step == "Cast" for step, _ in static.steps):
                numbers = apply(static.steps, tensor.numpy()).astype(np.float32).reshape(-1) * np.float32(beta)
                name = self.fresh(f"{static.name}_f32")
                value = self._initializer(static, ir.tensor(np.broadcast_to(numbers, (n,)).copy(), name=name))
            self._biases[key] = value
        return self._biases[key]

    def _constant(self, wanted: str, values: Any) -> ir.Value:
        """Returns the initializer with these values, which subgraphs see as well."""
        if wanted not in self._constants:
            value = ir.Value(name=self.fresh(wanted))
            value.const_value = ir.tensor(values, name=value.name)
            self._graph.register_initializer(value)
            self._constants[wanted] = value
        return self._constants[wanted]

    def _initializer(self, static: Static, tensor: ir.TensorProtocol) -> ir.Value:
        """Returns a new initializer from `static`, in the graph of `static`."""
        # Not in the graph of the site: sites in several subgraphs may share a weight of an outer graph.
        value, graph = ir.Value(name=tensor.name, const_value=tensor), static.value.graph
        assert graph is not None  # until `insert` removes the value
        graph.register_initializer(value)
        return value


Shared = dict[tuple[object, ...], list[ir.Value]]
"""Outputs of nodes that several sites of a graph read, by the graph and the computation."""


class Builder(NewNodes):
    """The new nodes of a site, which uses those that other sites of the graph already added."""

    def __init__(self, site: OnnxSite, fresh: Fresh, shared: Shared) -> None:
        super().__init__(fresh)
        self.site, self.shared = site, shared

    def _once(self, key: tuple[object, ...], make: Callable[[], list[ir.Value]]) -> list[ir.Value]:
        """Returns the values that `make` adds, or those that another site of the graph added for the same key."""
        # By graph: a subgraph's values are not visible in another.
        key = (self.site.node.graph, *key)
        if key not in self.shared:
            self.shared[key] = make()
        return list(self.shared[key])

    def k_last(self, operand: Operand) -> ir.Value:
        """Returns the operand with its axes permuted, and merged, so that K is last."""
        value = operand.value
        if operand.perm is not None:
            value = self._view("Transpose", value, operand.perm, f"{value.name}_k_last")
        if operand.merged is not None:
            value = self._view("Reshape", value, operand.merged, f"{value.name}_merged")
        return value

    def _view(self, op: str, value: ir.Value, argument: tuple[int, ...], wanted: str) -> ir.Value:
        def make() -> list[ir.Value]:
            output = self.fresh(wanted)
            if op == "Transpose":
                return self.add(op, [value], [output], name=output, perm=argument)
            shape = self.constant(ir.tensor(argument, ir.DataType.INT64), f"{output}_shape")
            return self.add(op, [value, shape], [output], name=output)

        return self._once((op, value, argument), make)[0]

    def ids(self) -> ir.Value:
        """Returns the ids of a lookup, as [...]."""
        ids = self.site.x.value
        if self.site.node.op_type != "GatherND":
            return ids

        def make() -> list[ir.Value]:
            output = self.fresh(f"{ids.name}_squeezed")
            last = self.constant(ir.tensor([-1], ir.DataType.INT64), f"{ids.name}_last")
            return self.add("Squeeze", [ids, last], [output], name=output)

        return self._once(("Squeeze", ids), make)[0]

    def quantize(self, value: ir.Value, element_format: str, scale_rounding: str) -> list[ir.Value]:
        """Returns the activation's elements and scales."""

        def make() -> list[ir.Value]:
            outputs = [self.fresh(f"{value.name}_mxfp8"), self.fresh(f"{value.name}_mxfp8_scales")]
            dtype = formats.element_format(element_format).onnx_dtype
            attributes = {**contract.QUANTIZE.attributes, "output_dtype": dtype, "scale_rounding": scale_rounding}
            label = self.fresh(f"{value.name}_mxfp8_quantize")
            return self.add(contract.QUANTIZE.name, [value], outputs, name=label, domain=contract.DOMAIN, **attributes)

        return self._once((contract.QUANTIZE.name, value, element_format, scale_rounding), make)

    def experts(self, picked: Picked) -> ir.Value:
        """Returns the int64 indices that pick the matrices of a weight."""

        def make() -> list[ir.Value]:
            value = picked.index
            for op, axes in picked.index_steps:
                axes_name, name = self.fresh(f"{value.name}_axes"), self.fresh(f"{value.name}_{op.lower()}")
                (at,) = self.add("Constant", [], [axes_name], name=axes_name, value_ints=axes)
                (value,) = self.add(op, [value, at], [name], name=name)
            if dtype_of(picked.index) != contract.INT64:
                value = self.result("Cast", value, wanted=f"{value.name}_int64", to=contract.INT64)
            return [value]

        return self._once(("experts", picked.index, picked.index_steps), make)[0]

    def epilogue(self, values: Sequence[ir.Value], steps: Sequence[EpilogueNode], result: ir.Value) -> None:
        """Adds these steps after the gemm's results `values`; the last of them computes `result`."""
        for number, step in enumerate(steps, 1):
            wanted = f"{result.name}_{step.op.lower()}"
            outputs = [result] if number == len(steps) else [self.fresh(wanted) for _ in range(step.outputs)]
            name = self.fresh(f"{self.site.matmul.name}_{step.op.lower()}")
            inputs = [*values, *map(self._input, step.inputs)]
            # ONNX leaves out absent inputs at the end.
            while inputs[-1] is None:
                inputs.pop()
            values = self.add(step.op, inputs, outputs, name=name, domain=step.domain, **step.attributes)

    def _input(self, entry: ir.Value | ir.TensorProtocol | tuple[ir.Value, float] | None) -> ir.Value | None:
        """Returns an entry of `EpilogueNode.inputs` as a value."""
        if entry is None or isinstance(entry, ir.Value):
            return entry
        if not isinstance(entry, tuple):
            return self.constant(entry, f"{self.site.matmul.name}_{'sizes' if len(entry.shape) else 'factor'}")
        value, factor = entry
        if factor == 1.0:
            return value
        scaled = self.fresh(f"{value.name}_scaled")
        number = self.constant(ir.tensor(factor, ir.DataType(self.site.dtype)), f"{self.site.matmul.name}_factor")
        return self.add("Mul", [value, number], [scaled], name=scaled)[0]


class _New(NamedTuple):
    """The node that replaces a site's."""

    op: contract.Op | None
    """None for the site's own op, with a dequantized weight."""
    inputs: list[ir.Value]
    """The inputs before the weight; `Replacer` adds the others."""
    takes_values: bool = False
    """Whether the first input is not quantized, and the node is one of ours."""
    attributes: Mapping[str, Any] = MappingProxyType({})
    operand: Callable[..., ir.Value] | None = None
    """`dequantized_weight`, which makes the weight of elements and scales; None if the node takes these."""
    after: tuple[EpilogueNode, ...] = ()
    """Further steps behind the node."""


def _product(site: OnnxSite, decision: Decision, build: Builder) -> _New:
    op = _GEMMS[decision.weight_only, site.w.picked is not None]
    x = build.k_last(site.x)
    if decision.activation_format is None:
        return _New(op, [x], takes_values=decision.weight_only)
    return _New(op, build.quantize(x, decision.activation_format, decision.scale_rounding))


def _lookup(site: OnnxSite, decision: Decision, build: Builder) -> _New:
    return _New(contract.EMBEDDING, [build.ids()])


def _convolution(site: OnnxSite, decision: Decision, build: Builder) -> _New:
    form = site.form
    assert isinstance(form, Convolution)
    window = {name: getattr(form, name) for name in ("strides", "pads", "dilations", "group")}
    shape = site.matmul.weight_shape
    inputs, after = [site.x.value], interleaved(form, shape[0])
    if decision.activation_format is None:
        of_format = partial(dequantized_weight, build, element_format=decision.weight_format, dtype=site.dtype)
        operand = partial(of_format, shape=shape)
        return _New(None, inputs, attributes=window, operand=operand, after=after)
    x_dtype = formats.element_format(decision.activation_format).onnx_dtype
    quantizes = {"x_dtype": x_dtype, "scale_rounding": decision.scale_rounding}
    defaults = {name: value for name, value in contract.CONV.attributes.items() if name != "output_dtype"}
    return _New(contract.CONV, inputs, takes_values=True, attributes=defaults | window | quantizes, after=after)


_NODES: Final[Mapping[type[Form], Callable[[OnnxSite, Decision, Builder], _New]]] = {
    Form: _product,
    Lookup: _lookup,
    Convolution: _convolution,
}
"""Form -> the function that makes its node."""
