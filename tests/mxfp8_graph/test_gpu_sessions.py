"""Rewritten models on a GPU inside ONNX Runtime, on an emulated CUDA driver: packed weights, external data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import builders
import numpy as np
import pytest
from cuda_driver_emulation import Driver, machine

import mxfp8_graph
from mxfp8_ops import ort

pytestmark = pytest.mark.cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    with machine(monkeypatch) as gpu:
        yield gpu


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("recipe", ["mxfp8", "all", "mxfp8-bf16", "mxfp8-weight-only"])
def test_a_rewritten_model_gives_what_it_gives_on_the_processor(
    gpu: Driver, tmp_path: Path, recipe: str, dtype: type
) -> None:
    original = builders.save(builders.attention_model(dtype=dtype), tmp_path / "model.onnx", external=True)
    path, _ = mxfp8_graph.rewrite(original, recipe=recipe, output=tmp_path / "packed.onnx", external_data="always")
    x = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(dtype)
    got, expected = (ort.session(path, device=device).run(None, {"x": x})[0] for device in ("cuda-copies", "cpu"))
    kernels = {launch.kernel.partition("<")[0] for launch in gpu.launches}
    first = {"mxfp8-bf16": {"bfloat16_rounded"}, "mxfp8-weight-only": set()}.get(recipe, {"quantize_rows"})
    assert kernels >= {*first, "gemm_skinny"}
    difference = np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64))
    assert difference < 1e-2, "more than an element that rounds the other way here and there"
