"""Attention, from the heads of Q, K and V to its heads side by side, becomes one MXFP8Attention.

    Reshape(Transpose(softmax(scale * q @ k^T + mask) @ v))    -> MXFP8Attention(Q, K, V, mask, past_key, past_value)
    Reshape(Transpose(Attention(q, k, v)))                     -> the same
    Attention(Q, K, V) of three dimensions                     -> the same

Only what nothing else needs goes away. So scores or weights that the model returns keep their nodes, and so do
products that became MXFP8Gemm. What makes the mask stays as it is: layers share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx

from mxfp8_graph.onnx_model.walk import iter_graphs, subgraphs
from mxfp8_graph.onnx_pass.fuse import attention_node, attention_scores
from mxfp8_graph.onnx_pass.fuse.attention_heads import HEADS_APART, Heads, is_transpose, same, shape_of
from mxfp8_graph.onnx_pass.fuse.attention_scores import Attention
from mxfp8_graph.onnx_pass.fuse.graph_view import Dim, GraphView, is_op
from mxfp8_graph.onnx_pass.fuse.replacement import Replacement
from mxfp8_ops import contract


def fuse_attention(view: GraphView, node: onnx.NodeProto, *, activation_dtype: int) -> Replacement | None:
    """Returns MXFP8Attention in place of the attention around a Softmax or an Attention; None if there is none.

    Args:
        view: the graph.
        node: any node.
        activation_dtype: what values are rounded to before they are multiplied, as the contract says.
    """
    for cached in (True, False):
        found = attention_scores.read(view, node, cached=cached)
        result = _result(view, found) if found is not None and _fits(view, found) else None
        if found is not None and result is not None:
            new = attention_node.build(view, found, result.output, activation_dtype)
            taken = {name for made in new for name in made.input}
            presents = set(filter(None, (found.k.present, found.v.present)))
            # Sorted, so that the report names the nodes in the same order in every process.
            gone = unneeded(view, (result.replaced, *sorted(presents)), taken)
            if all(id(inner) in gone for inner in found.inside) and not is_circular(view, presents, taken, gone):
                nodes = tuple(gone.values())
                return Replacement(kind="attention", node=new[-1], gone=nodes, before=new[:-1], after=result.after)
    return None


@dataclass(frozen=True)
class _Result:
    """The result with its heads side by side."""

    output: str
    """What the node calls them."""
    replaced: str
    """The value of the graph that is replaced: the same, or what is made of it."""
    after: tuple[onnx.NodeProto, ...] = ()


def _fits(view: GraphView, found: Attention) -> bool:
    """Whether MXFP8Attention takes Q, K, V, masks and past as they are."""
    q, k, v = found.q, found.k, found.v
    dtypes = {view.type_of(source.name).dtype for source in (q, k, v)}
    added = {view.type_of(mask.fill or mask.name).dtype for mask in found.masks}
    return (
        len(dtypes) == 1
        and dtypes <= set(contract.VALUES)
        and len(added) <= 1
        and added <= {*contract.VALUES, contract.BOOL}
        and same(q.heads.batch, k.heads.batch, v.heads.batch)
        and (not k.past or same(k.heads.length, v.heads.length))
        and q.heads.size == k.heads.size
        and k.heads.count == v.heads.count
        and q.heads.count % k.heads.count == 0
        and bool(k.past) == bool(v.past)
        and bool(k.present) == bool(v.present)
        and all(_is_mask(view.type_of(mask.name).shape, q.heads) for mask in found.masks)
    )


def _is_mask(shape: Sequence[Dim] | None, q: Heads) -> bool:
    """Whether a value broadcasts to scores, and not the scores to the value."""
    if shape is None or len(shape) > 4:
        return False
    sizes = (1, 1, 1, 1, *shape)[-4:-1]
    return all(size == 1 or own != 1 for size, own in zip(sizes, (q.batch, q.count, q.length), strict=True))


def _result(view: GraphView, found: Attention) -> _Result | None:
    """Returns how the graph puts the heads of the result side by side; None if it does not."""
    if found.merged:
        return _Result(found.result, found.result)
    name, batch, length = found.result, found.q.heads.batch, found.q.heads.length
    while (reshape := _user(view, name)) is not None and is_op(reshape, "Reshape"):
        if not _keeps(view, name, reshape.output[0], (batch, found.q.heads.count, length, found.v.heads.size)):
            return None
        name = reshape.output[0]
    transpose = _user(view, name)
    reshape = _user(view, transpose.output[0]) if is_transpose(transpose, HEADS_APART) else None
    if not is_op(reshape, "Reshape"):
        return None
    merged, target = reshape.output[0], view.constant(reshape.input[1])
    shape = shape_of(view, merged, 3)
    if shape is not None and same(shape[0], batch) and same(shape[1], length):
        return _Result(merged, merged)
    if target is None or 0 in target[2:]:  # 0 takes a size over from what is reshaped, which has one dimension less
        return None
    output = view.fresh(f"{merged}_heads")
    again = onnx.NodeProto()
    again.CopyFrom(reshape)
    again.input[0] = output
    return _Result(output, merged, (again,))


def _user(view: GraphView, name: str) -> onnx.NodeProto | None:
    """Returns the one node that uses a value, besides those that ask for its shape."""
    users = [reader for reader in view.readers(name) if not is_op(reader, "Shape")]
    return users[0] if len(users) == 1 else None


def _keeps(view: GraphView, name: str, reshaped: str, sizes: Sequence[Dim]) -> bool:
    """Whether `reshaped` is `name` of those four sizes as it is: if three are as they were, the fourth is."""
    after, before = shape_of(view, reshaped, 4), shape_of(view, name, 4)
    if after is None or before is None:
        return False
    ways = zip(after, before, sizes, strict=True)
    return sum(same(size, either) or same(size, other) for size, either, other in ways) >= 3


def unneeded(view: GraphView, given: Collection[str], taken: Collection[str]) -> dict[int, onnx.NodeProto]:
    """Returns, by id and in order, the nodes that nothing needs once `given` is made by a node that takes `taken`."""
    gone: dict[int, onnx.NodeProto] = {}
    waiting = [view.maker(name) for name in given]
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in gone:
            continue
        own = [name for name in node.output if name and name not in given]
        if all(name not in taken and view.is_between(name, *gone.values()) for name in own):
            gone[id(node)] = node
            waiting += [view.maker(name) for name in node.input]
    return gone


def is_circular(view: GraphView, presents: Collection[str], taken: Collection[str], gone: Collection[int]) -> bool:
    """Whether a node that stays makes some of `taken` from some of `presents`: a mask from their length, say."""
    readers = (node for name in presents for node in (*view.readers(name), *view.read_inside(name)))
    users = {id(node) for node in readers} - set(gone)
    waiting = [view.maker(name) for name in taken] if users else []
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen or id(node) in gone:
            continue
        if id(node) in users:
            return True
        seen.add(id(node))
        waiting += [view.maker(name) for name in _read_by(node)]
    return False


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node reads, in its subgraphs too."""
    yield from node.input
    for _, inner in subgraphs(node):
        for graph in iter_graphs(inner):
            yield from (output.name for output in graph.output)
            yield from (name for below in graph.node for name in below.input)
