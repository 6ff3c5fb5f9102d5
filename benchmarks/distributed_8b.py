"""Claim: of a Llama of 8 billion parameters, 8 processes of FSDP2 receive a third of the bytes that float32 takes.

Nothing is trained: the model is exported and rewritten on the meta device, and bytes follow from its shapes. It takes
half a minute and 1 GB.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from harness import publish
from transformers import LlamaConfig, LlamaForCausalLM

import mxfp8_graph
from mxfp8_graph.distributed import MemoryReport, bytes_per_process

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
BLOCKS = "model.layers.*"
PROCESSES = (8, 64)
MUST = 1 / 3
"""Largest share of the bytes of parameters in float32 that 8 processes receive."""


def tuned(layers: int) -> Any:
    """Returns a program to train with the shapes of Llama 3 8B, which has 32 layers, without values."""
    config = LlamaConfig(**SIZES, vocab_size=128256, num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(1, 128, dtype=torch.int64)
    return mxfp8_graph.rewrite(torch.export.export(model, (), {"input_ids": ids}), training=True)[0]


def layout(program: Any, reports: list[MemoryReport]) -> list[str]:
    """Returns a line for each parameter of a layer and outside of layers: its shards, and how it is gathered."""
    lines = []
    for name, value in program.state_dict.items():
        if name.startswith("model.layers.") and not name.startswith("model.layers.0."):
            continue
        shards = []
        for report in reports:
            shape = [math.ceil(value.shape[0] / report.processes), *value.shape[1:]]
            kind = "MXFP8" if name in report.weights else "high precision"
            shards.append(f"{shape} in each of {report.processes}, gathered in {kind}")
        lines.append(f"{name} {list(value.shape)}: {'; '.join(shards)}")
    return lines


def main() -> None:
    """Computes and writes distributed_8b.md and .json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    program = tuned(arguments.layers)
    reports = [bytes_per_process(program, processes, BLOCKS) for processes in PROCESSES]
    columns = ["GB in a process"]
    for report in reports:
        columns += [f"{report.processes} processes, MXFP8", f"{report.processes}, high precision"]
    rows = [[name, *(f"{n / 1e9:.3f}" for r in reports for n in r.rows()[name])] for name in reports[0].rows()]
    coded, plain = reports[0].received
    verdict = "ok" if coded <= MUST * plain else "MISSED"
    numbers = sum(value.numel() for value in program.state_dict.values())
    notes = [
        "Computed from shapes, not measured. Activations, buffers and the allocator's overhead are not in it.",
        f"{numbers / 1e9:.2f} billion parameters in float32, one block of FSDP2 per layer ({BLOCKS}), resharded after "
        "the forward pass; embedding, output projection and last norm are gathered with the root.",
        "High precision is float32; MixedPrecisionPolicy(param_dtype=torch.bfloat16) halves what is gathered in it.",
        f"8 processes receive {coded / plain:.2f} of the bytes in float32; at most {MUST:.2f}: {verdict}.",
        *layout(program, reports),
    ]
    title = "Training a Llama of 8 billion parameters with FSDP2: bytes in each process"
    publish("distributed_8b", title, columns, rows, notes=notes, keep=arguments.layers == 32, per_processor=False)


if __name__ == "__main__":
    main()
