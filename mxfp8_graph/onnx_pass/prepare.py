"""prepare(): brings a model into the form that `find.py` reads: opset, functions, Attention, Dropout, dtypes.

onnx's passes take protos. The model becomes one without the values of large initializers, once for all passes, and a
graph again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx import inliner, shape_inference

from mxfp8_graph.naming import first_line, reserve_name
from mxfp8_graph.onnx_pass import conversion
from mxfp8_graph.onnx_pass.float32 import to_float32
from mxfp8_graph.onnx_pass.graph import (
    INFERRED,
    OVERRIDABLE,
    STANDARD,
    fresh_names,
    initializers_of,
    is_large,
    is_op,
    name_of,
    opset_of,
    stored,
)
from mxfp8_graph.onnx_pass.ops import op_of
from mxfp8_graph.onnx_pass.protos import (
    ANNOTATION,
    from_proto,
    is_foreign,
    iter_graphs,
    large_constant,
    proto_without_data,
    subgraphs,
    training_graphs,
)
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.contract import MIN_OPSET
from mxfp8_ops.errors import ContractError

_AGAIN: Final = "export the model again"
_IR_VERSION: Final = 10  # the first with opset 21 and float8 in functions


Pass = Callable[[onnx.ModelProto], onnx.ModelProto]


def prepare(model: ir.Model, recipe: Recipe) -> tuple[ir.Model, list[str]]:
    """Returns the model as `find.py` reads it, with inferred types, and a note on each change.

    Raises:
        ContractError: the model has no opset, or onnx cannot inline or convert it.
    """
    holds_sites = lambda op: op_of(*op).product or (recipe.embeddings and op_of(*op).gathers)  # noqa: E731
    splits = recipe.attention_scores or recipe.attention_values
    model, notes = upgrade(model, holds_sites, splits_attention=splits)
    count = 0
    # Dropout's third input is its training mode. Without it, Dropout passes values on.
    for node in model.graph.all_nodes():
        flag = node.inputs[2] if is_op(node, "Dropout") and len(node.inputs) == 3 else None
        if flag is not None and (tensor := stored(flag)) is not None and tensor.numpy().any():
            node.resize_inputs(2)
            count += 1
    if count:
        notes.append(f"the model was exported in training mode; in the result Dropout is off ({count})")
    notes += infer(model)
    if recipe.runs_on:
        notes += to_float32(model)
    return model, notes


def upgrade(
    model: ir.Model,
    holds_sites: Callable[[tuple[str, str]], object],
    *,
    least: int = MIN_OPSET,
    splits_attention: bool = False,
) -> tuple[ir.Model, list[str]]:
    """Returns the model at opset `least` or above, and a note on each change.

    Functions with ops for which `holds_sites` is true are inlined. If the opset changes, all functions are inlined,
    because the new opset applies to their bodies too. With `splits_attention`, the ops of its definition in the
    standard replace each Attention; if onnx fails there, the nodes stay and a note has the reason.
    """
    if not opset_of(model):
        if any(node.domain in STANDARD for node in model.graph.all_nodes()):
            what = "no opset import for the default domain"
            raise ContractError(name_of(model), what, expected="one", advice="re-export the model with an opset")
        model.opset_imports[""] = MIN_OPSET  # for the bodies of our nodes
    notes = _name_nodes_apart(model)
    opset, imports, passes = opset_of(model), {}, list[Pass]()
    converts = opset < least
    if chosen := list(model.functions) if converts else _holding(model, holds_sites):
        imports = _use_one_opset(model, chosen)
        selected = list(dict.fromkeys((domain, function) for domain, function, _ in chosen))
        passes.append(partial(inline, selected=selected, model=name_of(model)))
        notes.append(f"inlined local functions: {', '.join(function for _, function in selected)}")
    if converts:
        conversion.before(model, least)
        passes.append(partial(_convert, opset=opset, least=least, model=name_of(model)))
    elif splits_attention and (chosen or any(_is_attention(node) for node in model.graph.all_nodes())):
        passes.append(partial(_split_attention, model=name_of(model), notes=notes))
    if passes:
        model = run_onnx_passes(model, passes, infers=converts)
    for key, function in model.functions.items() if chosen else ():
        function.opset_imports.update(imports[key])
    if converts:
        notes += [f"converted opset {opset} to {least}", *conversion.after(model, opset)]
        if training_graphs(model):
            notes.append(f"training_info stays as it was, for opset {opset}")
    model.ir_version = max(model.ir_version, _IR_VERSION)
    return model, notes


def _name_nodes_apart(model: ir.Model) -> list[str]:
    """Renames nodes that have the name of another node of their graph, which ONNX Runtime refuses; returns a note."""
    repeated: dict[str, None] = {}
    functions = (graph for each in model.functions.values() for graph in (each.graph, *each.graph.subgraphs()))
    for graph in (*model.graphs(), *functions):
        taken, seen = {str(node.name) for node in graph}, set[str]()
        for node in graph:
            if node.name and node.name in seen:
                repeated[node.name] = None
                node.name = reserve_name(node.name, taken)
            seen.add(str(node.name))
    return [f"renamed nodes, for several of one graph had the name {', '.join(repeated)}"] if repeated else []


def inline(proto: onnx.ModelProto, selected: list[tuple[str, str]], model: str) -> onnx.ModelProto:
    """Returns a proto without the local functions `selected`; raises ContractError, for `model`, if onnx fails."""
    with _refusing(model, "inliner"):
        return inliner.inline_selected_functions(proto, selected)


def _convert(proto: onnx.ModelProto, opset: int, least: int, model: str) -> onnx.ModelProto:
    with _refusing(model, f"converter from opset {opset} to {least}", f"opset {MIN_OPSET} or above"):
        conversion.hide_unknown(proto)  # before the inference, which knows them as little as the converter
        return conversion.convert(proto, inferred(proto), least)


def _is_attention(node: ir.Node | onnx.NodeProto) -> bool:
    return node.op_type == "Attention" and node.domain in STANDARD


def _split_attention(proto: onnx.ModelProto, model: str, notes: list[str]) -> onnx.ModelProto:
    """Returns the proto with the ops of its definition in place of each Attention, or as it is; adds a note.

    The new nodes have the metadata of the old one, and names that begin with its name.
    """
    nodes = [node for graph in iter_graphs(proto.graph) for node in graph.node]
    origins = {node.output[0]: node for node in nodes if _is_attention(node)}
    if not origins:
        return proto
    before = {name for node in nodes for name in node.output if name} - origins.keys()
    ops = [("", "Attention")]
    try:
        with _refusing(model, "inliner"):
            split = inliner.inline_selected_functions(proto, ops, inline_schema_functions=True)
    except ContractError as error:
        notes.append(f"the products inside Attention are not quantized: {error}")
        return proto
    # The inliner puts new nodes where the old one was. The last of them makes the output of the old one.
    for graph in iter_graphs(split.graph):
        parts: list[onnx.NodeProto] = []
        for node in graph.node:
            if before.isdisjoint(node.output):
                parts.append(node)
            if node.output and (origin := origins.get(node.output[0])) is not None:
                for part in parts:
                    part.metadata_props.extend(origin.metadata_props)
                    part.name = f"{origin.name}_{part.output[0]}" if origin.name else part.name
                parts = []
    notes.append(f"took apart {len(origins)} Attention, for the recipe quantizes attention products")
    return split


@contextlib.contextmanager
def _refusing(model: str, what: str, expected: str = "a model that onnx understands") -> Iterator[None]:
    """Raises an error of a pass of onnx, `what`, as ContractError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # exceptions from onnx's C++ have no common base
        said = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        text = f"onnx's {what} refuses it: {said[0].split('failed: ')[-1]}"
        raise ContractError(model, text, expected=expected, advice=_AGAIN) from None


def run_onnx_passes(model: ir.Model, passes: Sequence[Pass], *, infers: bool = False) -> ir.Model:
    """Returns the result of passes of onnx, with the tensors and the metadata that they do not see.

    Args:
        model: replaced by the result.
        passes: run one after the other; each raises ContractError if it fails.
        infers: whether the result has inferred types, see `infer`.

    Raises:
        ContractError: a pass fails.
    """
    renamed = _make_names_unique(model)
    with proto_without_data(model) as proto:
        changed = functools.reduce(lambda before, run: run(before), passes, proto)
    result = from_proto(changed, name_of(model))
    result.meta.update(model.meta)
    result.metadata_props.update(model.metadata_props)
    for key in model.functions.keys() - result.functions.keys():
        if key[0] not in STANDARD and any(node.op_identifier() == key for node in result.graph.all_nodes()):
            result.functions[key] = model.functions[key]  # the converter drops all
    _restore(result, model)
    if infers:
        _infer(result, changed)
    _rename(result, renamed)
    return result


def _restore(result: ir.Model, model: ir.Model) -> None:
    """Gives the values of `result` the tensors, declared types and texts of `model`, which passes of onnx changed."""
    # By name: onnx's passes keep the names of initializers and of results.
    tensors = {value.name: value for value in initializers_of(model)}
    outputs = (value for node in model.graph.all_nodes() for value in node.outputs if value.name)
    known = {value.name: value for value in (*model.graph.inputs, *outputs)}
    for graph in result.graphs():
        for value in graph.initializers.values():
            if (before := tensors.get(str(value.name))) is not None:
                if before.const_value is not None and (
                    is_large(before.const_value) or _same(before.const_value, value.const_value)
                ):
                    value.const_value = before.const_value
                value.meta[OVERRIDABLE] = before.meta.get(OVERRIDABLE, False)
                _describe(value, before)
            elif not (value.is_graph_input() or value.is_graph_output()):
                value.type = value.shape = None
        for node in graph:
            origin = next((known[value.name] for value in node.outputs if value.name in known), None)
            producer = None if origin is None else origin.producer()
            if producer is not None and (constant := large_constant(producer)) is not None:
                node.attributes["value"] = constant
        # The declared types stay as they were: onnx's passes add inferred ones.
        inputs = graph.inputs if graph is result.graph else ()  # inputs of a body may have the name of an outer value
        for value in (*inputs, *(output for node in graph for output in node.outputs)):
            if (before := known.get(str(value.name))) is not None:
                _describe(value, before)
            elif not value.is_graph_input():
                value.type = value.shape = None


def _describe(value: ir.Value, before: ir.Value) -> None:
    """Gives a value the declared type, the texts and the quantization annotation of `before`."""
    value.type, value.shape, value.doc_string = before.type, before.shape, before.doc_string
    value.metadata_props.update(before.metadata_props)
    if ANNOTATION in before.meta:
        value.meta[ANNOTATION] = before.meta[ANNOTATION]


def _same(tensor: ir.TensorProtocol, other: ir.TensorProtocol | None) -> bool:
    """Whether two small tensors have the same values; their texts may differ."""
    if other is None or (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    if tensor.dtype == ir.DataType.STRING:
        return bool(np.array_equal(tensor.numpy(), other.numpy()))
    return tensor.tobytes() == other.tobytes()


def _make_names_unique(model: ir.Model) -> dict[str, str]:
    """Renames a value that has the name of a value of another graph, as in the two branches of an If.

    Returns new name -> old name.
    """
    # `_restore` looks up values by name.
    fresh, seen, renamed = fresh_names(model), set[str](), dict[str, str]()
    for graph in model.graphs():
        for value in (*list(graph.initializers.values()), *(output for node in graph for output in node.outputs)):
            if value.name in seen:
                old, value.name = str(value.name), fresh(str(value.name))
                renamed[value.name] = old
            if value.name:
                seen.add(value.name)
    return renamed


def _rename(model: ir.Model, renamed: Mapping[str, str]) -> None:
    """Gives values their names of before `_make_names_unique` back: annotations refer to tensors by name."""
    for graph in model.graphs() if renamed else ():
        for value in (*list(graph.initializers.values()), *(output for node in graph for output in node.outputs)):
            if (old := renamed.get(str(value.name))) is not None:
                value.name = old


def infer(model: ir.Model) -> list[str]:
    """Puts the types and shapes that onnx infers into `Value.meta`, where `dtype_of` and `shape_of` read them.

    Returns a note if onnx cannot.
    """
    with proto_without_data(model) as proto:
        return _infer(model, proto)


def _infer(model: ir.Model, proto: onnx.ModelProto) -> list[str]:
    _copy_outer_constants(proto.graph, {})
    try:
        typed = inferred(proto)
    except MemoryError:
        raise
    except Exception as error:  # exceptions from onnx's C++ have no common base
        return [f"shapes could not be inferred: {first_line(error)}"]
    for part, message in zip(model.graphs(), iter_graphs(typed.graph), strict=True):
        types = {info.name: info for info in (*message.value_info, *message.input, *message.output)}
        for value in (*part.inputs, *(output for node in part for output in node.outputs)):
            info = types.get(value.name or "")
            if info is not None and info.HasField("type") and not is_foreign(info.type):
                value.meta[INFERRED] = ir.serde.deserialize_value_info_proto(info, None)
    return []


def _copy_outer_constants(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Copies outer INT64 constants into subgraphs that read them: onnx infers sizes from a graph's own constants."""
    hidden = {value.name for value in graph.input} | {name for node in graph.node for name in node.output}
    own = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in hidden}
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None) if node.op_type == "Constant" else None
        if value is not None:
            own[node.output[0]] = value
    own = {name: tensor for name, tensor in own.items() if tensor.data_type == onnx.TensorProto.INT64}
    hidden |= {tensor.name for tensor in graph.initializer}
    visible = {name: tensor for name, tensor in outer.items() if name not in hidden}
    read = {name for node in graph.node for name in node.input}
    for name in sorted(read & visible.keys()):
        graph.initializer.add().CopyFrom(visible[name])
        graph.initializer[-1].name = name  # the value of a Constant node has none
    for node in graph.node:
        for _, inner in subgraphs(node):
            _copy_outer_constants(inner, visible | own)


def inferred(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the proto with inferred types: strictly, or loosely if the declared types contradict strict inference."""
    try:
        return shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError:
        return shape_inference.infer_shapes(proto, data_prop=True)


def _holding(model: ir.Model, holds_sites: Callable[[tuple[str, str]], object]) -> list[ir.OperatorIdentifier]:
    """Returns the local functions that have such ops, directly or in functions that they call."""
    known: dict[ir.OperatorIdentifier, bool] = {}

    def holds(key: ir.OperatorIdentifier) -> bool:  # none calls itself: ONNX forbids that
        if key not in known:
            nodes = list(model.functions[key].all_nodes())
            called = [node.op_identifier() for node in nodes if node.op_identifier() in model.functions]
            known[key] = any(holds_sites((node.domain, node.op_type)) for node in nodes) or any(map(holds, called))
        return known[key]

    return [key for key in model.functions if holds(key)]


def _use_one_opset(model: ir.Model, chosen: list[ir.OperatorIdentifier]) -> dict[ir.OperatorIdentifier, dict[str, int]]:
    """Sets the opset of all functions to the model's, as the inliner requires; returns their old imports.

    That is correct for an inlined function only if its ops are the same in both opsets. The caller gives the other
    functions their old imports back.

    Raises:
        ContractError: an op of an inlined function differs between the two.
    """
    opset = opset_of(model)
    imports = {key: dict(function.opset_imports) for key, function in model.functions.items()}
    for function in model.functions.values():
        for domain, version in list(function.opset_imports.items()):
            if domain not in STANDARD or version == opset:
                continue
            ops = sorted({node.op_type for node in function.all_nodes() if node.domain in STANDARD})
            changed = [op for op in ops if _since(op, version) != _since(op, opset)]
            if changed and function.identifier() in chosen:  # the others are not inlined
                other = f"in which {changed[0]} is another than in the model's opset {opset}"
                what = f"local function {function.name!r} is of opset {version}, {other}"
                raise ContractError(name_of(model), what, expected="one opset for both", advice=_AGAIN)
            function.opset_imports[domain] = opset
    return imports


def _since(op: str, opset: int) -> int:
    known = 0 < opset <= onnx.defs.onnx_opset_version() and onnx.defs.has(op, opset)
    return int(onnx.defs.get_schema(op, opset).since_version) if known else 0
