"""What is recorded of a rewrite: digests of its parts, and the short texts, which a failing test compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import checkpoints
import models as b
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import contract
from mxfp8_ops.errors import Mxfp8Error

from .cases import Case

VERSION_KEY = "mxfp8_graph.version"
TEXT_LIMIT = 2100
"""Longer texts are recorded by their digest only."""


def record(case: Case, folder: Path) -> dict[str, str]:
    """Returns the text of each part of a rewrite in an empty folder: file, data, tensors, nodes, value_info, report.

    Those of `file` and `data` are digests. A rewrite that fails has the part `error` alone.
    """
    proto = case.build()
    source, output = folder / "model.onnx", folder / "out.onnx"
    options: dict[str, Any] = dict(case.options)
    if case.checkpoint:
        matrices = [tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2]
        packed = {t.name: checkpoints.codes(t.dims[1], t.dims[0], seed=i) for i, t in enumerate(matrices)}
        options["weights"] = checkpoints.save(folder / "weights.safetensors", packed)
    recipe = case.recipe if isinstance(case.recipe, str) else Recipe.model_validate(case.recipe)
    try:
        if case.via == "memory":
            result, report = mxfp8_graph.rewrite(proto, recipe, **options)
        elif case.via == "graphsurgeon":
            import onnx_graphsurgeon as gs

            graph, report = mxfp8_graph.rewrite(gs.import_onnx(proto), recipe, **options)
            result = gs.export_onnx(graph)
        else:
            b.save(proto, source, external=case.via == "external")
            if case.via == "twice":
                mxfp8_graph.rewrite(source, recipe, output=folder / "once.onnx")
                source = folder / "once.onnx"
            before = {path: path.read_bytes() for path in folder.iterdir()}
            result, report = mxfp8_graph.rewrite(source, recipe, output=output, **options)
            assert before == {path: path.read_bytes() for path in before}, "a source changed"
            assert result is None or result == output
    except Mxfp8Error as error:
        reasons = [f"{each.site.name}: {each.reason}" for each in getattr(error, "decisions", ())]
        return {"error": "\n".join([f"{type(error).__name__}: {error}", *reasons]).replace(str(folder), "FOLDER")}
    parts = {"report": report_text(report.to_dict(), folder)}
    data = output.with_name("out.onnx.data")
    if result is None:
        assert not output.exists()
        assert not data.exists()
        return parts
    if data.exists():
        parts["data"] = digest(data.read_bytes())
    proto = result
    if result == output:
        assert report.bytes_after == sum(path.stat().st_size for path in (output, data) if path.exists())
        proto = onnx.load(output, load_external_data=False)
    for entry in proto.metadata_props:  # the digests of the next version are the same
        entry.value = "" if entry.key == VERSION_KEY else entry.value
    parts["file"] = digest(without_bodies(proto).SerializeToString())
    onnx.load_external_data_for_model(proto, str(folder))
    return parts | model_text(proto)


def without_bodies(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model without the function bodies of our nodes, whose text may change."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    del copy.functions[:]
    copy.functions.extend(function for function in proto.functions if function.domain != contract.DOMAIN)
    return copy


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def summary(parts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the digest of each part, and the lines of the texts that are short enough."""
    digests = {name: text if name in ("file", "data") else digest(text) for name, text in sorted(parts.items())}
    lines = {name: parts[name].splitlines() for name in ("error", "nodes", "report") if name in parts}
    if "report" in lines:  # the account repeats what sites say
        lines["report"] = [line for line in lines["report"] if not line.startswith("account")]
    return {"digests": digests, "texts": {k: v for k, v in lines.items() if sum(map(len, v)) <= TEXT_LIMIT}}


def report_text(report: dict[str, Any], folder: Path) -> str:
    """Returns the report as one line per value, and per row of its lists; without times, paths and what is empty.

    The size of the file, which depends on the version's name, is left out too. Floats have 4 digits: the sums of the
    errors of weights are made in an order that depends on the processor.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items() if item not in (None, "", [], {})}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    defaults = Recipe().model_dump(mode="json")
    report["recipe"] = {k: v for k, v in report["recipe"].items() if k not in defaults or defaults[k] != v}
    report |= {f"account {key}": value for key, value in report.pop("account").items()}
    lines = []
    left_out = {"seconds", "advice", "source", "output", "bytes_after"}
    if report["already_rewritten"]:
        left_out.add("bytes_before")  # with our function bodies, whose size may change
    for key, value in plain(report).items():
        rows = value if isinstance(value, list) else [value]
        lines += [f"{key} {json.dumps(row)}" for row in rows if key not in left_out]
    return "\n".join(lines).replace(str(folder), "FOLDER")


def model_text(proto: onnx.ModelProto) -> dict[str, str]:
    """Returns tensors, nodes and value_info of a model as sorted lines, whatever the order of the protobuf.

    Nodes have inputs, outputs, attributes and metadata; with them are the ends of the graphs, functions and metadata of
    the model. Those inside subgraphs have the path of the subgraph in front.
    """
    tensors: list[str] = []
    infos: list[str] = []
    nodes = [f"ir {proto.ir_version} producer {proto.producer_name} {proto.producer_version} {proto.doc_string}"]
    nodes += sorted(f"import {entry.domain!r} {entry.version}" for entry in proto.opset_import)
    nodes += sorted(f"metadata {entry.key} {short(entry.value)}" for entry in proto.metadata_props)
    for function in sorted(proto.functions, key=lambda f: (f.domain, f.name)):
        if function.domain == contract.DOMAIN:
            nodes.append(f"function {function.domain}.{function.name}")
            continue
        lines = [f"{e.domain} {e.version}" for e in function.opset_import] + list(function.attribute)
        body = [line for node in function.node for line in node_lines(node, "", tensors, infos)]
        ends = f"{' '.join(function.input)} -> {' '.join(function.output)}"
        nodes.append(f"function {function.domain}.{function.name} {ends} {digest(str(sorted(lines) + body))[:16]}")
    nodes += graph_lines(proto.graph, "", tensors, infos)
    return {"tensors": "\n".join(sorted(tensors)), "nodes": "\n".join(nodes), "value_info": "\n".join(sorted(infos))}


def graph_lines(graph: onnx.GraphProto, path: str, tensors: list[str], infos: list[str]) -> list[str]:
    tensors += [f"{path}{t.name} {tensor_text(t)} {t.doc_string} {pairs(t.metadata_props)}" for t in graph.initializer]
    tensors += [f"{path}{t.values.name} sparse {tensor_text(t.values)}" for t in graph.sparse_initializer]
    infos += [f"{path}{value_text(value)}" for value in graph.value_info]
    lines = [f"{path}{kind} {value_text(v)}" for kind in ("input", "output") for v in getattr(graph, kind)]
    lines.append(f"{path}graph {graph.name} {graph.doc_string} {pairs(graph.metadata_props)}")
    return lines + sorted(line for node in graph.node for line in node_lines(node, path, tensors, infos))


def node_lines(node: onnx.NodeProto, path: str, tensors: list[str], infos: list[str]) -> list[str]:
    """Returns the line of a node, and behind it those of its subgraphs."""
    settings, below = [], []
    for a in sorted(node.attribute, key=lambda a: a.name):
        value = helper.get_attribute_value(a) if not a.ref_attr_name else f"@{a.ref_attr_name}"
        if isinstance(value, onnx.GraphProto):
            below += graph_lines(value, f"{path}{node.name or node.output[0]}/{a.name}/", tensors, infos)
            value = "graph"
        settings.append(f"{a.name}={tensor_text(value) if isinstance(value, TensorProto) else value!r}")
    op = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    line = f"{path}{node.name}: {op}({', '.join(node.input)}) -> {', '.join(node.output)}"
    more = (" ".join(settings), node.doc_string, pairs(node.metadata_props))
    return ["  ".join([line, *filter(None, more)]), *below]


def tensor_text(tensor: TensorProto) -> str:
    """Returns dtype, shape and a digest of the values."""
    kind = TensorProto.DataType.Name(tensor.data_type)
    values = numpy_helper.to_array(tensor)
    content = b"\0".join(values.flatten()) if values.dtype.kind == "O" else np.ascontiguousarray(values).tobytes()
    return f"{kind} {list(tensor.dims)} {digest(content)[:16]}"


def value_text(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        kind = digest(value.type.SerializeToString())[:16] if value.HasField("type") else "untyped"
        return f"{value.name} {kind}"
    dims = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim]
    shape = dims if tensor.HasField("shape") else "of unknown rank"
    texts = (value.doc_string, pairs(value.metadata_props))
    return " ".join([value.name, TensorProto.DataType.Name(tensor.elem_type), str(shape), *filter(None, texts)])


def pairs(entries: Iterable[onnx.StringStringEntryProto]) -> str:
    return " ".join(sorted(f"{entry.key}={short(entry.value)}" for entry in entries))


def short(text: str) -> str:
    return text if len(text) <= 60 else digest(text)[:16]
