"""Checkpoints of ComfyUI: scales in the tiles of cuBLAS, and markers that say the format of each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints as ck
import ml_dtypes
import models as b
import numpy as np
import oracle
import pytest
from grids import looped, pairwise
from safetensors.numpy import save_file

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError

MXFP8 = {"format": "mxfp8"}


def marker(told: Any) -> np.ndarray:
    return np.frombuffer(told if isinstance(told, bytes) else json.dumps(told).encode(), np.uint8)


def tensors(weights: dict[str, ck.Codes], told: Any = MXFP8) -> dict[str, np.ndarray]:
    """Returns layers as ComfyUI stores them, with a marker each."""
    found: dict[str, Any] = {}
    for layer, (elements, scales) in weights.items():
        found[f"{layer}.weight"] = elements.view(ml_dtypes.float8_e4m3fn)
        found[f"{layer}.weight_scale"] = ck.tiles(scales)
        found[f"{layer}.comfy_quant"] = marker(told)
    return found


def one(path: Path, told: Any = MXFP8, metadata: Any = None, **others: Any) -> Path:
    """Writes a checkpoint of a layer [256, 128] whose scales would fit in the order of rows, too; None leaves out."""
    stored = tensors({"up": ck.codes(256, 128)}, told) | {name.replace("__", "."): o for name, o in others.items()}
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(stored, path, None if metadata is None else {"_quantization_metadata": metadata})
    return path


# --- What is read ----------------------------------------------------------------------------------------------------


@looped("shape, dtype", pairwise(shape=[(256, 256), (96, 96), (160, 416), (32, 32)], dtype=["uint8", "float8_e8m0fnu"]))
def test_elements_and_scales_are_those_that_were_stored(shape: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    weights = {"up": ck.codes(*shape)}
    stored = tensors(weights)
    stored["up.weight_scale"] = stored["up.weight_scale"].view(np.dtype(dtype))
    save_file(stored, tmp_path / "a.safetensors")
    ck.check_bytes(mxfp8_graph.import_safetensors(tmp_path / "a.safetensors"), {"up.weight": weights["up"]})


NAMED = json.dumps({"format_version": "1.0", "layers": {"up": MXFP8, "gone": {"format": "nvfp4"}}})
OF_CONVERT_TO_QUANT = {**MXFP8, "group_size": 32, "orig_dtype": "torch.bfloat16", "orig_shape": [256, 128]}


@looped("told, metadata", [(None, NAMED), (OF_CONVERT_TO_QUANT, None)])
def test_metadata_may_mark_layers_and_convert_to_quant_says_more(told: Any, metadata: Any, tmp_path: Path) -> None:
    others = {"up__comfy_quant": None} if told is None else {}
    path = one(tmp_path / "a.safetensors", told, metadata, **others)
    ck.check_bytes(mxfp8_graph.import_safetensors(path), {"up.weight": ck.codes(256, 128)})


def linear() -> Any:
    ends = {"x": (np.float32, ["m", 128])}, {"y": (np.float32, ["m", 256])}
    return b.model(b.steps("MatMul x up.weight>h; Relu h>y"), *ends, {"up.weight": b.weight(128, 256)})


def test_a_rewritten_model_computes_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    recipe = Recipe(activations="unchanged")
    model, _ = mxfp8_graph.rewrite(linear(), recipe, weights=one(tmp_path / "comfy.safetensors"))
    x, w = oracle.normal(3, 128), ck.values(ck.codes(256, 128))
    expected = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T, 0)
    assert np.abs(oracle.run(model, {"x": x})[0] - expected).max() < 128 * 2.0**-24 * (np.abs(x) @ np.abs(w).T).max()


# --- What is refused -------------------------------------------------------------------------------------------------


def rewritten(path: Path) -> None:
    mxfp8_graph.rewrite(linear(), weights=path)


PLAIN = ck.codes(256, 128)
UNMARKED = {"down__weight": PLAIN[0].view(ml_dtypes.float8_e4m3fn), "down__weight_scale": PLAIN[1]}


@looped(
    "told, others, message",
    [
        ({**MXFP8, "convrot": True}, {}, "'up' .ComfyUI's {'format': 'mxfp8', 'convrot': True}"),
        ({**MXFP8, "group_size": 64}, {}, "'up' .ComfyUI's {'format': 'mxfp8', 'group_size': 64}"),
        ({"format": "float8_e4m3fn"}, {}, "no MXFP8 weight .'up' .ComfyUI's {'format': 'float8_e4m3fn'}"),
        ({}, {}, "'up' .ComfyUI's {}"),
        (b"{", {}, "'up.comfy_quant' is damaged; expected what ComfyUI writes"),
        (b"[]", {}, "is damaged"),
        (MXFP8, {"up__weight_scale": None}, "'up' .ComfyUI's {'format': 'mxfp8'}"),
        (MXFP8, {"up__weight_scale": np.ones(1, np.float32)}, "'up' .ComfyUI's"),
        (MXFP8, {"up__weight": np.zeros((256, 128), ml_dtypes.float8_e5m2)}, "'up' .ComfyUI's"),
        (MXFP8, {"up__weight_scale": np.zeros((256, 8), np.uint8)}, r"has scales of shape \[256, 8\], not \[256, 4\]"),
        (MXFP8, {"up__input_scale": np.ones(1, np.float32)}, "'up.input_scale' .* of an unknown quantization"),
        (MXFP8, UNMARKED, r"in another way: down\.weight \(F8_E4M3"),
        ("[]", {}, "'_quantization_metadata' is damaged"),
        ('{"layers": []}', {}, "'_quantization_metadata' is damaged"),
        ('{"layers": {}}', {}, "'_quantization_metadata' is damaged"),
        ('{"layers": {"up": "mxfp8"}}', {}, "'_quantization_metadata' is damaged"),
    ],
)
def test_layers_that_are_not_as_comfyui_writes_them_are_refused(
    told: Any, others: Any, message: str, tmp_path: Path
) -> None:
    if isinstance(told, str):
        path = one(tmp_path / "a.safetensors", metadata=told, up__comfy_quant=None)
    else:
        path = one(tmp_path / "a.safetensors", told, **others)
    with pytest.raises(ContractError, match=message):
        rewritten(path)


def test_layers_of_other_formats_are_named_and_not_imported(tmp_path: Path) -> None:
    others = {"down__weight": np.zeros((4, 4), np.uint8), "down__comfy_quant": marker({"format": "nvfp4"})}
    path = one(tmp_path / "a.safetensors", **others)
    with pytest.raises(ContractError, match=r"quantized in another way: 'down' .ComfyUI's .'format': 'nvfp4'"):
        rewritten(path)
    assert list(mxfp8_graph.import_safetensors(path)) == ["up.weight"]
