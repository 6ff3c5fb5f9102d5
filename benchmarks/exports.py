"""The models of the benchmarks as ONNX files. All but MiniLM have random weights, always the same."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "samples" / "01_minilm_onnx"))

OPSET = 23
"""Its Attention, RMSNormalization and RotaryEmbedding are one kernel each in ONNX Runtime."""


class Decoder(torch.nn.Module):
    """A Llama with its key-value cache as plain inputs and outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).eval()

    def forward(self, input_ids: torch.Tensor, past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns the last token's logits and the grown cache."""
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = result.past_key_values.layers
        return (result.logits, *(t for layer in layers for t in (layer.keys, layer.values)))


def decoder_config(layers: int, *, quick: bool) -> Any:
    """Returns the shape of the decoder: 0.84 billion parameters with 16 layers, 0.48 with 8."""
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256 if quick else 2048,
        intermediate_size=704 if quick else 5632,
        num_attention_heads=4 if quick else 32,
        num_key_value_heads=2 if quick else 4,
        head_dim=64,
        vocab_size=1024 if quick else 32000,
    )


def export_decoder(path: Path, config: Any) -> None:
    """Writes a Llama-config decoder with its cache as inputs and outputs."""
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    past = [torch.randn(1, heads, 8, config.head_dim) for _ in range(2 * layers)]
    names = [f"past.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    length, cached = torch.export.Dim("sequence"), torch.export.Dim("cached")
    export_module(
        path,
        Decoder(config),
        args=(torch.ones(1, 4, dtype=torch.int64), past),
        opset_version=OPSET,
        dynamic_shapes=({1: length}, [{2: cached}] * len(past)),
        input_names=["input_ids", *names],
        output_names=["logits", *(n.replace("past", "present") for n in names)],
        external_data=True,
    )


def write_decoder_weights(path: Path, config: Any) -> None:
    """Writes the same decoder's weights by transformers' names, for llama.cpp."""
    np.savez(path, **{name: value.numpy() for name, value in Decoder(config).model.state_dict().items()})


def export_vit(path: Path, *, quick: bool) -> None:
    """Writes a ViT-B/16, or two of its layers."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    export_module(
        path,
        ViTModel(ViTConfig(num_hidden_layers=2 if quick else 12)).eval(),
        kwargs={"pixel_values": torch.randn(2, 3, 224, 224)},
        opset_version=OPSET,
        dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
        input_names=["pixel_values"],
        output_names=["last_hidden_state", "pooler_output"],
    )


def export_minilm(path: Path, opset: int | None) -> None:
    """Writes the real all-MiniLM-L6-v2 at an opset, or the exporter's default."""
    from minilm import export

    export(path, opset)


def export_long_minilm(path: Path, opset: int | None, positions: int) -> None:
    """Writes an encoder of MiniLM's shape that takes as many tokens as there are positions."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536, max_position_embeddings=positions)
    torch.manual_seed(0)
    names = ("input_ids", "attention_mask")
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    export_module(
        path,
        BertModel(config).eval(),
        kwargs={name: torch.ones(2, 8, dtype=torch.int64) for name in names},
        opset_version=opset,
        dynamic_shapes=dict.fromkeys(names, dynamic),
        input_names=list(names),
        output_names=["last_hidden_state", "pooler_output"],
    )


def linears(k: int, n: int, layers: int) -> Any:
    """Returns a model of `layers` separate products: y0 = x0 @ w0, y1 = x1 @ w1, ..."""
    from onnx import helper, numpy_helper

    rng = np.random.default_rng(0)
    each = range(layers)
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"], name=f"linear{i}") for i in each],
        "linears",
        [helper.make_tensor_value_info(f"x{i}", 1, ["m", k]) for i in each],
        [helper.make_tensor_value_info(f"y{i}", 1, ["m", n]) for i in each],
        [numpy_helper.from_array(rng.standard_normal((k, n), np.float32), f"w{i}") for i in each],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def export_module(path: Path, model: torch.nn.Module, *, external_data: bool = False, **arguments: Any) -> None:
    """Writes what torch's exporter makes of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, dynamo=True, verbose=False, external_data=external_data, **arguments)
    program.save(path, external_data=external_data)
