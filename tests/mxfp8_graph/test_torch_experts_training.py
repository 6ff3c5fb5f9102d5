"""Mixtures of experts train in MXFP8: grouped matmuls become `mxfp8::grouped_linear_train`, and are packed after."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from grids import looped  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, Apply, count, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

ENDS = torch.tensor([1, 1, 38, 40], dtype=torch.int32)
X = values(42, 64, seed=2, dtype=torch.bfloat16)
TRAIN, GROUPED = "mxfp8.grouped_linear_train", "aten._grouped_mm"


def experts(*, stored_k_last: bool = True) -> ExportedProgram:
    """Returns relu(x @ up[e]^T) @ down[e]^T of rows in groups, each stack stored [E, N, K] or [E, K, N]."""
    up, down = (values(4, *shape, seed=1, dtype=torch.bfloat16) / 8 for shape in ((96, 64), (64, 96)))
    stacks = {"up": up, "down": down}

    def function(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        for name in stacks:
            stack = getattr(m, name)
            x = torch.relu(torch._grouped_mm(x, stack.transpose(-2, -1) if stored_k_last else stack, ends))
        return x

    parameters = stacks if stored_k_last else {name: t.mT.contiguous() for name, t in stacks.items()}
    return export(Apply(function, parameters), X, ENDS, dynamic=(({0: DYNAMIC}, None),))


def gradients(program: ExportedProgram) -> dict[str, Tensor]:
    """Returns the gradients of both stacks and of x."""
    module, x = program.module(), X.clone().requires_grad_()
    module(x, ENDS)[:40].float().square().sum().backward()
    return {name: p.grad for name, p in module.named_parameters()} | {"x": x.grad[:40]}  # torch leaves the rest


@looped("stored_k_last", [True, False])
def test_grouped_matmuls_become_one_op_that_trains_and_are_packed_afterwards(*, stored_k_last: bool) -> None:
    program = experts(stored_k_last=stored_k_last)
    tuned, report = mxfp8_graph.rewrite(program, Recipe(fp8_format="HYBRID"), training=True)
    assert count(tuned, TRAIN) == len(report.rewritten) == 2
    assert not report.notes
    assert all(tuned.state_dict[name] is tensor for name, tensor in program.state_dict.items())
    got, exact = gradients(tuned), gradients(program)
    for name, wanted in exact.items():
        error = float((got[name].float() - wanted.float()).norm() / wanted.float().norm())
        assert error < 0.2, f"{name}: E5M2 has 2 mantissa bits, and up to three products lie behind a gradient"
    packed, report = mxfp8_graph.rewrite(tuned, Recipe(fp8_format="HYBRID"))
    assert [site.decision.site.op for site in report.rewritten] == ["_grouped_mm"] * 2
    untrained, _ = mxfp8_graph.rewrite(program, Recipe(fp8_format="HYBRID"))
    assert packed.state_dict.keys() == untrained.state_dict.keys()
    with torch.no_grad():
        results = [each.module()(X, ENDS) for each in (packed, untrained, tuned)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_program_that_survives_a_file_becomes_what_it_was_where_a_recipe_keeps_it(tmp_path: Path) -> None:
    program = experts()
    tuned, _ = mxfp8_graph.rewrite(program, training=True)
    loaded = mxfp8_graph.load(mxfp8_graph.save(tuned, tmp_path / "tuned.pt2"))
    assert torch.equal(loaded.module()(X, ENDS), tuned.module()(X, ENDS))
    with pytest.warns(UserWarning, match="Recipe type changed"):
        kept, _ = mxfp8_graph.rewrite(loaded, Recipe(name="one", exclude=("^_grouped_mm_1$",)), training=True)
    assert (count(kept, TRAIN), count(kept, GROUPED)) == (1, 1)
    kept.run_decompositions({})
    with pytest.raises(ContractError, match=r"mxfp8.grouped_linear_train, which is for training and has no ONNX form"):
        mxfp8_graph.to_onnx(kept, tmp_path / "tuned.onnx")
    with pytest.warns(UserWarning, match="Recipe type changed"):
        packed, _ = mxfp8_graph.rewrite(kept, Recipe(name="other", exclude=("^_grouped_mm$",)))
    assert (count(packed, "mxfp8.grouped_gemm"), count(packed, GROUPED), count(packed, TRAIN)) == (1, 1, 0)


# --- It trains ----------------------------------------------------------------------------------------------------

TOKENS = 16
RATE = 1e-4


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


def train(module: nn.Module, steps: int) -> list[float]:
    """Trains in place by next-token prediction on noisy counting; returns the losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        start, stride = (torch.randint(1, high, (16, 1), generator=generator) for high in (TOKENS, 4))
        tokens = (start + stride * torch.arange(25)) % TOKENS
        noise = torch.rand(tokens.shape, generator=generator) < 0.1
        tokens = torch.where(noise, torch.randint(0, TOKENS, tokens.shape, generator=generator), tokens)
        loss = nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def in_float32(steps: int) -> tuple[ExportedProgram, list[float], nn.Module]:
    program = mixtral()
    reference = copy.deepcopy(program).module()
    return program, train(reference, steps), reference


@pytest.mark.parametrize(
    ("steps", "fp8_format"),
    [(20, "HYBRID"), *(pytest.param(300, each, marks=pytest.mark.slow) for each in ("E4M3", "HYBRID"))],
)
def test_a_small_mixtral_trains_as_in_float32(steps: int, fp8_format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program, expected, reference = in_float32(steps)
    tuned, _ = mxfp8_graph.rewrite(copy.deepcopy(program), Recipe(fp8_format=fp8_format), training=True)
    assert count(tuned, TRAIN) == 2
    module = tuned.module()
    losses = train(module, steps)
    final, wanted = (sum(each[-20:]) / 20 for each in (losses, expected))
    pairs = [(p.detach(), q.detach()) for p, q in zip(module.parameters(), reference.parameters(), strict=True)]
    apart, size = (
        torch.cat([t.flatten() for t in each]).norm() for each in ([p - q for p, q in pairs], [q for _, q in pairs])
    )
    with capsys.disabled():
        print(
            f"\n{fp8_format}, {steps} steps: loss {final:.4f}, float32 {wanted:.4f};",
            f"parameters {apart / size:.2%} apart",
        )
    assert steps < 300 or wanted < 0.7 * expected[0], "float32 itself did not learn: the comparison says nothing"
    assert abs(final - wanted) <= 0.005 * wanted
    assert apart <= 0.01 * size
