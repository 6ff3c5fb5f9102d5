"""Applies decisions to the model: packs the weights and puts the new nodes where the matmuls were.

    MatMul(X, w)        -> MXFP8Gemm(MXFP8Quantize(X), packed w)      one Quantize per activation, shared
    MatMul(X, w)        -> MXFP8WeightGemm(X, packed w)               activations bfloat16 or unchanged
    MatMul(X, w)        -> Cast(MXFP8WeightGemm(X, packed w))         the same, float16: see `weight_gemm_dtype`
    MatMul(Q, K^T)      -> MXFP8Gemm(MXFP8Quantize(Q), MXFP8Quantize(K))
    MatMul(X, Gather(w, i))  -> MXFP8GroupedGemm(MXFP8Quantize(X), packed w, i)    or MXFP8GroupedWeightGemm
    MatMul(w, X)        -> Transpose(MXFP8Gemm(MXFP8Quantize(Transpose(X)), packed w))
    Gather(w, ids)      -> MXFP8Embedding(ids, packed w)
    GatherND(w, ids)    -> MXFP8Embedding(Squeeze(ids), packed w)

All other nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.forms import EpilogueNode, Form, Lookup
from mxfp8_graph.onnx_pass.graph import dtype_of, fresh_names, remove, remove_unused, settings_of
from mxfp8_graph.onnx_pass.operands import Operand, Picked
from mxfp8_graph.onnx_pass.ops import READERS
from mxfp8_graph.onnx_pass.views import Static, apply, layout_of
from mxfp8_graph.onnx_pass.weights import PackedWeight, PackSettings
from mxfp8_graph.options import Progress, StoredWeight
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
    nodes: tuple[str, ...]
    weight: PackedWeight | None

    def report(self) -> SiteReport:
        """Returns the report of the site, with the error of its weight, which `PackedWeight.relative_l2` may pack."""
        if self.weight is None:
            return SiteReport(decision=self.decision, nodes=self.nodes)
        return SiteReport(
            decision=self.decision,
            nodes=self.nodes,
            packed=self.weight.elements.name,
            bytes_after=self.weight.byte_size,
            relative_l2=self.weight.relative_l2,
        )


class Editor:
    """Rewrites one model: `apply` each site in graph order, then `finish` once."""

    def __init__(
        self,
        model: ir.Model,
        *,
        allow_nonfinite: bool,
        checkpoint_weights: Mapping[str, StoredWeight] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Makes an editor.

        Args:
            model: its graph is edited in place.
            allow_nonfinite: see `mxfp8_graph.rewrite`.
            checkpoint_weights: weights that are packed already, by the name of the site.
            progress: called after each weight is packed, which is when the model is saved.
        """
        self._checkpoint_weights = checkpoint_weights or {}
        self._progress = progress
        self._bytes_done = 0
        self._bytes_in_all = 0
        self._model = model
        self._allow_nonfinite = allow_nonfinite
        self.fresh: Final = fresh_names(model)
        """Returns a name like its argument that no value or node of the model has yet."""
        self._packed: dict[tuple[object, ...], tuple[PackedWeight, list[ir.Value]]] = {}
        self._biases: dict[tuple[object, ...], ir.Value] = {}
        self._shared: Shared = {}
        self._results: dict[ir.Value, ir.Value] = {}
        """Result of a replaced node -> its replacement. Later sites still refer to the old result."""
        self._suspects: list[ir.Value] = []
        """Inputs of replaced nodes, which perhaps nothing uses any more."""

    def apply(self, site: OnnxSite, decision: Decision) -> Replaced:
        """Replaces the site's node by ones with a weight that is packed when the model is saved."""
        build = Builder(site, self._shared, self._results, self.fresh)
        node = _NODES[type(site.form)](site, decision, build)
        inputs = node.inputs
        weight = None
        if (static := site.w.static) is not None:
            weight, tensors = self._pack(site, static, decision)
            inputs += tensors
        else:
            inputs += build.quantize(build.k_last(site.w), decision.weight_format, decision.scale_rounding)
        if site.w.picked is not None:
            inputs.append(build.experts(site.w.picked))
        if site.added.bias is not None:
            inputs.append(self._bias(site, site.added.bias))
        result = self._result(site, decision, node, build)
        names = tuple(str(node.name) for node in build.new)
        self._replace(site, result, build.new)
        return Replaced(decision, names, weight)

    def finish(self) -> None:
        """Removes inputs of replaced nodes that nothing uses any more."""
        remove_unused(self._model, self._suspects, lambda node: node.op_type in READERS)

    def _replace(self, site: OnnxSite, result: ir.Value, new: Sequence[ir.Node]) -> None:
        """Puts `result`, which `new` nodes compute, in the place of the site's result, and removes the old nodes."""
        self._stand_for(site.added.output, result)
        # The Add first, since it reads the product.
        for node in (site.added.node, site.node):
            if node is not None:
                self._suspects += remove(node)

    def _stand_for(self, old: ir.Value, result: ir.Value) -> None:
        """Replaces `old` by `result` for all users; `result` gets the type and the metadata of `old`."""
        self._results[old] = result
        result.type, result.shape, result.doc_string = old.type, old.shape, old.doc_string
        result.metadata_props.update(old.metadata_props)
        result.meta.update(old.meta)
        old.replace_all_uses_with(result, replace_graph_outputs=True)

    def _result(self, site: OnnxSite, decision: Decision, new: _New, build: Builder) -> ir.Value:
        """Returns the result of a new node and the nodes behind it, for dtype, swap, alpha, C and activations."""
        dtype = weight_gemm_dtype(site.dtype) if new.takes_values else site.dtype
        if site.x.rank is None or (site.w.picked and site.w.picked.rank == 0):
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
        steps += [*site.form.after, *site.added.after]
        result = str(site.added.output.name)
        settings = {"output_dtype": dtype}
        if new.takes_values:
            settings["activation_dtype"] = formats.activation_dtype(decision.activation_dtype).onnx_dtype
        output = self.fresh(f"{result}_gemm") if steps else result
        outputs = build.add(
            new.op.name, new.inputs, [output], name=site.node.name or "", domain=contract.DOMAIN, **settings
        )
        gemm = build.new[-1]
        gemm.metadata_props.update(site.node.metadata_props)
        gemm.doc_string = site.node.doc_string
        return build.epilogue(outputs, steps)

    def _pack(self, site: OnnxSite, static: Static, decision: Decision) -> tuple[PackedWeight, list[ir.Value]]:
        """Returns the site's packed weight, with its elements and scales; sites with equal bytes share one."""
        stored = self._checkpoint_weights.get(site.matmul.name)
        # The key has all that decides the bytes.
        layout = layout_of(static.tensor, static.steps, site.w.transposed)
        how_packed = (decision.weight_format, decision.scale_rounding, site.form.alpha, stored and stored.name)
        key = (static.value, *layout, *how_packed)
        if key not in self._packed:
            settings = PackSettings(
                transposed=site.w.transposed,
                factor=site.form.alpha,  # before rounding: alpha need not be a power of two
                element_format=decision.weight_format,
                scale_rounding=decision.scale_rounding,
                allow_nonfinite=self._allow_nonfinite,
            )
            size = site.matmul.weight_bytes
            self._bytes_in_all += size
            weight = PackedWeight(static, settings, stored, lambda: self._tell(site.matmul.name, size))
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

    def _initializer(self, static: Static, tensor: ir.TensorProtocol) -> ir.Value:
        """Returns a new initializer from `static`, in the graph of `static`."""
        # Not in the graph of the site: sites in several subgraphs may share a weight of an outer graph.
        value, graph = ir.Value(name=tensor.name, const_value=tensor), static.value.graph
        assert graph is not None  # until `finish` removes the value
        graph.register_initializer(value)
        return value


Shared = dict[tuple[object, ...], list[ir.Value]]
"""Outputs of nodes that several sites of a graph read, by the graph and the computation."""


@dataclass
class Builder:
    """Adds nodes in front of a site's, sharing those that other sites of the graph already added."""

    site: OnnxSite
    shared: Shared
    results: Mapping[ir.Value, ir.Value]
    """Result of a replaced node -> its replacement."""
    fresh: Callable[[str], str]
    """Returns a unique name."""
    new: list[ir.Node] = field(default_factory=list)

    def add(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[str],
        *,
        name: str,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Returns the outputs of a new node, in front of the site's."""
        now = [None if value is None else self.results.get(value, value) for value in inputs]
        values = [ir.Value(name=output) for output in outputs]
        node = ir.Node(domain, op, now, settings_of(attributes), outputs=values, name=name)
        self.site.node.prepend(node)
        self.new.append(node)
        return values

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
            shape = self._constant(ir.tensor(argument, ir.DataType.INT64), f"{output}_shape")
            return self.add(op, [value, shape], [output], name=output)

        return self._once((op, value, argument), make)[0]

    def ids(self) -> ir.Value:
        """Returns the ids of a lookup, as [...]."""
        ids = self.site.x.value
        if self.site.node.op_type != "GatherND":
            return ids

        def make() -> list[ir.Value]:
            output, last = self.fresh(f"{ids.name}_squeezed"), self.fresh(f"{ids.name}_last")
            axes = self.add("Constant", [], [last], name=last, value=ir.tensor([-1], ir.DataType.INT64, name=last))
            return self.add("Squeeze", [ids, *axes], [output], name=output)

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
                name = self.fresh(f"{value.name}_int64")
                (value,) = self.add("Cast", [value], [name], name=name, to=contract.INT64)
            return [value]

        return self._once(("experts", picked.index, picked.index_steps), make)[0]

    def epilogue(self, values: Sequence[ir.Value], steps: Sequence[EpilogueNode]) -> ir.Value:
        """Returns the site's result: the gemm's results `values` after these steps."""
        site, result = self.site, str(self.site.added.output.name)
        for number, step in enumerate(steps, 1):
            wanted = f"{result}_{step.op.lower()}"
            outputs = [result] if number == len(steps) else [self.fresh(wanted) for _ in range(step.outputs)]
            name = self.fresh(f"{site.matmul.name}_{step.op.lower()}")
            inputs = [*values, *map(self._input, step.inputs)]
            # ONNX leaves out absent inputs at the end.
            while inputs[-1] is None:
                inputs.pop()
            values = self.add(step.op, inputs, outputs, name=name, domain=step.domain, **step.attributes)
        return values[0]

    def _input(self, entry: ir.Value | ir.TensorProtocol | tuple[ir.Value, float] | None) -> ir.Value | None:
        """Returns an entry of `EpilogueNode.inputs` as a value."""
        if entry is None or isinstance(entry, ir.Value):
            return entry
        if not isinstance(entry, tuple):
            return self._constant(entry, f"{self.site.matmul.name}_{'sizes' if len(entry.shape) else 'factor'}")
        value, factor = entry
        if factor == 1.0:
            return value
        scaled = self.fresh(f"{value.name}_scaled")
        number = self._constant(ir.tensor(factor, ir.DataType(self.site.dtype)), f"{self.site.matmul.name}_factor")
        return self.add("Mul", [value, number], [scaled], name=scaled)[0]

    def _constant(self, tensor: ir.TensorProtocol, wanted: str) -> ir.Value:
        name = self.fresh(wanted)
        tensor.name = name
        return self.add("Constant", [], [name], name=name, value=tensor)[0]


class _New(NamedTuple):
    """The node that replaces a site's."""

    op: contract.Op
    inputs: list[ir.Value]
    """The inputs before the weight; `Editor.apply` adds the others."""
    takes_values: bool = False
    """Whether the first input is not quantized."""


def _product(site: OnnxSite, decision: Decision, build: Builder) -> _New:
    op = _GEMMS[decision.weight_only, site.w.picked is not None]
    x = build.k_last(site.x)
    if decision.activation_format is None:
        return _New(op, [x], takes_values=decision.weight_only)
    return _New(op, build.quantize(x, decision.activation_format, decision.scale_rounding))


def _lookup(site: OnnxSite, decision: Decision, build: Builder) -> _New:
    return _New(contract.EMBEDDING, [build.ids()])


_NODES: Final[Mapping[type[Form], Callable[[OnnxSite, Decision, Builder], _New]]] = {Form: _product, Lookup: _lookup}
"""Form -> the function that makes its node."""
