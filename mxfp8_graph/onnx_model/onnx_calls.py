"""Calls of onnx's own passes. They are C++, which may abort, run away or raise anything: here it is one clear error.

Each call runs in a child process, within limits; see `child.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import onnx
from onnx import inliner, shape_inference, version_converter

from mxfp8_graph.onnx_model import child
from mxfp8_graph.onnx_model.walk import STANDARD
from mxfp8_ops.errors import ContractError

MOST_SECONDS: Final = 10
"""Processor time for a small model."""

BYTES_PER_SECOND: Final = 1_000_000
"""A model of this size, without its weights, may take a second more."""


def infer_shapes(model: onnx.ModelProto, name: str, notes: list[str]) -> onnx.ModelProto:
    """Returns a copy of `model` with every shape that onnx can infer; where it finds a contradiction, with a note.

    Args:
        model: without the data of its weights.
        name: what to call the model in messages.
        notes: what is told of a rewrite.

    Raises:
        ContractError: onnx cannot read the model at all.
    """
    result = _call(lambda: shape_inference.infer_shapes(model, data_prop=True), model)
    if isinstance(result, onnx.ModelProto):
        return result
    if result.kind != shape_inference.InferenceError.__name__:
        what = f"onnx's shape inference {_said(result)}"
        raise ContractError(name, what, expected="a model that onnx understands", advice="export the model again")
    notes.append(f"shapes could not be inferred: {result.message.splitlines()[0]}")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def inline(model: onnx.ModelProto, functions: Sequence[tuple[str, str]], name: str) -> onnx.ModelProto:
    """Returns `model` with calls of these local functions, each (domain, name), replaced by their bodies.

    Raises:
        ContractError: onnx cannot do that.
    """
    result = _call(lambda: inliner.inline_selected_functions(model, list(functions)), model)
    if isinstance(result, onnx.ModelProto):
        return result
    what = f"onnx's inliner of local functions {_said(result)}"
    raise ContractError(name, what, expected="a model that onnx understands", advice="export the model again")


def convert(model: onnx.ModelProto, opset: int, name: str) -> onnx.ModelProto:
    """Returns `model` at another version of the default domain.

    Raises:
        ContractError: onnx cannot convert it.
    """
    result = _call(lambda: version_converter.convert_version(model, opset), model)
    if isinstance(result, onnx.ModelProto):
        return result
    before = next(entry.version for entry in model.opset_import if entry.domain in STANDARD)
    what = f"opset {before}, and onnx's converter cannot bring it to {opset}: {_said(result, refusal='')}"
    expected = f"opset {opset} or above"
    raise ContractError(name, what, expected=expected, advice="export the model again with one")


def _call(function: Callable[[], onnx.ModelProto], model: onnx.ModelProto) -> onnx.ModelProto | child.Failure:
    seconds = MOST_SECONDS + model.ByteSize() // BYTES_PER_SECOND
    content = child.call(lambda: function().SerializeToString(), seconds)
    return content if isinstance(content, child.Failure) else onnx.ModelProto.FromString(content)


def _said(failure: child.Failure, refusal: str = "refuses it: ") -> str:
    if not failure.kind:
        return failure.message
    lines = failure.message.strip().splitlines() or [failure.kind]
    return refusal + lines[-1].split("failed: ")[-1]
