"""Opens safetensors checkpoints: MXFP8 weights of any tool, and tensors in high precision. Reads headers only.

A checkpoint is one file, the files that an index names, or a Hugging Face folder with either. Names of the tensors of
MXFP8 weights, and the metadata that describe them:

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
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.file_reading import locate
from mxfp8_graph.packed import safetensors
from mxfp8_graph.packed.safetensors import Stored
from mxfp8_graph.packed.weight import Codes, PackedWeight
from mxfp8_graph.weights import swizzled_tiles, unswizzled
from mxfp8_ops import formats
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError

Tensors = Mapping[str, Stored]

_FORMATS: Final = {fmt.safetensors_name: fmt.name for fmt in formats.ELEMENT_FORMATS.values()}
_FLOAT8: Final = frozenset({safetensors.E4M3, safetensors.E5M2})
_SCALE_DTYPES: Final = frozenset({safetensors.U8, safetensors.E8M0})

_INDEX: Final = "model.safetensors.index.json"
_FILE: Final = "model.safetensors"

_FOREIGN: Final = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "weight_qdata")
"""Endings of the names of tensors that belong to a quantized weight of any format."""


COMPRESSED_TENSORS: Final = "compressed-tensors"
SCALE_INV: Final = "scale-inv"

CONVENTIONS: Final = {COMPRESSED_TENSORS: "_scale", SCALE_INV: "_scale_inv"}
"""Suffix of the name of the scales, after the name of the elements, by convention."""

CONFIG_KEY: Final = "quantization_config"
"""Key in the file's metadata; its value belongs in the checkpoint's config.json."""

_OF_QUANTIZATION: Final = re.compile(r"_?weight_(?!\d+$)|q(weight|zeros|data)|(?s:.*?)(scale|zero|amax|g_idx)")

COMFY_MARKER: Final = ".comfy_quant"
_COMFY_GLOBAL: Final = "scaled_fp8"
"""Name of the tensor that marks ComfyUI's older form, where each float8 weight has one scale."""

_COMFY_METADATA: Final = "_quantization_metadata"
_COMFY_KEYS: Final = frozenset({"format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape"})
"""Keys of an MXFP8 layer that do not change its values. convert_to_quant writes the last two."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint by name."""

    path: Path
    """File, index or folder, as the caller named it."""
    weights: Mapping[str, PackedWeight]
    others: Tensors
    """All other tensors, unchanged."""
    foreign: tuple[str, ...]
    """Tensors of other quantizations than MXFP8 in blocks of 32 along the last axis, with dtype and shape."""
    byte_size: int
    """Bytes of all tensors."""
    files: frozenset[Path]

    def require_mxfp8(self) -> None:
        """Raises ContractError if a tensor is quantized in another way."""
        if self.foreign:
            what = f"{len(self.foreign)} tensors are quantized in another way: {listed(self.foreign)}"
            expected = "float8 or int8 elements and one E8M0 scale per 32 values of the last axis"
            raise ContractError(self.path, what, expected=expected, advice="name an MXFP8 checkpoint")


def listed(names: tuple[str, ...] | list[str], most: int = 20) -> str:
    """Returns names for a message, the first of them where there are many."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Returns the tensors of a checkpoint by name. It reads headers and ComfyUI's markers, and no other data.

    Args:
        path: a .safetensors file, the .safetensors.index.json of a sharded checkpoint, or a folder with
            model.safetensors or model.safetensors.index.json.

    Raises:
        ContractError: a file cannot be read, there is no MXFP8 weight, scales do not fit their weights, or a tensor
            or metadata beside a weight describe an unknown quantization.
    """
    path = Path(path)
    file = _file_in(path) if os.path.isdir(path) else path
    stored, metadata = _sharded(file) if file.suffix == ".json" else safetensors.read(file)
    comfy = _comfy_layers(stored, metadata, path)
    weights: dict[str, PackedWeight] = {}
    # Markers are descriptions of layers and no tensors of the model.
    used = {name for name in stored if name.endswith(COMFY_MARKER)}
    misfits: list[str] = []
    for name, elements, scales, swizzled in _pairs(stored, metadata, comfy):
        used |= {elements, scales}
        if misfit := _misfit(name, stored[elements].shape, stored[scales].shape, swizzled=swizzled):
            misfits.append(misfit)
        else:
            only = bool(comfy.get(name.removesuffix(".weight"), {}).get("full_precision_matrix_mult"))
            weights[name] = _weight(name, stored[elements], stored[scales], swizzled=swizzled, only=only)
    # Refused and not ignored: an unknown scale or zero point beside a weight would change its values.
    misfits += _unknown(stored, metadata, used, weights)
    if misfits:
        expected = f"one scale per {formats.BLOCK_SIZE} values of the last axis, and no other quantization"
        advice = "store them unswizzled, in blocks of 32, or keep ComfyUI's markers of tiles of 128 x 4"
        raise ContractError(path, listed(misfits), expected=expected, advice=advice)
    others = {name: tensor for name, tensor in stored.items() if name not in used}
    foreign = (
        *(
            f"{layer!r} (ComfyUI's {str(comfy[layer])[:200]})"
            for layer in sorted(comfy)
            if f"{layer}.weight" in stored.keys() - weights.keys()
        ),
        *(
            f"{name} ({tensor.dtype} {list(tensor.shape)})"
            for name, tensor in sorted(others.items())
            if tensor.dtype in _FLOAT8 or name.endswith(_FOREIGN)
        ),
    )
    if not weights:
        what = "no MXFP8 weight" + (f" ({listed(foreign)})" if foreign else "")
        expected = "X.weight of float8 or int8 with X.weight_scale or X.weight_scale_inv of uint8"
        raise ContractError(path, what, expected=expected, advice="name a checkpoint with MXFP8 weights")
    return Checkpoint(
        path=path,
        weights=weights,
        others=others,
        foreign=foreign,
        byte_size=sum(tensor.byte_size for tensor in stored.values()),
        files=frozenset({file, *(tensor.path for tensor in stored.values())}),
    )


def _unknown(stored: Tensors, metadata: Mapping[str, str], used: Set[str], weights: Collection[str]) -> list[str]:
    """Returns the tensors and metadata that describe an unknown quantization of MXFP8 weights or of their inputs."""
    # If a module has several weights, such as experts.gate_up, its other tensors may belong to any of them.
    heads = {w.removesuffix("weight") if f".{w}".endswith(".weight") else f"{w}_" for w in weights}
    suspects = {
        name
        for name in stored
        if name.rpartition(".")[2] == _COMFY_GLOBAL
        or any(
            name[: end.end()] in heads and _of_quantization(name[end.end() :]) for end in re.finditer(r"^|[._]", name)
        )
    }
    descriptions = [f"{name!r} ({stored[name].dtype} {list(stored[name].shape)})" for name in sorted(suspects - used)]
    descriptions += [] if _is_known(metadata.get(CONFIG_KEY)) else [f"{CONFIG_KEY!r} of the file"]
    return [f"{each} of an unknown quantization" for each in descriptions]


def _file_in(folder: Path) -> Path:
    """Returns the index or the only file of a Hugging Face folder."""
    for name in (_INDEX, _FILE):
        if (folder / name).exists():
            return folder / name
    expected = f"{_INDEX} or {_FILE} in it"
    raise ContractError(folder, "a folder without a checkpoint", expected=expected, advice="name the file itself")


def _pairs(
    stored: Tensors, metadata: Mapping[str, str], comfy: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, str, bool]]:
    """Yields (name of a weight, of its elements, of its scales, whether the scales are swizzled).

    `comfy` has ComfyUI's description of each layer; if it has any, it covers every quantized layer.
    """
    for name, tensor in stored.items():
        if tensor.dtype not in _FORMATS or (
            comfy and not _is_comfy_mxfp8(comfy.get(name.removesuffix(".weight")), tensor)
        ):
            continue
        # By name and by dtype: FP8 with one float32 scale per tensor has the same names.
        scales = next((s for suffix in CONVENTIONS.values() if (s := name + suffix) in stored), None)
        if scales is not None and stored[scales].dtype in _SCALE_DTYPES:
            yield name, name, scales, bool(comfy)  # only ComfyUI swizzles scales under these names
        elif name.endswith("_qdata") and (pair := _of_torchao(name, stored, metadata)) is not None:
            yield pair


def _of_torchao(elements: str, stored: Tensors, metadata: Mapping[str, str]) -> tuple[str, str, str, bool] | None:
    """Returns the tuple of `_pairs` for X._weight_qdata, if its metadata describe an MXTensor in blocks of 32."""
    # X._weight_qdata belongs to X.weight, the name under which the metadata describe it.
    module, _, rest = elements.removesuffix("_qdata").rpartition(".")
    name, scales = f"{module}.{rest[1:]}".lstrip("."), f"{elements.removesuffix('_qdata')}_scale"
    try:
        description = json.loads(metadata[name])
        data = description["_data"]
        kind, size, swizzled = description["_type"], data["block_size"], data["is_swizzled_scales"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    if kind != "MXTensor" or size != formats.BLOCK_SIZE or scales not in stored:
        return None
    return (name, elements, scales, bool(swizzled)) if stored[scales].dtype in _SCALE_DTYPES else None


def _misfit(name: str, shape: tuple[int, ...], scales: tuple[int, ...], *, swizzled: bool) -> str | None:
    """Returns a description of scales that do not fit a weight of that shape, or None if they fit."""
    blocks = scale_shape(shape or (0,), -1)
    # Tiles pad rows to multiples of 128 and scales to multiples of 4.
    if swizzled and len(shape) == 2:
        down, across = swizzled_tiles(*blocks)
        blocks = (down * 128, across * 4)
        fits = math.prod(scales) == math.prod(blocks)
    else:
        fits = not swizzled and scales == blocks
    misfit = f"weight {name!r} of shape {list(shape)} has scales of shape {list(scales)}, not {list(blocks)}"
    return None if fits else misfit


def _weight(name: str, elements: Stored, scales: Stored, *, swizzled: bool, only: bool) -> PackedWeight:
    def codes() -> Codes:
        codes = scales.bytes()
        return unswizzled(codes, *scale_shape(elements.shape, -1)) if swizzled else codes.reshape(scales.shape)

    return PackedWeight(
        name=name,
        module=name.removesuffix(".weight") if name.endswith(".weight") else None,
        shape=elements.shape,
        element_format=_FORMATS[elements.dtype],
        weight_only=only or None,  # without ComfyUI's flag a checkpoint says nothing about activations
        read_elements=lambda: elements.bytes().reshape(elements.shape),
        read_scales=codes,
    )


def read_json(path: Path, *, what: str, expected: str, advice: str) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ContractError: the file cannot be read; or it has no JSON object, with `what`, `expected` and `advice`.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ContractError.unreadable(path, error, "a readable file") from None
    except (ValueError, RecursionError):  # json raises RecursionError for text with deep nesting
        data = None
    if not isinstance(data, dict):
        raise ContractError(path, what, expected=expected, advice=advice)
    return data


def _sharded(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns the tensors of all files that an index names, and their metadata."""
    what, expected = "not the index of a checkpoint", "JSON with a weight_map"
    advice = "name a .safetensors.index.json"
    weight_map = read_json(path, what=what, expected=expected, advice=advice).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ContractError(path, what, expected=expected, advice=advice)
    stored: dict[str, Stored] = {}
    metadata: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        try:
            # An index of unknown origin may name any file; `locate` refuses a file outside of its folder.
            shard_path = locate(path, shard, str(path))
        except OSError as error:
            raise ContractError.unreadable(path.parent / shard, error, "a readable safetensors file") from None
        tensors, shard_metadata = safetensors.read(shard_path)
        # A shard may have a copy of a tensor that the index places in another shard.
        stored |= {name: tensor for name, tensor in tensors.items() if weight_map.get(name, shard) == shard}
        metadata |= shard_metadata
    if missing := [f"{name!r} in {weight_map[name]}" for name in sorted(weight_map.keys() - stored.keys())]:
        expected, advice = "the tensors that it names", "download it again"
        raise ContractError(path, f"no {listed(missing)}", expected=expected, advice=advice)
    return stored, metadata


def _of_quantization(name: str) -> bool:
    """Whether a tensor describes a quantization, by its name in the module of a weight.

    True for scales of the input (input_scale, pre_quant_scale), zero points, orders of columns (g_idx), and modules
    such as input_quantizer. False for a bias, adapters, and TransformerEngine's _extra_state, which has no state for
    MXFP8.
    """
    return "quant" in name or ("." not in name and _OF_QUANTIZATION.match(name) is not None)


def _is_known(config: str | None) -> bool:
    """Whether the quantization_config in a file's metadata is of a convention above, or is missing."""
    try:
        return config is None or json.loads(config)["quant_method"] in (COMPRESSED_TENSORS, "mxfp8")
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def _comfy_layers(stored: Tensors, metadata: Mapping[str, str], path: Path) -> dict[str, dict[str, Any]]:
    """Returns ComfyUI's description of each layer; metadata overrule markers, as in ComfyUI.

    Raises:
        ContractError: a marker or the metadata has another form than ComfyUI's.
    """
    texts = {name: tensor.bytes().tobytes() for name, tensor in stored.items() if name.endswith(COMFY_MARKER)}
    descriptions: dict[str, Any] = {}
    where = ""
    try:
        # `where` is used after the loop: the error names the marker that failed, or the metadata.
        for where, text in texts.items():
            descriptions[where.removesuffix(COMFY_MARKER)] = json.loads(text)
        where = _COMFY_METADATA
        if where in metadata:
            descriptions = {**descriptions, **json.loads(metadata[where])["layers"]}
        # Files without metadata are normal; metadata without a layer are damaged.
        if (descriptions or where not in metadata) and all(isinstance(layer, dict) for layer in descriptions.values()):
            return descriptions
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = "what ComfyUI writes, such as {'format': 'mxfp8'} for a layer"
    raise ContractError(path, f"{where!r} is damaged", expected=expected, advice="write the checkpoint again")


def _is_comfy_mxfp8(layer: Mapping[str, Any] | None, weight: Stored) -> bool:
    """Whether ComfyUI describes a layer as plain MXFP8, with no key that may change its values."""
    layer = layer or {}
    kind = layer.get("format"), layer.get("group_size", formats.BLOCK_SIZE), weight.dtype
    return kind == ("mxfp8", formats.BLOCK_SIZE, safetensors.E4M3) and layer.keys() <= _COMFY_KEYS
