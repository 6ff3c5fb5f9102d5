"""Experts in several processes compute what one process computes, and their rows travel in MXFP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from distributed_models import mesh, whole  # noqa: E402
from process_pool import ProcessPool, in_each_process  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_programs import DYNAMIC, TOKENS, Apply, export, mixtral, values  # noqa: E402  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import distributed  # noqa: E402
from mxfp8_graph.distributed import ExpertReport, routes  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402
from mxfp8_ops.torch_ops import weight_cache  # noqa: E402

pytestmark = pytest.mark.processes

SIZES = ((3, 0, 40, 5), (33, 0, 1, 0), (0, 0, 0, 0), (64, 0, 2, 7))
"""Rows of each expert in each process; two rows more belong to none."""
NAMES = ("y", "dx", "up", "down")
ops = torch.ops.mxfp8


class Experts(nn.Module):
    """A gated mixture of experts, whose activation is a module of its own.

    It calls the op for training itself: torch does not export grouped matmuls of float32.
    """

    settings: tuple[str, str] = ("E4M3", "ceil")

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(values(experts, 192, 64, seed=1) / 8)
        self.down = nn.Parameter(values(experts, 96, 64, seed=2) / 8)  # stored [E, K, N]
        self.act = nn.SiLU()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = ops.grouped_linear_train(x, self.up, ends, *self.settings).chunk(2, dim=-1)
        result: Tensor = ops.grouped_linear_train(self.act(gate) * up, self.down.mT, ends, *self.settings)
        return result


def ends_of(process: int) -> Tensor:
    return torch.tensor(SIZES[process]).cumsum(0).to(torch.int32)


def exported(module: nn.Module, *, flat: bool = False) -> Any:
    """Returns the program of experts for any number of rows."""
    return export(module, rows(0, 64, 3, flat=flat), ends_of(0), dynamic=({0: DYNAMIC}, None))


def here(*, flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows of this process, the ends of their groups, and a gradient."""
    x, dy = (rows(dist.get_rank(), 64, seed, flat=flat) for seed in (3, 4))
    return x, ends_of(dist.get_rank()), dy


def rows(process: int, width: int, seed: int, *, flat: bool) -> Tensor:
    """Returns the rows of a process; flat ones have no value that is subnormal in a block."""
    x = values(sum(SIZES[process]) + 2, width, seed=10 * process + seed)
    return x.sign() * (1 + x.abs() % 1) if flat else x


def step(module: nn.Module, x: Tensor, ends: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Returns the result and the gradients."""
    x = x.clone().requires_grad_()
    y = module(x, ends)
    y.backward(dy)
    named = dict(module.named_parameters())
    return {"y": y.detach(), "dx": x.grad} | {name: named[name].grad for name in ("up", "down")}


def together(each: list[Tensor], processes: int) -> Tensor:
    """Returns the rows of all processes, sorted by expert and then by process, and those of no expert."""
    parts = [x.split([*SIZES[process], 2]) for process, x in zip(range(processes), each, strict=True)]
    return torch.cat([part[e] for e in range(5) for part in parts])


def apart(x: Tensor, process: int, processes: int) -> Tensor:
    """Returns the rows of a process out of `together`."""
    sizes = [[*each, 2][e] for e in range(5) for each in SIZES[:processes]]
    return torch.cat(x.split(sizes)[process::processes])


def in_one_process(processes: int, module: nn.Module, *, flat: bool, rounded: tuple[str, str] | None = None) -> Any:
    """Returns `step` with the rows of all processes; `rounded` also rounds x and dy along rows before."""
    x, dy = (together([rows(p, 64, seed, flat=flat) for p in range(processes)], processes) for seed in (3, 4))
    if rounded is not None:
        gradient, rounding = {"E4M3": "e4m3", "HYBRID": "e5m2"}[rounded[0]], rounded[1]
        x = ops.dequantize(*ops.quantize(x, -1, "e4m3", rounding))
        dy = ops.dequantize(*ops.quantize(dy, -1, gradient, rounding), -1, gradient)
    ends = torch.tensor(SIZES[:processes]).sum(0).cumsum(0).to(torch.int32)
    return step(module, x, ends, dy)


def same_as_one_process(settings: tuple[str, str], flat: bool, unflattened: bool = False) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    module, (x, ends, dy) = Experts(), here(flat=flat)
    module.settings = settings
    program = exported(module, flat=flat)
    sharded = torch.export.unflatten(program) if unflattened else program.module()
    held = range(rank * 4 // processes, (rank + 1) * 4 // processes)
    assert distributed.expert_parallel(sharded, mesh()) == ExpertReport(dict.fromkeys(("up", "down"), held))
    got = step(sharded, x, ends, dy)
    wanted = in_one_process(processes, module, flat=flat)
    module.zero_grad()
    twice = in_one_process(processes, module, flat=flat, rounded=settings)
    for name in ("y", "dx"):
        assert_equal(name, got[name], apart(wanted[name], rank, processes))
    for name in ("up", "down"):
        # Rows that were rounded along the other axis before make the gradient of a weight.
        assert_equal(name, got[name].to_local(), twice[name][held.start : held.stop])
        if flat:
            assert_equal(name, got[name].full_tensor(), wanted[name])


@pytest.mark.parametrize(("fp8_format", "unflattened"), [("E4M3", True), ("HYBRID", False)])
def test_all_is_bitwise_what_one_process_computes_if_no_value_is_subnormal_in_its_block(
    two: ProcessPool, fp8_format: str, unflattened: bool
) -> None:
    two(same_as_one_process, (fp8_format, "ceil"), True, unflattened)


@pytest.mark.parametrize("settings", [("E4M3", "ceil"), ("HYBRID", "floor"), ("HYBRID", "even")])
def test_gradients_of_weights_alone_see_rows_that_were_rounded_twice(
    two: ProcessPool, settings: tuple[str, str]
) -> None:
    two(same_as_one_process, settings, False)


def test_four_processes_with_rows_for_some_of_them() -> None:
    with ProcessPool(4) as four:
        four(same_as_one_process, ("E4M3", "ceil"), True)


def assert_equal(name: str, got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    assert torch.equal(got, wanted), f"{name}: differs by {float((got.double() - wanted.double()).abs().max())}"


@in_each_process
def test_rows_take_33_bytes_for_32_values_and_results_their_own_dtype() -> None:
    x, ends, dy = here()
    module = exported(Experts()).module()
    distributed.expert_parallel(module, mesh())
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(output, given, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        y = module(x.requires_grad_(), ends)
        forward, sent = sent, []
        y.backward(dy)
    rank = dist.get_rank()
    own, received = sum(SIZES[rank]), sum(sizes[e] for sizes in SIZES[:2] for e in range(2 * rank, 2 * rank + 2))
    counts = 4 * 8  # rows of four experts, int64 after `diff`, or int32
    assert forward[0] <= counts
    assert forward[1:] == sent == [own * 66, received * 64 * 4]


def between(function: Callable[[Any, Tensor], Tensor], *, then: bool = False) -> nn.Module:
    """Returns two products with something between them; with `then`, their result is added to it."""

    def experts(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        h = function(m, ops.grouped_linear_train(x, m.up, ends))
        y: Tensor = ops.grouped_linear_train(h, m.down, ends)
        return y + h if then else y

    stacks = {"up": torch.ones(4, 64, 64), "down": torch.ones(4, 64, 64), "bias": torch.ones(5, 64)}
    return Apply(experts, stacks)


@in_each_process
def test_weights_of_experts_are_quantized_once_per_step() -> None:
    x, ends, dy = here()
    module = exported(Experts()).module()
    distributed.expert_parallel(module, mesh())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    wanted = step(module, x, ends, dy)
    counts = []
    with weight_cache():
        for _ in range(3):
            optimizer.zero_grad()
            with torch.profiler.profile(record_shapes=True) as profile:
                got = step(module, x, ends, dy)
            shapes = [event.input_shapes[0] for event in profile.events() if event.name == "mxfp8::quantize"]
            counts.append(sum(len(shape) == 3 for shape in shapes))
            if len(counts) < 3:
                for name in NAMES:
                    assert_equal(name, *(whole(each[name]) for each in (got, wanted)))
            if len(counts) == 2:
                optimizer.step()
    assert counts == [4, 0, 4], "two copies of two stacks, once more after a step"


@in_each_process
def test_a_module_that_cannot_be_cut_is_refused_and_not_changed() -> None:
    x, ends = torch.ones(5, 64), torch.tensor([1, 2, 3, 5], dtype=torch.int32)
    with pytest.raises(ContractError, match="the module has no mxfp8::grouped_linear_train; expected experts to train"):
        distributed.expert_parallel(nn.Linear(2, 2), mesh())
    with pytest.raises(ContractError, match=r"a mesh of 2 dimensions; expected one dimension; pass one of its"):
        distributed.expert_parallel(nn.Linear(2, 2), init_device_mesh("cpu", (dist.get_world_size(), 1)))
    computed = Apply(lambda m, x, ends: ops.grouped_linear_train(x, m.up * 2, ends), {"up": torch.ones(4, 64, 64)})
    frozen = Apply(lambda m, x, ends: ops.grouped_linear_train(x, m.up, ends), {}, {"up": torch.ones(4, 64, 64)})
    cases = {
        "the weight of 'grouped_linear_train' is no parameter; expected a parameter": (frozen, ends),
        "3 experts in 'up'; expected a plain parameter with a multiple of 2": (Experts(3), ends[:3]),
        "between experts is softmax": (between(lambda m, h: torch.softmax(h, 0)), ends),
        "between experts is split": (between(lambda m, h: torch.cat(h.split([2, 3], 0))), ends),
        "between experts reads 'bias'": (between(lambda m, h: h + m.bias), ends),
        "node 'relu' between experts is read by 'add": (between(lambda m, h: torch.relu(h), then=True), ends),
        "weight of 'grouped_linear_train' is computed, or read by another node": (computed, ends),
    }
    for message, (module, offs) in cases.items():
        sharded = export(module, x, offs).module()
        before = dict(sharded.named_parameters())
        with pytest.raises(ContractError, match=message):
            distributed.expert_parallel(sharded, mesh())
        assert all(parameter is before[name] for name, parameter in sharded.named_parameters()), message


TEXT = torch.randint(0, TOKENS, (2, 4, 25), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file of a Mixtral to train."""
    tuned, _ = mxfp8_graph.rewrite(mixtral(dynamic=True), training=True)
    return mxfp8_graph.save(tuned, tmp_path_factory.mktemp("experts") / "mixtral.pt2")


def losses_of(module: nn.Module, text: Tensor, steps: int, summed: Callable[[Tensor], bool]) -> list[float]:
    """Trains in place; returns the losses. Gradients of parameters that are `summed` are added up here."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        logits, targets = module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / TEXT[..., 1:].numel()
        loss.backward()
        for parameter in filter(summed, module.parameters()):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_experts_apart(path: Path) -> tuple[nn.Module, set[Tensor]]:
    """Returns a language model whose experts are split among the processes, and their weights."""
    module = torch.export.unflatten(mxfp8_graph.load(path))
    report = distributed.expert_parallel(module, mesh())
    assert len(report.weights) == 2
    return module, {module.get_parameter(name) for name in report.weights}


@in_each_process
def test_a_mixtral_trains_as_in_one_process(language_model: Path) -> None:
    module, experts = with_experts_apart(language_model)
    graphs = [each.graph for each in module.modules() if "graph" in each.__dict__]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert (targets.count(routes.dispatch), targets.count(routes.combine)) == (1, 1), "rows travel once"
    losses = torch.tensor(losses_of(module, TEXT[dist.get_rank()], 3, lambda p: p not in experts))
    dist.all_reduce(losses)
    wanted = losses_of(mxfp8_graph.load(language_model).module(), TEXT.flatten(0, 1), 3, lambda p: False)
    assert losses.tolist() == pytest.approx(wanted, rel=1e-3), "a token near the border between experts may change"
    assert losses[-1] < losses[0]


@in_each_process
def test_fsdp2_shards_the_rest_and_checkpoints_hold_all(language_model: Path, tmp_path: Path) -> None:
    text, trained = TEXT[dist.get_rank()], []
    for sharded in (False, True):
        module, experts = with_experts_apart(language_model)
        if sharded:
            fully_shard(module, mesh=mesh(), ignored_params=experts)
            module.set_gradient_divide_factor(1.0)  # sums, no means
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        losses_of(module, text, 1, lambda p, apart=experts, here=not sharded: here and p not in apart)
        trained.append({name: whole(p.detach()) for name, p in module.named_parameters()})
    for name, parameter in trained[0].items():
        torch.testing.assert_close(trained[1][name], parameter, rtol=2.0**-20, atol=2.0**-20, msg=name)
    dcp.save(get_model_state_dict(module), checkpoint_id=tmp_path / "checkpoint")
    state = mxfp8_graph.load(language_model).module().state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    for name, parameter in trained[1].items():
        assert_equal(name, state[name], parameter)


def test_the_report_has_a_line_for_each_stack() -> None:
    assert str(ExpertReport({"up": range(2, 4), "down": range(1)})) == "up: experts 2 to 3\ndown: experts 0 to 0"
