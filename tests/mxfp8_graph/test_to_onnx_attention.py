"""to_onnx of scaled_dot_product_attention: masks that hide all keys from a row, causal masks, grouped heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_models import kinds_fused
from grids import looped, pairwise
from onnx_exports import packed
from torch.nn.functional import scaled_dot_product_attention

import mxfp8_graph
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.torch_pass.to_onnx import plain_to_onnx

EXACT = "mxfp8-weight-only"
"""A recipe with which the attention that is fused rounds nothing."""

pytestmark = pytest.mark.usefixtures("own_folder")


class Attention(torch.nn.Module):
    """Attention of x to y between its projections; 4 heads of 16 read `heads` heads of keys and values."""

    def __init__(self, *, heads: int = 4, is_causal: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = (torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(64, 16 * heads, dtype=dtype) for _ in range(2))
        self.norm = torch.nn.LayerNorm(64, dtype=dtype)
        self.is_causal, self.enable_gqa = is_causal, heads != 4

    def forward(self, x: Any, y: Any, mask: Any = None) -> Any:
        q, k, v = (linear(z).unflatten(-1, (-1, 16)).transpose(1, 2) for linear, z in
                   ((self.q, x), (self.k, y), (self.v, y)))  # fmt: skip
        options = {"attn_mask": mask, "is_causal": self.is_causal, "enable_gqa": self.enable_gqa}
        return self.norm(self.o(scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)))


def inputs(rows: int = 7, keys: int = 5, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2, size, 64, generator=generator) for size in (rows, keys))
    return x.to(dtype), y.to(dtype)


def mask_of(kind: str, dtype: Any = torch.float32) -> Any:
    """Returns a mask that hides all keys from row 0 of sample 0, and two of five keys from sample 1."""
    seen = torch.ones(2, 1, 7, 5, dtype=torch.bool)
    seen[0, 0, 0], seen[1, ..., 3:] = False, False
    if kind == "bool":
        return seen
    hidden = -torch.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def errors(path: Path, program: Any, arguments: tuple[Any, ...], *, kernels: bool) -> np.ndarray:
    """Returns the relative L2 error of each row [2, rows] of an ONNX file against a program."""
    want = program.module()(*arguments).detach().double().numpy()
    session = Session(path, kernels=kernels)
    feeds = dict(zip(("x", "y", "mask"), (argument.numpy() for argument in arguments), strict=False))
    result = next(iter(session.run(feeds).values()))
    return np.linalg.norm(result.astype(np.float64) - want, axis=-1) / np.linalg.norm(want, axis=-1)


MASKED = pairwise(
    kind=("bool", "-inf", "lowest"), opset=({}, {"opset": 21}, {"opset": 23}), heads=(4, 2), kernels=(False, True)
)


@looped("kind, opset, heads, kernels", MASKED)
def test_a_row_that_sees_no_key_is_that_of_the_program(
    kind: str, opset: dict[str, int], heads: int, kernels: bool
) -> None:
    """0 behind a boolean mask and one of -Inf; one of the lowest float is added like any number."""
    arguments = (*inputs(), mask_of(kind))
    program = packed(Attention(heads=heads), *arguments, recipe=EXACT, batch=False)
    path = mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True, **opset)
    found = errors(path, program, arguments, kernels=kernels)
    assert found.max() < 1e-5, found.round(3)


@looped("keys, opset, heads", pairwise(keys=(4, 9), opset=(21, 23), heads=(4, 2)))
def test_causal_rows_see_the_first_keys(keys: int, opset: int, heads: int) -> None:
    """Row i sees keys 0 to i, whatever the number of keys."""
    arguments = inputs(keys=keys)
    program = packed(Attention(heads=heads, is_causal=True), *arguments, recipe=EXACT, batch=False)
    path = mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True, opset=opset)
    found = errors(path, program, arguments, kernels=True)
    assert found.max() < 1e-5, found.round(3)


@looped("kind", ["bool", "-inf"])
def test_hidden_rows_in_float16(kind: str) -> None:
    arguments = (*inputs(dtype=torch.float16), mask_of(kind, torch.float16))
    program = packed(Attention(dtype=torch.float16), *arguments, recipe=EXACT, batch=False)
    found = errors(mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True), program, arguments, kernels=True)
    assert found.max() < 4 * 2**-11, found.round(4)  # rounded to 11 bits after other ops than in torch


@looped("kind", ["bool", "-inf", "lowest"])
def test_a_nan_stays_one_behind_a_mask(kind: str) -> None:
    x, y = inputs()
    arguments = (x, y, mask_of(kind))
    program = packed(Attention(), *arguments, recipe=EXACT, batch=False)
    path = mxfp8_graph.to_onnx(program, "m.onnx", overwrite=True)
    x[1, 2] = torch.nan
    rows = np.isnan(errors(path, program, (x, y, arguments[2]), kernels=True))
    assert np.argwhere(rows).tolist() == [[1, 2]]


@looped("kind", ["bool", "-inf", "lowest"])
def test_the_onnx_pass_fuses_what_to_onnx_writes(kind: str) -> None:
    """The guard of hidden rows is a part of the attention; `from_hf` fuses such graphs."""
    arguments = (*inputs(), mask_of(kind))
    module = Attention().eval()
    program = torch.export.export(module, arguments)
    Path("plain.onnx").unlink(missing_ok=True)
    path, report = mxfp8_graph.rewrite(plain_to_onnx(program, Path("plain.onnx")), EXACT, overwrite=True)
    assert kinds_fused(report) == ["attention"]
    found = errors(path, mxfp8_graph.rewrite(program, EXACT)[0], arguments, kernels=True)
    assert found.max() < 1e-5, found.round(3)
