"""Names of the tensors of MXFP8 weights in safetensors checkpoints, and the metadata that describes them.

    compressed-tensors   X.weight F8_E4M3 [N, K]   X.weight_scale U8 [N, K / 32]       (modelopt and auto-round, too)
    scale-inv            X.weight F8_E4M3 [N, K]   X.weight_scale_inv U8 [N, K / 32]   quant_method "mxfp8"
    torchao (read only)  X._weight_qdata           X._weight_scale F8_E8M0, perhaps swizzled, as the metadata say
    ComfyUI (read only)  X.weight F8_E4M3 [N, K]   X.weight_scale swizzled, as a marker says

Despite its name, weight_scale_inv is a factor of the elements, as weight_scale is; the bytes are the same.
Ours alone, which other readers may refuse: a K that is no multiple of 32 (the last block is partial, so there are
ceil(K / 32) scales), F8_E5M2 elements, I8 elements (MXINT8), and stacks [..., N, K].

In ComfyUI's checkpoints a layer X has a tensor X.comfy_quant, uint8, whose bytes are JSON such as {"format": "mxfp8"};
or the file's metadata have "_quantization_metadata", JSON with {"layers": {X: {"format": "mxfp8"}}}. An MXFP8 layer has
X.weight of F8_E4M3, its sizes padded to multiples of 32, and X.weight_scale, U8 or F8_E8M0, in the tiles that
`unswizzled` describes.
Sources: ComfyUI's comfy/ops.py (`_load_quantized_module`) and comfy/utils.py (`convert_old_quants`), comfy-kitchen's
tensor/mxfp8.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.packed.safetensors import E4M3, Stored
from mxfp8_ops import formats
from mxfp8_ops.errors import ContractError

COMPRESSED_TENSORS: Final = "compressed-tensors"
SCALE_INV: Final = "scale-inv"

CONVENTIONS: Final = {COMPRESSED_TENSORS: "_scale", SCALE_INV: "_scale_inv"}
"""Suffix of the name of the scales, after the name of the elements, by convention."""

CONFIG_KEY: Final = "quantization_config"
"""Key in the file's metadata; its value belongs in the checkpoint's config.json."""

_OF_QUANTIZATION: Final = re.compile(r"_?weight_(?!\d+$)|q(weight|zeros|data)|(?s:.*?)(scale|zero|amax|g_idx)")


def of_quantization(name: str) -> bool:
    """Returns whether a tensor says how values are quantized, by its name in the module of a weight.

    Scales of the input (input_scale, pre_quant_scale), zero points, orders of columns (g_idx), and modules such as
    input_quantizer do; a bias, adapters, and TransformerEngine's _extra_state, which has no state for MXFP8, do not.
    """
    return "quant" in name or ("." not in name and _OF_QUANTIZATION.match(name) is not None)


def is_known(config: str | None) -> bool:
    """Returns whether a quantization_config in a file's metadata, if there is one, is of a convention above."""
    try:
        return config is None or json.loads(config)["quant_method"] in (COMPRESSED_TENSORS, "mxfp8")
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def quantization_config(
    convention: str, modules: Mapping[tuple[str, bool], Sequence[str]], ignored: Iterable[str]
) -> dict[str, Any]:
    """Returns what belongs under "quantization_config" in the checkpoint's config.json.

    `modules` has the names of modules by element format, and whether they are weight-only; `ignored` those of modules
    whose weights are not packed.
    """
    # This convention has one config for all modules: it cannot say which of them are weight-only.
    if convention == SCALE_INV:
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, formats.BLOCK_SIZE],
            "scale_fmt": "ue8m0",
            # Without it readers take every linear layer for an MXFP8 one.
            "modules_to_not_convert": sorted(ignored),
        }
    groups: dict[str, dict[str, Any]] = {}
    for (element_format, weight_only), targets in modules.items():
        is_int = element_format == formats.INT8.name
        settings = {
            "num_bits": 8,
            "type": "int" if is_int else "float",
            "strategy": "group",
            "group_size": formats.BLOCK_SIZE,
            "symmetric": True,
            "scale_dtype": "torch.uint8",
        }
        groups[f"group_{len(groups)}"] = {
            "targets": sorted(targets),
            "weights": {**settings, "dynamic": False},
            "input_activations": None if weight_only else {**settings, "dynamic": True},
            "output_activations": None,
            # compressed-tensors has no name for MXINT8: a reader that knows others alone refuses this one.
            "format": "mxint8-quantized" if is_int else "mxfp8-quantized",
        }
    kinds = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


COMFY_MARKER: Final = ".comfy_quant"
COMFY_GLOBAL: Final = "scaled_fp8"
"""A tensor of this name says that all float8 weights have one scale each; ComfyUI's older form."""

_COMFY_METADATA: Final = "_quantization_metadata"
_COMFY_KEYS: Final = frozenset({"format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape"})
"""Keys of an MXFP8 layer that do not change its values. convert_to_quant writes the last two."""


def comfy_layers(stored: Mapping[str, Stored], metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Returns the description of each layer; metadata overrule markers, as in ComfyUI.

    Raises:
        ContractError: a marker or the metadata is not what ComfyUI writes.
    """
    texts = {name: tensor.bytes().tobytes() for name, tensor in stored.items() if name.endswith(COMFY_MARKER)}
    descriptions: dict[str, Any] = {}
    where = ""
    try:
        # `where` outlives the loop: it is the name in the error, of the marker that failed or of the metadata.
        for where, text in texts.items():
            descriptions[where.removesuffix(COMFY_MARKER)] = json.loads(text)
        where = _COMFY_METADATA
        if where in metadata:
            descriptions = {**descriptions, **json.loads(metadata[where])["layers"]}
        # Metadata without a layer say nothing, as do files without metadata; only the latter are normal.
        if (descriptions or where not in metadata) and all(isinstance(layer, dict) for layer in descriptions.values()):
            return descriptions
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = "what ComfyUI writes, such as {'format': 'mxfp8'} for a layer"
    raise ContractError(path, f"{where!r} is damaged", expected=expected, advice="write the checkpoint again")


def is_comfy_mxfp8(said: Mapping[str, Any] | None, weight: Stored) -> bool:
    """Returns whether a layer is in plain MXFP8, with no key that may change its values."""
    said = said or {}
    kind = said.get("format"), said.get("group_size", formats.BLOCK_SIZE), weight.dtype
    return kind == ("mxfp8", formats.BLOCK_SIZE, E4M3) and said.keys() <= _COMFY_KEYS


def comfy_others(said: Mapping[str, Any], stored: Collection[str], weights: Collection[str]) -> list[str]:
    """Returns the layers of other quantizations, each with its description."""
    foreign = [layer for layer in sorted(said) if f"{layer}.weight" in stored and f"{layer}.weight" not in weights]
    return [f"{layer!r} (ComfyUI's {str(said[layer])[:200]})" for layer in foreign]
