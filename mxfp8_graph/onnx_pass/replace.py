"""Applies decisions to the model: packs the weights and puts the new nodes where the matmuls were.

    MatMul(X, w)        -> MXFP8Gemm(MXFP8Quantize(X), packed w)      one Quantize per activation, shared
    MatMul(X, w)        -> MXFP8WeightGemm(X, packed w)               activations bfloat16 or unchanged
    MatMul(X, w)        -> Cast(MXFP8WeightGemm(X, packed w))         the same, float16: see `weight_gemm_dtype`
    MatMul(Q, K^T)      -> MXFP8Gemm(MXFP8Quantize(Q), MXFP8Quantize(K))
    MatMul(X, Gather(w, i))  -> MXFP8GroupedGemm(MXFP8Quantize(X), packed w, i)    or MXFP8GroupedWeightGemm, alike
    MatMul(w, X)        -> Transpose(MXFP8Gemm(MXFP8Quantize(Transpose(X)), packed w))
    Gather(w, ids)      -> MXFP8Embedding(ids, packed w)
    GatherND(w, ids)    -> MXFP8Embedding(Squeeze(ids), packed w)

Whatever is not named by a decision stays the very message it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np
import onnx

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.tensor_data import byte_length, read
from mxfp8_graph.onnx_model.walk import iter_graphs
from mxfp8_graph.onnx_model.write import Target
from mxfp8_graph.onnx_pass.build import Builder, ScopeEdit
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.form import Step
from mxfp8_graph.onnx_pass.prune import prune
from mxfp8_graph.onnx_pass.static_operands import Static
from mxfp8_graph.onnx_pass.weight_rows import apply, layout_of, open_rows
from mxfp8_graph.options import StoredWeight
from mxfp8_graph.pass_steps import PackedNames, replaced
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.weights import Packed, Rows, pack, packed_bytes, take
from mxfp8_ops import contract, formats, onnx_functions

_GEMMS: Final = {
    (False, False): contract.GEMM,
    (True, False): contract.WEIGHT_GEMM,
    (False, True): contract.GROUPED_GEMM,
    (True, True): contract.GROUPED_WEIGHT_GEMM,
}
"""The node for a product by whether it is weight-only, and whether its weights are picked from a stack."""


def bytes_after(opened: OpenedModel, sites: Sequence[OnnxSite], decisions: Sequence[Decision]) -> int:
    """Returns how many bytes the result takes, without its new nodes and weights that something else uses too."""
    packed: dict[tuple[object, ...], int] = {}
    replaced: dict[int, int] = {}
    kept: set[int] = set()
    for site, decision in zip(sites, decisions, strict=True):
        if (static := site.w.static) is None:
            continue
        if decision.quantize:
            packed[_key(site, static, decision)] = packed_bytes(static.shape, transposed=site.w.transposed)
            replaced[id(static.tensor)] = byte_length(static.tensor)
        else:
            kept.add(id(static.tensor))
    gone = sum(size for tensor, size in replaced.items() if tensor not in kept)
    return opened.byte_size - gone + sum(packed.values())


class Editor:
    """Rewrites one model: `apply` each site in graph order, then `finish` once."""

    def __init__(
        self,
        opened: OpenedModel,
        target: Target,
        *,
        allow_nonfinite: bool,
        sizes_only: bool = False,
        given: Mapping[str, StoredWeight] | None = None,
    ) -> None:
        """Makes an editor.

        Args:
            opened: the model.
            target: where tensors go.
            allow_nonfinite: see `mxfp8_graph.rewrite`.
            sizes_only: pack nothing: new weights get names, dims and dtypes, as a dry run needs them.
            given: weights that are packed already, by the name of the site.
        """
        self._given = given or {}
        self.made_from: dict[str, tuple[int, str]] = {}
        """Tensors that were added: id of the graph that held what each was made of, and its name there."""
        self._sizes_only = sizes_only
        self._opened = opened
        self._target = target
        self._allow_nonfinite = allow_nonfinite
        self._names = {name for graph in iter_graphs(opened.proto.graph) for name in _names(graph)}
        self._edits: dict[str, ScopeEdit] = {}
        self._packed: dict[tuple[object, ...], PackedNames] = {}
        self._biases: dict[tuple[object, ...], str] = {}
        self._suspects: set[str] = set()
        """What the replaced nodes read and made, and nothing may use any more."""

    def apply(self, site: OnnxSite, decision: Decision) -> SiteReport:
        """Packs the site's weight, plans its new nodes, and returns the report of the site; errors as `pack`."""
        edit = self._edits.setdefault(site.scope.path, ScopeEdit(site.scope))
        build = Builder(edit, site.index, self.fresh)
        inputs = [build.ids(site.lookup) if site.lookup else build.k_last(site.x)]
        if decision.activation_format is not None and site.lookup is None:
            inputs = build.quantize(inputs[0], decision.activation_format, decision.scale_rounding)
        packed = None
        if (static := site.w.static) is not None:
            packed = self._pack(site, static, decision)
            inputs += [packed.elements, packed.scales]
        else:
            inputs += build.quantize(build.k_last(site.w), decision.weight_format, decision.scale_rounding)
        if site.w.picked is not None:
            inputs.append(build.experts(site.w.picked))
        if site.added.bias is not None:
            inputs.append(self._bias(site, site.added.bias))
        self._put(site, decision, inputs, build)
        gone = {site.index} if site.added.index is None else {site.index, site.added.index}
        edit.gone |= gone
        for index in gone:
            self._suspects.update(site.scope.proto.node[index].input)
            self._suspects.update(site.scope.proto.node[index].output)
        return replaced(decision, [node.name for node in build.new], packed)

    def finish(self) -> None:
        """Puts the new nodes in place, and removes what nothing uses any more."""
        # Inner graphs first: rebuilding an outer one copies what is inside.
        for edit in sorted(self._edits.values(), key=lambda e: -e.scope.depth):
            edit.rebuild()
        prune(self._opened, self._suspects)

    def fresh(self, wanted: str) -> str:
        """Returns `wanted`, or `wanted` with a number, that no tensor or node of the model is called."""
        return take_name(wanted, self._names)

    def _put(self, site: OnnxSite, decision: Decision, inputs: Sequence[str], build: Builder) -> None:
        """Adds the gemm, and after it what it cannot do: its dtype, the swap back, alpha and C where not absorbed."""
        node = site.scope.proto.node[site.index]
        op = contract.EMBEDDING if site.lookup else _GEMMS[decision.weight_only, site.w.picked is not None]
        takes_values = decision.weight_only and site.lookup is None
        dtype = onnx_functions.weight_gemm_dtype(site.dtype) if takes_values else site.dtype
        if site.x.rank is None or (site.w.picked and site.w.picked.rank == 0):
            # ONNX Runtime takes no dtype from a node whose shape is unknown, and assumes the first it may have. To the
            # node it shows a single index as a tensor of unknown rank.
            dtype = contract.FLOAT
        steps: list[Step] = []
        if dtype != site.dtype:
            steps.append(Step(op="Cast", attributes={"to": site.dtype}))
        if site.swapped:
            perm = k_last(range(max(site.x.rank or 2, site.w.rank or 2)))
            steps.append(Step(op="Transpose", attributes={"perm": perm}))
        if site.form.alpha != 1.0 and site.w.static is None:
            alpha = onnx.helper.make_tensor("", site.dtype, [], [site.form.alpha])
            steps.append(Step(op="Mul", inputs=(alpha,)))
        if site.added.addend is not None:
            steps.append(Step(op="Add", inputs=((site.added.addend, site.form.beta),)))
        steps += [*site.form.after, *site.added.after]
        output = self.fresh(f"{site.added.output}_gemm") if steps else site.added.output
        settings = {"output_dtype": dtype}
        if takes_values:
            settings["activation_dtype"] = formats.activation_dtype(decision.activation_dtype).onnx_dtype
        gemm = build.add(op.name, inputs, [output], name=node.name, domain=contract.DOMAIN, **settings)
        gemm.metadata_props.MergeFrom(node.metadata_props)
        if node.doc_string:
            gemm.doc_string = node.doc_string
        build.epilogue(site, output, steps)

    def _pack(self, site: OnnxSite, static: Static, decision: Decision) -> PackedNames:
        """Returns the site's packed weight; packs each weight once."""
        given = self._given.get(site.matmul.name)
        key = (*_key(site, static, decision), given and given.name)
        if key not in self._packed:
            result = self._result(site, static, decision, given)
            names = self.fresh(f"{static.name}_mxfp8"), self.fresh(f"{static.name}_mxfp8_scales")
            dtypes = formats.element_format(decision.weight_format).onnx_dtype, contract.UINT8
            for name, dtype, data in zip(names, dtypes, (result.elements, result.scales), strict=True):
                tensor = static.owner.initializer.add(name=name, data_type=dtype, dims=data.shape)
                self.made_from[name] = (id(static.owner), static.name)
                if not self._sizes_only:
                    self._target.store(tensor, data)
            self._packed[key] = PackedNames(*names, result.byte_size, None if given else result.relative_l2)
        return self._packed[key]

    def _result(self, site: OnnxSite, static: Static, decision: Decision, given: StoredWeight | None) -> Packed:
        if given is not None and not self._sizes_only:
            return take(given, allow_nonfinite=self._allow_nonfinite)
        with self._rows(static) as (rows, flipped):
            return pack(
                rows,
                transposed=site.w.transposed != flipped,
                factor=site.form.alpha,  # before rounding: alpha need not be a power of two
                element_format=decision.weight_format,
                scale_rounding=decision.scale_rounding,
                name=static.name,
                allow_nonfinite=self._allow_nonfinite,
            )

    def _bias(self, site: OnnxSite, static: Static) -> str:
        """Returns the name of a float32 [N] initializer that holds beta * bias."""
        n, beta = int(site.matmul.n or 0), site.form.beta  # a bias is absorbed only where N is known
        key = (id(static.owner), static.name, static.steps, beta, n)
        if key not in self._biases:
            # As it is, if it is an initializer: a Constant node may come only after the place of the gemm.
            plain = any(static.tensor is tensor for tensor in static.owner.initializer)
            plain = plain and static.tensor.data_type == contract.FLOAT and static.tensor.dims == [n]
            name = static.name
            if not plain or beta != 1.0 or any(step == "Cast" for step, _ in static.steps):
                name = self.fresh(f"{static.name}_f32")
                self.made_from[name] = (id(static.owner), static.name)
                stored = read(self._stored(static), self._opened.folder, self._opened.name)
                values = apply(static.steps, stored).astype(np.float32).reshape(-1) * np.float32(beta)
                tensor = static.owner.initializer.add(name=name, data_type=contract.FLOAT, dims=[n])
                tensor.raw_data = np.broadcast_to(values, (n,)).astype("<f4").tobytes()
            self._biases[key] = name
        return self._biases[key]

    def _rows(self, static: Static) -> AbstractContextManager[tuple[Rows, bool]]:
        """Returns what `open_rows` yields for a weight."""
        if self._sizes_only:
            return nullcontext((Rows(shape=static.shape), False))
        return open_rows(self._stored(static), static.steps, self._opened.folder, self._opened.name)

    def _stored(self, static: Static) -> onnx.TensorProto:
        return self._opened.tensors.get(static.name, static.tensor)


def _key(site: OnnxSite, static: Static, decision: Decision) -> tuple[object, ...]:
    """Returns what sites that can share one packed weight have in common."""
    layout = layout_of(static.tensor, static.steps, site.w.transposed)
    return (id(static.owner), static.name, *layout, decision.weight_format, decision.scale_rounding, site.form.alpha)


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields every tensor and node name of one graph."""
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (value.name for value in values)
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
