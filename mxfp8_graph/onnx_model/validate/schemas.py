"""What onnx knows of an op, read once per op and version: asking the library each time is slow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from mxfp8_graph.onnx_model.walk import MICROSOFT
from mxfp8_ops import contract

MANY: Final = 2**31 - 1
"""What schemas have as the most inputs or outputs of a variadic op."""


_INT: Final = int(onnx.AttributeProto.INT)
_FLOAT: Final = int(onnx.AttributeProto.FLOAT)
_INTS: Final = int(onnx.AttributeProto.INTS)
_STRING: Final = int(onnx.AttributeProto.STRING)
_KINDS: Final[dict[type, int]] = {int: _INT, float: _FLOAT, str: _STRING}
"""What a default is written as."""

_TRANSPOSES: Final = dict.fromkeys(("transA", "transB", "transBatchA", "transBatchB"), _INT)
_ACTIVATION: Final = {
    "activation": _STRING,
    "activation_axis": _INT,
    **{f"activation_{name}": _FLOAT for name in ("alpha", "beta", "gamma")},
}
_PACKED_ATTENTION: Final = {
    **dict.fromkeys(("num_heads", "unidirectional", "past_present_share_buffer"), _INT),
    **dict.fromkeys(("do_rotary", "rotary_embedding_dim"), _INT),
    **dict.fromkeys(("scale", "mask_filter_value"), _FLOAT),
    "qkv_hidden_sizes": _INTS,
}
_MICROSOFT: Final = {
    "FusedMatMul": ((2, 2), (1, 1), {"alpha": _FLOAT, **_TRANSPOSES}, ()),
    "TransposeMatMul": ((2, 2), (1, 1), {"alpha": _FLOAT, **_TRANSPOSES}, ()),
    "FusedMatMulActivation": ((2, 2), (1, 1), {"alpha": _FLOAT, **_TRANSPOSES, **_ACTIVATION}, ("activation",)),
    "FusedGemm": ((2, 3), (1, 1), {"alpha": _FLOAT, "beta": _FLOAT, "transA": _INT, "transB": _INT, **_ACTIVATION}, ()),
    "Attention": ((2, 7), (1, 3), _PACKED_ATTENTION, ("num_heads",)),
}
"""Inputs, outputs, attributes and needed attributes of those of ONNX Runtime's ops that the pass reads."""


@dataclass(frozen=True)
class Schema:
    """Inputs, outputs and attributes of an op."""

    inputs: tuple[int, int]
    """The fewest and the most."""
    outputs: tuple[int, int]
    needed_inputs: frozenset[int]
    """Indices that must not be left empty."""
    needed_outputs: frozenset[int]
    attributes: Mapping[str, int]
    """Name -> onnx.AttributeProto.AttributeType."""
    needed_attributes: frozenset[str]
    more_attributes: bool = False
    """A node may have attributes that are not among these."""


@functools.cache
def schema_of(op: str, domain: str, opset: int) -> Schema | None:
    """Returns the schema of an op at a version of its domain; None for what onnx does not know or has retired."""
    if domain == contract.DOMAIN:
        return _ours(op)
    if domain == MICROSOFT:
        return _microsoft(op)
    if domain == "" and opset > onnx.defs.onnx_opset_version():
        return None
    if not 0 < opset < MANY or not onnx.defs.has(op, opset, domain):
        return None
    schema = onnx.defs.get_schema(op, opset, domain)
    if schema.deprecated:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return Schema(
        inputs=(schema.min_input, schema.max_input),
        outputs=(schema.min_output, schema.max_output),
        needed_inputs=frozenset(i for i, formal in enumerate(schema.inputs) if formal.option == single),
        needed_outputs=frozenset(i for i, formal in enumerate(schema.outputs) if formal.option == single),
        attributes={name: int(attribute.type.value) for name, attribute in schema.attributes.items()},  # type: ignore[attr-defined]
        needed_attributes=frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _ours(op: str) -> Schema | None:
    row = contract.OPS.get(op)
    if row is None:
        return None
    needed = frozenset(index for index, port in enumerate(row.inputs) if not port.optional)
    kinds = {name: _KINDS[type(default)] for name, default in row.attributes.items()}
    outputs = len(row.outputs)
    return Schema(
        inputs=(len(needed), len(row.inputs)),
        outputs=(outputs, outputs),
        needed_inputs=needed,
        needed_outputs=frozenset(index for index, port in enumerate(row.outputs) if not port.optional),
        attributes=kinds,
        needed_attributes=frozenset(),
    )


def _microsoft(op: str) -> Schema | None:
    row = _MICROSOFT.get(op)
    if row is None:
        return None
    inputs, outputs, attributes, needed = row
    return Schema(
        inputs=inputs,
        outputs=outputs,
        needed_inputs=frozenset({0, 1}),
        needed_outputs=frozenset({0}),
        attributes=attributes,
        needed_attributes=frozenset(needed),
        more_attributes=True,  # another version of ONNX Runtime may have others
    )
