"""Claim: whole models run faster than what else runs them on a processor: an encoder, a vision encoder, a decoder.

All are exported at opset 23, whose Attention, RMSNormalization and RotaryEmbedding are one kernel each in ONNX Runtime:
the fastest float32 there is to compare with. The real encoder comes at the exporter's default opset as well. `linears`
is eight matmuls of 4096 x 4096 with a weight each, more than the caches hold, as in a model. The peers are ONNX
Runtime, as it is and without the optimizations that slow it down, and its own 8-bit quantizers. With `--openvino`
OpenVINO takes part, with the weights as they are, in int8 and in MXFP8 (`pip install openvino nncf`), and with
`--llama` llama.cpp in Q8_0 on the decoder (see llama_peer.py). Idle threads spin nowhere.

Ratios are those of the medians in one run, all contenders taking turns. Where memory has no room for all, they run in
several heats with ONNX Runtime's float32 in each, and ratios are those of the ratios to it. Cosines are those of each
output vector (of the means over the tokens for MiniLM) with ONNX Runtime's float32.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from contenders import (
    COLUMNS,
    LEGEND,
    OV_BF16,
    OV_INT8,
    OV_MXFP8,
    PREPACK,
    Field,
    Workload,
    table,
)
from exports import (
    OPSET,
    decoder_config,
    export_decoder,
    export_minilm,
    export_vit,
    linears,
    write_decoder_weights,
)
from floors import Floors, measure
from harness import THREADS, options, publish
from peers import Feeds, Peer
from settings import BEST, INT8, STOCK

from mxfp8_graph import Recipe
from mxfp8_graph.policy import presets

NAMES = ("mxfp8", "mxfp8-bf16", "mxfp8-weight-only", "mxint8", "mxint8-bf16", "mxint8-weight-only")
RECIPES = {
    **{name: presets.PRESETS[name] for name in NAMES},
    **{name: presets.PRESETS[of] for name, (of, _) in PREPACK.items()},
    "mxfp8, not fused": {"fuse": False},
}
ROUNDS = 9
PAST = 256


@dataclass(frozen=True)
class Run:
    """The options of the command line."""

    folder: Path
    """Where models are kept."""
    openvino: str | None
    llama: str | None
    layers: int
    together: int
    quick: bool
    """Small models, few rounds, no result files: whether everything works."""

    @property
    def rounds(self) -> int:
        """Rounds of a workload of moderate size."""
        return 3 if self.quick else ROUNDS

    def model(self, name: str, write: Callable[[Path], object]) -> Path:
        """Returns a model's file, which is written if it does not exist yet."""
        path = self.folder / f"{name}{'-quick' if self.quick else ''}.onnx"
        if not path.exists():
            write(path)
        return path


class Results:
    """The rows and notes of one table."""

    def __init__(self, run: Run) -> None:
        self.run, self.floors = run, measure(*((16 << 20,) if run.quick else ()))
        self.rows: list[list[str]] = []
        self.notes = [LEGEND, self.floors.describe()]
        self.versions: dict[str, str] = {}

    def race(self, field: Field, workloads: list[Workload]) -> None:
        """Adds the rows of these workloads."""
        outcomes = field.race(workloads)
        for workload in workloads:
            self.rows += table(workload, outcomes[workload.label], field.recipes)
        self.notes += field.notes
        self.versions |= field.versions

    def publish(self, name: str, title: str) -> None:
        """Prints the table and writes it, unless the run was a quick one."""
        if self.run.openvino is None:
            self.notes.append("OpenVINO is not in this table: it was not installed.")
        cells = [column for column in zip(COLUMNS, *self.rows, strict=True) if any(column[1:])]
        columns, *rows = zip(*cells, strict=True)
        notes = list(dict.fromkeys(self.notes))
        title = f"{title}, {THREADS} threads"
        publish(name, title, columns, rows, notes=notes, versions=self.versions, keep=not self.run.quick)


def recipes(*, output_projections: bool = False) -> dict[str, Recipe]:
    """Returns ours, with or without the output projection."""
    return {name: Recipe(**each, output_projections=output_projections) for name, each in RECIPES.items()}


def targets(least: Mapping[str, float], **others: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """Returns one set of targets for MXFP8 weights, with float32 activations "no slower", and the targets of others."""
    return {"mxfp8": least, "mxfp8-bf16": least, "mxfp8-weight-only": {STOCK: 1.0}, **others}


def texts(batch: int, tokens: int) -> Feeds:
    """Returns passages of Python's language reference, cut into as many tokens each."""
    from minilm import model_folder, sentences
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = tokenizer.encode(" ".join(sentences()), add_special_tokens=False).ids
    body = np.resize(np.array(words), (batch, tokens - 2))
    start, end = (np.full((batch, 1), tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]"))
    ids = np.concatenate([start, body, end], axis=1).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def minilm(run: Run) -> None:
    """Times the real all-MiniLM-L6-v2."""
    results = Results(run)
    tokens = 16 if run.quick else 128
    for opset in (OPSET, None):
        path = run.model(f"minilm-{opset or 'default'}", functools.partial(export_minilm, opset=opset))
        least = {STOCK: 2.0, BEST: 1.8, OV_BF16: 1.15} if opset else {STOCK: 2.2, OV_BF16: 1.1}
        workloads = [
            Workload(
                f"{batch} x {tokens}" + ("" if opset else ", default opset"),
                [texts(batch, tokens)],
                run.rounds,
                targets(
                    least,
                    mxint8={OV_INT8: 1.2, INT8: 1.4},
                    **{"mxint8-bf16": {STOCK: 2.1}},
                ),
                pooled=True,
            )
            for batch in ((2,) if run.quick else (8, 32))
        ]
        results.race(Field(path, recipes(), openvino=run.openvino), workloads)
    results.publish("minilm", "all-MiniLM-L6-v2")


def vit(run: Run) -> None:
    """Times a ViT-B/16 with random weights."""
    results = Results(run)
    path = run.model("vit", functools.partial(export_vit, quick=run.quick))
    workloads = []
    for batch in (1,) if run.quick else (1, 8):
        pixels = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), np.float32)
        aims = targets({STOCK: 1.9, OV_BF16: 1.0}, mxint8={INT8: 1.0})
        workloads.append(Workload(f"{batch} of 224 x 224", [{"pixel_values": pixels}], run.rounds, aims))
    results.race(Field(path, recipes(), openvino=run.openvino), workloads)
    results.publish("vit", "ViT-B/16, random weights")


def decoder_feeds(path: Path, config: Any, length: int, cached: int, count: int) -> list[Feeds]:
    """Returns random tokens with the cache that ONNX Runtime's float32 makes of those before them."""
    session = onnxruntime.InferenceSession(path, options())
    caches = [port.name for port in session.get_inputs()[1:]]
    empty = np.zeros((1, config.num_key_value_heads, 0, config.head_dim), np.float32)
    samples = []
    for seed in range(count):
        ids = np.random.default_rng(seed).integers(0, config.vocab_size, (1, cached + length))
        past, rest = ids[:, :cached], ids[:, cached:]
        feeds = {"past_ids": past, "input_ids": rest} | dict.fromkeys(caches, empty)
        if cached:
            grown = session.run(None, dict.fromkeys(caches, empty) | {"input_ids": past})[1:]
            feeds |= dict(zip(caches, grown, strict=True))
        samples.append(feeds)
    return samples


def llama_peer(run: Run, config: Any, path: Path) -> Callable[[], Peer] | None:
    """Returns what opens llama.cpp's form of the decoder."""
    if run.llama is None:
        return None
    target = path.with_suffix(".gguf")

    def open_it() -> Peer:
        names = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads"
        shape = {name: getattr(config, name) for name in (*names.split(), "vocab_size", "rms_norm_eps")}
        shape["rope_theta"] = config.rope_parameters["rope_theta"]
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            weights = Path(folder) / "weights.npz"
            if not target.exists():
                write_decoder_weights(weights, config)
            settings = {"model": str(target), "weights": str(weights), "config": shape, "threads": THREADS}
            return Peer("llama_peer.py", settings, python=run.llama or sys.executable)

    return open_it


def weight_note(field: Field, floors: Floors, embedding: int) -> str:
    """Returns the least time of a decode step: that of reading all weights once, without the embedding."""
    times = []
    files = {STOCK: field.path, **{name: field.file(name) for name in field.recipes if name not in PREPACK}}
    for name, file in files.items():
        size = sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*")) - embedding
        times.append(f"{name} {size / 1e6:.0f} MB, {1e3 * size / floors.read:.0f} ms")
    return f"Weights that a decode step reads, and the time that takes at the bandwidth measured: {'; '.join(times)}"


def decoder(run: Run) -> None:
    """Times a Llama-config decoder with random weights."""
    results = Results(run)
    layers = 2 if run.quick else run.layers
    config = decoder_config(layers, quick=run.quick)
    path = run.model(f"decoder-{layers}", functools.partial(export_decoder, config=config))
    ours = {**recipes(output_projections=True), "mxfp8, output projection kept": Recipe()}
    field = Field(path, ours, openvino=run.openvino, llama=llama_peer(run, config, path), together=run.together)
    decode = targets({STOCK: 3.5, OV_BF16: 1.8, OV_INT8: 1.8, OV_MXFP8: 1.8})
    prefill = targets({STOCK: 2.0, OV_BF16: 1.1, OV_MXFP8: 1.0}, mxint8={INT8: 1.0})
    workloads = [
        Workload(
            f"decode, {PAST} cached",
            decoder_feeds(path, config, 1, PAST, 8),
            3 if run.quick else 25,
            {**decode, "mxfp8-weight-only": decode["mxfp8"]},  # a row's activations make no difference
        ),
        Workload(f"prefill {PAST}", decoder_feeds(path, config, PAST, 0, 4), 3 if run.quick else 5, prefill),
    ]
    results.race(field, workloads)
    results.notes.append(weight_note(field, results.floors, config.vocab_size * config.hidden_size * 4))
    results.publish("decoder", f"A decoder of {layers} layers, its cache in and out")


def eight_linears(run: Run) -> None:
    """Times eight linears of 4096 x 4096, a weight each."""
    results = Results(run)
    size, layers = (256, 2) if run.quick else (4096, 8)
    path = run.model(f"linears-{size}", lambda target: onnx.save(linears(size, size, layers), target))
    workloads = []
    fast: dict[int, Mapping[str, float]] = {64: {STOCK: 2.4}, 256: {STOCK: 2.6}}
    for rows, least, int8 in ((1, 1.8, 1.2), (4, 1.1, 1.05), (16, 1.0, 1.0), (64, 1.0, 0.95), (256, 1.0, 0.93)):
        x = np.random.default_rng(rows).standard_normal((rows, size), np.float32)
        feeds = {f"x{i}": x.copy() for i in range(layers)}
        aims = targets({OV_INT8: least}, mxint8={OV_INT8: 1.1, INT8: int8}, **{"mxint8-bf16": fast.get(rows, {})})
        workloads.append(Workload(f"M = {rows}", [feeds], run.rounds, aims))
    results.race(Field(path, recipes(output_projections=True), openvino=run.openvino), workloads)
    results.publish("linears", f"{layers} linears of {size} x {size}")


MODELS = {"minilm": minilm, "vit": vit, "decoder": decoder, "linears": eight_linears}


def main() -> None:
    """Times the models that are asked for, and writes a table of each to results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=16, help="layers of the decoder; 16 are 0.84 billion parameters")
    parser.add_argument(
        "--together", type=int, default=6, help="contenders of the decoder in memory at once, besides the first"
    )
    parser.add_argument("--folder", type=Path, help="where the models stay for the next run; by default they do not")
    parser.add_argument("--openvino", help="an interpreter that has openvino and nncf; by default this one, if it has")
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--quick", action="store_true", help="tiny models, three rounds, nothing written")
    arguments = parser.parse_args()
    openvino = arguments.openvino
    if openvino is None and all(map(importlib.util.find_spec, ("openvino", "nncf"))):
        openvino = sys.executable
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(folder, openvino, arguments.llama, arguments.layers, arguments.together, arguments.quick)
        for name in arguments.only:
            MODELS[name](run)


if __name__ == "__main__":
    main()
