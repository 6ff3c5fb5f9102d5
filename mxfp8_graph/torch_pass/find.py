"""Finds the matmuls of a program and describes each as a `MatMulSite`.

Every form is read as the nodes compute it, Y [..., M, N] = X [..., M, K] @ W [..., N, K] transposed:

    linear(x, w [N, K], b)              the bias is absorbed
    matmul(x, w [K, N])                 W = w^T; likewise mm, bmm
    matmul(w [N, K], x)                 Y^T = X^T @ w^T: operands and result swapped
    addmm(c, x, w, beta, alpha)         c is absorbed if it is one value per column; likewise baddbmm
    add(matmul(x, w), b [N])            the bias is absorbed
    bmm(x, w [E, K, N][ids])            experts picked at run time: W's packed form is picked from instead
    grouped_mm(x, w [E, K, N], offs)    rows sorted by expert; offs says where each expert's rows end
    matmul(q, k^T), matmul(softmax, v)  both operands computed at run time
    scaled_dot_product_attention        two sites, and one node until a recipe wants either quantized
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.fx import Node

from mxfp8_graph.naming import unique_name
from mxfp8_graph.policy.plan import Dim, MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_graph.torch_pass import attention, matmul_forms, torchao_weights
from mxfp8_graph.torch_pass.matmul_forms import Form
from mxfp8_graph.torch_pass.roles import ROLE_OPS, TorchView
from mxfp8_graph.torch_pass.site import Operand, TorchSite, identity, module_of
from mxfp8_graph.torch_pass.static_operands import Constants, Static, permutation
from mxfp8_graph.torch_program import internals
from mxfp8_graph.torch_program.program import Program, Scope
from mxfp8_graph.torch_program.values import DTYPE_NAMES, dtype_name

_TRANSFORMED: Final = "inside vmap, which the program still holds as such; call run_decompositions({}) first"


def find_sites(program: Program) -> list[TorchSite]:
    """Returns every matmul of the program and its subgraphs, in graph order, each with its role or blocker."""
    constants = Constants(program)
    roles = Roles(TorchView(program, constants), ROLE_OPS)
    found: list[TorchSite] = []
    names: set[str] = set()
    for scope in program.scopes:
        nesting = 0
        for node in scope.module.graph.nodes:
            nesting += internals.opens_transform(node) - internals.closes_transform(node)
            for site in _describe(node, program, scope, constants, roles):
                name = unique_name(site.site.name, names, "#")
                names.add(name)
                blocker = site.site.blocker or (_TRANSFORMED if nesting else None)
                found.append(replace(site, site=replace(site.site, name=name, blocker=blocker)))
    uses: dict[object, int] = {}
    keys = [identity(program, s.w.static) if s.w and s.w.static else None for s in found]
    for key in keys:
        uses[key] = uses.get(key, 0) + 1
    return [
        s if key is None else replace(s, site=replace(s.site, shared_with=uses[key] - 1))
        for s, key in zip(found, keys, strict=True)
    ]


def _describe(
    node: Node, program: Program, scope: Scope, constants: Constants, roles: Roles[Node, Node]
) -> Iterator[TorchSite]:
    if matmul_forms.is_attention(node):
        yield from _attention(node, scope)
        return
    form = matmul_forms.form_of(node)
    if form is None or not all(isinstance(n.meta.get("val"), torch.Tensor) for n in (form.a, form.b, node)):
        return
    site = _with_bias(_read(node, form, program, scope, constants), form, constants)
    w = site.w
    if w is not None and w.static and torchao_weights.is_mx(stored := program.tensor(w.static.name)):
        straight = not w.static.steps and not w.transposed and not site.swapped and w.static.gather is None
        unfit = (
            torchao_weights.obstacle(stored)
            if straight
            else "torchao packed this weight, and a view of it is multiplied"
        )
        site = replace(site, unfit=unfit, packed=torchao_weights.element_format(stored))
    role: Role = roles.of_linear(node) if site.site.weight else roles.of_product(node)
    blocker = scope.blocker or _blocker(site, form, constants)
    yield replace(site, site=replace(site.site, role=role, blocker=blocker, has_bias=site.bias is not None))


def _read(node: Node, form: Form, program: Program, scope: Scope, constants: Constants) -> TorchSite:
    """Returns which operand of a matmul is the weight, and its sizes; role, bias and blocker are still to come."""
    left, right = constants.resolve(form.a), constants.resolve(form.b)
    swapped = left is not None and right is None
    if swapped:
        x, w = _run_time(form.b, form.b_transposed), _operand(form.a, left, False)
    else:
        x = _run_time(form.a, False)
        w = _operand(form.b, right, form.b_transposed) if right else _run_time(form.b, form.b_transposed)
    m, n, k = _sizes(x, w)
    op = "einsum" if internals.is_from_einsum(node) else program.labels.get(node, internals.op_name(node))
    return TorchSite(
        site=MatMulSite(
            name=node.name,
            op="linear" if op == matmul_forms.LINEAR_TRAIN else op,
            module=module_of(node),
            subgraph=scope.path,
            dtype=dtype_name(w.static.dtype if w.static else form.a.meta["val"].dtype),
            weight=w.static.name if w.static else None,
            weight_bytes=w.static.byte_size if w.static else 0,
            m=m,
            n=n,
            k=k,
        ),
        scope=scope,
        node=node,
        output=node,
        x=x,
        w=w,
        swapped=swapped and x.rank != 1,  # matrix times vector gives a vector: nothing to swap back
        alpha=form.alpha,
        beta=form.beta,
        offs=form.offs,
    )


def _attention(node: Node, scope: Scope) -> Iterator[TorchSite]:
    """Yields the scores and the values product of an attention node, under the names `attention.expand` gives them."""
    query, key, value = (n.meta["val"] for n in node.args[:3])  # type: ignore[union-attr]
    roles: Sequence[tuple[str, Role, Any, Any]] = (
        (attention.scores_name(node), "attention_scores", key.shape[-2], query.shape[-1]),
        (node.name, "attention_values", value.shape[-1], key.shape[-2]),
    )
    for name, role, n, k in roles:
        site = MatMulSite(
            name=name,
            op=internals.op_name(node),
            module=module_of(node),
            subgraph=scope.path,
            role=role,
            m=_rows(query.shape[:-1]),
            n=_dim(n),
            k=_dim(k),
            dtype=dtype_name(query.dtype),
            blocker=scope.blocker,
        )
        yield TorchSite(site=site, scope=scope, node=node, output=node, unfit=attention.obstacle(node))


def _operand(node: Node, static: Static | None, transposed: bool) -> Operand:
    """Returns a static operand; leading dimensions of 1, or along which it repeats, fall away."""
    assert static is not None
    while len(static.shape) > 2 and static.shape[0] == 1 and static.gather is None:
        static = static.then(torch.ops.aten.squeeze.dim, 0, shape=static.shape[1:])
    return Operand(node=node, rank=len(static.shape), transposed=transposed, static=static)


def _run_time(node: Node, transposed: bool) -> Operand:
    """Returns an operand computed at run time. A transpose in front of it and the one it needs become one, or none."""
    rank = node.meta["val"].dim()
    if not transposed or rank < 2:
        return Operand(node=node, rank=rank)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    before = permutation(node, rank)
    if before is None:
        return Operand(node=node, rank=rank, transposed=True, perm=swap)
    perm = tuple(before[axis] for axis in swap)
    source = node.args[0]
    assert isinstance(source, Node)
    return Operand(node=source, rank=rank, transposed=True, perm=None if perm == tuple(range(rank)) else perm)


def _with_bias(site: TorchSite, form: Form, constants: Constants) -> TorchSite:
    """Returns `site` with c, or the static operand of a following add, absorbed where that is exact."""
    node, n = site.node, site.site.n
    rank = node.meta["val"].dim()
    if form.c is not None:
        static = constants.resolve(form.c)
        if not site.swapped and static is not None and _is_bias(static, n, rank):
            return replace(site, bias=form.c, bias_static=static)
        value = form.c.meta["val"]
        if not site.swapped and value.dim() == 1 and value.shape[0] == n and site.beta == 1.0:
            return replace(site, bias=form.c)
        return replace(site, addend=form.c)
    add = next(iter(node.users), None)
    if site.offs is not None or site.swapped or len(node.users) != 1:
        return site
    if add is None or internals.op_name(add) not in {"add", "add_"}:
        return site
    if module_of(add) != module_of(node) or internals.argument(add, "alpha", 1) != 1 or len(add.args) < 2:
        return site
    other = add.args[1] if add.args[0] is node else add.args[0]
    static = constants.resolve(other)
    if static is None or not _is_bias(static, n, rank) or static.dtype != node.meta["val"].dtype:
        return site
    assert isinstance(other, Node)
    return replace(site, bias=other, bias_static=static, output=add)


def _is_bias(static: Static, n: Dim, rank: int) -> bool:
    """Whether `static` adds one value per column (or one to all) without changing the result's shape."""
    shape = static.shape
    fits = not shape or shape[-1] in {1, n}
    return static.dtype in DTYPE_NAMES and math.prod(shape[:-1]) == 1 and len(shape) <= rank and fits


def _blocker(site: TorchSite, form: Form, constants: Constants) -> str | None:
    """Returns why this site cannot be rewritten whatever the recipe says, or None."""
    x, w = site.x, site.w
    assert x is not None
    assert w is not None
    if w.static is not None and constants.resolve(form.a) is not None and constants.resolve(form.b) is not None:
        return "both operands are constant; fold the constants of the model first"
    if site.site.dtype not in DTYPE_NAMES.values():
        return f"dtype {site.site.dtype}; expected float32, float16 or bfloat16; cast the model first"
    if site.offs is not None and (reason := _ungroupable(site)):
        return reason
    if w.static is not None:
        if len(w.static.shape) < 2:
            return "the static operand is a vector; expected a matrix"
        if 0 in w.static.shape:
            return f"the weight is empty (shape {list(w.static.shape)}); expected N and K above 0"
        if x.node.meta["val"].dtype not in DTYPE_NAMES:
            what = dtype_name(x.node.meta["val"].dtype)
            return f"the activation has dtype {what}; expected float32, float16 or bfloat16; cast it first"
        if w.static.broadcast and [str(d) for d in form.a.meta["val"].shape[:-1]] != [
            str(d) for d in site.node.meta["val"].shape[:-1]
        ]:
            return "the weight is repeated along a batch that the activation lacks; expand the result instead"
        return None
    for node in (form.a, form.b):
        if changed := constants.writer_of(node):
            return f"weight {changed[0]!r} is changed by {changed[1]} while the program runs; expected it fixed"
        if constants.is_constant(node):
            if any(s.meta["val"].dtype == torch.float8_e8m0fnu for s in constants.stored_below(node)):
                return "torchao packed this weight, and the program was decomposed; rewrite before run_decompositions()"
            via = constants.source_of(node)
            return f"weight {node.name!r} is computed by {via}; expected a stored tensor behind views; fold it first"
    if min(x.rank, w.rank) < 2:
        return "an operand is a vector; expected matrices"
    return None


def _ungroupable(site: TorchSite) -> str | None:
    """Returns why a matmul of groups of rows cannot be rewritten, or None."""
    if site.w is None or site.w.static is None:
        return "a grouped matmul whose weights are computed at run time; expected one stored stack [E, N, K]"
    if site.swapped or site.x is None or site.x.rank != 2 or site.w.rank != 3 or site.w.static.gather is not None:
        return "a grouped matmul of another form; expected rows [S, K] times one stored stack of weights [E, N, K]"
    if internals.argument(site.node, "bias") is not None:
        return "a grouped matmul with a bias; expected the bias added after it"
    return None


def _sizes(x: Operand, w: Operand) -> tuple[Dim, Dim, Dim]:
    """Returns m, n and k; m counts all rows of X."""
    n: Dim = None
    k: Dim = None
    shape: Any = w.static.shape if w.static else w.node.meta["val"].shape
    if not w.static and w.perm is not None:
        shape = [shape[axis] for axis in w.perm]
    if len(shape) >= 2:
        flipped = w.transposed and w.static is not None
        n, k = (_dim(shape[-1]), _dim(shape[-2])) if flipped else (_dim(shape[-2]), _dim(shape[-1]))
    sizes: Any = x.node.meta["val"].shape
    if x.perm is not None:
        sizes = [sizes[axis] for axis in x.perm]
    return _rows(sizes[:-1]), n, k


def _rows(sizes: Sequence[Any]) -> Dim:
    dims = [_dim(size) for size in sizes]
    if all(isinstance(d, int) for d in dims):
        return math.prod(d for d in dims if isinstance(d, int))
    return "*".join(str(d) for d in dims if d != 1)


def _dim(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)
