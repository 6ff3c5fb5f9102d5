"""Finds the matmuls of an ONNX model with onnx-graphsurgeon and describes each as a `MatMulSite`.

Every form is read as the nodes compute it, Y [..., M, N] = X [..., M, K] @ W [..., N, K] transposed:

    MatMul(X, w [K, N])                 W = w^T
    MatMul(w [N, K], X)                 Y^T = X^T @ w^T: operands and result swapped
    Gemm(X, w, C), transA transB alpha beta
    Add(MatMul(X, w), b [N])            the bias is absorbed
    MatMul(Q, K^T), MatMul(softmax, V)  both operands computed at run time
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from mxfp8_graph.naming import unique_name
from mxfp8_graph.onnx_model.open import STANDARD, Source, subgraphs
from mxfp8_graph.onnx_model.upgrade import MATMUL_OPS
from mxfp8_graph.onnx_pass.roles import ROLE_OPS, OnnxView
from mxfp8_graph.onnx_pass.site import OnnxSite, Operand, Scope
from mxfp8_graph.onnx_pass.static_operands import QUANTIZED, VIEW_OPS, Constants, Static, overridable, stored_in
from mxfp8_graph.policy.plan import Dim, MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_ops.contract import VALUE_NAMES


def find_sites(source: Source) -> list[OnnxSite]:
    """Returns every MatMul and Gemm of the model and its subgraphs, in graph order, each with its role or blocker."""
    skip = overridable(source)
    visible = {name: stored for name, stored in stored_in(source.proto.graph).items() if name not in skip}
    scopes = list(_scopes(Scope("", 0, _view(source), source.proto.graph, visible), set()))
    constants = Constants(source, [(scope.view, scope.visible) for scope in scopes])
    roles = Roles(OnnxView([scope.view for scope in scopes], constants), ROLE_OPS)
    found: list[OnnxSite] = []
    names: set[str] = set()
    for scope in scopes:
        indices = {id(node): index for index, node in enumerate(scope.view.nodes)}
        for node in scope.view.nodes:
            if node.op in MATMUL_OPS and node.domain in STANDARD:
                site = _describe(node, scope, constants, roles, indices)
                name = unique_name(site.site.name, names, "#")
                names.add(name)
                found.append(replace(site, site=replace(site.site, name=name)))
    uses = Counter(id(site.w.static.tensor) for site in found if site.w.static)
    return [
        replace(s, site=replace(s.site, shared_with=uses[id(s.w.static.tensor)] - 1)) if s.w.static else s
        for s in found
    ]


def _view(source: Source) -> gs.Graph:
    """Returns the skeleton in graphsurgeon, with every shape that onnx can infer."""
    try:
        inferred = onnx.shape_inference.infer_shapes(source.proto, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        source.notes.append(f"shapes could not be inferred: {str(error).splitlines()[0]}")
        inferred = onnx.ModelProto()
        inferred.CopyFrom(source.proto)
    del inferred.functions[:]  # graphsurgeon would parse them; the pass needs only what is left in the graphs
    severity = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.ERROR  # it warns of float8 and of missing shapes, neither of which concerns a user
    try:
        return gs.import_onnx(inferred)
    finally:
        G_LOGGER.severity = severity


def _scopes(scope: Scope, paths: set[str]) -> Iterator[Scope]:
    """Yields `scope` and every scope below it. Graphsurgeon keeps the order of nodes, so the two views run in step."""
    yield scope
    for gs_node, node in zip(scope.view.nodes, scope.proto.node, strict=True):
        for name, graph in subgraphs(node):
            inner = gs_node.attrs.get(name)
            if isinstance(inner, gs.Graph):
                wanted = "/".join(filter(None, (scope.path, node.name or node.output[0], name)))
                path = unique_name(wanted, paths, "#")
                paths.add(path)
                visible = {**scope.visible, **stored_in(graph)}
                yield from _scopes(Scope(path, scope.depth + 1, inner, graph, visible), paths)


def _describe(
    node: gs.Node, scope: Scope, constants: Constants, roles: Roles[gs.Node, gs.Tensor], indices: dict[int, int]
) -> OnnxSite:
    a, b = node.inputs[:2]
    is_gemm = node.op == "Gemm"
    trans_a, trans_b = (bool(node.attrs.get(k, 0)) for k in ("transA", "transB")) if is_gemm else (False, False)
    left, right = constants.resolve(a), constants.resolve(b)
    swapped = left is not None and right is None
    if left is not None and swapped:
        w = Operand(name=a.name, transposed=trans_a, static=left, rank=len(left.shape))
        x = _run_time(b, not trans_b, is_gemm)
        swapped = x.rank != 1  # matrix times vector gives a vector: nothing to swap back
    else:
        x = _run_time(a, trans_a, is_gemm)
        if right is not None:
            w = Operand(name=b.name, transposed=not trans_b, static=right, rank=len(right.shape))
        else:
            w = _run_time(b, not trans_b, is_gemm)
    dtype = w.static.dtype if w.static else _dtype(a) or _dtype(b)
    m, n, k = _sizes(b if left is not None and right is None else a, x, w, b)
    site = OnnxSite(
        site=MatMulSite(
            name=node.name or f"{node.op}_{node.outputs[0].name}",
            op=node.op,
            module=module_path(scope.proto.node[indices[id(node)]]),
            subgraph=scope.path,
            dtype=_dtype_name(dtype),
            weight=w.static.name if w.static else None,
            weight_bytes=w.static.byte_size if w.static else 0,
            m=m,
            n=n,
            k=k,
        ),
        scope=scope,
        index=indices[id(node)],
        x=x,
        w=w,
        dtype=dtype,
        output=node.outputs[0].name,
        swapped=swapped,
        alpha=float(node.attrs.get("alpha", 1.0)) if is_gemm else 1.0,
        beta=float(node.attrs.get("beta", 1.0)) if is_gemm else 1.0,
    )
    site = _with_bias(site, node, constants, indices)
    role: Role = roles.of_linear(node.outputs[0]) if w.static else roles.of_product(node.outputs[0])
    blocker = _blocker(site, node, constants)
    if w.static and constants.is_constant(a) and constants.is_constant(b):
        blocker = "both operands are constant; fold the constants of the model first"
    return replace(site, site=replace(site.site, role=role, blocker=blocker, has_bias=site.bias is not None))


def _run_time(tensor: gs.Tensor, transposed: bool, is_matrix: bool) -> Operand:
    """Returns an operand computed at run time. A Transpose in front of it and the one it needs become one, or none."""
    rank = 2 if is_matrix else None if tensor.shape is None else len(tensor.shape)
    if not transposed or rank is None or rank < 2:
        return Operand(name=tensor.name, rank=rank, transposed=transposed and rank != 1)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    producer = tensor.inputs[0] if tensor.inputs else None
    if producer is None or producer.op != "Transpose" or producer.domain not in STANDARD:
        return Operand(name=tensor.name, rank=rank, transposed=True, perm=swap)
    before = tuple(producer.attrs.get("perm") or reversed(range(rank)))
    perm = tuple(before[axis] for axis in swap)
    return Operand(
        name=producer.inputs[0].name, rank=rank, transposed=True, perm=None if perm == tuple(range(rank)) else perm
    )


def _with_bias(site: OnnxSite, node: gs.Node, constants: Constants, indices: dict[int, int]) -> OnnxSite:
    """Returns `site` with Gemm's C, or the static operand of a following Add, absorbed where that is exact."""
    n = site.site.n
    if node.op == "Gemm":
        if len(node.inputs) < 3 or node.inputs[2].is_empty():
            return site
        c = constants.resolve(node.inputs[2])
        if c is not None and not site.swapped and _is_bias(c, n, 2):
            return replace(site, bias=c)
        return replace(site, addend=node.inputs[2].name)
    output = node.outputs[0]
    if site.swapped or len(output.outputs) != 1 or any(o is output for o in site.scope.view.outputs):
        return site
    add = output.outputs[0]
    if add.op != "Add" or id(add) not in indices:
        return site
    other = add.inputs[1] if add.inputs[0] is output else add.inputs[0]
    c = constants.resolve(other)
    if c is None or other is output or c.dtype != site.dtype or not _is_bias(c, n, len(output.shape or (n,))):
        return site
    return replace(site, bias=c, bias_index=indices[id(add)], output=add.outputs[0].name)


def _is_bias(c: Static, n: Dim, rank: int) -> bool:
    """Whether `c` adds one value per column (or one to all) without changing the result's shape."""
    return (
        c.dtype in VALUE_NAMES
        and math.prod(c.shape[:-1]) == 1
        and len(c.shape) <= rank
        and (not c.shape or c.shape[-1] in {1, n})
    )


def _blocker(site: OnnxSite, node: gs.Node, constants: Constants) -> str | None:
    """Returns why this site cannot be rewritten whatever the recipe says, or None."""
    x, w = site.x, site.w
    if site.site.dtype not in VALUE_NAMES.values():
        what = site.site.dtype or "unknown"
        return f"dtype {what}; expected float32, float16 or bfloat16; cast the model or give it shape information"
    if w.static is not None:
        if len(w.static.shape) < 2:
            return "the static operand is a vector; expected a matrix"
        if 0 in w.static.shape:
            return f"the weight is empty (shape {list(w.static.shape)}); expected N and K above 0"
        if x.rank is None and (x.transposed or site.swapped):
            return "the activation must be transposed and its rank is unknown; give the model shape information"
        return None
    for tensor in node.inputs[:2]:
        if tensor.name in constants.overridable:
            return f"weight {tensor.name!r} is also a graph input that a caller may replace; remove it from the inputs"
        if constants.is_constant(tensor):
            allowed = ", ".join(VIEW_OPS)
            via = constants.source_of(tensor)
            if via in QUANTIZED:
                return (
                    f"weight {tensor.name!r} is quantized already, by {via}, and would be rounded twice; rewrite the "
                    "model it was quantized from"
                )
            return f"weight {tensor.name!r} comes through {via}; expected only {allowed}; fold the constants first"
        if experts := constants.gathered(tensor):
            return (
                f"weight {experts!r} holds experts that are gathered while the model runs, and a packed weight cannot "
                "be; expected one MatMul per expert; export the model so"
            )
    if x.rank is None or w.rank is None or min(x.rank, w.rank) < 2:
        return "an operand's rank is unknown or below 2; give the model shape information"
    return None


def _sizes(x_tensor: gs.Tensor, x: Operand, w: Operand, w_tensor: gs.Tensor) -> tuple[Dim, Dim, Dim]:
    """Returns m, n and k as far as the shapes tell; m counts all rows of X."""
    n = k = m = None
    w_shape = w.static.shape if w.static else w_tensor.shape
    if w_shape is not None and len(w_shape) >= 2:
        n, k = (w_shape[-1], w_shape[-2]) if w.transposed else (w_shape[-2], w_shape[-1])
    shape = x_tensor.shape
    if shape is not None and len(shape) >= 2:
        rows = [*shape[:-2], shape[-1] if x.transposed else shape[-2]]
        m = math.prod(rows) if all(isinstance(d, int) for d in rows) else "*".join(str(d) for d in rows if d != 1)
    elif shape is not None and len(shape) == 1:
        m = 1
    return m, n, k


def _dtype(tensor: gs.Tensor) -> int:
    if tensor.dtype is None:
        return 0
    if isinstance(tensor.dtype, int):
        return tensor.dtype
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)))


def _dtype_name(code: int) -> str | None:
    if code in VALUE_NAMES:
        return VALUE_NAMES[code]
    return onnx.TensorProto.DataType.Name(code).lower() if code else None


def module_path(node: onnx.NodeProto) -> str:
    """Returns the module path that torch's exporter records, such as "model.layers.0.mlp.up_proj"; "" without one."""
    recorded = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), "")
    names = re.findall(r"'([^']*)'", recorded)  # the repr of a list: outermost module first, then the fx node
    return names[-2] if len(names) >= 2 else ""
