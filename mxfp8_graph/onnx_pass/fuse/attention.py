"""Attention, from the heads of Q, K and V to its heads side by side, becomes one MXFP8Attention.

    Reshape(Transpose(softmax(scale * q @ k^T + mask) @ v))    -> MXFP8Attention(Q, K, V, mask, past_key, past_value)
    Reshape(Transpose(Attention(q, k, v)))                     -> the same
    Attention(Q, K, V) of three dimensions                     -> the same

A node goes away only if nothing else needs it. So an attention stays as it is if the model returns its scores or
weights, or if one of its products became MXFP8Gemm. The nodes that compute the mask stay, because layers share them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.fuse import attention_scores
from mxfp8_graph.onnx_pass.fuse.attention_heads import HEADS_APART, Heads, Source, same, shape_of_rank, transposed
from mxfp8_graph.onnx_pass.fuse.attention_scores import Attention, Mask
from mxfp8_graph.onnx_pass.fuse.nodes import in_place_of, mxfp8_node, type_of
from mxfp8_graph.onnx_pass.graph import Dim, constant, is_op, only_used_by, with_inner
from mxfp8_graph.onnx_pass.replacement import Fresh, NewNodes, Replacement, value_replacing
from mxfp8_ops import contract


def fuse_attention(node: ir.Node, *, fresh: Fresh, activation_dtype: int) -> Replacement | str | None:
    """Returns the MXFP8Attention that replaces the attention around `node`, the reason if it stays, or None.

    Args:
        node: any node; only a Softmax or an Attention has an attention around it.
        fresh: makes names.
        activation_dtype: dtype that the operands of the products are rounded to, an attribute of MXFP8Attention.
    """
    # First with past keys and values as inputs of the node. Where that does not fit, their Concat stays before it.
    reason: str | None = None
    for cached in (True, False):
        attention = attention_scores.read(node, cached=cached)
        if attention is None or isinstance(attention, str):
            reason = attention
            continue
        if misfit := _misfit(attention):
            reason = misfit
            continue
        result = _result(attention)
        if result is None:
            reason = "no Transpose and Reshape put its heads side by side"
            continue
        merged, reshape = result
        presents = [each for each in (attention.k.present, attention.v.present) if each is not None]
        # Sorted, so that the report names the nodes in the same order in every process.
        replaced = (merged, *sorted(dict.fromkeys(presents), key=lambda each: str(each.name)))
        # The new Reshape reads the shape of the old one, which nothing else reads until then.
        kept = () if reshape is None else reshape.inputs[1:]
        gone = unneeded(replaced, {*attention.operands, *filter(None, kept)})
        if all(inner in gone for inner in attention.inside) and not is_circular(presents, attention.operands, gone):
            # All of it or none: a product that stays would compute the attention a second time.
            writer = _Writer(type_of(attention.q.value).dtype, fresh)
            return writer.replacement(attention, *result, tuple(gone), activation_dtype)
        reason = "other nodes need its scores or its weights, or a product of it is quantized"
    return reason


def _misfit(attention: Attention) -> str | None:
    """Returns the reason why MXFP8Attention cannot take Q, K, V, masks and past as they are, or None."""
    q, k, v = attention.q, attention.k, attention.v
    dtypes = {type_of(source.value).dtype for source in (q, k, v)}
    added = {type_of(mask.fill or mask.value).dtype for mask in attention.masks}
    checks = {
        "Q, K and V have several dtypes, or an unknown one": len(dtypes) == 1 and dtypes <= set(contract.VALUES),
        "its masks have several dtypes, or an unknown one": len(added) <= 1
        and added <= {*contract.VALUES, contract.BOOL},
        "the batches of Q, K and V differ, or one is unknown": same(q.heads.batch, k.heads.batch, v.heads.batch),
        "K and V have other lengths": not k.past or same(k.heads.length, v.heads.length),
        "the heads of Q and K have other sizes": q.heads.size == k.heads.size,
        # Each head of K and V serves the same number of heads of Q.
        "the heads of Q are no multiple of those of K and V": k.heads.count == v.heads.count
        and q.heads.count % k.heads.count == 0,
        "only one of K and V has a past": bool(k.past) == bool(v.past) and bool(k.present) == bool(v.present),
        "the shape of a mask is unknown, or larger than the scores": all(
            _is_mask(type_of(mask.value).shape, q.heads) for mask in attention.masks
        ),
    }
    return next((reason for reason, holds in checks.items() if not holds), None)


def _is_mask(shape: Sequence[Dim] | None, q: Heads) -> bool:
    """Whether a value broadcasts to the scores, and not the scores to the value."""
    if shape is None or len(shape) > 4:
        return False
    sizes = (1, 1, 1, 1, *shape)[-4:-1]
    return all(size == 1 or own != 1 for size, own in zip(sizes, (q.batch, q.count, q.length), strict=True))


def _result(attention: Attention) -> tuple[ir.Value, ir.Node | None] | None:
    """Returns (the result with its heads side by side, a Reshape behind it or None); None if heads stay apart.

    The Reshape is needed where the graph gives the result another shape.
    """
    value, batch, length = attention.result, attention.q.heads.batch, attention.q.heads.length
    if attention.merged:
        return value, None
    while (reshape := _user(value)) is not None and is_op(reshape, "Reshape"):
        if not _keeps(value, reshape.outputs[0], (batch, attention.q.heads.count, length, attention.v.heads.size)):
            return None
        value = reshape.outputs[0]
    transpose = _user(value)
    is_transpose = transpose is not None and transposed(transpose.outputs[0], HEADS_APART) is not None
    reshape = _user(transpose.outputs[0]) if transpose is not None and is_transpose else None
    if reshape is None or not is_op(reshape, "Reshape") or reshape.inputs[1] is None:
        return None
    merged, target = reshape.outputs[0], constant(reshape.inputs[1])
    shape = shape_of_rank(merged, 3)
    if shape is not None and same(shape[0], batch) and same(shape[1], length):
        return merged, None
    if target is None or 0 in target[2:]:  # 0 copies a size of the input, and the new input has one axis less
        return None
    return merged, reshape


def _user(value: ir.Value) -> ir.Node | None:
    """Returns the only user of a value, apart from Shape nodes; None if there are several or none."""
    users = [use.node for use in value.uses() if use.node.graph is value.graph and not is_op(use.node, "Shape")]
    return users[0] if len(users) == 1 else None


def _keeps(value: ir.Value, reshaped: ir.Value, sizes: Sequence[Dim]) -> bool:
    """Whether `reshaped` has the four `sizes` of `value`. Three equal ones suffice: they determine the fourth."""
    after, before = shape_of_rank(reshaped, 4), shape_of_rank(value, 4)
    if after is None or before is None:
        return False
    ways = zip(after, before, sizes, strict=True)
    return sum(same(size, either) or same(size, other) for size, either, other in ways) >= 3


def unneeded(values: Collection[ir.Value], operands: Collection[ir.Value]) -> dict[ir.Node, None]:
    """Returns, in order, the nodes that nothing needs once `values` are computed by a node that takes `operands`."""
    gone: dict[ir.Node, None] = {}
    waiting = [value.producer() for value in values]
    graph = next((node.graph for node in waiting if node is not None), None)
    while waiting:
        node = waiting.pop()
        if node is None or node in gone or node.graph is not graph:
            continue
        own = [output for output in node.outputs if output.name and output not in values]
        if all(output not in operands and only_used_by(output, gone) for output in own):
            gone[node] = None
            waiting += [value.producer() for value in node.inputs if value is not None]
    return gone


def is_circular(presents: Collection[ir.Value], operands: Collection[ir.Value], gone: Collection[ir.Node]) -> bool:
    """Whether a node that stays computes some of `operands` from `presents`, such as a mask from their length."""
    users = {user for present in presents for user in present.consumers() if user not in gone}
    waiting = [value.producer() for value in operands] if users else []
    seen: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in gone:
            continue
        seen.add(node)
        for each in with_inner(node):
            if each in users:
                return True
            waiting += [value.producer() for value in each.inputs if value is not None]
    return False


class _Writer:
    """Collects the nodes in front of MXFP8Attention: heads side by side, one mask, constants for absent inputs."""

    def __init__(self, dtype: int, fresh: Fresh) -> None:
        """`dtype` is the dtype of Q, K and V."""
        self._new = NewNodes(fresh)
        self._dtype = dtype

    def replacement(
        self,
        attention: Attention,
        replaced: ir.Value,
        reshape: ir.Node | None,
        gone: tuple[ir.Node, ...],
        activation_dtype: int,
    ) -> Replacement:
        """Returns MXFP8Attention with the nodes around it."""
        q, k, v, last = attention.q, attention.k, attention.v, attention.inside[-1]
        output = value_replacing(replaced)
        after: tuple[ir.Node, ...] = ()
        if reshape is not None:
            merged, output = output, ir.Value(name=self._new.fresh(f"{replaced.name}_heads"))
            settings = {entry.name: entry.value for entry in reshape.attributes.values()}
            after = (in_place_of(reshape, reshape.op_type, [output, *reshape.inputs[1:]], [merged], **settings),)
        inputs = [
            *map(self._side_by_side, (q, k, v)),
            self._mask(attention.masks),
            *(source.past or self._constant("no_past", self._dtype, []) for source in (k, v)),
        ]
        settings = {
            "q_num_heads": q.heads.count,
            "kv_num_heads": k.heads.count,
            "is_causal": int(attention.is_causal),
            "scale": attention.scale,
            "activation_dtype": activation_dtype,
            "nan_guard": int(attention.nan_guard),
        }
        outputs = [output, value_replacing(k.present), value_replacing(v.present)]
        fused = mxfp8_node(last, contract.ATTENTION, inputs, outputs, **settings)
        fused.name = last.name or self._new.fresh(f"{output.name}_attention")
        return Replacement(kind="attention", node=fused, gone=gone, before=tuple(self._new.nodes), after=after)

    def _constant(self, wanted: str, dtype: int, values: Sequence[float], *, scalar: bool = False) -> ir.Value:
        tensor = onnx.helper.make_tensor(wanted, dtype, [] if scalar else [len(values)], values)
        return self._new.result("Constant", wanted=wanted, value=ir.from_proto(tensor))

    def _side_by_side(self, source: Source) -> ir.Value:
        """Returns [B, S, H * D]."""
        value = source.value
        if source.layout == "merged":
            return value
        if source.layout == "heads":
            value = self._new.result("Transpose", value, wanted=f"{value.name}_split", perm=HEADS_APART)
        # 0 keeps batch and length, which need not be known.
        width = source.heads.count * source.heads.size
        shape = self._constant(f"{source.value.name}_width", contract.INT64, [0, 0, width])
        return self._new.result("Reshape", value, shape, wanted=f"{source.value.name}_merged")

    def _mask(self, masks: Sequence[Mask]) -> ir.Value:
        if not masks:
            return self._constant("no_mask", self._dtype, [0.0])
        value, *others = map(self._addend, masks)
        for other in others:
            value = self._new.result("Add", value, other, wanted=f"{value.name}_sum")
        return value

    def _addend(self, mask: Mask) -> ir.Value:
        if mask.fill is None:
            return mask.value
        # MXFP8Attention adds masks: 0 where a score counts, the fill where it does not.
        zero = self._constant(f"{mask.value.name}_zero", type_of(mask.fill).dtype, [0.0], scalar=True)
        either = (zero, mask.fill) if mask.counts else (mask.fill, zero)
        return self._new.result("Where", mask.value, *either, wanted=f"{mask.value.name}_added")
