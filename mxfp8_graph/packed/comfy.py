"""What ComfyUI's checkpoints say about the format of each layer.

A layer X has a tensor X.comfy_quant, uint8, whose bytes are JSON such as {"format": "mxfp8"}; or the file's metadata
have "_quantization_metadata", JSON with {"layers": {X: {"format": "mxfp8"}}}. An MXFP8 layer has X.weight of F8_E4M3,
its sizes padded to multiples of 32, and X.weight_scale, U8 or F8_E8M0, in the tiles that `unswizzled` describes.
Sources: `_load_quantized_module` in comfy/ops.py and `convert_old_quants` in comfy/utils.py of ComfyUI; tensor/mxfp8.py
of comfy-kitchen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.packed.safetensors import Stored
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

MARKER: Final = ".comfy_quant"
GLOBAL: Final = "scaled_fp8"
"""A tensor of this name says that all float8 weights have one scale each; ComfyUI's older form."""

_METADATA: Final = "_quantization_metadata"
_LONGEST: Final = 1 << 16
"""Bytes of a marker; ComfyUI's have less than 100."""
_FULL_PRECISION: Final = "full_precision_matrix_mult"
_KNOWN: Final = {"format": "mxfp8", "group_size": formats.BLOCK_SIZE}
"""What an MXFP8 layer may say, beside whether its activations are quantized; anything else may change its values."""


def marked_layers(stored: Mapping[str, Stored], metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Returns what is said about each layer; what the metadata say overrules markers, as in ComfyUI.

    Raises:
        ContractError: a marker or the metadata is not what ComfyUI writes.
    """
    markers = {name: tensor for name, tensor in stored.items() if name.endswith(MARKER)}
    said = {name.removesuffix(MARKER): _parsed(tensor, repr(name), path) for name, tensor in markers.items()}
    if _METADATA in metadata:
        where = f"{_METADATA!r} of the file"
        layers = _object(metadata[_METADATA], where, path).get("layers")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise _damaged(path, f"{where} says nothing about layers")
        said |= layers
    return said


def obstacle(said: Mapping[str, Any]) -> str | None:
    """Returns in which other format a layer is, or None if it is in MXFP8."""
    kind = said.get("format")
    if kind != "mxfp8":
        return f"ComfyUI's {kind!r}"
    others = (key for key, value in said.items() if key != _FULL_PRECISION and _KNOWN.get(key) != value)
    return f"ComfyUI's 'mxfp8' with {other!r}" if (other := next(others, None)) is not None else None


def is_weight_only(said: Mapping[str, Any] | None) -> bool | None:
    """Returns whether activations that meet a layer are not quantized; None if that is not said."""
    return None if said is None else bool(said.get(_FULL_PRECISION, False))


def _parsed(tensor: Stored, where: str, path: Path) -> dict[str, Any]:
    return _object(tensor.bytes().tobytes() if tensor.byte_size <= _LONGEST else b"", where, path)


def _object(text: str | bytes, where: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _damaged(path, f"{where} is no JSON object")
    return found


def _damaged(path: Path, what: str) -> ContractError:
    expected = "what ComfyUI writes, such as {'format': 'mxfp8'} for a layer"
    return ContractError(path, what, expected=expected, advice="write the checkpoint again")
