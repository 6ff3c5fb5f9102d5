"""Tensors of compressed-tensors and of the convention weight_scale_inv: names, and the config that describes them.

    compressed-tensors   X.weight F8_E4M3 [N, K]   X.weight_scale U8 [N, K / 32]       (modelopt and auto-round, too)
    scale-inv            X.weight F8_E4M3 [N, K]   X.weight_scale_inv U8 [N, K / 32]   quant_method "mxfp8"

Despite its name, weight_scale_inv is a factor of the elements, as weight_scale is; the bytes are the same.
Ours alone, which other readers may refuse: a K that is no multiple of 32 (the last block is partial, so there are
ceil(K / 32) scales), F8_E5M2 elements, I8 elements (MXINT8), and stacks [..., N, K].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mxfp8_graph.packed import safetensors
from mxfp8_graph.packed.contents import PackedWeight, Tensor
from mxfp8_graph.packed.safetensors import Tensors
from mxfp8_ops import formats
from mxfp8_ops.checks import scale_shape

FORMATS: Final = {fmt.safetensors_name: fmt.name for fmt in formats.ELEMENT_FORMATS.values()}
"""dtype of the elements -> name of the element format."""
SCALE_DTYPES: Final = frozenset({safetensors.U8, safetensors.E8M0})

COMPRESSED_TENSORS: Final = "compressed-tensors"
SCALE_INV: Final = "scale-inv"

CONVENTIONS: Final = {COMPRESSED_TENSORS: "_scale", SCALE_INV: "_scale_inv"}
"""Suffix of the name of the scales, after the name of the elements, by convention."""

CONFIG_KEY: Final = "quantization_config"
"""Key in the file's metadata; its value belongs in the checkpoint's config.json."""


@dataclass(frozen=True)
class Pair:
    """Names of an MXFP8 weight, and of the tensors with its elements and scales."""

    name: str
    elements: str
    scales: str
    swizzled: bool = False
    """Whether the scales are in the tiles that `unswizzled` describes."""
    weight_only: bool = False


def pairs(stored: Tensors) -> Iterator[Pair]:
    """Yields the tensors of each weight."""
    for name, tensor in stored.items():
        if tensor.dtype in FORMATS and (scales := scales_of(name, stored)):
            yield Pair(name, name, scales)


def scales_of(name: str, stored: Tensors) -> str | None:
    """Returns the name of the E8M0 scales of the elements `name`, or None."""
    scales = next((s for suffix in CONVENTIONS.values() if (s := name + suffix) in stored), None)
    # By dtype too: FP8 with one float32 scale per tensor has the same names.
    return scales if scales is not None and stored[scales].dtype in SCALE_DTYPES else None


def is_known(config: str | None) -> bool:
    """Whether the quantization_config in a file's metadata is of one of these conventions, or is missing."""
    try:
        return config is None or json.loads(config)["quant_method"] in (COMPRESSED_TENSORS, "mxfp8")
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def entries_of(tensors: Mapping[str, PackedWeight | Tensor], convention: str) -> list[safetensors.Entry]:
    """Returns the tensors of a checkpoint, scales after their elements, without dtypes that safetensors lacks."""
    entries = []
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedWeight):
            dtype = formats.element_format(tensor.element_format).safetensors_name
            scales = name + CONVENTIONS[convention]
            blocks = scale_shape(tensor.shape, -1)
            entries.append(safetensors.Entry(dtype, tensor.shape, name, partial(getattr, tensor, "elements")))
            entries.append(safetensors.Entry(safetensors.U8, blocks, scales, partial(getattr, tensor, "scales")))
        elif (other := safetensors.NAMES.get(tensor.dtype)) is not None:
            entries.append(safetensors.Entry(other, tensor.shape, name, tensor.read))
    return entries


def config_of(weights: Mapping[str, PackedWeight], convention: str, ignored: Iterable[str]) -> dict[str, Any]:
    """Returns the value of "quantization_config" in the checkpoint's config.json.

    `weights` are by their names in the checkpoint; `ignored` has the names of modules whose weights are not packed.
    """
    # This convention has one config for all modules: it cannot say which of them are weight-only.
    if convention == SCALE_INV:
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, formats.BLOCK_SIZE],
            "scale_fmt": "ue8m0",
            # Without it readers treat every linear layer as MXFP8.
            "modules_to_not_convert": sorted(ignored),
        }
    modules: dict[tuple[bool, bool], list[str]] = {}
    # E4M3 and E5M2 are one kind of config, since the dtype of the tensors differs. Quantized modules come first.
    for name, weight in sorted(weights.items(), key=lambda item: bool(item[1].weight_only)):
        kind = weight.element_format == formats.INT8.name, bool(weight.weight_only)
        modules.setdefault(kind, []).append(name.removesuffix(".weight"))
    groups = {f"group_{at}": _config_group(targets, *kind) for at, (kind, targets) in enumerate(modules.items())}
    kinds = {group["format"] for group in groups.values()}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


def _config_group(targets: list[str], is_int: bool, weight_only: bool) -> dict[str, Any]:
    settings = {
        "num_bits": 8,
        "type": "int" if is_int else "float",
        "strategy": "group",
        "group_size": formats.BLOCK_SIZE,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
    }
    return {
        "targets": sorted(targets),
        "weights": {**settings, "dynamic": False},
        "input_activations": None if weight_only else {**settings, "dynamic": True},
        "output_activations": None,
        # compressed-tensors has no name for MXINT8, so readers that know only its names refuse this one.
        "format": "mxint8-quantized" if is_int else "mxfp8-quantized",
    }
