"""onnx_graphsurgeon graphs: to ONNX models and back, with the metadata that its importer and exporter drop.

What graphsurgeon raises has no common base: here it becomes one clear error.
"""

from __future__ import annotations

from typing import Any, Final

import onnx

from mxfp8_ops.errors import ContractError

_METADATA: Final = "metadata_props"
"""The attribute a graph is given: the model's metadata, our record of how it was rewritten among them."""


def to_proto(graph: Any) -> onnx.ModelProto:
    """Returns an `onnx_graphsurgeon.Graph` as a model; ContractError if graphsurgeon cannot make one of it."""
    import onnx_graphsurgeon as gs

    try:
        proto: onnx.ModelProto = gs.export_onnx(graph)
    except Exception as error:
        what = f"onnx_graphsurgeon cannot export it: {type(error).__name__}: {error}"
        raise ContractError(
            "model", what, expected="a complete graph", advice="see onnx_graphsurgeon.export_onnx"
        ) from None
    onnx.helper.set_model_props(proto, vars(graph).get(_METADATA, {}))
    return proto


def to_graph(proto: onnx.ModelProto) -> Any:
    """Returns a model as an `onnx_graphsurgeon.Graph` whose attribute `metadata_props` has the metadata, as a dict."""
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(proto)
    setattr(graph, _METADATA, {entry.key: entry.value for entry in proto.metadata_props})
    return graph
