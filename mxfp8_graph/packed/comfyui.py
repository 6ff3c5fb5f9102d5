"""ComfyUI's MXFP8 layers (read only): X.weight F8_E4M3 [N, K] with swizzled scales X.weight_scale, as a marker says.

A layer X has a tensor X.comfy_quant, uint8, whose bytes are JSON such as {"format": "mxfp8"}; or the file's metadata
have "_quantization_metadata", JSON with {"layers": {X: {"format": "mxfp8"}}}. The sizes of X.weight are padded to
multiples of 32, and X.weight_scale, U8 or F8_E8M0, is in the tiles that `unswizzled` describes.
Sources: ComfyUI's comfy/ops.py (`_load_quantized_module`) and comfy/utils.py (`convert_old_quants`), comfy-kitchen's
tensor/mxfp8.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.packed import safetensors
from mxfp8_graph.packed.compressed_tensors import Pair, scales_of
from mxfp8_graph.packed.safetensors import Tensors
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

MARKER: Final = ".comfy_quant"
OLDER_MARKER: Final = "scaled_fp8"
"""Name of the tensor that marks ComfyUI's older form, where each float8 weight has one scale."""

_METADATA: Final = "_quantization_metadata"
_KEYS: Final = frozenset({"format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape"})
"""Keys of an MXFP8 layer that do not change its values. convert_to_quant writes the last two."""

Layers = Mapping[str, Mapping[str, Any]]


def layers(stored: Tensors, metadata: Mapping[str, str], path: Path) -> Layers:
    """Returns ComfyUI's description of each layer; metadata overrule markers, as in ComfyUI.

    Raises:
        ContractError: a marker or the metadata has another form than ComfyUI's.
    """
    texts = {name: tensor.bytes().tobytes() for name, tensor in stored.items() if name.endswith(MARKER)}
    descriptions: dict[str, Any] = {}
    where = ""
    try:
        # `where` is used after the loop: the error names the marker that failed, or the metadata.
        for where, text in texts.items():
            descriptions[where.removesuffix(MARKER)] = json.loads(text)
        where = _METADATA
        if where in metadata:
            descriptions = {**descriptions, **json.loads(metadata[where])["layers"]}
        # Files without metadata are normal; metadata without a layer are damaged.
        if (descriptions or where not in metadata) and all(isinstance(layer, dict) for layer in descriptions.values()):
            return descriptions
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = "what ComfyUI writes, such as {'format': 'mxfp8'} for a layer"
    raise ContractError(path, f"{where!r} is damaged", expected=expected, advice="write the checkpoint again")


def pairs(stored: Tensors, described: Layers) -> Iterator[Pair]:
    """Yields the tensors of each weight that is plain MXFP8, with no key that may change its values."""
    for name, tensor in stored.items():
        layer = described.get(name.removesuffix(".weight"), {})
        kind = layer.get("format"), layer.get("group_size", formats.BLOCK_SIZE), tensor.dtype
        if kind == ("mxfp8", formats.BLOCK_SIZE, safetensors.E4M3) and layer.keys() <= _KEYS:
            only = bool(layer.get("full_precision_matrix_mult"))
            if scales := scales_of(name, stored):
                yield Pair(name, name, scales, swizzled=True, weight_only=only)


def others(stored: Tensors, described: Layers, weights: Mapping[str, Any]) -> Iterator[str]:
    """Yields a description of each quantized layer that is none of `weights`."""
    for layer in sorted(described):
        if f"{layer}.weight" in stored.keys() - weights.keys():
            yield f"{layer!r} (ComfyUI's {str(described[layer])[:200]})"
