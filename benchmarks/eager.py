"""Claim: `quantize_` makes a module of PyTorch faster on a CPU without an export, at a small part of int8's error.

Eager modules: the real all-MiniLM-L6-v2 on real texts, ViT-B/16 and a Llama-config decoder with random weights, which
generates one token after 128 others. The error is of the outputs, against float32. Then the time of one call of a
linear of 64 x 64, whose product takes no time: what a module of ours costs more than nn.Linear.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from exports import decoder_config
from harness import THREADS, noise_notes, publish, take_turns
from minilm import model_folder
from retrieval import feeds_of, functions, tokenizer
from settings import TORCH_INT8
from torch import nn

from mxfp8_graph import quantize_

FP32, BF16 = "torch fp32", "torch bf16"
RECIPES = ("mxint8", "mxfp8", "mxint8-weight-only", "mxint8-bf16")
COLUMNS = ["model", "contender", "ms", "spread", "times float32", "relative L2", "MB"]

PAST = 128
"""Tokens in the decoder's cache."""


def cases(quick: bool) -> Iterator[tuple[str, nn.Module, dict[str, Any], str]]:
    """Yields (name, module, inputs, the output that counts)."""
    from transformers import AutoModel, DynamicCache, LlamaForCausalLM, ViTConfig, ViTModel

    texts = [text for _, text in functions()]
    texts = [" ".join(pair) for pair in zip(texts[:16:2], texts[1:16:2], strict=True)]
    encoder = tokenizer()
    encoder.enable_truncation(128)
    feeds = {name: torch.from_numpy(value) for name, value in feeds_of(encoder, texts).items()}
    shape = " x ".join(map(str, feeds["input_ids"].shape))
    yield f"MiniLM, {shape}", AutoModel.from_pretrained(model_folder()), feeds, "last_hidden_state"
    torch.manual_seed(0)
    image = {"pixel_values": torch.randn(1, 3, 224, 224)}
    yield "ViT-B/16, 1 image", ViTModel(ViTConfig(num_hidden_layers=2 if quick else 12)), image, "last_hidden_state"
    config = decoder_config(2 if quick else 8, quick=quick)
    decoder = LlamaForCausalLM(config).eval()
    past = decoder(torch.randint(0, config.vocab_size, (1, PAST)), use_cache=True).past_key_values
    layers = [(layer.keys, layer.values) for layer in past.layers]

    def token(dtype: torch.dtype) -> dict[str, Any]:
        cache = DynamicCache()
        for index, pair in enumerate(layers):
            cache.update(*(each.to(dtype) for each in pair), index)
        return {"input_ids": torch.ones(1, 1, dtype=torch.int64), "past_key_values": cache}

    yield f"Llama, {config.num_hidden_layers} layers, one token", decoder, {"": token}, "logits"


def contenders(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.dtype]]:
    """Yields (name, a copy of the module, its dtype)."""
    for name in (FP32, BF16, TORCH_INT8, *RECIPES, "mxint8, module in bf16"):
        dtype = torch.bfloat16 if name.endswith("bf16") and name != "mxint8-bf16" else torch.float32
        other = copy.deepcopy(module).to(dtype)
        if name == TORCH_INT8:
            config = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
            other = torch.ao.quantization.quantize_dynamic(other, config)
        elif name.startswith("mx"):
            quantize_(other, name.partition(",")[0])
        yield name, other, dtype


def prepared(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns new inputs in a dtype."""
    if "" in inputs:
        return inputs[""](dtype)  # type: ignore[no-any-return]
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def called(module: nn.Module, feeds: dict[str, Any]) -> Any:
    """Returns the result of a module; its cache has as many tokens as before."""
    result = module(**feeds)
    if cache := feeds.get("past_key_values"):
        cache.crop(-1)
    return result


def megabytes(module: nn.Module) -> str:
    """Returns the bytes of a module's parameters and buffers; those of torch's int8 modules are in neither."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return f"{sum(tensors.values()) / 1e6:.0f}"


def overhead() -> list[list[str]]:
    """Returns the rows of a call of one small linear."""
    x, rows = torch.randn(1, 64), []
    plain = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    calls: dict[str, Callable[[], Any]] = {FP32: partial(plain[0], x)}
    for recipe in RECIPES:
        quantize_(packed := copy.deepcopy(plain), recipe)
        calls[recipe] = partial(packed[0], x)
    torch.set_num_threads(1)
    timings = take_turns(calls, rounds=15)
    torch.set_num_threads(THREADS)
    for name, timing in timings.items():
        ratio, spread = timings[FP32].median / timing.median, timing.spread / timing.median
        numbers = [f"{timing.median * 1e3:.4f}", f"{spread:.0%}", f"{ratio:.2f}"]
        rows.append(["one call, 1 x 64 x 64", name, *numbers, "", ""])
    return rows


@torch.no_grad()
def main() -> None:
    """Times each module in each form, and writes results/eager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller models; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(THREADS)
    rows, notes = [], []
    for model, module, inputs, output in cases(quick):
        calls, errors, sizes = {}, {}, {}
        for name, other, dtype in contenders(module.eval()):
            calls[name] = partial(called, other, prepared(inputs, dtype))
            result = calls[name]()[output].float()
            expected = result if name == FP32 else expected  # noqa: F821 - float32 comes first
            errors[name] = float((result - expected).norm() / expected.norm())
            sizes[name] = megabytes(other) if name != TORCH_INT8 else ""
        timings = take_turns(calls, rounds=3 if quick else 9)
        for name, timing in timings.items():
            spread, ratio = timing.spread / timing.median, timings[FP32].median / timing.median
            numbers = [f"{timing.median * 1e3:.2f}", f"{spread:.0%}", f"{ratio:.2f}", f"{errors[name]:.3g}"]
            rows.append([model, name, *numbers, sizes[name]])
        notes += [f"{model}: {note}" for note in noise_notes(timings)]
    rows += overhead()
    publish("eager", f"Modules of PyTorch in eager mode, {THREADS} threads", COLUMNS, rows, notes=notes, keep=not quick)


if __name__ == "__main__":
    main()
