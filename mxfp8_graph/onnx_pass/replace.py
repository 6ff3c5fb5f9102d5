"""Applies decisions to the model: packs the weights and puts the new nodes where the matmuls were.

    MatMul(X, w)        -> MXFP8Gemm(MXFP8Quantize(X), packed w)      one Quantize per activation, shared
    MatMul(X, w)        -> MXFP8WeightGemm(X, packed w)               weight_only
    MatMul(X, w)        -> Cast(MXFP8WeightGemm(X, packed w))         weight_only, float16: see `_widened`
    MatMul(Q, K^T)      -> MXFP8Gemm(MXFP8Quantize(Q), MXFP8Quantize(K))
    MatMul(w, X)        -> Transpose(MXFP8Gemm(MXFP8Quantize(Transpose(X)), packed w))

Whatever is not named by a decision stays the very message it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from mxfp8_graph.onnx_model.open import Source, iter_graphs
from mxfp8_graph.onnx_model.sinks import Sink
from mxfp8_graph.onnx_model.tensor_data import read
from mxfp8_graph.onnx_pass.prune import prune
from mxfp8_graph.onnx_pass.site import OnnxSite, Operand, Scope
from mxfp8_graph.onnx_pass.static_operands import Static
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.weights import apply, open_rows, pack
from mxfp8_ops import contract, formats

Array = npt.NDArray[Any]


class Editor:
    """Rewrites one model: `apply` each site in graph order, then `finish` once."""

    def __init__(self, source: Source, sink: Sink, *, allow_nonfinite: bool) -> None:
        self._source = source
        self._sink = sink
        self._allow_nonfinite = allow_nonfinite
        self._names = {name for graph in iter_graphs(source.proto.graph) for name in _names(graph)}
        self._edits: dict[str, _ScopeEdit] = {}
        self._packed: dict[tuple[object, ...], tuple[str, str, float]] = {}
        self._suspects: set[str] = set()
        self._ops: set[str] = set()

    def apply(self, site: OnnxSite, decision: Decision) -> SiteReport:
        """Packs the site's weight, plans its new nodes, and returns what became of it.

        Raises:
            ContractError: the weight cannot be read, or holds a NaN or Inf.
        """
        edit = self._edits.setdefault(site.scope.path, _ScopeEdit(site.scope))
        build = _Builder(self, edit, site.index)
        node = site.scope.proto.node[site.index]
        inputs = [build.k_last(site.x)]
        if not decision.weight_only:
            inputs = build.quantize(inputs[0], decision.activation_format, decision.scale_rounding)
        packed = None
        if site.w.static is not None:
            packed = self._pack(site, decision, site.w.static)
            inputs += packed[:2]
        else:
            inputs += build.quantize(build.k_last(site.w), decision.weight_format, decision.scale_rounding)
        if site.bias is not None:
            inputs.append(self._bias(site, site.bias))

        op = contract.WEIGHT_GEMM if decision.weight_only else contract.GEMM
        dtype = contract.FLOAT if _widened(site, decision) else site.dtype
        epilogue = _epilogue(site, decision)
        output = self.fresh(f"{site.output}_gemm") if epilogue else site.output
        gemm = build.add(op.name, inputs, [output], name=node.name, domain=contract.DOMAIN, output_dtype=dtype)
        gemm.metadata_props.MergeFrom(node.metadata_props)
        gemm.doc_string = node.doc_string
        self._ops |= {op.name} if decision.weight_only else {op.name, contract.QUANTIZE.name}
        build.epilogue(output, epilogue, site)

        for index in (site.index, *([] if site.bias_index is None else [site.bias_index])):
            edit.gone.add(index)
            self._suspects.update(site.scope.proto.node[index].input)
            self._suspects.update(site.scope.proto.node[index].output)
        static = site.w.static
        return SiteReport(
            decision=decision,
            nodes=tuple(new.name for new in edit.new[site.index]),
            packed=packed[0] if packed else None,
            bytes_before=static.byte_size if static else 0,
            bytes_after=_packed_bytes(site.w) if static else 0,
            relative_l2=packed[2] if packed else None,
        )

    def finish(self) -> None:
        """Puts the new nodes in place, removes what nothing uses any more, and adds the function bodies."""
        from mxfp8_ops import onnx_functions

        model = self._source.proto
        # Inner graphs first: rebuilding an outer one copies what is inside.
        for edit in sorted(self._edits.values(), key=lambda e: -e.scope.depth):
            edit.rebuild()
        prune(self._source, self._suspects)
        if not any(entry.domain == contract.DOMAIN for entry in model.opset_import):
            model.opset_import.add(domain=contract.DOMAIN, version=contract.VERSION)
        model.functions.extend(onnx_functions.functions(self._source.opset, sorted(self._ops)))

    def fresh(self, wanted: str) -> str:
        """Returns `wanted`, or `wanted` with a number, that no tensor or node of the model is called."""
        name, count = wanted, 1
        while name in self._names:
            count += 1
            name = f"{wanted}_{count}"
        self._names.add(name)
        return name

    def _pack(self, site: OnnxSite, decision: Decision, static: Static) -> tuple[str, str, float]:
        """Returns (elements name, scales name, relative L2 error) of the packed weight; packs each weight once."""
        settings = (decision.weight_format, decision.scale_rounding, site.alpha, site.w.transposed)
        key = (id(static.owner), static.name, static.steps, *settings)
        if key not in self._packed:
            with open_rows(self._stored(static), static.steps, self._source.folder, self._source.name) as (rows, flip):
                result = pack(
                    rows,
                    transposed=site.w.transposed != flip,
                    factor=site.alpha,  # before rounding: alpha need not be a power of two
                    element_format=decision.weight_format,
                    scale_rounding=decision.scale_rounding,
                    name=static.name,
                    allow_nonfinite=self._allow_nonfinite,
                )
            names = self.fresh(f"{static.name}_mxfp8"), self.fresh(f"{static.name}_mxfp8_scales")
            dtypes = formats.element_format(decision.weight_format).onnx_dtype, contract.UINT8
            for name, dtype, data in zip(names, dtypes, (result.elements, result.scales), strict=True):
                self._sink.store(static.owner.initializer.add(name=name, data_type=dtype, dims=data.shape), data)
            self._packed[key] = (*names, result.relative_l2)
        return self._packed[key]

    def _bias(self, site: OnnxSite, static: Static) -> str:
        """Returns the name of a float32 [N] initializer that holds beta * bias."""
        n = static.shape[-1] if site.site.n is None else int(site.site.n)
        values = self._load(static).astype(np.float32).reshape(-1) * np.float32(site.beta)
        key = (id(static.owner), static.name, static.steps, "bias", site.beta, n)
        if key not in self._packed:
            # As it is, if it is an initializer: a Constant node may come only after the place of the gemm.
            plain = any(static.tensor is tensor for tensor in static.owner.initializer)
            plain = plain and static.tensor.data_type == contract.FLOAT and static.tensor.dims == [n]
            name = static.name
            if not plain or site.beta != 1.0 or any(step == "Cast" for step, _ in static.steps):
                name = self.fresh(f"{static.name}_f32")
                tensor = static.owner.initializer.add(name=name, data_type=contract.FLOAT, dims=[n])
                tensor.raw_data = np.broadcast_to(values, (n,)).astype("<f4").tobytes()
            self._packed[key] = (name, "", 0.0)
        return self._packed[key][0]

    def _load(self, static: Static) -> Array:
        return apply(static.steps, read(self._stored(static), self._source.folder, self._source.name))

    def _stored(self, static: Static) -> onnx.TensorProto:
        return self._source.tensors.get(static.name, static.tensor)


class _ScopeEdit:
    """What changes in one graph: new nodes by the index they precede, and indices that go away."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.new: dict[int, list[onnx.NodeProto]] = {}
        self.gone: set[int] = set()
        self.shared: dict[tuple[object, ...], list[str]] = {}
        """Outputs of Quantize and Transpose nodes, by what they compute."""

    def rebuild(self) -> None:
        """Applies the edit."""
        graph = self.scope.proto
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(graph.node):
            nodes.extend(self.new.get(index, ()))
            if index not in self.gone:
                nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)


class _Builder:
    """Adds nodes in front of one node of a graph, sharing those that other sites of the graph already added."""

    def __init__(self, editor: Editor, edit: _ScopeEdit, index: int) -> None:
        self._editor = editor
        self._edit = edit
        self._nodes = edit.new.setdefault(index, [])

    def add(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str, domain: str = "", **attributes: Any
    ) -> onnx.NodeProto:
        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        self._nodes.append(node)
        return node

    def k_last(self, operand: Operand) -> str:
        """Returns the operand's name with its axes permuted so that K is last."""
        if operand.perm is None:
            return operand.name
        key = ("Transpose", operand.name, operand.perm)
        if key not in self._edit.shared:
            output = self._editor.fresh(f"{operand.name}_k_last")
            self.add("Transpose", [operand.name], [output], name=output, perm=operand.perm)
            self._edit.shared[key] = [output]
        return self._edit.shared[key][0]

    def quantize(self, name: str, element_format: str, scale_rounding: str) -> list[str]:
        """Returns the names of the activation's elements and scales."""
        key = ("MXFP8Quantize", name, element_format, scale_rounding)
        if key not in self._edit.shared:
            outputs = [self._editor.fresh(f"{name}_mxfp8"), self._editor.fresh(f"{name}_mxfp8_scales")]
            attributes = {
                **contract.QUANTIZE.attributes,
                "output_dtype": formats.element_format(element_format).onnx_dtype,
                "scale_rounding": scale_rounding,
            }
            label = self._editor.fresh(f"{name}_mxfp8_quantize")
            self.add(contract.QUANTIZE.name, [name], outputs, name=label, domain=contract.DOMAIN, **attributes)
            self._edit.shared[key] = outputs
        return list(self._edit.shared[key])

    def epilogue(self, tensor: str, steps: Sequence[tuple[str, Any]], site: OnnxSite) -> None:
        """Adds the nodes of `_epilogue`, from `tensor` to the site's output."""
        for number, (op, argument) in enumerate(steps, 1):
            last = number == len(steps)
            output = site.output if last else self._editor.fresh(f"{site.output}_{op.lower()}")
            name = self._editor.fresh(f"{site.site.name}_{op.lower()}")
            if op == "Cast":
                self.add(op, [tensor], [output], name=name, to=argument)
            elif op == "Transpose":
                self.add(op, [tensor], [output], name=name, perm=argument)
            elif op == "Mul":
                self.add(op, [tensor, self._scalar(argument, site)], [output], name=name)
            else:
                addend, beta = argument
                if beta != 1.0:
                    scaled = self._editor.fresh(f"{addend}_scaled")
                    self.add("Mul", [addend, self._scalar(beta, site)], [scaled], name=scaled)
                    addend = scaled
                self.add(op, [tensor, addend], [output], name=name)
            tensor = output

    def _scalar(self, value: float, site: OnnxSite) -> str:
        name = self._editor.fresh(f"{site.site.name}_factor")
        tensor = helper.make_tensor(name, site.dtype, [], [value])
        self.add("Constant", [], [name], name=name, value=tensor)
        return name


def _widened(site: OnnxSite, decision: Decision) -> bool:
    """Whether the gemm gives float32, and a Cast its dtype.

    ONNX Runtime runs a float16 node between nodes that it has in float32 only in float32 too, but leaves its attributes
    alone: a node with float16 on both sides whose dtype is an attribute then fails to load.
    """
    return decision.weight_only and site.dtype == contract.FLOAT16


def _epilogue(site: OnnxSite, decision: Decision) -> list[tuple[str, Any]]:
    """Returns the ops that must follow the gemm: its dtype, the result swapped back, alpha and C where not absorbed."""
    steps: list[tuple[str, Any]] = []
    if _widened(site, decision):
        steps.append(("Cast", site.dtype))
    if site.swapped:
        rank = max(site.x.rank or 2, site.w.rank or 2)
        steps.append(("Transpose", (*range(rank - 2), rank - 1, rank - 2)))
    if site.alpha != 1.0 and site.w.static is None:
        steps.append(("Mul", site.alpha))
    if site.addend is not None:
        steps.append(("Add", (site.addend, site.beta)))
    return steps


def _packed_bytes(w: Operand) -> int:
    shape = w.static.shape if w.static else ()
    *lead, rows, columns = shape
    n, k = (columns, rows) if w.transposed else (rows, columns)
    return math.prod(lead) * n * (k + -(-k // formats.BLOCK_SIZE))


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields every tensor and node name of one graph."""
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (value.name for value in values)
    for node in graph.node:
        yield node.name
        yield from node.input
        yield from node.output
