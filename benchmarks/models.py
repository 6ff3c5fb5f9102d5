"""Claim: whole models run faster than float32 ONNX Runtime: a real encoder, and a decoder's prefill and decode step.

Both are exported at opset 23, whose Attention, RMSNormalization and RotaryEmbedding are one kernel each in ONNX
Runtime: the fastest float32 there is to compare with. The encoder comes at the exporter's default opset as well.
"""

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
from floors import Floors, measure
from harness import THREADS, noise_notes, options, publish, take_turns
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

sys.path.insert(0, str(Path(__file__).parents[1] / "samples" / "01_minilm_onnx"))
from minilm import export as export_minilm

Feeds = dict[str, np.ndarray]

OPSET = 23
HIDDEN, VOCABULARY = 2048, 32000


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


def export_decoder(path: Path, layers: int) -> None:
    """Writes a random-weight Llama-config decoder with cache."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
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
            opset_version=OPSET,
            dynamic_shapes=({1: length}, [{2: cached}] * len(past)),
            input_names=["input_ids", *names],
            output_names=["logits", *(n.replace("past", "present") for n in names)],
            verbose=False,
            external_data=True,
        )
    program.save(path, external_data=True)


RECIPES = {
    "mxfp8": Recipe(),
    "mxfp8, bf16 activations": Recipe(activations="bfloat16"),
    "mxfp8, weight-only": Recipe(activations="unchanged"),
    "mxfp8, output projection too": Recipe(output_projections=True),
}


def file_of(path: Path, contender: str) -> Path:
    """Returns where the model that a contender runs is kept."""
    return path.with_suffix(f".{contender.replace(', ', '.').replace(' ', '-')}.onnx")


def sessions_of(path: Path, recipes: tuple[str, ...], *, int8: bool) -> dict[str, onnxruntime.InferenceSession]:
    """Returns a session per contender; writes those of their files that do not exist yet."""
    sessions = {"ORT fp32": onnxruntime.InferenceSession(path, options())}
    for recipe in recipes:
        if not file_of(path, recipe).exists():
            _, report = mxfp8_graph.rewrite(path, RECIPES[recipe], output=file_of(path, recipe))
            print(f"{path.name}, {recipe}: {len(report.rewritten)} of {len(report.sites)} matmuls")
        sessions[recipe] = ort.session(file_of(path, recipe), session_options=options())
    bits8 = path.with_suffix(".bits8.onnx")
    if not bits8.exists():
        quantizer = MatMulNBitsQuantizer(onnx.load(path), bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        quantizer.model.save_model_to_file(str(bits8), use_external_data_format=True)
    sessions["ORT MatMulNBits 8"] = onnxruntime.InferenceSession(bits8, options())
    if int8:
        if not path.with_suffix(".int8.onnx").exists():
            nodes = ["MatMul", "Gemm", "Gather"]  # it takes opset 23's Attention for ONNX Runtime's own
            target = path.with_suffix(".int8.onnx")
            quantize_dynamic(path, target, op_types_to_quantize=nodes, weight_type=QuantType.QInt8)
        sessions["ORT int8 dynamic"] = onnxruntime.InferenceSession(path.with_suffix(".int8.onnx"), options())
    return sessions


def weight_note(path: Path, bandwidth: float, embedding: int) -> str:
    """Returns the least time of a decode step: that of reading all weights once, without the embedding."""
    files = {"fp32": path} | {name: file_of(path, name) for name in ("mxfp8", "mxfp8, output projection too")}
    times = []
    for name, file in files.items():
        size = file.with_name(f"{file.name}.data").stat().st_size - embedding
        times.append(f"{name} {size / 1e6:.0f} MB, {1e3 * size / bandwidth:.0f} ms")
    return f"Weights that a decode step reads, and the time that takes at the bandwidth measured: {'; '.join(times)}"


class Results:
    """The rows and notes of one table."""

    def __init__(self, floors: Floors) -> None:
        self.rows: list[list[Any]] = []
        self.notes = [floors.describe()]

    def compare(
        self, label: str, sessions: dict[str, onnxruntime.InferenceSession], feeds: Feeds, *, rounds: int
    ) -> None:
        """Times one workload."""
        timings = take_turns({name: lambda s=s: s.run(None, feeds) for name, s in sessions.items()}, rounds=rounds)
        base = timings["ORT fp32"].median
        for name, t in timings.items():
            spread = f"{t.spread / t.median:.0%}"
            self.rows.append([label, name, f"{t.median * 1e3:.1f}", spread, f"{base / t.median:.2f}x"])
        self.notes += [f"{label}: {note}" for note in noise_notes(timings)]

    def publish(self, name: str, title: str) -> None:
        """Prints and writes the table."""
        columns = ["workload", "contender", "ms", "spread", "vs fp32"]
        publish(name, f"{title}, {THREADS} threads", columns, self.rows, notes=self.notes)


def minilm(folder: Path) -> None:
    """Times the real all-MiniLM-L6-v2."""
    results = Results(measure())
    for opset in (OPSET, None):
        path = folder / f"minilm-{opset or 'default'}.onnx"
        if not path.exists():
            export_minilm(path, opset)
        sessions = sessions_of(path, ("mxfp8", "mxfp8, bf16 activations", "mxfp8, weight-only"), int8=True)
        wanted = {i.name for i in sessions["ORT fp32"].get_inputs()}
        for batch in (8, 32):
            ids = np.random.default_rng(0).integers(1000, 20000, (batch, 128))
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            label = f"{batch} x 128" + ("" if opset else ", the exporter's default opset")
            results.compare(label, sessions, {k: v for k, v in feeds.items() if k in wanted}, rounds=9)
    results.publish("minilm", "all-MiniLM-L6-v2")


def decoder(folder: Path, layers: int) -> None:
    """Times a Llama-config decoder with random weights."""
    floors = measure()
    results = Results(floors)
    path = folder / f"decoder-{layers}.onnx"
    if not path.exists():
        export_decoder(path, layers)
    sessions = sessions_of(path, tuple(RECIPES), int8=False)
    results.notes.append(weight_note(path, floors.read, embedding=VOCABULARY * HIDDEN * 4))
    for label, length, cached, rounds in (("decode, 256 cached", 1, 256, 25), ("prefill 256", 256, 0, 5)):
        rng = np.random.default_rng(1)
        feeds = {"input_ids": rng.integers(0, VOCABULARY, (1, length))}
        for i in sessions["ORT fp32"].get_inputs()[1:]:
            feeds[i.name] = rng.standard_normal((1, 4, cached, 64), np.float32)
        results.compare(label, sessions, feeds, rounds=rounds)
    parameters = path.with_name(f"{path.name}.data").stat().st_size / 4e9
    results.publish("decoder", f"A decoder of {parameters:.2f} billion parameters, its cache in and out")


def main() -> None:
    """Times the models that are asked for, and writes a table of each to results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("minilm", "decoder"))
    parser.add_argument("--layers", type=int, default=16, help="layers of the decoder; 16 are 0.8 billion parameters")
    parser.add_argument("--folder", type=Path, help="where the models stay for the next run; by default they do not")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.only != "decoder":
            minilm(folder)
        if arguments.only != "minilm":
            decoder(folder, arguments.layers)


if __name__ == "__main__":
    main()
