"""Names of the tensors of MXFP8 weights in safetensors checkpoints, and the metadata that describes them.

    compressed-tensors   X.weight F8_E4M3 [N, K]   X.weight_scale U8 [N, K / 32]       (modelopt and auto-round, too)
    scale-inv            X.weight F8_E4M3 [N, K]   X.weight_scale_inv U8 [N, K / 32]   quant_method "mxfp8"
    torchao (read only)  X._weight_qdata           X._weight_scale F8_E8M0, perhaps swizzled, as the metadata say
    ComfyUI (read only)  X.weight F8_E4M3 [N, K]   X.weight_scale swizzled, as a marker says; see comfy.py

Despite its name, weight_scale_inv is a factor of the elements, as weight_scale is; the bytes are the same.
Ours alone, which other readers may refuse: a K that is no multiple of 32 (the last block is partial, so there are
ceil(K / 32) scales), F8_E5M2 elements, and stacks [..., N, K].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mxfp8_ops import formats


@dataclass(frozen=True)
class Convention:
    """One way to name scales."""

    name: str
    scale_suffix: str
    """Suffix of the name of the scales, after the name of the elements, X.weight."""


COMPRESSED_TENSORS: Final = Convention("compressed-tensors", "_scale")
SCALE_INV: Final = Convention("scale-inv", "_scale_inv")

CONVENTIONS: Final[Mapping[str, Convention]] = MappingProxyType({c.name: c for c in (COMPRESSED_TENSORS, SCALE_INV)})

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
        return config is None or json.loads(config)["quant_method"] in (COMPRESSED_TENSORS.name, "mxfp8")
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def quantization_config(chosen: Convention, quantized: Sequence[str], weight_only: Sequence[str]) -> dict[str, Any]:
    """Returns what belongs under "quantization_config" in the checkpoint's config.json.

    `quantized` are the modules whose activations are quantized too, `weight_only` the others.
    """
    # This convention has one config for all modules: it cannot say which of them are weight-only.
    if chosen is SCALE_INV:
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, formats.BLOCK_SIZE],
            "scale_fmt": "ue8m0",
        }
    groups = ((quantized, _arguments(dynamic=True)), (weight_only, None))
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": sorted(targets),
                "weights": _arguments(dynamic=False),
                "input_activations": activations,
                "output_activations": None,
                "format": "mxfp8-quantized",
            }
            for index, (targets, activations) in enumerate(group for group in groups if group[0])
        },
        "ignore": [],
    }


def _arguments(*, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": formats.BLOCK_SIZE,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }
