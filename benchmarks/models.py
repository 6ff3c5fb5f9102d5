"""Claim: whole models run faster than float32 ONNX Runtime: a real encoder, and a decoder's prefill and decode step."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from floors import measure
from harness import THREADS, noise_notes, options, publish, take_turns
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

sys.path.insert(0, str(Path(__file__).parents[1] / "samples" / "01_minilm_onnx"))
from minilm import export as export_minilm

Feeds = dict[str, np.ndarray]


class Decoder(torch.nn.Module):
    """A Llama with its key-value cache as plain inputs and outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM(config).eval()

    def forward(self, input_ids: torch.Tensor, past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns the last token's logits and the grown cache."""
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers = result.past_key_values.layers
        return (result.logits, *(t for layer in layers for t in (layer.keys, layer.values)))


def export_decoder(path: Path, layers: int) -> int:
    """Writes a random-weight Llama-config decoder with cache; returns its parameter count."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    decoder = Decoder(config)
    past = [torch.randn(1, 4, 8, 64) for _ in range(2 * layers)]
    length, cached = torch.export.Dim("sequence"), torch.export.Dim("cached")
    names = [f"past.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            decoder,
            (torch.ones(1, 4, dtype=torch.int64), past),
            dynamo=True,
            dynamic_shapes=({1: length}, [{2: cached}] * len(past)),
            input_names=["input_ids", *names],
            output_names=["logits", *(n.replace("past", "present") for n in names)],
            verbose=False,
            external_data=True,
        )
    program.save(path, external_data=True)
    return sum(p.numel() for p in decoder.parameters())


RECIPES = {
    "mxfp8": Recipe(),
    "mxfp8, weight-only": Recipe(weight_only=True),
    "mxfp8, output projection too": Recipe(output_projections=True),
}


def file_of(path: Path, contender: str) -> Path:
    return path.with_suffix(f".{contender.replace(', ', '.').replace(' ', '-')}.onnx")


def sessions_of(path: Path, recipes: tuple[str, ...], *, int8: bool) -> dict[str, onnxruntime.InferenceSession]:
    sessions = {"ORT fp32": onnxruntime.InferenceSession(path, options())}
    for recipe in recipes:
        rewritten, report = mxfp8_graph.rewrite(path, RECIPES[recipe], output=file_of(path, recipe), overwrite=True)
        print(f"{path.name}, {recipe}: {len(report.rewritten)} of {len(report.sites)} matmuls")
        sessions[recipe] = ort.session(rewritten, session_options=options())
    bits8 = MatMulNBitsQuantizer(onnx.load(path), bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    bits8.process()
    bits8.model.save_model_to_file(str(path.with_suffix(".bits8.onnx")), use_external_data_format=True)
    sessions["ORT MatMulNBits 8"] = onnxruntime.InferenceSession(path.with_suffix(".bits8.onnx"), options())
    if int8:
        quantize_dynamic(path, path.with_suffix(".int8.onnx"), weight_type=QuantType.QInt8)
        sessions["ORT int8 dynamic"] = onnxruntime.InferenceSession(path.with_suffix(".int8.onnx"), options())
    return sessions


def weight_note(path: Path, bandwidth: float, embedding: int) -> str:
    """Returns how long a decode step takes at least: one reading of the weights, but for the embedding's rows."""
    files = {"fp32": path} | {name: file_of(path, name) for name in ("mxfp8", "mxfp8, output projection too")}
    times = []
    for name, file in files.items():
        size = file.with_name(f"{file.name}.data").stat().st_size - embedding
        times.append(f"{name} {size / 1e6:.0f} MB, {1e3 * size / bandwidth:.0f} ms")
    return f"Weights that a decode step reads, and the time that takes at the bandwidth measured: {'; '.join(times)}"


def compare(label: str, sessions: dict[str, onnxruntime.InferenceSession], feeds: Feeds) -> tuple[list[Any], list[str]]:
    """Returns the table's rows for one workload, and noise notes."""
    timings = take_turns({name: lambda s=s: s.run(None, feeds) for name, s in sessions.items()}, rounds=9)
    base = timings["ORT fp32"].median
    rows = [
        [label, name, f"{t.median * 1e3:.1f}", f"{t.spread / t.median:.0%}", f"{base / t.median:.2f}x"]
        for name, t in timings.items()
    ]
    return rows, [f"{label}: {note}" for note in noise_notes(timings)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of the decoder; 16 is 0.8 billion parameters")
    parser.add_argument("--skip-decoder", action="store_true")
    arguments = parser.parse_args()
    floors = measure()
    rows, notes = [], [floors.describe()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_minilm(folder / "minilm.onnx")
        sessions = sessions_of(folder / "minilm.onnx", ("mxfp8", "mxfp8, weight-only"), int8=True)
        for batch in (8, 32):
            ids = np.random.default_rng(0).integers(1000, 20000, (batch, 128))
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            wanted = {i.name for i in sessions["ORT fp32"].get_inputs()}
            more, noise = compare(f"MiniLM {batch} x 128", sessions, {k: v for k, v in feeds.items() if k in wanted})
            rows, notes = rows + more, notes + noise
        del sessions
        if not arguments.skip_decoder:
            count = export_decoder(folder / "decoder.onnx", arguments.layers)
            sessions = sessions_of(folder / "decoder.onnx", ("mxfp8", "mxfp8, output projection too"), int8=False)
            notes.append(weight_note(folder / "decoder.onnx", floors.read, embedding=32000 * 2048 * 4))
            for label, length, cached in (("decode, 256 cached", 1, 256), ("prefill 256", 256, 0)):
                rng = np.random.default_rng(1)
                feeds = {"input_ids": rng.integers(0, 32000, (1, length))}
                for i in sessions["ORT fp32"].get_inputs()[1:]:
                    feeds[i.name] = rng.standard_normal((1, 4, cached, 64), np.float32)
                more, noise = compare(f"decoder {count / 1e9:.2f}B, {label}", sessions, feeds)
                rows, notes = rows + more, notes + noise
    publish(
        "models",
        f"Whole models, {THREADS} threads",
        ["workload", "contender", "ms", "spread", "vs fp32"],
        rows,
        notes=notes,
    )


if __name__ == "__main__":
    main()
