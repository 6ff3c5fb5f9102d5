"""What a rewrite leaves alone in a program, what can follow it, and the graphs inside of its ops."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grids import looped

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._higher_order_ops.map import map as over_rows  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch._higher_order_ops.while_loop import while_loop  # noqa: E402
from torch.export import ExportedProgram, unflatten  # noqa: E402
from torch_programs import (  # noqa: E402
    DYNAMIC,
    OUTPUTS_TOO,
    Apply,
    as_numpy,
    count,
    export,
    kept,
    predict,
    relative_l2,
    rewrite,
    values,
)

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_graph.torch_pass import internals  # noqa: E402
from mxfp8_ops.errors import BackendError, RecipeError  # noqa: E402

X = values(5, 64, seed=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks, one of them called twice, and an input called as a builtin, which torch renames on copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, input: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = self.second(self.first(input))
        return {"y": self.second(y) * scale, "mean": y.mean()}


@pytest.fixture(scope="module")
def ep() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Model().eval(), X, dynamic={"input": {0: DYNAMIC}})


@pytest.fixture(scope="module")
def rewritten(ep: ExportedProgram) -> ExportedProgram:
    return mxfp8_graph.rewrite(ep)[0]


@looped("training", [False, True])
def test_the_source_is_not_modified(ep: ExportedProgram, training: bool) -> None:
    def snapshot() -> tuple[Any, ...]:
        nodes = [(n.name, str(n.target), str(n.args), str(n.kwargs), sorted(n.meta)) for n in ep.graph.nodes]
        return str(ep), nodes, copy.deepcopy(ep.graph_signature), [t.requires_grad for t in ep.state_dict.values()]

    before, tensors = snapshot(), dict(ep.state_dict)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    mxfp8_graph.rewrite(ep, training=training)
    assert snapshot() == before
    for name, tensor in ep.state_dict.items():
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name]), name


class Counting(nn.Module):
    """Writes to buffers: one that is saved, one that is not, and a view of the first under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("first", self.count[:1])
        self.register_buffer("fleeting", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.fleeting.add_(10)
        return torch.relu(self.down(torch.relu(self.up(x)))) + self.count.sum() + self.fleeting


def stored(ep: ExportedProgram) -> dict[str, list[float]]:
    tensors = {**ep.state_dict, **ep.constants}
    return {name: tensors[name].tolist() for name in ("count", "first", "fleeting")}


@looped("training", [False, True])
def test_running_the_result_does_not_change_the_source(training: bool) -> None:
    ep = export(Counting().eval(), X)
    before = stored(ep)
    rewritten, _ = mxfp8_graph.rewrite(ep, training=training)
    module = rewritten.module()
    for _ in range(2):
        module(X)
    assert stored(ep) == before
    assert stored(rewritten) == {"count": [2.0] * 4, "first": [2.0], "fleeting": [20.0]}


def test_checks_run_every_program_from_the_state_that_it_has() -> None:
    """The counts would be larger by one for whichever runs second, and stay so in the caller's program."""
    ep = export(Counting().eval(), X)
    ep.module()(X)
    rewritten, _ = mxfp8_graph.rewrite(ep)
    before = stored(ep), stored(rewritten)
    for _ in range(2):
        [output] = mxfp8_graph.verify(ep, rewritten, inputs={"x": X.numpy()}).outputs
        assert output.rewritten.max_abs < 0.5
    mxfp8_graph.analyze(ep, inputs={"x": X.numpy()})
    assert (stored(ep), stored(rewritten)) == before


def test_signature_ranges_and_module_calls_stay(ep: ExportedProgram, rewritten: ExportedProgram) -> None:
    assert rewritten.graph_signature.user_inputs == ep.graph_signature.user_inputs
    assert rewritten.graph_signature.output_specs == ep.graph_signature.output_specs
    assert rewritten.range_constraints == ep.range_constraints
    assert [e.fqn for e in rewritten.module_call_graph] == [e.fqn for e in ep.module_call_graph]
    assert rewritten.call_spec == ep.call_spec
    rewritten.validate()


def test_names_and_metadata_of_the_matmuls_stay(ep: ExportedProgram) -> None:
    rewritten, report = mxfp8_graph.rewrite(ep)
    new = {n.name: n for n in rewritten.graph.nodes}
    for old in ep.graph.nodes:
        if internals.op_name(old) == "linear":
            node = new[old.name]
            assert internals.op_name(node) == "mxfp8::gemm"
            assert node.meta["nn_module_stack"] == old.meta["nn_module_stack"]
            assert list(node.users) == [new[user.name] for user in old.users]
    modules = [s.decision.site.module for s in report.sites]
    assert modules == ["first.up", "first.down", "second.up", "second.down", "second.up", "second.down"]
    again, _ = mxfp8_graph.rewrite(ep)
    assert str(again) == str(rewritten)
    assert again.state_dict.keys() == rewritten.state_dict.keys()


def test_unflatten() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    ep = torch.export.export(model, (X,), preserve_module_call_signature=("first",))
    assert torch.equal(unflatten(ep)(X)["y"], model(X)["y"])  # leaves a module behind in the program's metadata
    rewritten, _ = mxfp8_graph.rewrite(ep)
    with torch.no_grad():
        module, expected = unflatten(rewritten), rewritten.module()(X)
        assert all(torch.equal(expected[key], got) for key, got in module(X).items())
    assert "weight_mxfp8" in dict(module.first.up.named_buffers())


@looped("decompositions", [{}, None])
def test_decomposing_afterwards(rewritten: ExportedProgram, decompositions: Any) -> None:
    again = rewritten.run_decompositions(decompositions)
    assert [count(again, op) for op in ("mxfp8.gemm", "mxfp8.quantize")] == [6, 6]
    assert torch.equal(again.module()(X)["y"], rewritten.module()(X)["y"])


def test_retracing_and_compiling_without_graph_breaks(rewritten: ExportedProgram) -> None:
    again, expected = torch.export.export(rewritten.module(), (X,)), rewritten.module()(X)["y"]
    assert count(again, "mxfp8.gemm") == 6
    assert torch.equal(again.module()(X)["y"], expected)
    compiled = torch.compile(rewritten.module(), fullgraph=True, backend="aot_eager")
    assert relative_l2(compiled(X)["y"], expected) < 1e-6  # layer_norm in another order


def test_a_torch_that_is_too_old_or_too_new(ep: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(BackendError, match=r"torch 2.4.1\+cpu: too old; expected torch 2.10 to 2.15"):
        mxfp8_graph.rewrite(ep)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    _, report = mxfp8_graph.rewrite(ep)
    assert report.notes == ("torch 2.99.0 is newer than the last one tested (2.15)",)
    monkeypatch.setattr(ExportedProgram, "_update", lambda self, graph_module: self)
    with pytest.raises(BackendError, match=r"_update is not the one this pass knows; expected torch 2\.10 to 2\.15"):
        mxfp8_graph.rewrite(ep)


@pytest.mark.tools
def test_private_torch_is_in_the_modules_for_it() -> None:
    from mxfp8_graph import torch_pass

    folder = Path(inspect.getfile(torch_pass)).parent
    private = re.compile(r"torch\._[a-z]|\._(schema|update|name)\b|_higher_order_ops")
    assert [p.name for p in folder.glob("*.py") if private.search(p.read_text())] == ["internals.py"]


def test_arguments_that_equal_their_defaults_are_left_out(ep: ExportedProgram, rewritten: ExportedProgram) -> None:
    nodes = [n for n in rewritten.graph.nodes if str(n.target).startswith("mxfp8.")]
    assert nodes
    assert all(n.kwargs == {} for n in nodes), "each that is passed costs a call half a microsecond"
    other, _ = mxfp8_graph.rewrite(ep, Recipe(name="floor", scale_rounding="floor", weight_format="e5m2"))
    found = {(str(n.target), *n.kwargs.items()) for n in other.graph.nodes if str(n.target).startswith("mxfp8.")}
    assert found == {
        ("mxfp8.quantize.default", ("scale_rounding", "floor")),
        ("mxfp8.gemm.default", ("b_format", "e5m2")),
    }


def test_a_recorded_recipe_that_cannot_be_read_is_named_as_such(ep: ExportedProgram) -> None:
    rewritten, _ = mxfp8_graph.rewrite(ep)
    for node in rewritten.graph.nodes:
        if "mxfp8_graph.recipe" in (node.meta.get("custom") or {}):
            node.meta["custom"]["mxfp8_graph.recipe"] = '{"a field of the future": 1}'
    with pytest.raises(RecipeError, match="packed with 'a recipe this version cannot read', asked for 'mxfp8'"):
        mxfp8_graph.rewrite(rewritten)


# --- Graphs inside of ops ----------------------------------------------------------------------------------------

W, V = values(64, 64, seed=1) / 8, values(64, 64, seed=2) / 8
ROWS = values(6, 64, seed=3)
linear = nn.functional.linear


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: linear(x, m.w), lambda x: linear(x, m.v) + linear(x, m.w), (x,))


def loop(m: Any, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64), x
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(linear(x, m.w))), start)[1]


def mapped(m: Any, x: Tensor) -> Tensor:
    return over_rows(lambda row: linear(row, m.w), x.reshape(2, 3, 64))


def scanned(m: Any, x: Tensor) -> Any:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(linear(carry, m.w) + row)
        return new, new * 1.0

    return scan(step, torch.zeros(1, 64), x.reshape(6, 1, 64))[1]


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = linear(x, m.w)
    return linear(y, m.v)


def in_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, m.w)
    return y.float()


KEPT: dict[str, Callable[..., Any]] = {"cond": branches, "while_loop": loop, "map_impl": mapped, "scan": scanned}


@looped("name", KEPT)
def test_matmuls_in_the_graphs_of_an_op_are_kept(name: str, tmp_path: Path) -> None:
    module = Apply(lambda m, x: linear(KEPT[name](m, x).reshape(6, 64), m.w), {"w": W, "v": V})
    program = export(module, ROWS)
    before = str(program)
    rewritten, report = mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    assert str(program) == before
    assert [s.decision.site.subgraph != "" for s in report.sites].count(False) == len(report.rewritten) == 1
    reasons = {s.decision.reason for s in report.sites if s.decision.site.subgraph}
    assert reasons == {f"inside {name}, whose graphs stay in high precision"}
    assert count(rewritten, "mxfp8.gemm") == 1
    assert "w" in rewritten.state_dict
    loaded = mxfp8_graph.load(mxfp8_graph.save(rewritten, tmp_path / f"{name}.pt2"))
    with torch.no_grad():
        assert relative_l2(rewritten.module()(ROWS), module(ROWS)) < 0.12
        assert torch.equal(loaded.module()(ROWS), rewritten.module()(ROWS))


def test_a_region_of_no_grad_is_rewritten() -> None:
    module = Apply(without_gradients, {"w": W, "v": V})
    rewritten, report = mxfp8_graph.rewrite(export(module, ROWS), OUTPUTS_TOO)
    assert len(report.rewritten) == len(report.sites) == count(rewritten, "mxfp8.gemm") == 2
    with torch.no_grad():
        assert relative_l2(rewritten.module()(ROWS), module(ROWS)) < 0.12


def test_a_region_of_autocast_is_rewritten_and_gives_the_dtype_it_gave() -> None:
    rewritten, report = mxfp8_graph.rewrite(export(Apply(in_autocast, {"w": W, "v": V}), ROWS), OUTPUTS_TOO)
    assert len(report.rewritten) == len(report.sites) == count(rewritten, "mxfp8.gemm") == 1
    x, w = (t.bfloat16().float() for t in (ROWS, W))  # what autocast multiplies
    predict(x, w, dtype="bfloat16").check(as_numpy(rewritten.module()(ROWS)))


def test_training_passes_no_gradient_through_a_no_grad_region() -> None:
    tuned, report = rewrite(without_gradients, {"w": W, "v": V}, ROWS, training=True)
    assert len(report.rewritten) == 1
    module = tuned.module()
    module(ROWS).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert sorted(name for name, grad in gradients.items() if grad is not None) == ["v"]


def test_a_weight_that_the_loop_changes_is_not_static() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), m.w
        return while_loop(lambda i, w: i < 3, lambda i, w: (i + 1, torch.tanh(linear(x, w).t() @ x)), start)[1]

    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        rewrite(function, {"w": W}, ROWS)
    assert {d.site.weight for d in caught.value.decisions} == {None}


def test_vmap_must_be_decomposed_first() -> None:
    program = export(Apply(lambda m, x: torch.vmap(lambda row: torch.relu(linear(row, m.w)))(x), {"w": W}), ROWS)
    assert "call run_decompositions({}) first" in kept(program, "mxfp8")[0]
    rewritten, _ = mxfp8_graph.rewrite(program.run_decompositions({}))
    assert relative_l2(rewritten.module()(ROWS), program.module()(ROWS)) < 0.12
