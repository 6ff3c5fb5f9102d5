"""Adapters on packed programs: rewrite(packed, training=True) freezes what is packed and trains everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from grids import looped  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, Apply, count, export, relative_l2, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError  # noqa: E402

WIDTH, TOKENS, HEADS = 64, 16, 4
GRADIENT = 0.15
"""How far a gradient may be from that of the float32 model, in relative L2: MXFP8's 4% per product, several deep."""
LOSS = 0.01
"""How far, relatively, the final loss of adapters on the packed model may be from that on the float32 model."""


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
        sizes = {"q": 1, "k": 1, "v": 1, "out": 1, "up": 4}
        self.linears = nn.ModuleDict({name: Adapted(WIDTH, n * WIDTH) for name, n in sizes.items()})
        self.down = Adapted(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (self.linears[name](y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linears["out"](attention.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.linears["up"](self.norms[1](x))))


class Transformer(nn.Module):
    """Two blocks with adapters at every linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def tokens(step: int, stride: int = 4) -> Tensor:
    """Returns a batch of noisy counting, by strides below `stride`."""
    generator = torch.Generator().manual_seed(step)
    start, by = (torch.randint(1, high, (16, 1), generator=generator) for high in (TOKENS, stride))
    ids = (start + by * torch.arange(25)) % TOKENS
    noise = torch.rand(ids.shape, generator=generator) < 0.1
    return torch.where(noise, torch.randint(0, TOKENS, ids.shape, generator=generator), ids)


def batch_of(step: int) -> Tensor:
    """Returns what a model is given of a batch."""
    return tokens(step)[:, :-1].contiguous()


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(module: nn.Module, steps: int, *, lr: float = 2e-3, stride: int = 4) -> float:
    """Trains what asks for a gradient; returns the mean loss of the last 20 steps."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        loss = loss_of(module, tokens(step, stride))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def exported(model: nn.Module) -> ExportedProgram:
    return export(model, batch_of(0), dynamic=({0: DYNAMIC},))


def packed_names(model: nn.Module, tuned: ExportedProgram) -> set[str]:
    return {name for name, _ in model.named_parameters()} - {name for name, _ in tuned.named_parameters()}


@pytest.fixture(scope="module")
def transformer() -> tuple[Transformer, ExportedProgram]:
    """Returns a model and the program of it, packed. They share what is not packed: tests do not train it."""
    model = Transformer()
    return model, mxfp8_graph.rewrite(exported(model))[0]


def test_everything_but_the_packed_weights_gets_its_gradient(transformer: Any) -> None:
    model, packed = transformer
    tuned, report = mxfp8_graph.rewrite(packed, training=True)
    assert (count(tuned, "mxfp8.linear_packed"), count(tuned, "mxfp8.quantize"), len(report.rewritten)) == (12, 0, 12)
    assert "to train them, rewrite the original program with training=True" in report.notes[0]
    module = tuned.module()
    with torch.no_grad():
        assert torch.equal(module(batch_of(1)), packed.module()(batch_of(1))), "the forward pass is that of inference"
    for trained in (module, model):
        loss_of(trained, tokens(1)).backward()
    wanted = dict(model.named_parameters())
    assert packed_names(model, tuned) == {name for name in wanted if name.endswith("base.weight")}
    for name, parameter in module.named_parameters():
        if name.endswith("k.base.bias"):  # the softmax takes away what is the same for all keys: rounding is left
            assert parameter.grad.norm() < 1e-3
        else:
            assert relative_l2(parameter.grad, wanted[name].grad) < GRADIENT, name


def test_after_training_the_packed_program_comes_back() -> None:
    packed, _ = mxfp8_graph.rewrite(exported(Transformer()))
    tuned, _ = mxfp8_graph.rewrite(packed, training=True)
    before = {name: p.detach().clone() for name, p in tuned.module().named_parameters()}
    module = tuned.module()
    train(module, 2)
    assert not [name for name, p in module.named_parameters() if torch.equal(p, before[name])], "all are trained"
    final, report = mxfp8_graph.rewrite(tuned)
    ops = ("mxfp8.gemm", "mxfp8.quantize", "mxfp8.linear_packed")
    assert [count(final, op) for op in ops] == [count(packed, op) for op in ops] == [12, 8, 0]
    assert {site.decision.reason for site in report.rewritten} == {"its weight was packed before"}
    assert not any(p.requires_grad for p in final.parameters())
    with torch.no_grad():
        assert torch.equal(final.module()(batch_of(1)), module(batch_of(1)))
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


FORMS: dict[str, tuple[Any, dict[str, Tensor], tuple[Tensor, ...]]] = {
    "addmm": (
        lambda m, x: torch.addmm(m.c, x, m.w),
        {"w": values(64, 96, seed=1), "c": values(96)},
        (values(40, 64),),
    ),
    "weight first": (lambda m, x: m.w @ x, {"w": values(96, 64, seed=1)}, (values(3, 64, 40),)),
    "stack": (lambda m, x: x @ m.w, {"w": values(3, 64, 96, seed=1)}, (values(3, 40, 64),)),
    "picked": (
        lambda m, x, ids: torch.bmm(x, m.w[ids]),
        {"w": values(3, 64, 96, seed=1)},
        (values(2, 40, 64), torch.tensor([2, -3])),
    ),
    "bfloat16": (
        lambda m, x: nn.functional.linear(x, m.w),
        {"w": values(96, 64, seed=1, dtype=torch.bfloat16)},
        (values(40, 64, dtype=torch.bfloat16),),
    ),
    "products": (
        lambda m, x: torch.softmax((x @ m.w) @ x.mT, -1) @ x,
        {"w": values(64, 64, seed=1) / 4096},
        (values(3, 40, 64),),
    ),
}


@looped("name", FORMS)
def test_every_form_passes_the_gradient_of_its_input(name: str) -> None:
    function, weights, inputs = FORMS[name]
    module = Apply(lambda m, x, *rest: function(m, x * m.gain, *rest), {**weights, "gain": torch.ones(())})
    program = export(module, *inputs)
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
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.middle, self.norm = nn.Embedding(40, 64), nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.linear(self.norm(self.middle(self.embed(ids))), self.embed.weight)

    model, ids = Tied(), torch.arange(12).reshape(3, 4)
    packed, _ = mxfp8_graph.rewrite(export(model, ids))
    module = mxfp8_graph.rewrite(packed, training=True)[0].module()
    assert len(list(module.parameters())) == len({p.data_ptr() for p in module.parameters()}) == 4
    module(ids).square().mean().backward()
    model(ids).square().mean().backward()
    grads = [p.grad for p in module.parameters() if p.shape == (40, 64)]
    assert len(grads) == 1
    assert relative_l2(grads[0], model.embed.weight.grad) < GRADIENT


def test_what_cannot_be_trained_says_what_to_do() -> None:
    bare = Apply(lambda m, x: torch.tanh(x @ m.w), {"w": values(64, 96)})
    packed, _ = mxfp8_graph.rewrite(export(bare, values(5, 64)))
    nothing = (
        "there is nothing to train: every weight is kept in MXFP8 only.*rewrite the original program with training"
    )
    with pytest.raises(ContractError, match=nothing):
        mxfp8_graph.rewrite(packed, training=True)

    def experts(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x.bfloat16(), m.w, offs=ends).float() * m.gain

    parameters = {"w": values(4, 64, 96).bfloat16(), "gain": torch.ones(96)}
    inputs = values(8, 64), torch.tensor([1, 4, 6, 8], dtype=torch.int32)
    program = export(Apply(experts, parameters), *inputs)
    with pytest.raises(ContractError, match="experts are chosen at run time for quantized activations"):
        mxfp8_graph.rewrite(mxfp8_graph.rewrite(program, "all")[0], "all", training=True)
    weight_only = Recipe(activations="unchanged", output_projections=True)
    tuned, _ = mxfp8_graph.rewrite(mxfp8_graph.rewrite(program, weight_only)[0], weight_only, training=True)
    tuned.module()(*inputs).sum().backward()


@pytest.mark.slow
def test_adapters_on_a_packed_transformer_learn_as_on_the_float32_one(capsys: pytest.CaptureFixture[str]) -> None:
    """200 steps of another task than the model was trained for, on the model in float32 and packed."""
    model = Transformer()
    train(model, 200)
    packed, _ = mxfp8_graph.rewrite(exported(model))
    tuned, _ = mxfp8_graph.rewrite(packed, training=True)
    module = tuned.module()
    frozen = packed_names(model, tuned)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    untrained = loss_of(model, tokens(0, stride=8)).item()
    with torch.no_grad():
        state = dict(model.named_parameters())
        for name, parameter in module.named_parameters():  # the program shares its parameters with the model
            parameter.data = state[name].detach().clone()
    wanted, got = train(model, 200, stride=8), train(module, 200, stride=8)
    with capsys.disabled():
        print(f"\nadapters: loss {untrained:.4f} -> {got:.4f}, on the float32 model {wanted:.4f}")
    assert wanted < 0.8 * untrained, "the adapters of the float32 model did not learn: the comparison says nothing"
    assert abs(got - wanted) <= LOSS * wanted
