"""A model of diffusers: packed in place, and when it loads. Packed ones are not saved."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from mxfp8_graph import quantize_  # noqa: E402
from mxfp8_graph.integrations.torchao import MXConfig  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402


def test_a_transformer_is_packed_in_place_and_when_it_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = diffusers.DiTTransformer2DModel
    kind(num_attention_heads=2, attention_head_dim=32, in_channels=4, num_layers=1, sample_size=8).save_pretrained(
        tmp_path
    )
    config = diffusers.TorchAoConfig(MXConfig("mxint8"))
    loaded = kind.from_pretrained(tmp_path, quantization_config=config, torch_dtype=torch.float32)
    quantize_(model := kind.from_pretrained(tmp_path), "mxint8")
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([3])
    with torch.no_grad():
        result, expected = (each(*inputs, class_labels=torch.tensor([1])).sample for each in (loaded, model))
    assert torch.equal(result, expected)
    with pytest.raises(ContractError, match="save_pretrained of a model that quantize_ packed"):
        model.save_pretrained(tmp_path / "packed")
