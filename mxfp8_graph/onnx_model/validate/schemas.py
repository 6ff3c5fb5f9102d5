"""What onnx knows of an op, read once per op and version: asking the library each time is slow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from mxfp8_ops import contract

MANY: Final = 2**31 - 1
"""What schemas have as the most inputs or outputs of a variadic op."""


_INT: Final = int(onnx.AttributeProto.INT)
_STRING: Final = int(onnx.AttributeProto.STRING)


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


@functools.cache
def schema_of(op: str, domain: str, opset: int) -> Schema | None:
    """Returns the schema of an op at a version of its domain; None for what onnx does not know or has retired."""
    if domain == contract.DOMAIN:
        return _ours(op)
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
    kinds = {name: _INT if isinstance(default, int) else _STRING for name, default in row.attributes.items()}
    outputs = len(row.outputs)
    return Schema(
        inputs=(len(needed), len(row.inputs)),
        outputs=(outputs, outputs),
        needed_inputs=needed,
        needed_outputs=frozenset(range(outputs)),
        attributes=kinds,
        needed_attributes=frozenset(),
    )
