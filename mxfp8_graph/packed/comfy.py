"""Reads the formats of layers in ComfyUI's checkpoints.

A layer X has a tensor X.comfy_quant, uint8, whose bytes are JSON such as {"format": "mxfp8"}; or the file's metadata
have "_quantization_metadata", JSON with {"layers": {X: {"format": "mxfp8"}}}. An MXFP8 layer has X.weight of F8_E4M3,
its sizes padded to multiples of 32, and X.weight_scale, U8 or F8_E8M0, in the tiles that `unswizzled` describes.
Sources: ComfyUI's comfy/ops.py (`_load_quantized_module`) and comfy/utils.py (`convert_old_quants`), comfy-kitchen's
tensor/mxfp8.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.packed.safetensors import E4M3, Stored
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

MARKER: Final = ".comfy_quant"
GLOBAL: Final = "scaled_fp8"
"""A tensor of this name says that all float8 weights have one scale each; ComfyUI's older form."""

_METADATA: Final = "_quantization_metadata"
_LONGEST: Final = 1 << 16
"""Bytes of a marker; ComfyUI's have less than 100."""
_KNOWN: Final = frozenset({"format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape"})
"""Keys of an MXFP8 layer that do not change its values. convert_to_quant writes the last two."""


def layers(stored: Mapping[str, Stored], metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Returns the description of each layer; metadata overrule markers, as in ComfyUI.

    Raises:
        ContractError: a marker or the metadata is not what ComfyUI writes.
    """
    markers = {name: tensor for name, tensor in stored.items() if name.endswith(MARKER)}
    # A marker beyond the limit is not read; as empty text it is reported as damaged.
    texts = {name: t.bytes().tobytes() if t.byte_size <= _LONGEST else b"" for name, t in markers.items()}
    descriptions: dict[str, Any] = {}
    where = ""
    try:
        # `where` outlives the loop: it is the name in the error, of the marker that failed or of the metadata.
        for where, text in texts.items():
            descriptions[where.removesuffix(MARKER)] = json.loads(text)
        where = _METADATA
        if where in metadata:
            descriptions = {**descriptions, **json.loads(metadata[where])["layers"]}
        # Metadata without a layer say nothing, as do files without metadata; only the latter are normal.
        if (descriptions or where not in metadata) and all(isinstance(layer, dict) for layer in descriptions.values()):
            return descriptions
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = "what ComfyUI writes, such as {'format': 'mxfp8'} for a layer"
    raise ContractError(path, f"{where!r} is damaged", expected=expected, advice="write the checkpoint again")


def is_mxfp8(said: Mapping[str, Any] | None, weight: Stored) -> bool:
    """Returns whether a layer is in plain MXFP8, with no key that may change its values."""
    said = said or {}
    kind = said.get("format"), said.get("group_size", formats.BLOCK_SIZE), weight.dtype
    return kind == ("mxfp8", formats.BLOCK_SIZE, E4M3) and said.keys() <= _KNOWN


def others(said: Mapping[str, Any], stored: Collection[str], weights: Collection[str]) -> list[str]:
    """Returns the layers of other quantizations, each with its description."""
    foreign = [layer for layer in sorted(said) if f"{layer}.weight" in stored and f"{layer}.weight" not in weights]
    return [f"{layer!r} (ComfyUI's {str(said[layer])[:200]})" for layer in foreign]
