"""onnx_graphsurgeon graphs: to ONNX models and back, with the metadata that its importer and exporter drop."""

from __future__ import annotations

from typing import Any, Final

import onnx

_METADATA: Final = "metadata_props"
"""The attribute a graph is given: the model's metadata, our record of how it was rewritten among them."""


def to_proto(graph: Any) -> onnx.ModelProto:
    """Returns an `onnx_graphsurgeon.Graph` as a model."""
    import onnx_graphsurgeon as gs

    proto: onnx.ModelProto = gs.export_onnx(graph)
    onnx.helper.set_model_props(proto, vars(graph).get(_METADATA, {}))
    return proto


def to_graph(proto: onnx.ModelProto) -> Any:
    """Returns a model as an `onnx_graphsurgeon.Graph` whose attribute `metadata_props` has the metadata, as a dict."""
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(proto)
    setattr(graph, _METADATA, {entry.key: entry.value for entry in proto.metadata_props})
    return graph
