"""Checkpoints of ComfyUI: scales in the tiles of cuBLAS, and markers that say the format of each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builders as b
import checkpoints as ck
import commands
import ml_dtypes
import numpy as np
import pytest
from grids import looped, pairwise
from safetensors.numpy import save_file

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops import ort
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


def one(path: Path, told: Any = MXFP8, metadata: dict[str, str] | None = None, **others: Any) -> Path:
    """Writes a checkpoint of a layer [256, 128] whose scales would fit in the order of rows, too; None leaves out."""
    stored = tensors({"up": ck.codes(256, 128)}, told) | {name.replace("__", "."): o for name, o in others.items()}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path, metadata)
    return path


# --- What is read ----------------------------------------------------------------------------------------------------


@looped("shape, dtype", pairwise(shape=[(256, 256), (96, 96), (160, 416), (32, 32)], dtype=["uint8", "float8_e8m0fnu"]))
def test_elements_and_scales_are_those_that_were_stored(shape: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    weights = {"up": ck.codes(*shape)}
    stored = tensors(weights)
    stored["up.weight_scale"] = stored["up.weight_scale"].view(np.dtype(dtype))
    save_file(stored, tmp_path / "a.safetensors")
    ck.check_bytes(mxfp8_graph.import_safetensors(tmp_path / "a.safetensors"), {"up.weight": weights["up"]})


def test_tiles_are_those_of_torchao() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    torch = pytest.importorskip("torch")
    _, scales = ck.codes(160, 416)
    expected = utils.to_blocked(torch.from_numpy(scales).view(torch.float8_e8m0fnu)).view(torch.uint8)
    np.testing.assert_array_equal(ck.tiles(scales).reshape(-1), expected.numpy())


def test_the_metadata_of_the_file_may_mark_layers(tmp_path: Path) -> None:
    weights = {"up": ck.codes(256, 128)}
    told = json.dumps({"format_version": "1.0", "layers": {"up": MXFP8, "gone": {"format": "nvfp4"}}})
    path = one(tmp_path / "a.safetensors", metadata={"_quantization_metadata": told}, up__comfy_quant=None)
    ck.check_bytes(mxfp8_graph.import_safetensors(path), {"up.weight": weights["up"]})


def test_markers_of_convert_to_quant_are_read(tmp_path: Path) -> None:
    told = {**MXFP8, "group_size": 32, "orig_dtype": "torch.bfloat16", "orig_shape": [256, 128]}
    ck.check_bytes(mxfp8_graph.import_safetensors(one(tmp_path / "a", told)), {"up.weight": ck.codes(256, 128)})


def test_a_rewritten_model_computes_with_the_weights_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {"w": ck.codes(256, 128)}
    save_file(tensors(weights) | {"w.bias": np.zeros(256, np.float32)}, "comfy.safetensors")
    nodes = [b.node("MatMul", "x w.weight", "h"), b.node("Relu", "h", "y")]
    shapes = {"x": (np.float32, ["m", 128])}, {"y": (np.float32, ["m", 256])}
    source = commands.save(b.model(nodes, *shapes, {"w.weight": b.weight(128, 256)}))
    done = commands.run(
        "rewrite", source, "--weights", "comfy.safetensors", "--recipe", "mxfp8-weight-only", "-o", "y.onnx"
    )
    assert done.exit_code == 0, done.output
    x = np.random.default_rng(0).standard_normal((3, 128), np.float32)
    (found,) = ort.session("y.onnx").run(None, {"x": x})
    expected = np.maximum(x.astype(np.float64) @ ck.values(weights["w"]).astype(np.float64).T, 0)
    assert np.abs(found - expected).max() < 128 * 2.0**-24 * (np.abs(x) @ np.abs(ck.values(weights["w"])).T).max()


# --- What is refused -------------------------------------------------------------------------------------------------


def rewritten(path: Path) -> None:
    model = b.model(
        [b.node("MatMul", "x up.weight", "y")],
        {"x": (np.float32, [4, 128])},
        {"y": (np.float32, [4, 256])},
        {"up.weight": b.weight(128, 256)},
    )
    mxfp8_graph.rewrite(model, Recipe(output_projections=True), weights=path)


@looped("kind", ["nvfp4", "float8_e4m3fn", "int8_tensorwise"])
def test_layers_of_other_formats_are_named(kind: str, tmp_path: Path) -> None:
    told = marker({"format": kind})
    path = one(tmp_path / "a.safetensors", down__weight=np.zeros((4, 4), np.uint8), down__comfy_quant=told)
    with pytest.raises(ContractError, match=f"quantized in another way: 'down' .ComfyUI's .'format': '{kind}'"):
        rewritten(path)
    assert list(mxfp8_graph.import_safetensors(path)) == ["up.weight"]


def test_bytes_that_look_like_mxfp8_are_what_their_marker_says(tmp_path: Path) -> None:
    path = one(tmp_path / "a.safetensors", {"format": "float8_e4m3fn"})
    with pytest.raises(ContractError, match=r"no MXFP8 weight \('up' \(ComfyUI's {'format': 'float8_e4m3fn'}\)"):
        mxfp8_graph.import_safetensors(path)


@looped(
    "told, others, message",
    [
        ({**MXFP8, "convrot": True}, {}, "'up' .ComfyUI's {'format': 'mxfp8', 'convrot': True}"),
        ({**MXFP8, "group_size": 64}, {}, "'up' .ComfyUI's {'format': 'mxfp8', 'group_size': 64}"),
        ({}, {}, "'up' .ComfyUI's {}"),
        (b"{", {}, "'up.comfy_quant' is damaged; expected what ComfyUI writes"),
        (b"[]", {}, "is damaged"),
        (b"[" * 60_000, {}, "'up.comfy_quant' is damaged"),
        (MXFP8, {"up__weight_scale": None}, "'up' .ComfyUI's {'format': 'mxfp8'}"),
        (MXFP8, {"up__weight_scale": np.ones(1, np.float32)}, "'up' .ComfyUI's"),
        (MXFP8, {"up__weight": np.zeros((256, 128), ml_dtypes.float8_e5m2)}, "'up' .ComfyUI's"),
        (MXFP8, {"up__weight_scale": np.zeros((256, 8), np.uint8)}, r"has scales of shape \[256, 8\], not \[256, 4\]"),
        (MXFP8, {"up__input_scale": np.ones(1, np.float32)}, "'up.input_scale' .* of an unknown quantization"),
    ],
)
def test_layers_that_are_not_as_comfyui_writes_them(told: Any, others: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        rewritten(one(tmp_path / "a.safetensors", told, **others))


def test_a_layer_without_marker_beside_marked_ones_is_refused(tmp_path: Path) -> None:
    elements, scales = ck.codes(256, 128)
    others = {"down__weight": elements.view(ml_dtypes.float8_e4m3fn), "down__weight_scale": scales}
    with pytest.raises(ContractError, match=r"in another way: down\.weight \(F8_E4M3"):
        rewritten(one(tmp_path / "a.safetensors", **others))


@looped("told", ["{", "[]", '{"layers": []}', '{"layers": {}}', '{"layers": {"up": "mxfp8"}}'])
def test_metadata_that_comfyui_did_not_write(told: str, tmp_path: Path) -> None:
    path = one(tmp_path / "a.safetensors", metadata={"_quantization_metadata": told}, up__comfy_quant=None)
    with pytest.raises(ContractError, match="'_quantization_metadata' is damaged"):
        rewritten(path)
