"""Finds the matmuls of an ONNX model with onnx-graphsurgeon and describes each as a `MatMulSite`.

Every form is read as the nodes compute it, Y [..., M, N] = X [..., M, K] @ W [..., N, K] transposed:

    MatMul(X, w [K, N])                 W = w^T
    MatMul(w [N, K], X)                 Y^T = X^T @ w^T: operands and result swapped
    Gemm(X, w, C), transA transB alpha beta
    Add(MatMul(X, w), b [N])            the bias is absorbed; likewise that of BiasGelu
    Einsum(X, w), equation              one operand permuted, axes merged: see `einsum.py`
    FusedMatMul, FusedGemm, Attention   ONNX Runtime's own ops: see `dense_forms.py`, `packed_attention.py`
    MatMul(X, Gather(w [E, K, N], i))   experts, picked while the model runs: see `picked.py`
    MatMul(Q, K^T), MatMul(softmax, V)  both operands computed at run time
    Gather(w [N, K], ids)               rows picked, nothing multiplied: see `embeddings.py`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx_graphsurgeon as gs

from mxfp8_graph.naming import take_name
from mxfp8_graph.onnx_model import graphsurgeon, onnx_calls
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_graph.onnx_model.walk import MICROSOFT, STANDARD, module_path, node_label, stored_in, subgraphs
from mxfp8_graph.onnx_pass.embeddings import Lookup, lookup_of
from mxfp8_graph.onnx_pass.experts import operands_with_experts, stack_of
from mxfp8_graph.onnx_pass.form import AS_IS, Form, Step
from mxfp8_graph.onnx_pass.matmul_forms import Operand, form_of
from mxfp8_graph.onnx_pass.picked import experts_blocker
from mxfp8_graph.onnx_pass.roles import ROLE_OPS, OnnxView
from mxfp8_graph.onnx_pass.static_operands import (
    QUANTIZED,
    VIEW_OPS,
    Static,
    StaticOperands,
    Stored,
    dtype_of,
    overridable,
)
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Dim, MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_ops.contract import VALUE_NAMES


@dataclass(frozen=True)
class Scope:
    """One graph of the model, seen by graphsurgeon and as the message itself."""

    path: str
    """Node and attribute names down to it, unique; "" is the main graph."""
    depth: int
    view: gs.Graph
    proto: onnx.GraphProto
    visible: Stored
    """Stored tensors of this graph and of those around it."""

    @cached_property
    def indices(self) -> Mapping[int, int]:
        """Where each node of `view`, by its id, is among the nodes of the graph."""
        return {id(node): index for index, node in enumerate(self.view.nodes)}


@dataclass(frozen=True, kw_only=True)
class Added:
    """What is added to the product."""

    bias: Static | None = None
    """Absorbed into the gemm, times beta."""
    index: int | None = None
    """Index of the Add node that the bias came from, which goes away."""
    addend: str | None = None
    """C where it cannot be absorbed: added by nodes of its own, times beta."""
    after: tuple[Step, ...] = ()
    """What the node that the bias came from does with the sum."""
    output: str
    """Name of the sum."""


@dataclass(frozen=True, kw_only=True)
class OnnxSite:
    """A matmul: what `plan` sees of it, and what `replace.py` needs to replace it."""

    matmul: MatMulSite
    scope: Scope
    index: int
    """Index of the node within `scope.proto.node`."""
    form: Form
    x: Operand
    w: Operand
    dtype: int
    """onnx.TensorProto.DataType of activations and result."""
    swapped: bool
    """The gemm computes the transpose of the result."""
    added: Added

    @property
    def lookup(self) -> Lookup | None:
        """The form, if rows of a table are looked up and nothing is multiplied."""
        return self.form if isinstance(self.form, Lookup) else None


def find_sites(opened: OpenedModel, inferred: onnx.ModelProto | None = None) -> list[OnnxSite]:
    """Returns every matmul of the model and its subgraphs, in graph order, each with its role or blocker.

    `inferred` is the model with every shape that onnx can infer; they are inferred if it is not passed.
    """
    hidden, graph = overridable(opened), opened.proto.graph
    visible = {name: stored for name, stored in _stored(graph).items() if name not in hidden}
    scopes = list(_scopes(Scope("", 0, _view(opened, inferred), graph, visible), set()))
    statics = StaticOperands(opened, [(scope.view, scope.visible) for scope in scopes])
    nodes = [(node, scope) for scope in scopes for node in scope.view.nodes]
    read = ((node, form_of(node, statics) or lookup_of(node, statics), scope) for node, scope in nodes)
    matmuls = [(node, form, scope) for node, form, scope in read if form]
    roles = Roles(OnnxView([scope.view for scope in scopes], statics), ROLE_OPS)
    finder = _Finder(statics, roles, [form for _, form, _ in matmuls])
    return [finder.describe(*matmul) for matmul in matmuls]


def _stored(graph: onnx.GraphProto) -> Stored:
    return {name: (graph, tensor) for name, tensor in stored_in(graph).items()}


def _view(opened: OpenedModel, inferred: onnx.ModelProto | None) -> gs.Graph:
    """Returns the skeleton in graphsurgeon, with every shape that onnx can infer."""
    inferred = inferred or onnx_calls.infer_shapes(opened.proto, opened.name, opened.notes)
    del inferred.functions[:]  # graphsurgeon would parse them; the pass needs only what is left in the graphs
    return graphsurgeon.view(inferred, opened.name)


def _scopes(scope: Scope, paths: set[str]) -> Iterator[Scope]:
    """Yields `scope` and every scope below it. Graphsurgeon keeps the order of nodes, so the two views run in step."""
    yield scope
    for gs_node, node in zip(scope.view.nodes, scope.proto.node, strict=True):
        for name, graph in subgraphs(node):
            inner = gs_node.attrs.get(name)
            if isinstance(inner, gs.Graph):
                steps = (scope.path, node_label(node), name)
                path = take_name("/".join(filter(None, steps)), paths, "#")
                visible = {**scope.visible, **_stored(graph)}
                yield from _scopes(Scope(path, scope.depth + 1, inner, graph, visible), paths)


class _Finder:
    """Describes the matmuls of one model, one after another."""

    def __init__(self, statics: StaticOperands, roles: Roles[gs.Node, gs.Tensor], forms: Sequence[Form]) -> None:
        """`forms`: those of all matmuls, to count how many use one weight."""
        self._statics = statics
        self._roles = roles
        self._names: set[str] = set()
        weights = (stack_of(form, statics) for form in forms)
        self._uses = Counter(id(weight.tensor) for weight in weights if weight)

    def describe(self, node: gs.Node, form: Form, scope: Scope) -> OnnxSite:
        """Returns the site of one matmul, or of one lookup in a table."""
        if isinstance(form, Lookup):
            return self._lookup(node, form, scope)
        x, w, swapped = operands_with_experts(form, self._statics)
        m, n, k = (None, None, None) if form.blocker else eligibility.sizes(x.shape, w.shape)
        dtype = w.static.dtype if w.static else dtype_of(form.a) or dtype_of(form.b)
        index = scope.indices[id(node)]
        output = node.outputs[0].name
        absorbed = None if swapped or w.picked else self._absorbed(node, form, scope, n, dtype)
        added = absorbed or Added(addend=None if form.c is None else form.c.name, output=output)
        matmul = MatMulSite(
            name=take_name(node.name or f"{node.op}_{output}", self._names, "#"),
            op=node.op,
            module=module_path(scope.proto.node[index]),
            subgraph=scope.path,
            role=self._role(node, form, w),
            m=m,
            n=n,
            k=k,
            dtype=_dtype_name(dtype),
            weight=w.static.name if w.static else None,
            weight_shape=k_last(w.static.shape, w.transposed) if w.static else (),
            weight_factor=form.alpha,
            weight_bytes=w.static.byte_size if w.static else 0,
            shared_with=self._uses[id(w.static.tensor)] - 1 if w.static else 0,
            has_bias=added.bias is not None,
            blocker=self._blocker(form, x, w, swapped, dtype) or _repeat_blocker(form, x, w, node.outputs[0]),
        )
        return OnnxSite(
            matmul=matmul, scope=scope, index=index, form=form, x=x, w=w, dtype=dtype, swapped=swapped, added=added
        )

    def _lookup(self, node: gs.Node, form: Lookup, scope: Scope) -> OnnxSite:
        static, output, index = self._statics.resolve(form.b), node.outputs[0].name, scope.indices[id(node)]
        shape = static.shape if static else form.b.shape
        dtype = static.dtype if static else dtype_of(form.b)
        unfit = form.blocker or (None if static else self._weight_blocker(form.b))
        site = MatMulSite(
            name=take_name(node.name or f"{node.op}_{output}", self._names, "#"),
            op=node.op,
            module=module_path(scope.proto.node[index]),
            subgraph=scope.path,
            role="embedding",
            m=None if form.ids.shape is None else eligibility.rows(form.ids.shape),
            n=eligibility.rows(shape[:1]),
            k=eligibility.rows(shape[1:]),
            dtype=_dtype_name(dtype),
            weight=static.name if static else None,
            weight_shape=static.shape if static else (),
            weight_bytes=static.byte_size if static else 0,
            shared_with=self._uses[id(static.tensor)] - 1 if static else 0,
            blocker=unfit or eligibility.dtype_blocker(_dtype_name(dtype), "cast the model first"),
        )
        return OnnxSite(
            matmul=site,
            scope=scope,
            index=index,
            form=form,
            x=form.ids,
            w=Operand(name=form.b.name, rank=2, shape=shape, static=static),
            dtype=dtype,
            swapped=False,
            added=Added(output=output),
        )

    def _role(self, node: gs.Node, form: Form, w: Operand) -> Role:
        if w.static is None:
            return self._roles.of_product(node.outputs[0])
        # What the op itself does with the product stands between it and whatever follows.
        passive = ROLE_OPS.views | ROLE_OPS.to_output
        return self._roles.of_linear(node.outputs[0]) if all(s.op in passive for s in form.after) else "linear"

    def _absorbed(self, node: gs.Node, form: Form, scope: Scope, n: Dim, dtype: int) -> Added | None:
        """Returns the op's own c, or the static operand of a following Add, if the gemm can add it exactly."""
        product = node.outputs[0]
        c, index, total = form.c, None, product
        after: tuple[Step, ...] = ()
        if c is None:
            add = product.outputs[0] if len(product.outputs) == 1 and form.absorbs_add else None
            returned = any(output is product for output in scope.view.outputs)
            if add is None or returned or id(add) not in scope.indices:
                return None
            if not _is_add(add) and not (_is_bias_gelu(add) and add.inputs[0] is product):
                return None
            after = (Step(op="Gelu"),) if _is_bias_gelu(add) else ()
            c = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
            index, total = scope.indices[id(add)], add.outputs[0]
        bias = self._statics.resolve(c)
        rank = form.rank or len(product.shape or (n,))
        if bias is None or bias.lead or bias.dtype != dtype or not isinstance(n, int):
            return None
        if not eligibility.is_bias(bias.shape, _dtype_name(bias.dtype), n=n, rank=rank):
            return None
        return Added(bias=bias, index=index, output=total.name, after=after)

    def _blocker(self, form: Form, x: Operand, w: Operand, swapped: bool, dtype: int) -> str | None:
        """Returns why a site cannot be rewritten whatever the recipe says, or None."""
        if w.static and self._statics.is_constant(form.a) and self._statics.is_constant(form.b):
            return eligibility.BOTH_CONSTANT
        if reason := form.blocker or _contradiction(form, x, w):
            return reason
        if reason := eligibility.dtype_blocker(_dtype_name(dtype), "cast the model or give it shape information"):
            return reason
        if w.static is None:
            reasons = filter(None, map(self._weight_blocker, (form.a, form.b)))
            unknown = x.rank is None or w.rank is None or min(x.rank, w.rank) < 2
            low = "an operand's rank is unknown or below 2; give the model shape information"
            return next(reasons, low if unknown else None)
        if reason := eligibility.weight_blocker(w.static.shape):
            return reason
        if w.picked and (x.rank is None or x.rank < 2):
            return "the activation's rank is unknown or below 2; give the model shape information"
        if x.rank is None and (x.transposed or swapped):
            return "the activation must be transposed and its rank is unknown; give the model shape information"
        return None

    def _weight_blocker(self, tensor: gs.Tensor) -> str | None:
        """Returns why an operand that is known before the model runs is no static operand, or None."""
        name = tensor.name
        if name in self._statics.overridable:
            return f"weight {name!r} is also a graph input that a caller may replace; remove it from the inputs"
        if self._statics.is_constant(tensor):
            via = self._statics.source_of(tensor)
            if via in QUANTIZED:
                return (
                    f"weight {name!r} is quantized already, by {via}, and would be rounded twice; rewrite the "
                    "model it was quantized from"
                )
            allowed = ", ".join(VIEW_OPS)
            return f"weight {name!r} comes through {via}; expected only {allowed}; fold the constants first"
        if reason := experts_blocker(tensor, self._statics):
            return reason
        if repeated := self._statics.repeated(tensor):
            return (
                f"weight {repeated!r} is repeated along dimensions that are not constant; expected constant ones; "
                "give the model shape information"
            )
        return None


def _contradiction(form: Form, x: Operand, w: Operand) -> str | None:
    """Returns how the operands of a matmul contradict each other, or None; a kept one fails as it did before."""
    for shape in (x.shape, w.shape):
        if form.rank is not None and shape is not None and len(shape) != form.rank:
            return f"an operand has rank {len(shape)}; expected {form.rank}; correct the model's shapes"
    k = [shape[-1] for shape in (x.shape, w.shape) if shape and isinstance(shape[-1], int) and shape[-1] >= 0]
    if len(set(k)) > 1:
        return f"the operands disagree on K, {k[0]} and {k[1]}; correct the model's shapes"
    return None


def _repeat_blocker(form: Form, x: Operand, w: Operand, result: gs.Tensor) -> str | None:
    """Returns why a weight cannot be packed that repeats along leading dimensions, or None if it can or does not."""
    if w.static is None or not w.static.lead:
        return None
    if form.a_view != AS_IS or form.b_view != AS_IS:
        return "the weight is repeated along a dimension, and its axes are permuted; expected only one of the two"
    batch, seen = (None if shape is None else list(shape[:-2]) for shape in (x.shape, result.shape))
    if batch is not None and None not in batch and batch == seen:
        return None
    return "the weight is repeated along a batch that the activation lacks; expand the result instead"


def _is_add(node: gs.Node) -> bool:
    return node.op == "Add" and node.domain in STANDARD


def _is_bias_gelu(node: gs.Node) -> bool:
    """Whether `node` is what ONNX Runtime makes of an Add and a Gelu."""
    return node.op == "BiasGelu" and node.domain == MICROSOFT and len(node.inputs) == 2


def _dtype_name(code: int) -> str | None:
    if code in VALUE_NAMES:
        return VALUE_NAMES[code]
    return onnx.TensorProto.DataType.Name(code).lower() if code else None
