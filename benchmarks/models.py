"""Claim: whole models run faster than float32 ONNX Runtime: a real encoder, a vision encoder, a decoder.

All are exported at opset 23, whose Attention, RMSNormalization and RotaryEmbedding are one kernel each in ONNX Runtime:
the fastest float32 there is to compare with. The real encoder comes at the exporter's default opset as well. The peers
are ONNX Runtime, as it is and without the optimizations that slow it down, its own 8-bit quantizers, and OpenVINO with
the weights as they are, in int8 and in MXFP8, if it is installed (`pip install openvino nncf`).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
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
from openvino_peer import Peer

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


def export_vit(path: Path) -> None:
    """Writes a random-weight ViT-B/16."""
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            kwargs={"pixel_values": torch.randn(2, 3, 224, 224)},
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
            input_names=["pixel_values"],
            output_names=["last_hidden_state", "pooler_output"],
            verbose=False,
        )
    program.save(path)


RECIPES = {
    "mxfp8": Recipe(),
    "mxfp8, bf16 activations": Recipe(activations="bfloat16"),
    "mxfp8, weight-only": Recipe(activations="unchanged"),
    "mxfp8, output projection too": Recipe(output_projections=True),
}


OPENVINO = (
    ("OpenVINO fp32", "f32", "as they are"),
    ("OpenVINO bf16", "bf16", "as they are"),
    ("OpenVINO bf16, NNCF int8 weights", "bf16", "int8"),
    ("OpenVINO bf16, NNCF MXFP8 weights", "bf16", "mxfp8"),
)
"""Name, what it computes in, what NNCF makes of the weights."""


def file_of(path: Path, contender: str) -> Path:
    """Returns where the model that a contender runs is kept."""
    return path.with_suffix(f".{contender.replace(', ', '.').replace(' ', '-')}.onnx")


class Contenders:
    """Everybody who runs one model; writes those of their files that do not exist yet.

    Args:
        path: the float32 model.
        recipes: names in `RECIPES`.
        int8: whether ONNX Runtime's int8 dynamic quantization takes part.
        openvino: an interpreter that has openvino and nncf, or None.
    """

    def __init__(self, path: Path, recipes: tuple[str, ...], *, int8: bool, openvino: str | None) -> None:
        self.path = path
        self.notes: list[str] = []
        self.sessions = {"ORT fp32": onnxruntime.InferenceSession(path, options())}
        best = options()
        best.add_session_config_entry(ort.DISABLE, ";".join(ort.FASTER_WITHOUT))
        self.sessions["ORT fp32, best settings"] = onnxruntime.InferenceSession(path, best)
        for recipe in recipes:
            if not file_of(path, recipe).exists():
                _, report = mxfp8_graph.rewrite(path, RECIPES[recipe], output=file_of(path, recipe))
                print(f"{path.name}, {recipe}: {len(report.rewritten)} of {len(report.sites)} matmuls")
            self.sessions[recipe] = ort.session(file_of(path, recipe), session_options=options())
        self.sessions["ORT MatMulNBits 8"] = self._bits8()
        if int8:
            self.sessions["ORT int8 dynamic"] = self._int8_dynamic()
        self.peers = {} if openvino is None else self._openvino(openvino)

    def _bits8(self) -> onnxruntime.InferenceSession:
        target = self.path.with_suffix(".bits8.onnx")
        if not target.exists():
            model = onnx.load(self.path)
            quantizer = MatMulNBitsQuantizer(model, bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
            quantizer.process()
            quantizer.model.save_model_to_file(str(target), use_external_data_format=True)
        return onnxruntime.InferenceSession(target, options())

    def _int8_dynamic(self) -> onnxruntime.InferenceSession:
        target = self.path.with_suffix(".int8.onnx")
        if not target.exists():
            nodes = ["MatMul", "Gemm", "Gather"]  # it takes opset 23's Attention for ONNX Runtime's own
            quantize_dynamic(self.path, target, op_types_to_quantize=nodes, weight_type=QuantType.QInt8)
        return onnxruntime.InferenceSession(target, options())

    def _openvino(self, python: str) -> dict[str, Peer]:
        peers = {}
        for label, precision, weights in OPENVINO:
            try:
                peers[label] = Peer(self.path, precision=precision, weights=weights, threads=THREADS, python=python)
            except RuntimeError as error:
                self.notes.append(f"{self.path.name}: {label} does not run: {error}")
        return peers

    def calls(self, feeds: Feeds) -> dict[str, Callable[[], Any]]:
        """Returns what each of them does with these inputs."""
        wanted = {i.name for i in self.sessions["ORT fp32"].get_inputs()}
        given = {name: value for name, value in feeds.items() if name in wanted}
        for peer in self.peers.values():
            peer.feed(given)
        return {name: lambda s=s: s.run(None, given) for name, s in self.sessions.items()} | dict(self.peers)

    def close(self) -> None:
        """Ends the processes of the peers."""
        for peer in self.peers.values():
            peer.close()


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

    def compare(self, label: str, contenders: Contenders, feeds: Feeds, *, rounds: int) -> None:
        """Times one workload."""
        timings = take_turns(contenders.calls(feeds), rounds=rounds)
        base = timings["ORT fp32"].median
        for name, t in timings.items():
            spread = f"{t.spread / t.median:.0%}"
            self.rows.append([label, name, f"{t.median * 1e3:.1f}", spread, f"{base / t.median:.2f}x"])
        self.notes += [f"{label}: {note}" for note in noise_notes(timings)]

    def publish(self, name: str, title: str, openvino: str | None) -> None:
        """Prints and writes the table."""
        if openvino is None:
            self.notes.append("OpenVINO is not in this table: it was not installed.")
        columns = ["workload", "contender", "ms", "spread", "vs fp32"]
        publish(name, f"{title}, {THREADS} threads", columns, self.rows, notes=list(dict.fromkeys(self.notes)))


def minilm(folder: Path, openvino: str | None) -> None:
    """Times the real all-MiniLM-L6-v2."""
    results = Results(measure())
    for opset in (OPSET, None):
        path = folder / f"minilm-{opset or 'default'}.onnx"
        if not path.exists():
            export_minilm(path, opset)
        recipes = ("mxfp8", "mxfp8, bf16 activations", "mxfp8, weight-only")
        contenders = Contenders(path, recipes, int8=True, openvino=openvino)
        for batch in (8, 32):
            ids = np.random.default_rng(0).integers(1000, 20000, (batch, 128))
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            label = f"{batch} x 128" + ("" if opset else ", the exporter's default opset")
            results.compare(label, contenders, feeds, rounds=9)
        contenders.close()
        results.notes += contenders.notes
    results.publish("minilm", "all-MiniLM-L6-v2", openvino)


def vit(folder: Path, openvino: str | None) -> None:
    """Times a ViT-B/16 with random weights."""
    results = Results(measure())
    path = folder / "vit.onnx"
    if not path.exists():
        export_vit(path)
    contenders = Contenders(path, ("mxfp8", "mxfp8, bf16 activations"), int8=True, openvino=openvino)
    for batch in (1, 8):
        pixels = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), np.float32)
        results.compare(f"{batch} of 224 x 224", contenders, {"pixel_values": pixels}, rounds=7)
    contenders.close()
    results.notes += contenders.notes
    results.publish("vit", "ViT-B/16, random weights", openvino)


def decoder(folder: Path, openvino: str | None, layers: int) -> None:
    """Times a Llama-config decoder with random weights."""
    floors = measure()
    results = Results(floors)
    path = folder / f"decoder-{layers}.onnx"
    if not path.exists():
        export_decoder(path, layers)
    contenders = Contenders(path, tuple(RECIPES), int8=False, openvino=openvino)
    results.notes.append(weight_note(path, floors.read, embedding=VOCABULARY * HIDDEN * 4))
    for label, length, cached, rounds in (("decode, 256 cached", 1, 256, 25), ("prefill 256", 256, 0, 5)):
        rng = np.random.default_rng(1)
        feeds: Feeds = {"input_ids": rng.integers(0, VOCABULARY, (1, length))}
        for i in contenders.sessions["ORT fp32"].get_inputs()[1:]:
            feeds[i.name] = rng.standard_normal((1, 4, cached, 64), np.float32)
        results.compare(label, contenders, feeds, rounds=rounds)
    contenders.close()
    results.notes += contenders.notes
    parameters = path.with_name(f"{path.name}.data").stat().st_size / 4e9
    results.publish("decoder", f"A decoder of {parameters:.2f} billion parameters, its cache in and out", openvino)


def main() -> None:
    """Times the models that are asked for, and writes a table of each to results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("minilm", "vit", "decoder"))
    parser.add_argument("--layers", type=int, default=16, help="layers of the decoder; 16 are 0.8 billion parameters")
    parser.add_argument("--folder", type=Path, help="where the models stay for the next run; by default they do not")
    parser.add_argument("--openvino", help="an interpreter that has openvino and nncf; by default this one, if it has")
    arguments = parser.parse_args()
    openvino = arguments.openvino
    if openvino is None and all(map(importlib.util.find_spec, ("openvino", "nncf"))):
        openvino = sys.executable
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.only in {None, "minilm"}:
            minilm(folder, openvino)
        if arguments.only in {None, "vit"}:
            vit(folder, openvino)
        if arguments.only in {None, "decoder"}:
            decoder(folder, openvino, arguments.layers)


if __name__ == "__main__":
    main()
