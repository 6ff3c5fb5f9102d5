"""Safetensors files, mutated: weights that can be read, or a documented error."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.packed import import_safetensors
from mxfp8_ops.errors import Mxfp8Error

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 4.0, 2**31, 2**63, 2**64, 10**30, "", "x", "F8_E4M3", "U8", "F8_E8M0", "F4", "BF16"),
    *([], {}, [1], [0, 256], [256, 264], [2**62, 4], [-1, 5], [0, 1, 2], ["a"], {"a": "b"}),
)


def file(header: Any, size: int) -> bytes:
    """Returns a file with that header and `size` bytes of data."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(256)) * (size // 256) + bytes(size % 256)


def seeds() -> list[bytes]:
    """Returns checkpoints in both conventions and ComfyUI's, with other tensors and metadata, and an index."""
    weight = {"dtype": "F8_E4M3", "shape": [4, 64], "data_offsets": [0, 256]}
    scales = {"dtype": "U8", "shape": [4, 2], "data_offsets": [256, 264]}
    other = {"dtype": "F32", "shape": [3], "data_offsets": [264, 276]}
    tiles = {"dtype": "F8_E8M0", "shape": [128, 4], "data_offsets": [256, 768]}
    marker = {"dtype": "U8", "shape": [19], "data_offsets": [768, 787]}
    said = {"_quantization_metadata": json.dumps({"layers": {"up": {"format": "mxfp8"}}})}
    comfy = {"up.weight": weight, "up.weight_scale": tiles, "up.bias": {**other, "data_offsets": [768, 780]}}
    index = {"metadata": {"total_size": 264}, "weight_map": {"up.weight": "model.safetensors"}}
    return [
        file({"up.weight": weight, "up.weight_scale": scales}, 264),
        file({"__metadata__": {"format": "pt"}, "up.weight": weight, "up.weight_scale_inv": scales, "b": other}, 276),
        json.dumps(index).encode(),
        file({"__metadata__": said, **comfy}, 780),
        file({**comfy, "up.bias": marker | {"shape": [0], "data_offsets": [768, 768]}, "up.comfy_quant": marker}, 768)
        + b'{"format": "mxfp8"}',
    ]


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns `data` with a value of its JSON exchanged, or bytes of it changed."""
    start = 0 if data[:1] == b"{" else 8
    stop = len(data) if start == 0 else 8 + int.from_bytes(data[:8], "little")
    if random.random() < 0.7:
        try:
            parsed = json.loads(data[start:stop])
        except (ValueError, RecursionError):
            parsed = {}
        text = json.dumps(_changed(parsed, random)).encode()
        return (len(text).to_bytes(8, "little") if start else b"") + text + data[stop:]
    at = random.randrange(len(data) + 1)
    pieces = (b"", bytes([random.randrange(256)]), b"[" * 3000, b"../", b"\xff\xfe", b"9" * 5000, b'"a":1,')
    return data[:at] + random.choice(pieces) + data[at + random.randrange(4) :]


def _changed(value: Any, random: random.Random) -> Any:
    """Returns JSON with one value in it exchanged, removed or doubled."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        kind = random.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        name = random.choice((key, f"{key}_scale", "__metadata__", "../x", "")) if kind < 0.2 else key
        return {**value, name: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return [*value[:at], _changed(value[at], random), *value[at + random.randrange(2) :]]
    return random.choice(_VALUES)


def check(data: bytes, folder: Path) -> None:
    """Raises unless every weight of the file can be read, or it is refused with a documented error."""
    index = data[:1] == b"{"
    (folder / "model.safetensors").write_bytes(seeds()[0] if index else data)
    path = folder / ("model.safetensors.index.json" if index else "model.safetensors")
    if index:
        path.write_bytes(data)
    try:
        for weight in import_safetensors(path).values():
            weight.dequantize()
    except Mxfp8Error as error:
        error.message()
