"""Opens safetensors checkpoints: MXFP8 weights of any tool, and tensors in high precision. Reads headers only.

A checkpoint is one file, the files that an index names, or a Hugging Face folder with either. `compressed_tensors.py`,
`torchao.py` and `comfyui.py` have the names of the tensors of MXFP8 weights, and the metadata that describe them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.file_reading import locate
from mxfp8_graph.packed import comfyui, compressed_tensors, safetensors, torchao
from mxfp8_graph.packed.compressed_tensors import CONFIG_KEY, FORMATS, Pair
from mxfp8_graph.packed.contents import Codes, PackedWeight
from mxfp8_graph.packed.safetensors import Stored, Tensors
from mxfp8_graph.packing import swizzled_tiles, unswizzled
from mxfp8_graph.policy.checkpoint_weights import CheckpointWeights
from mxfp8_ops import formats
from mxfp8_ops.checks import scale_shape
from mxfp8_ops.errors import ContractError

_FLOAT8: Final = frozenset({safetensors.E4M3, safetensors.E5M2})

_INDEX: Final = "model.safetensors.index.json"
_FILE: Final = "model.safetensors"

_FOREIGN: Final = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "weight_qdata")
"""Endings of the names of tensors that belong to a quantized weight of any format."""

_OF_QUANTIZATION: Final = re.compile(r"_?weight_(?!\d+$)|q(weight|zeros|data)|(?s:.*?)(scale|zero|amax|g_idx)")


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
    # ComfyUI's descriptions, if there are any, cover every quantized layer.
    if layers := comfyui.layers(stored, metadata, path):
        pairs = [*comfyui.pairs(stored, layers)]
    else:
        pairs = [*compressed_tensors.pairs(stored), *torchao.pairs(stored, metadata)]
    weights: dict[str, PackedWeight] = {}
    # Markers are descriptions of layers and no tensors of the model.
    used = {name for name in stored if name.endswith(comfyui.MARKER)}
    misfits: list[str] = []
    for pair in pairs:
        used |= {pair.elements, pair.scales}
        if misfit := _misfit(pair, stored[pair.elements].shape, stored[pair.scales].shape):
            misfits.append(misfit)
        else:
            weights[pair.name] = _weight(pair, stored[pair.elements], stored[pair.scales])
    # Refused and not ignored: an unknown scale or zero point beside a weight would change its values.
    misfits += _unknown(stored, metadata, used, weights)
    if misfits:
        expected = f"one scale per {formats.BLOCK_SIZE} values of the last axis, and no other quantization"
        advice = "store them unswizzled, in blocks of 32, or keep ComfyUI's markers of tiles of 128 x 4"
        raise ContractError(path, listed(misfits), expected=expected, advice=advice)
    others = {name: tensor for name, tensor in stored.items() if name not in used}
    foreign = (
        *comfyui.others(stored, layers, weights),
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


def weights_for_model(path: str | Path, names: str | Path | Mapping[str, str] | None) -> CheckpointWeights:
    """Returns the weights of a checkpoint in place of a model's own; `names` are `weight_names` of `rewrite`.

    Raises:
        ContractError: the checkpoint cannot be read, or has another quantization; or `names` is no mapping of texts.
    """
    expected = "a mapping of names in the model to names in the checkpoint"
    files = {Path(names)} if isinstance(names, (str, Path)) else set()
    if isinstance(names, (str, Path)):
        names = read_json(Path(names), what="not a JSON object", expected=expected, advice="correct it")
    for key, value in (names or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            what = f"{key!r}: {value!r} is not text"
            raise ContractError("weight_names", what, expected=expected, advice="correct it")
    checkpoint = open_checkpoint(path)
    checkpoint.require_mxfp8()
    return CheckpointWeights(
        where=str(path),
        weights=checkpoint.weights,
        names=names or {},
        others=tuple(sorted(checkpoint.others)),
        files=checkpoint.files | files,
    )


def _unknown(stored: Tensors, metadata: Mapping[str, str], used: Set[str], weights: Collection[str]) -> list[str]:
    """Returns the tensors and metadata that describe an unknown quantization of MXFP8 weights or of their inputs."""
    # If a module has several weights, such as experts.gate_up, its other tensors may belong to any of them.
    heads = {w.removesuffix("weight") if f".{w}".endswith(".weight") else f"{w}_" for w in weights}
    suspects = {
        name
        for name in stored
        if name.rpartition(".")[2] == comfyui.OLDER_MARKER
        or any(
            name[: end.end()] in heads and _of_quantization(name[end.end() :]) for end in re.finditer(r"^|[._]", name)
        )
    }
    descriptions = [f"{name!r} ({stored[name].dtype} {list(stored[name].shape)})" for name in sorted(suspects - used)]
    descriptions += [] if compressed_tensors.is_known(metadata.get(CONFIG_KEY)) else [f"{CONFIG_KEY!r} of the file"]
    return [f"{each} of an unknown quantization" for each in descriptions]


def _file_in(folder: Path) -> Path:
    """Returns the index or the only file of a Hugging Face folder."""
    for name in (_INDEX, _FILE):
        if (folder / name).exists():
            return folder / name
    expected = f"{_INDEX} or {_FILE} in it"
    raise ContractError(folder, "a folder without a checkpoint", expected=expected, advice="name the file itself")


def _misfit(pair: Pair, shape: tuple[int, ...], scales: tuple[int, ...]) -> str | None:
    """Returns a description of scales that do not fit a weight of that shape, or None if they fit."""
    blocks = scale_shape(shape or (0,), -1)
    # Tiles pad rows to multiples of 128 and scales to multiples of 4.
    if pair.swizzled and len(shape) == 2:
        down, across = swizzled_tiles(*blocks)
        blocks = (down * 128, across * 4)
        fits = math.prod(scales) == math.prod(blocks)
    else:
        fits = not pair.swizzled and scales == blocks
    misfit = f"weight {pair.name!r} of shape {list(shape)} has scales of shape {list(scales)}, not {list(blocks)}"
    return None if fits else misfit


def _weight(pair: Pair, elements: Stored, scales: Stored) -> PackedWeight:
    def codes() -> Codes:
        codes = scales.bytes()
        return unswizzled(codes, *scale_shape(elements.shape, -1)) if pair.swizzled else codes.reshape(scales.shape)

    return PackedWeight(
        name=pair.name,
        module=pair.name.removesuffix(".weight") if pair.name.endswith(".weight") else None,
        shape=elements.shape,
        element_format=FORMATS[elements.dtype],
        weight_only=pair.weight_only or None,  # without ComfyUI's flag a checkpoint says nothing about activations
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
