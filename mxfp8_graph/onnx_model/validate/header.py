"""IR version and opset imports."""

from __future__ import annotations

import onnx

from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.walk import STANDARD


def check_header(model: onnx.ModelProto, place: Place) -> None:
    """Raises ContractError if the model has no graph or output, or says two things about its versions."""
    if not model.ir_version or not model.HasField("graph"):
        raise place.error("not an ONNX model (no IR version or no graph)", "an ONNX model", "export it again")
    if not model.graph.output:
        raise place.error("the graph has no outputs", "at least one")
    newest = int(onnx.IR_VERSION)
    if not 1 <= model.ir_version <= newest:
        expected = f"1 to {newest}, which onnx {onnx.__version__} knows"
        raise place.error(f"IR version {model.ir_version}", expected, "upgrade onnx")
    for message in (model, model.graph):
        for field, value in message.ListFields():
            if field.type == field.TYPE_STRING and not isinstance(value, str):
                raise place.error(f"its {field.name} is not UTF-8", "text")
    for entry in model.metadata_props:
        if not isinstance(entry.key, str) or not isinstance(entry.value, str):
            raise place.error(f"metadata {entry.key!r} is not UTF-8", "text")
    opsets(model.opset_import, place)


def opsets(imports: object, place: Place) -> dict[str, int]:
    """Returns the version of each domain that a model or a function imports.

    Raises:
        ContractError: two versions of one domain.
    """
    found: dict[str, int] = {}
    for entry in imports:  # type: ignore[attr-defined]
        domain = "" if entry.domain in STANDARD else entry.domain
        if found.setdefault(domain, entry.version) != entry.version:
            both = f"{found[domain]} and {entry.version}"
            raise place.error(f"imports domain {domain or 'ai.onnx'!r} twice, versions {both}", "one version")
    return found
