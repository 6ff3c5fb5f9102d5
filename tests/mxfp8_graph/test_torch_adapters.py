"""Adapters on packed programs: rewrite(packed, training=True) freezes what is packed and trains everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from grids import looped  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, OUTPUTS_TOO, Apply, count, export, relative_l2, rewrite, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError  # noqa: E402

WIDTH, TOKENS, HEADS = 64, 16, 4
GRADIENT = 0.15
"""How far a gradient may be from that of the float32 model, in relative L2: MXFP8's 4% per product, several deep."""


class Adapted(nn.Module):
    """A linear and a low-rank adapter beside it."""

    def __init__(self, n_in: int, n_out: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out)
        self.down, self.up = nn.Linear(n_in, rank, bias=False), nn.Linear(rank, n_out, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        sizes = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
        self.linears = nn.ModuleDict({name: Adapted(k * WIDTH, n * WIDTH) for name, (k, n) in sizes.items()})

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.linears[name](y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linears["out"](attention.transpose(1, 2).flatten(-2))
        return x + self.linears["down"](nn.functional.gelu(self.linears["up"](self.norms[1](x))))


def transformer_model() -> nn.Module:
    """Returns two blocks with adapters at every linear."""
    torch.manual_seed(0)
    blocks = Block(), Block(), nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS))


def tokens(step: int) -> Tensor:
    return torch.randint(0, TOKENS, (16, 24), generator=torch.Generator().manual_seed(step))


def loss_of(module: nn.Module, step: int) -> Tensor:
    return nn.functional.cross_entropy(module(tokens(step)).flatten(0, 1), tokens(step).roll(1, 1).flatten())


def exported(model: nn.Module) -> ExportedProgram:
    return export(model, tokens(0), dynamic=({0: DYNAMIC},))


@pytest.fixture(scope="module")
def transformer() -> tuple[nn.Module, ExportedProgram]:
    """Returns a model and the program of it, packed. They share what is not packed: tests do not train it."""
    model = transformer_model()
    return model, mxfp8_graph.rewrite(exported(model))[0]


def test_everything_but_the_packed_weights_gets_its_gradient(transformer: Any) -> None:
    model, packed = transformer
    tuned, report = mxfp8_graph.rewrite(packed, training=True)
    assert (count(tuned, "mxfp8.linear_packed"), count(tuned, "mxfp8.quantize"), len(report.rewritten)) == (12, 0, 12)
    assert "to train them, rewrite the original program with training=True" in report.notes[0]
    module = tuned.module()
    with torch.no_grad():
        assert torch.equal(module(tokens(1)), packed.module()(tokens(1))), "the forward pass is that of inference"
    for trained in (module, model):
        loss_of(trained, 1).backward()
    wanted = dict(model.named_parameters())
    packed_names = {*wanted} - {name for name, _ in tuned.named_parameters()}
    assert packed_names == {name for name in wanted if name.endswith("base.weight")}
    for name, parameter in module.named_parameters():
        if name.endswith("k.base.bias"):  # the softmax takes away what is the same for all keys: rounding is left
            assert parameter.grad.norm() < 1e-3
        else:
            assert relative_l2(parameter.grad, wanted[name].grad) < GRADIENT, name


def test_after_training_the_packed_program_comes_back() -> None:
    packed, _ = mxfp8_graph.rewrite(exported(transformer_model()))
    tuned, _ = mxfp8_graph.rewrite(packed, training=True)
    before = {name: p.detach().clone() for name, p in tuned.module().named_parameters()}
    module = tuned.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    assert not [name for name, p in module.named_parameters() if torch.equal(p, before[name])], "all are trained"
    final, report = mxfp8_graph.rewrite(tuned)
    ops = ("mxfp8.gemm", "mxfp8.quantize", "mxfp8.linear_packed")
    assert [count(final, op) for op in ops] == [count(packed, op) for op in ops] == [12, 8, 0]
    assert {site.decision.reason for site in report.rewritten} == {"its weight was packed before"}
    assert not any(p.requires_grad for p in final.parameters())
    with torch.no_grad():
        assert torch.equal(final.module()(tokens(1)), module(tokens(1)))
    assert mxfp8_graph.rewrite(final)[1].already_rewritten


def test_files_recipes_and_formats_of_gradients(transformer: Any, tmp_path: Path) -> None:
    packed = transformer[1]
    tuned, _ = mxfp8_graph.rewrite(packed, training=True)
    loaded = mxfp8_graph.load(mxfp8_graph.save(tuned, tmp_path / "tuned.pt2"))
    assert all(p.requires_grad for p in loaded.module().parameters())
    assert mxfp8_graph.rewrite(loaded, training=True)[1].already_rewritten
    hybrid, _ = mxfp8_graph.rewrite(loaded, Recipe(name="hybrid", fp8_format="HYBRID"), training=True)
    nodes = [node for node in hybrid.graph.nodes if "linear_packed" in str(node.target)]
    assert [node.kwargs["fp8_format"] for node in nodes] == ["HYBRID"] * 12
    with pytest.raises(RecipeError, match=r"packed with scale_rounding ceil, asked for floor; .* or name the recipe"):
        mxfp8_graph.rewrite(packed, "ocp", training=True)
    with pytest.raises(ContractError, match=r"is mxfp8\.linear_packed, which is for training and has no ONNX form"):
        mxfp8_graph.to_onnx(tuned, tmp_path / "tuned.onnx")
    plan = mxfp8_graph.rewrite(packed, training=True, dry_run=True)
    assert (plan[0], len(plan[1].rewritten)) == (None, 12)


def test_a_gradient_through_a_packed_program_is_never_dropped() -> None:
    """The gradient of an input, as for a prompt that is trained: an error, the same one in torch.func; then right."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.LayerNorm(64)), values(5, 64)
    packed, _ = mxfp8_graph.rewrite(export(model, x))
    with pytest.raises(Mxfp8Error, match=r"quantize: x requires a gradient.*training=True"):
        packed.module()(x.clone().requires_grad_())
    with pytest.raises(Mxfp8Error, match="quantize: x requires a gradient"):
        torch.func.grad(lambda x: packed.module()(x).sum())(x)
    weights, prompt = values(5, 64, seed=1), x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((model(prompt) * weights).sum(), prompt)
    tuned, _ = mxfp8_graph.rewrite(packed, training=True)
    for program in (tuned, mxfp8_graph.rewrite(export(model, x), "mxfp8-weight-only")[0]):
        (got,) = torch.autograd.grad((program.module()(prompt) * weights).sum(), prompt)
        assert relative_l2(got, wanted) < GRADIENT


@looped("recipe", ["mxfp8-weight-only", "mxfp8-bf16"])
def test_weights_that_alone_are_quantized_need_no_other_nodes(recipe: str) -> None:
    module = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.LayerNorm(64))
    packed, _ = mxfp8_graph.rewrite(export(module, values(5, 64)), recipe)
    tuned, report = mxfp8_graph.rewrite(packed, recipe, training=True)
    assert (count(tuned, "mxfp8.weight_gemm"), len(report.rewritten)) == (2, 2)
    tuned.module()(values(5, 64)).sum().backward()
    assert all(p.requires_grad for p in tuned.parameters())
    assert not any(p.requires_grad for p in packed.parameters()), "the source stays as it was"


STACK = values(3, 64, 96, seed=1)


@looped(
    "function, w, inputs",
    [
        (lambda m, x: torch.addmm(m.c, x, m.w), values(64, 96, seed=1), [values(40, 64)]),
        (lambda m, x: m.w @ x, values(96, 64, seed=1), [values(3, 64, 40)]),
        (lambda m, x: x @ m.w, STACK, [values(3, 40, 64)]),
        (lambda m, x, ids: torch.bmm(x, m.w[ids]), STACK, [values(2, 40, 64), torch.tensor([2, -3])]),
        (lambda m, x: nn.functional.linear(x, m.w), values(96, 64, seed=1).bfloat16(), [values(40, 64).bfloat16()]),
        (lambda m, x: torch.softmax((x @ m.w) @ x.mT, -1) @ x, values(64, 64, seed=1) / 4096, [values(3, 40, 64)]),
    ],
)
def test_every_form_passes_the_gradient_of_its_input(function: Any, w: Tensor, inputs: list[Tensor]) -> None:
    parameters = {"w": w, "c": values(96), "gain": torch.ones(())}
    program = export(Apply(lambda m, x, *rest: function(m, x * m.gain, *rest), parameters), *inputs)
    packed, _ = mxfp8_graph.rewrite(program, "all")
    tuned, _ = mxfp8_graph.rewrite(packed, "all", training=True)
    assert count(tuned, "mxfp8.gemm") == 0
    x, *rest = inputs
    leaf = x.clone().requires_grad_()
    result = tuned.module()(leaf, *rest)
    with torch.no_grad():
        assert torch.equal(result, packed.module()(x, *rest))
        assert torch.equal(mxfp8_graph.rewrite(tuned, "all")[0].module()(x, *rest), result)
    upstream = values(*result.shape, seed=2, dtype=result.dtype)
    wanted, got = (torch.autograd.grad(y, leaf, upstream)[0] for y in (program.module()(leaf, *rest), result))
    assert relative_l2(got.float(), wanted.float()) < GRADIENT


def test_tied_parameters_stay_one() -> None:
    def tied(m: Any, ids: Tensor) -> Tensor:
        h = nn.functional.linear(nn.functional.embedding(ids, m.w), m.v, m.b)
        return nn.functional.linear(nn.functional.layer_norm(h, (64,)), m.w)

    weights = {"w": values(40, 64), "v": values(64, 64, seed=1) / 8, "b": values(64, seed=2)}
    model, ids = Apply(tied, weights), torch.arange(12).reshape(3, 4)
    packed, _ = mxfp8_graph.rewrite(export(model, ids))
    module = mxfp8_graph.rewrite(packed, training=True)[0].module()
    for each in (module, model):
        each(ids).square().mean().backward()
    assert {name for name, _ in module.named_parameters()} == {"w", "b"}
    assert relative_l2(module.w.grad, model.w.grad) < GRADIENT


def test_a_program_without_anything_to_train_is_refused() -> None:
    packed, _ = rewrite(lambda m, x: torch.tanh(x @ m.w), {"w": values(64, 96)}, values(5, 64))
    nothing = (
        "there is nothing to train: every weight is kept in MXFP8 only.*rewrite the original program with training"
    )
    with pytest.raises(ContractError, match=nothing):
        mxfp8_graph.rewrite(packed, OUTPUTS_TOO, training=True)


def test_packed_experts_pass_gradients_on_for_activations_in_high_precision_alone() -> None:
    def experts(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x.bfloat16(), m.w, offs=ends).float() * m.gain

    parameters = {"w": values(4, 64, 96).bfloat16(), "gain": torch.ones(96)}
    inputs = values(8, 64), torch.tensor([1, 4, 6, 8], dtype=torch.int32)
    with pytest.raises(ContractError, match="experts are chosen at run time for quantized activations"):
        mxfp8_graph.rewrite(rewrite(experts, parameters, *inputs)[0], OUTPUTS_TOO, training=True)
    weight_only = Recipe(activations="unchanged", output_projections=True)
    packed, _ = rewrite(experts, parameters, *inputs, recipe=weight_only)
    mxfp8_graph.rewrite(packed, weight_only, training=True)[0].module()(*inputs).sum().backward()
