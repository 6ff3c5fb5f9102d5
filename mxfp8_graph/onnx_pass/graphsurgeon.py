"""Converts onnx_graphsurgeon graphs to ONNX models and back, with the metadata that graphsurgeon drops."""

from __future__ import annotations

from typing import Any, Final

import onnx

from mxfp8_ops.errors import ContractError

_METADATA: Final = "metadata_props"
"""The attribute of a graph for the model's metadata, which has our record of the rewrite."""


def to_proto(graph: Any) -> onnx.ModelProto:
    """Returns an `onnx_graphsurgeon.Graph` as a model; ContractError if graphsurgeon cannot make one of it."""
    import onnx_graphsurgeon as gs

    try:
        proto: onnx.ModelProto = gs.export_onnx(graph)
    except Exception as error:  # graphsurgeon's exceptions have no common base
        what = f"onnx_graphsurgeon cannot export it: {type(error).__name__}: {error}"
        raise ContractError(
            "model", what, expected="a complete graph", advice="see onnx_graphsurgeon.export_onnx"
        ) from None
    # By `vars`: attribute access on a graph also looks up functions registered with graphsurgeon.
    onnx.helper.set_model_props(proto, vars(graph).get(_METADATA, {}))
    return proto


def to_graph(proto: onnx.ModelProto) -> Any:
    """Returns a model as an `onnx_graphsurgeon.Graph` whose attribute `metadata_props` has the metadata, as a dict."""
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(proto)
    setattr(graph, _METADATA, {entry.key: entry.value for entry in proto.metadata_props})
    return graph
