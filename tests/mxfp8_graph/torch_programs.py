"""Tiny torch modules and exported programs for tests, and what NumPy says a rewritten matmul computes."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from oracle import Expected, expect
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

import mxfp8_graph
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.report.data import RewriteReport, SiteReport

DYNAMIC = torch.export.Dim.DYNAMIC


def export(module: nn.Module, *args: Any, dynamic: Any = None, **kwargs: Any) -> ExportedProgram:
    """Returns the program of a module in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module.eval(), args, kwargs, dynamic_shapes=dynamic)


class Apply(nn.Module):
    """A module made of one function of (self, inputs) and its parameters and buffers by name."""

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._function = function
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)

    def forward(self, *args: Tensor) -> Any:
        return self._function(self, *args)


OUTPUTS_TOO = Recipe(name="outputs too", output_projections=True)


def rewrite(function: Any, weights: Any, *x: Tensor, recipe: Any = OUTPUTS_TOO, **options: Any) -> Any:
    """Returns the rewritten program of function(module with these weights, *x), and the report."""
    return mxfp8_graph.rewrite(export(Apply(function, weights), *x), recipe, **options)


def kept(program: ExportedProgram, recipe: Any = OUTPUTS_TOO, **options: Any) -> list[str]:
    """Returns why each site of a program is kept, in which nothing is eligible."""
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, recipe, **options)
    return [decision.reason for decision in caught.value.decisions]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns heavy-tailed values: rounding errors of a matmul do not average out as they do for normal ones."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    return (normal * torch.exp(torch.randn(*shape, generator=generator))).to(dtype)


def as_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def predict(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activations: str = "e4m3",
    weight_format: str = "e4m3",
    **settings: str,
) -> Expected:
    """Returns x [..., M, K] times weight [..., N, K] transposed, plus bias, in MXFP8 by NumPy."""
    added, formats = None if bias is None else as_numpy(bias), (activations, weight_format)
    whole = activations == "unchanged"
    return expect(as_numpy(x), as_numpy(weight), added, weight_only=whole, formats=formats, **settings)


def tensors(output: Any) -> list[Tensor]:
    """Returns the floating-point tensors of a model's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def relative_l2(got: Any, expected: Any) -> float:
    """Returns the largest relative L2 distance between the tensors of two outputs."""
    pairs = zip(tensors(got), tensors(expected), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def call_targets(program: ExportedProgram) -> list[str]:
    """Returns the targets of every call in the program's graphs, inner ones too."""
    modules = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return [str(n.target) for m in modules for n in m.graph.nodes if n.op == "call_function"]


def count(program: ExportedProgram, op: str) -> int:
    """Returns how many nodes call `op`, such as "mxfp8.gemm"."""
    return sum(target.startswith(f"{op}.") for target in call_targets(program))


def site(report: RewriteReport, name: str) -> SiteReport:
    """Returns the site whose name or module path is `name`."""
    return next(s for s in report.sites if name in (s.decision.site.name, s.decision.site.module))


def decision(report: RewriteReport, name: str) -> Decision:
    return site(report, name).decision


def reasons(report: RewriteReport) -> Sequence[str]:
    return [s.decision.reason for s in report.sites]


SAMPLES = "data/sample_inputs/model.pt"
"""The record of a .pt2 file with its example inputs."""


def records(source: Path) -> dict[str, bytes]:
    """Returns the records of a .pt2 file by their names below its root."""
    with zipfile.ZipFile(source) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(target: Path, content: Mapping[str, bytes]) -> Path:
    """Returns `target`, a .pt2 file of these records."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in content.items():
            archive.writestr(f"model/{name}", data)
    return target


TOKENS = 16


def mixtral(*, dynamic: bool = False) -> ExportedProgram:
    """Returns a small Mixtral with transformers' grouped experts, in training mode, for 16 rows of 24 tokens or any."""
    transformers = pytest.importorskip("transformers", "5.14")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=TOKENS, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="grouped_mm", initializer_range=0.125,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    wrapped = Apply(lambda m, ids: model(input_ids=ids, use_cache=False).logits, {})
    wrapped.model = model
    shapes = ({0: DYNAMIC},) if dynamic else None
    ids = torch.zeros(16, 24, dtype=torch.int64)
    return torch.export.export(wrapped, (ids,), dynamic_shapes=(shapes,) if dynamic else None, strict=False)
