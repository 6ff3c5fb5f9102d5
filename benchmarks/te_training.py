"""Claim: weights in MXFP8 only train as float32 weights do if the optimizer has masters; without, steps are lost.

Three linears learn a fixed function of heavy-tailed values under `te.autocast`. All runs begin with the same weights. A
step that is smaller than half the distance of two neighbours in E4M3 (1/16 to 1/32 of a value) rounds to no change.
Losses depend on the kernels' order of sums in the last digit only, so there is one file for all processors.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import publish
from torch import Tensor, nn

from mxfp8_graph import te

SHOWN = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99)
COLUMNS = ["optimizer", "weights", "bytes of weights", *(f"loss at {step}" for step in SHOWN)]
OPTIMIZERS = {"AdamW, 1e-3": (torch.optim.AdamW, 1e-3), "SGD, 0.05": (torch.optim.SGD, 0.05)}
WEIGHTS = ("float32", "MXFP8 and masters", "MXFP8 without masters")


def heavy(*shape: int) -> Tensor:
    """Returns normal values times lognormal ones."""
    return torch.randn(*shape) * torch.randn(*shape).exp()


def train(optimizer: str, weights: str) -> tuple[int, list[float]]:
    """Returns (the bytes of the weights, the loss of each of 100 steps)."""
    torch.manual_seed(0)
    x = heavy(200, 96)
    target = torch.tanh(x @ heavy(96, 64) / 20)
    with te.quantized_model_init(enabled=weights != "float32"):
        model = nn.Sequential(te.Linear(96, 128), nn.GELU(), te.Linear(128, 96), nn.GELU(), te.Linear(96, 64))
    make, rate = OPTIMIZERS[optimizer]
    stepped: Any = list(model.parameters()) if weights == WEIGHTS[2] else te.master_weights(model)
    optimizing, losses = make(stepped, lr=rate), []
    for _ in range(SHOWN[-1] + 1):
        with te.autocast():
            loss = (model(x) - target).square().mean()
        optimizing.zero_grad()
        loss.backward()
        optimizing.step()
        losses.append(loss.item())
    return sum(each.weight.nbytes for each in model if isinstance(each, te.Linear)), losses


def rows() -> list[list[Any]]:
    """Returns one row per optimizer and kind of weights."""
    result = []
    for optimizer in OPTIMIZERS:
        for weights in WEIGHTS:
            size, losses = train(optimizer, weights)
            result.append([optimizer, weights, size, *(f"{losses[step]:.4f}" for step in SHOWN)])
    return result


if __name__ == "__main__":
    note = "Three te.Linear in MXFP8 (E4M3), 200 samples, 100 steps, the same first weights."
    publish(
        "te_training",
        "Training of weights that are stored in MXFP8",
        COLUMNS,
        rows(),
        notes=[note],
        per_processor=False,
    )
