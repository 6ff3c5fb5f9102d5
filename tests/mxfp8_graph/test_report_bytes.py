"""The report of a rewrite has every byte of the model and of the result, and a dry run says the same.

The fixture `every_byte_is_in_the_report` in conftest.py checks every rewrite of this file.
"""

from __future__ import annotations

from random import Random

import builders as b
import numpy as np
import pytest
import structures
from test_random_graphs import RandomGraph

import mxfp8_graph

MODELS = {
    "a chain in float16": lambda: b.chain_model(dtype=np.float16),
    "a Gemm with a bias": lambda: b.gemm_model(transB=1, alpha=0.5),
    "attention": b.attention_model,
    "embeddings and a head": b.language_model,
    **{f"random graph {seed}": lambda seed=seed: RandomGraph(Random(seed), 12).proto() for seed in (1, 2, 3, 4)},
    **{
        name: lambda name=name: structures.structure(name)
        for name in ("gpt2", "llama_with_cache", "t5", "mixtral", "sharp_bert_23", "sharp_bert_older_17")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_of_an_onnx_model(name: str) -> None:
    model = MODELS[name]()
    for recipe in ("mxfp8", "all"):
        _, report = mxfp8_graph.rewrite(model, recipe)
        assert report.account.bytes_after < report.account.bytes_before, recipe


def test_of_a_program() -> None:
    torch = pytest.importorskip("torch")
    from torch_programs import Apply, export, values

    class Tied(torch.nn.Module):
        """The head is the table, two weights are rows of one parameter, and a buffer in bfloat16 is multiplied."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 64)
            self.both = torch.nn.Parameter(values(128, 64))
            self.register_buffer("narrow", values(64, 64, seed=1, dtype=torch.bfloat16))
            self.register_buffer("numbers", torch.arange(64))

        def forward(self, ids):
            x = torch.relu(self.table(ids) @ self.both[:64].T) + self.numbers
            x = torch.relu(x @ self.both[64:].T).bfloat16() @ self.narrow
            return x.float().relu() @ self.table.weight.T

    shared = Apply(lambda m, x: torch.relu(torch.relu(x @ m.w) @ m.w), {"w": values(64, 64)})
    programs = (export(Tied(), torch.zeros(2, 8, dtype=torch.long)), export(shared, values(3, 64)))
    for program in programs:
        for recipe in ("mxfp8", "all"):
            _, report = mxfp8_graph.rewrite(program, recipe)
            assert report.account.bytes_after < report.account.bytes_before, recipe
