"""Finds the matmuls of a program, and describes each as a `MatMulSite`.

Every form is read as the nodes compute it, Y [..., M, N] = X [..., M, K] @ W [..., N, K] transposed:

    linear(x, w [N, K], b)              the bias is absorbed
    matmul(x, w [K, N])                 W = w^T; likewise mm, bmm
    matmul(w [N, K], x)                 Y^T = X^T @ w^T: operands and result swapped
    addmm(c, x, w, beta, alpha)         c is absorbed if it is one value per column; likewise baddbmm
    add(matmul(x, w), b [N])            the bias is absorbed
    bmm(x, w [E, K, N][ids])            experts picked at run time: W's packed form is picked from instead
    grouped_mm(x, w [E, K, N], offs)    rows sorted by expert; offs says where each expert's rows end
    matmul(q, k^T), matmul(softmax, v)  both operands computed at run time
    conv1d, conv2d (x, w, b)            pixels times taps: see `convolutions.py`
    embedding(w [N, K], ids)            rows picked, nothing multiplied: see `ops.lookup_of`
    scaled_dot_product_attention        two sites, and one node until a recipe wants either quantized
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Node

from mxfp8_graph.naming import reserve_name
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Dim, MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_graph.torch_pass import attention, convolutions, internals, ops, torchao_weights
from mxfp8_graph.torch_pass.convolutions import Affine, Convolution, Floats
from mxfp8_graph.torch_pass.operands import Static, StaticOperands, identity
from mxfp8_graph.torch_pass.ops import Form, Lookup, Operand
from mxfp8_graph.torch_pass.program import GraphScope, Program
from mxfp8_ops.checks import dtype_name

_TRANSFORMED: Final = "inside vmap, which is not decomposed in the program; call run_decompositions({}) first"


@dataclass(frozen=True, kw_only=True)
class Addend:
    """The addition after the product, if there is one."""

    bias: Node | None = None
    """One value per column, absorbed into the gemm, times beta."""
    bias_static: Static | None = None
    """The bias, if its value is known."""
    addend: Node | None = None
    """An addend that the gemm cannot absorb: nodes of its own add it, times beta."""
    output: Node
    """Node whose value is the sum: the matmul, or the add after it."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A matmul, described for the plan. The two of an attention node are only this until `attention.expand`."""

    matmul: MatMulSite
    node: Node
    """The matmul; the nodes it needs go in front of it."""
    unfit: str | None
    """The reason why it stays even if a recipe asks for it, or None; the policy's own reasons come first."""


@dataclass(frozen=True, kw_only=True)
class TorchSite(Site):
    """A matmul with the operands and the addition that `replace.py` and `train.py` need to replace it."""

    form: Form
    x: Operand
    w: Operand
    swapped: bool
    """The gemm computes the transpose of the result."""
    added: Addend
    packed: str | None
    """Element format of the static operand, if torchao packed it."""
    affine: Affine | None = None
    """The steps behind a convolution; None for other sites."""

    @property
    def factor(self) -> float | Floats:
        """The factor of the weight, or one for each row of a matrix."""
        if self.affine is None or self.affine.factors is None or self.w.static is None:
            return self.form.alpha
        return np.repeat(self.affine.factors, self.w.static.shape[0] // self.affine.factors.size)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that the result replaces; the last one becomes the result."""
        if self.affine is not None:
            return (self.node, *self.affine.nodes)
        return (self.node,) if self.added.output is self.node else (self.node, self.added.output)

    @property
    def lookup(self) -> Lookup | None:
        """The form, if rows of a table are looked up and nothing is multiplied."""
        return self.form if isinstance(self.form, Lookup) else None


def find_sites(program: Program) -> list[Site]:
    """Returns every matmul of the program and its subgraphs, in graph order, each with its role or blocker."""
    return list(_Finder(program).sites())


class _Finder:
    """Describes the matmuls of one program, one after another."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._statics = statics = StaticOperands(program)
        self._roles: Roles[Node, Node] = Roles(ops.TorchView(program, statics), ops.ROLE_OPS)
        self._names: set[str] = set()
        nodes = [node for scope in program.scopes for node in scope.module.graph.nodes]
        self._forms = {node: form for node in nodes if (form := _form_of(node, statics))}
        # Counted before sites are described: each one reports how many others share its weight.
        weights = (statics.resolve(form.b) or statics.resolve(form.a) for form in self._forms.values())
        self._uses = Counter(identity(program, weight) for weight in weights if weight)

    def sites(self) -> Iterator[Site]:
        """Yields the sites in graph order."""
        for scope in self._program.scopes:
            nesting = 0
            for node in scope.module.graph.nodes:
                # Nodes inside of vmap see tensors without the mapped axis, so the run has other shapes.
                op = internals.op_name(node)
                nesting += op.endswith("_increment_nesting") - op.endswith("_decrement_nesting")
                transformed = _TRANSFORMED if nesting else None
                if ops.is_attention(node):
                    yield from self._attention(node, scope, transformed)
                elif isinstance(form := self._forms.get(node), Convolution):
                    yield self._convolution(node, form, scope, transformed)
                elif form is not None:
                    yield self._described(node, form, scope, transformed)

    def _attention(self, node: Node, scope: GraphScope, transformed: str | None) -> Iterator[Site]:
        """Yields the scores and the values product, under the names that `attention.expand` gives them."""
        query, key, value = (internals.argument(node, name).meta["val"] for name in ("query", "key", "value"))
        products: tuple[tuple[str, Role, tuple[Any, Any]], ...] = (
            (attention.scores_name(node), "attention_scores", (key.shape[-2], query.shape[-1])),
            (node.name, "attention_values", (value.shape[-1], key.shape[-2])),
        )
        for name, role, weight in products:
            # The sizes are known without splitting the node, so a plan costs no edit.
            m, n, k = eligibility.sizes(query.shape, weight)
            matmul = MatMulSite(
                name=reserve_name(name, self._names, "#"),
                op=internals.op_name(node),
                module=internals.module_path(node),
                subgraph=scope.path,
                role=role,
                m=m,
                n=n,
                k=k,
                dtype=dtype_name(query.dtype),
                blocker=scope.blocker or transformed,
            )
            yield Site(matmul=matmul, node=node, unfit=attention.obstacle(node))

    def _described(self, node: Node, form: Form, scope: GraphScope, transformed: str | None) -> TorchSite:
        """Returns the site of a matmul or of a lookup in a table."""
        lookup = form if isinstance(form, Lookup) else None
        if lookup:
            x, w, swapped = Operand(node=form.a), Operand(node=form.b, static=self._statics.resolve(form.b)), False
        else:
            x, w, swapped = ops.operands_of(form, self._statics)
        static = w.static
        m, n, k = eligibility.sizes([*x.shape, 1] if lookup else x.shape, w.shape)  # each id is a row
        added = Addend(output=node) if lookup else self._added(node, form, n, swapped)
        if static is None and form.alpha != 1.0 and added.bias is not None:  # alpha comes after the gemm, bias after it
            added = replace(added, bias=None, addend=added.bias)
        # Reports name the op of the user's program, and not the bmm that an einsum was decomposed into.
        op = self._program.labels.get(node, internals.op_name(node))
        if any(source.target == str(torch.ops.aten.einsum.default) for source in node.meta.get("from_node") or ()):
            op = "einsum"  # torch's record of decompositions
        dtype = dtype_name(static.dtype if static else (form.b if lookup else form.a).meta["val"].dtype)
        blocker = self._lookup_blocker(lookup, w, dtype) if lookup else self._blocker(node, form, x, w, dtype)
        matmul = MatMulSite(
            name=reserve_name(node.name, self._names, "#"),
            op={ops.LINEAR_TRAIN: "linear" if static else "matmul", ops.GROUPED_TRAIN: "_grouped_mm"}.get(op, op),
            module=internals.module_path(node),
            subgraph=scope.path,
            role="embedding" if lookup else self._role(node, static, scope),
            m=m,
            n=n,
            k=k,
            dtype=dtype,
            weight=static.name if static else None,
            weight_shape=k_last(static.shape, w.transposed) if static else (),
            weight_factor=form.alpha,
            weight_bytes=static.byte_size if static else 0,
            shared_with=self._uses[identity(self._program, static)] - 1 if static else 0,
            has_bias=added.bias is not None,
            blocker=scope.blocker or blocker or transformed,
        )
        packed, unfit = self._packed_by_torchao(w, swapped)
        return TorchSite(
            matmul=matmul, node=node, form=form, x=x, w=w, swapped=swapped, added=added, packed=packed, unfit=unfit
        )

    def _convolution(self, node: Node, form: Convolution, scope: GraphScope, transformed: str | None) -> TorchSite:
        """Returns the site of a convolution."""
        static, bias, y = self._statics.resolve(form.b), self._statics.resolve(form.c), node.meta["val"].shape
        dtype = dtype_name(static.dtype if static else form.a.meta["val"].dtype)
        blocker = form.blocker or eligibility.dtype_blocker(dtype, "cast the model first")
        shape: tuple[int, ...] = ()
        affine, plain = None, static
        if static is None or static.broadcast or static.gather is not None:
            blocker = blocker or self._weight_blocker(form.b) or "its weight is computed; expected a stored one"
            static = None
        elif not (blocker := blocker or eligibility.convolution_blocker(static.shape, form.group, False)):
            static, shape = convolutions.packed_weight(static)
            affine = convolutions.affine_behind(self._program, node, form, self._statics)
        if form.c is not None and bias is None:
            blocker = blocker or "its bias is computed; expected a stored one"
        n, k = (shape[0], math.prod(shape[1:])) if shape else (None, None)
        matmul = MatMulSite(
            name=reserve_name(node.name, self._names, "#"),
            op=internals.op_name(node),
            module=internals.module_path(node),
            subgraph=scope.path,
            role="convolution",
            m=eligibility.rows([*y[:1], *y[2:]]),
            n=n,
            k=k,
            dtype=dtype,
            weight=static.name if static else None,
            weight_shape=shape,
            weight_factor=math.nan if affine is not None and affine.factors is not None else 1.0,
            weight_bytes=static.byte_size if static else 0,
            shared_with=self._uses[identity(self._program, static)] - 1 if static else 0,
            has_bias=form.c is not None,
            blocker=scope.blocker or blocker or transformed,
        )
        perm = (0, *range(2, form.a.meta["val"].dim()), 1)  # blocks are along the channels
        x, w = Operand(node=form.a, perm=perm), Operand(node=form.b, static=static)
        packed, unfit = self._packed_by_torchao(replace(w, static=plain), False)
        unfit = unfit or ("torchao packed this weight for a matmul" if packed else None)
        added = Addend(output=affine.nodes[-1] if affine and affine.nodes else node)
        if affine is not None and not affine.nodes:
            added = replace(added, bias=form.c, bias_static=bias)
        return TorchSite(
            matmul=matmul, node=node, form=form, x=x, w=w, swapped=False, added=added, packed=packed, unfit=unfit,
            affine=affine,
        )  # fmt: skip

    def _role(self, node: Node, static: Static | None, scope: GraphScope) -> Role:
        if scope.blocker:  # the call outside passes its operands, so their origin is unknown here
            return "linear"
        return self._roles.of_linear(node) if static else self._roles.of_product(node)

    def _added(self, node: Node, form: Form, n: Dim, swapped: bool) -> Addend:
        """Returns the op's own addend or a static one of the add after it; as a bias where the gemm adds it exactly."""
        if form.c is not None:
            static, value = self._statics.resolve(form.c), form.c.meta["val"]
            # The columns of a swapped product are the rows of the result, so it cannot absorb a bias per column.
            if not swapped and static is not None and _is_bias(static, n, node):
                return Addend(bias=form.c, bias_static=static, output=node)
            if not swapped and value.dim() == 1 and value.shape[0] == n and form.beta == 1.0:
                return Addend(bias=form.c, output=node)
            return Addend(addend=form.c, output=node)
        alone, add = Addend(output=node), next(iter(node.users), None)
        # Another user needs the product without the addition.
        if add is None or len(node.users) != 1 or form.offs is not None or swapped:
            return alone
        if internals.op_name(add) not in {"add", "add_"} or len(add.args) < 2:
            return alone
        # A parameter that another module adds belongs to that module, and an alpha scales it.
        if internals.module_path(add) != internals.module_path(node) or internals.argument(add, "alpha", 1) != 1:
            return alone
        other = add.args[1] if add.args[0] is node else add.args[0]
        static = self._statics.resolve(other)
        if not isinstance(other, Node) or static is None or static.dtype != node.meta["val"].dtype:
            return alone
        return Addend(bias=other, bias_static=static, output=add) if _is_bias(static, n, node) else alone

    def _packed_by_torchao(self, w: Operand, swapped: bool) -> tuple[str | None, str | None]:
        """Returns (element format, reason against keeping its bytes) of a weight of torchao, or (None, None)."""
        static = w.static
        if static is None or not torchao_weights.is_mx(stored := self._program.tensor(static.name)):
            return None, None
        unfit = torchao_weights.obstacle(stored)
        # torchao's scales run along the last axis of the stored weight; a view may put another axis there.
        if static.steps or w.transposed or swapped or static.gather is not None:
            unfit = "torchao packed this weight, and a view of it is multiplied"
        return torchao_weights.element_format(stored), unfit

    def _blocker(self, node: Node, form: Form, x: Operand, w: Operand, dtype: str) -> str | None:
        """Returns the reason why no recipe can quantize a matmul, or None."""
        if self._statics.resolve(form.a) is not None and self._statics.resolve(form.b) is not None:
            return eligibility.BOTH_CONSTANT
        if reason := eligibility.dtype_blocker(dtype, "cast the model first"):
            return reason
        if form.offs is not None and (reason := _group_blocker(node, form, x, w)):
            return reason
        if w.static is None:
            reasons = filter(None, map(self._weight_blocker, (form.a, form.b)))
            return next(reasons, "an operand is a vector; expected matrices" if min(x.rank, w.rank) < 2 else None)
        activation = dtype_name(x.node.meta["val"].dtype)
        return (
            eligibility.weight_blocker(w.static.shape)
            or eligibility.dtype_blocker(activation, "cast it first", owner="the activation")
            or (_broadcast_blocker(node, form.a) if w.static.broadcast else None)
        )

    def _lookup_blocker(self, form: Lookup, w: Operand, dtype: str) -> str | None:
        return (
            form.unfit
            or (None if w.static else self._weight_blocker(w.node))
            or eligibility.weight_blocker(w.shape)
            or eligibility.dtype_blocker(dtype, "cast the model first")
        )

    def _weight_blocker(self, node: Node) -> str | None:
        """Returns the reason why a weight cannot be packed, or None if the operand is no weight."""
        if changed := self._statics.writer_of(node):
            return f"weight {changed[0]!r} is changed by {changed[1]} while the program runs; expected it fixed"
        if not self._statics.is_constant(node):
            return None
        # Decomposition turns torchao's weight into ops that dequantize it. Without this check the message would only
        # name a computed weight.
        if any(s.meta["val"].dtype == torch.float8_e8m0fnu for s in self._statics.stored_below(node)):
            return "torchao packed this weight, and the program was decomposed; rewrite before run_decompositions()"
        via = self._statics.source_of(node)
        return f"weight {node.name!r} is computed by {via}; expected a stored tensor behind views; fold it first"


def _form_of(node: Node, statics: StaticOperands) -> Form | None:
    return ops.form_of(node) or convolutions.form_of(node) or ops.lookup_of(node, statics)


def _is_bias(static: Static, n: Dim, node: Node) -> bool:
    return eligibility.is_bias(static.shape, dtype_name(static.dtype), n=n, rank=node.meta["val"].dim())


def _broadcast_blocker(node: Node, activation: Node) -> str | None:
    """Returns the reason why a weight that repeats along a batch cannot be packed, or None."""
    # As text: comparing symbolic sizes would add guards to the program.
    batch, result = (list(map(str, n.meta["val"].shape[:-1])) for n in (activation, node))
    if batch == result:
        return None
    return "the weight is repeated along a batch that the activation lacks; expand the result instead"


def _group_blocker(node: Node, form: Form, x: Operand, w: Operand) -> str | None:
    """Returns the reason why a matmul of groups of rows cannot be rewritten, or None."""
    if w.static is None:
        return "a grouped matmul whose weights are computed at run time; expected one stored stack [E, N, K]"
    if w.node is not form.b or x.rank != 2 or w.rank != 3 or w.static.gather is not None:
        return "a grouped matmul of another form; expected rows [S, K] times one stored stack of weights [E, N, K]"
    if internals.argument(node, "bias") is not None:
        return "a grouped matmul with a bias; expected the bias added after it"
    return None
