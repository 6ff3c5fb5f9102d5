"""Refuses models that later steps cannot handle.

`load` checks the header, names, sizes of tensors and nodes of ours, because later steps rely on them. If a later step
fails all the same, `blame.py` asks onnx.checker about the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import onnx
import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import STANDARD, label, name_of
from mxfp8_graph.onnx_pass.protos import iter_graphs, subgraphs
from mxfp8_ops import contract, formats
from mxfp8_ops.errors import ContractError

_AGAIN: Final = "export the model again"
_DTYPES: Final = frozenset(map(int, ir.DataType))

_MOST_VALUES: Final = 1 << 59
"""A value has at most 16 bytes. No machine can hold a tensor of so many values."""


def fields(proto: onnx.ModelProto, name: str) -> None:
    """Checks the header and the initializers of a model.

    Raises:
        ContractError: the graph or its outputs are missing, onnx does not know the IR version or opset, a local
            function is defined twice, or the values of an initializer do not match its dtype and dims.
    """
    if not proto.ir_version or not proto.HasField("graph"):
        what = "not an ONNX model (no IR version or no graph)"
        raise ContractError(name, what, expected="an ONNX model", advice=_AGAIN)
    if not proto.graph.output:
        raise ContractError(name, "the graph has no outputs", expected="at least one", advice=_AGAIN)
    newest = onnx.defs.onnx_opset_version()
    _one_opset(proto.opset_import, name)
    for function in proto.functions:
        _one_opset(function.opset_import, f"{name}: function {function.name!r}")
    versions = {entry.version for entry in proto.opset_import if entry.domain in STANDARD}
    known = [("IR version", proto.ir_version, int(onnx.IR_VERSION)), *(("opset", v, newest) for v in versions)]
    for what, version, most in known:
        least = 3 if what == "IR version" else 1  # before 3 a model has no opset
        if not least <= version <= most:
            advice = "upgrade onnx" if version > most else _AGAIN
            expected = f"{least} to {most}, which onnx {onnx.__version__} knows"
            raise ContractError(name, f"{what} {version}", expected=expected, advice=advice)
    functions = Counter((function.domain, function.name, function.overload) for function in proto.functions)
    if twice := next((key for key, times in functions.items() if times > 1), None):
        raise ContractError(name, f"local function {twice[1]!r} is defined twice", expected="each once", advice=_AGAIN)
    for graph in iter_graphs(proto.graph):
        for tensor in graph.initializer:
            _check_tensor(tensor, name)
    parts: list[Any] = [proto.graph, *proto.functions]  # a function has nodes like a graph
    for part in parts:
        for node in (each for graph in iter_graphs(part) for each in graph.node):
            _check_attributes(node, name, refers=part is not proto.graph)


def _one_opset(imports: Iterable[onnx.OperatorSetIdProto], where: str) -> None:
    """Raises ContractError if the default domain is imported, by either of its names, in several versions."""
    versions = sorted({entry.version for entry in imports if entry.domain in STANDARD})
    if len(versions) > 1:
        what = f"imports the default domain in versions {' and '.join(map(str, versions))}"
        raise ContractError(where, what, expected="one version", advice="remove the wrong import")


def names(proto: onnx.ModelProto, name: str) -> Iterator[onnx.GraphProto]:
    """Yields the graph and every subgraph, in the order of `ir.Model.graphs`, each after a check of its names.

    Raises:
        ContractError: a value is defined twice or not at all; or an initializer has the name of an outer value, and
            ONNX Runtime and onnx's passes disagree about which of the two a node reads.
    """
    for function in proto.functions:
        _defined(function.node, {*function.input}, function.output, f"{name}: function {function.name!r}")
    yield from _checked(proto.graph, frozenset(), name, "")


def _checked(graph: onnx.GraphProto, outer: Set[str], name: str, path: str) -> Iterator[onnx.GraphProto]:
    where = f"{name}: {path}" if path else name
    stored = [tensor.name for tensor in graph.initializer]
    twice, times = next(iter(Counter(stored).most_common(1)), ("", 0))
    if times > 1 or "" in stored:
        what = f"an initializer called {twice!r} is defined twice" if times > 1 else "an initializer has no name"
        raise ContractError(where, what, expected="each name once", advice=_AGAIN)
    if hidden := next((each for each in stored if each in outer), None):
        what = f"the initializer {hidden!r} has the name of a value of a graph around it"
        raise ContractError(where, what, expected="another name", advice=f"rename it, or {_AGAIN}")
    own = {value.name for value in graph.input} | {*stored}
    visible = _defined(graph.node, own, [value.name for value in graph.output], where, outer)
    # Before its subgraphs, in the order of `ir.Model.graphs`: `load` walks both side by side.
    yield graph
    for node in graph.node:
        for attribute, inner in subgraphs(node):
            yield from _checked(inner, visible, name, f"{path}/{_called(node)}/{attribute}".lstrip("/"))


def _defined(
    nodes: Sequence[onnx.NodeProto],
    own: Set[str],
    results: Iterable[str],
    where: str,
    outer: Set[str] = frozenset(),
) -> set[str]:
    """Returns the names that subgraphs of `nodes` may read; ContractError if one is defined twice, or not at all."""
    outputs = Counter(output for node in nodes for output in node.output)
    visible = {*outer, *own, *outputs}
    expected = "an input, an initializer or an output of a node"
    for node in nodes:
        missing = next((f"input {each!r} is not defined" for each in node.input if each and each not in visible), "")
        twice = (each for each in node.output if outputs[each] > 1 or each in own)
        if what := missing or next((f"output {each!r} is defined twice" for each in twice if each), ""):
            at = f"{where}: node {_called(node)!r} ({node.op_type})"
            raise ContractError(at, what, expected=expected if missing else "each name once", advice=_AGAIN)
    # ONNX Runtime sorts the nodes of the main graph, so their order is free. A cycle has no order, and later steps
    # would not end.
    makers = {each: index for index, node in enumerate(nodes) for each in node.output if each and each not in own}
    needs = {index: {makers[each] for each in node.input if each in makers} for index, node in enumerate(nodes)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        node = nodes[error.args[1][0]]
        at = f"{where}: node {_called(node)!r} ({node.op_type})"
        raise ContractError(at, "it needs its own result", expected="no cycle", advice=_AGAIN) from None
    for each in results:
        if each not in own and each not in outputs:
            raise ContractError(where, f"output {each!r} is not defined", expected=expected, advice=_AGAIN)
    return visible


def _called(node: onnx.NodeProto) -> str:
    return str(node.name or next(iter(node.output), "") or node.op_type)


def nodes(model: ir.Model) -> None:
    """Raises ContractError if a node of our domain breaks the contract: its op, inputs, outputs or attributes."""
    for node in model.graph.all_nodes():
        if node.domain == contract.DOMAIN:
            _check_ours(node, name_of(model))


def _check_attributes(node: onnx.NodeProto, model: str, *, refers: bool) -> None:
    """Checks the attributes of a node; `refers`: they may refer to attributes of a function around the node."""
    for attribute in node.attribute or ():
        if attribute.ref_attr_name and not refers:
            where = f"{model}: node {_called(node)!r} ({node.op_type})"
            what = f"attribute {attribute.name!r} refers to attribute {attribute.ref_attr_name!r} of a function"
            raise ContractError(where, what, expected="a value outside of functions", advice=_AGAIN)
        is_one = attribute.type == onnx.AttributeProto.TENSOR and not attribute.ref_attr_name
        for tensor in [attribute.t] if is_one else attribute.tensors:
            _check_tensor(tensor, model)


def _check_tensor(tensor: onnx.TensorProto, model: str) -> None:
    where = f"{model}: tensor {tensor.name!r}"
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        what = f"unknown dtype {tensor.data_type}"
        raise ContractError(where, what, expected="a dtype of onnx", advice=_AGAIN)
    if tensor.data_type not in _DTYPES:
        what = f"dtype {onnx.TensorProto.DataType.Name(tensor.data_type)}, which onnx_ir {ir.__version__} lacks"
        raise ContractError(where, what, expected="a dtype that it has", advice="upgrade onnx-ir")
    # NumPy counts the bytes of an empty array without its dims of 0.
    if min(tensor.dims, default=0) < 0 or math.prod(dim for dim in tensor.dims if dim) >= _MOST_VALUES:
        most = "dims from 0 on, of a tensor that memory can hold"
        raise ContractError(where, f"dims {list(tensor.dims)}", expected=most, advice=_AGAIN)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if tensor.data_type == onnx.TensorProto.STRING:
            raise ContractError(where, "strings as external data", expected="strings in the model", advice=_AGAIN)
        numbers = (entry.value for entry in tensor.external_data if entry.key in {"offset", "length"})
        if not all(number.isdecimal() for number in numbers):
            what = "external offset or length is not a number"
            raise ContractError(where, what, expected="integers from 0 on", advice=_AGAIN)
        return  # `load` compares its size with the file
    dtype, size = ir.DataType(tensor.data_type), math.prod(tensor.dims)
    if dtype == ir.DataType.STRING:
        stored, expected, unit = len(tensor.string_data), size, "strings"
    elif tensor.HasField("raw_data"):
        stored, expected, unit = len(tensor.raw_data), -(-size * dtype.bitwidth // 8), "bytes"
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        stored, unit = len(getattr(tensor, field)), f"entries of {field}"
        # A complex number takes two entries. Elements below 8 bits share the bytes of an entry.
        pairs = 2 if dtype.name.startswith("COMPLEX") else 1
        expected = pairs * size if dtype.bitwidth >= 8 else -(-size * dtype.bitwidth // 8)
    if stored != expected:
        text = f"{expected} for {dtype.name.lower()} {list(tensor.dims)}"
        raise ContractError(where, f"has {stored} {unit}", expected=text, advice=_AGAIN)


def _check_ours(node: ir.Node, model: str) -> None:
    where = f"{model}: node {label(node)!r} ({node.op_type})"
    if (op := contract.OPS.get(node.op_type)) is None:
        expected = f"one of {', '.join(contract.OPS)}"
        raise ContractError(where, f"no node of domain {node.domain!r}", expected=expected, advice=_AGAIN)
    # In every row of the contract the required inputs come first.
    least = sum(not port.optional for port in op.inputs)
    if not least <= len(node.inputs) <= len(op.inputs) or None in node.inputs[:least]:
        count = sum(value is not None for value in node.inputs)
        raise ContractError(where, f"{count} inputs", expected=f"{least} to {len(op.inputs)}", advice=_AGAIN)
    if len(node.outputs) != len(op.outputs):
        raise ContractError(where, f"{len(node.outputs)} outputs", expected=f"{len(op.outputs)}", advice=_AGAIN)
    for name, attribute in node.attributes.items():
        if name not in op.attributes or attribute.type.name != op.kind(name).onnx:
            what = f"attribute {name!r} of kind {attribute.type.name}"
            raise ContractError(where, what, expected=f"one of {', '.join(op.attributes)}", advice=_AGAIN)
        if name == "block_size" and attribute.value != formats.BLOCK_SIZE:
            expected = f"{formats.BLOCK_SIZE}, the only one that runs"
            raise ContractError(where, f"block_size {attribute.value}", expected=expected, advice=_AGAIN)
