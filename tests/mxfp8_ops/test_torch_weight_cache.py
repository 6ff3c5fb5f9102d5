"""`weight_cache`: weights are quantized once per step of an optimizer, with the same bits."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from grids import looped
from tensors import values

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from mxfp8_ops.torch_ops import cached_weights, weight_cache  # noqa: E402

ops = torch.ops.mxfp8
ENDS = torch.tensor([33, 33, 40], dtype=torch.int32)


class Net(torch.nn.Module):
    """A linear, a stored transpose, a stack and experts: every form in which a program has a weight."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"linear": (64, 48), "transposed": (64, 80), "stack": (2, 96, 80), "experts": (3, 48, 96)}
        for seed, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, torch.nn.Parameter(values(*shape, seed=seed) / 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(ops.linear_train(x, self.linear))
        x = torch.relu(ops.linear_train(x, self.transposed.t(), None, "HYBRID"))
        x = torch.relu(ops.linear_train(x.unflatten(0, (2, -1)), self.stack)).flatten(0, 1)
        return ops.grouped_linear_train(x, self.experts, ENDS)


BATCHES = [values(40, 48, seed=seed) for seed in (7, 8)]
QUANTIZED = {"linear": [(64, 48), (48, 64)], "transposed": [(80, 64), (64, 80)], "stack": [(2, 96, 80), (2, 80, 96)],
             "experts": [(3, 48, 96), (3, 96, 48)]}  # fmt: skip
"""Shapes of the two copies of each weight, blocked along the last axis."""


def step(net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the result and the gradients of one micro-batch."""
    net.zero_grad()
    y = net(x.clone().requires_grad_())
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def quantized(call: Callable[[], Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of the weights that `call` quantizes."""
    shapes = {shape for both in QUANTIZED.values() for shape in both}
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    events = [e for e in profile.events() if e.name == "mxfp8::quantize"]
    return sorted(shape for e in events if (shape := tuple(e.input_shapes[0])) in shapes)


ALL = sorted(shape for both in QUANTIZED.values() for shape in both)


def test_the_second_micro_batch_quantizes_no_weight_and_has_the_same_bits() -> None:
    net = Net()
    wanted = [step(net, x) for x in BATCHES]
    assert quantized(lambda: step(net, BATCHES[0])) == ALL
    with weight_cache():
        got = [step(net, x) for x in BATCHES]
        assert quantized(lambda: step(net, BATCHES[1])) == []
        with weight_cache():
            assert quantized(lambda: step(net, BATCHES[1])) == []
        assert quantized(lambda: step(net, BATCHES[1])) == [], "an inner context ended"
    assert quantized(lambda: step(net, BATCHES[1])) == ALL
    for x, y in zip(itertools.chain(*got), itertools.chain(*wanted), strict=True):
        assert torch.equal(x, y), f"differs by {float((x - y).abs().max())}"


def test_after_a_step_of_an_optimizer_weights_are_quantized_again() -> None:
    net, twin = Net(), Net()
    with weight_cache():
        for each in (torch.optim.SGD, torch.optim.AdamW):
            for trained in (net, twin):
                step(trained, BATCHES[0])
                each(trained.parameters(), lr=0.1).step()
            assert quantized(lambda: step(net, BATCHES[0])) == ALL
        got = step(net, BATCHES[1])
    for x, y in zip(got, step(twin, BATCHES[1]), strict=True):
        assert torch.equal(x, y)


def test_a_weight_that_changes_in_place_is_quantized_again_alone() -> None:
    net = Net()
    with weight_cache():
        step(net, BATCHES[0])
        with torch.no_grad():
            net.transposed.mul_(2)
        assert quantized(lambda: step(net, BATCHES[0])) == sorted(QUANTIZED["transposed"])
        got = step(net, BATCHES[0])
    assert all(map(torch.equal, got, step(net, BATCHES[0])))


def test_a_step_in_memory_whose_changes_are_not_counted_empties_the_cache() -> None:
    """FSDP2 gathers weights so, after a step of the optimizer on their shards."""
    net = Net()
    shard = torch.nn.Parameter(torch.ones(3))
    shard.grad = torch.ones(3)
    with weight_cache():
        step(net, BATCHES[0])
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(net.parameters())):
            net.linear.mul_(2)
        torch.optim.SGD([shard], lr=0.1).step()
        got = step(net, BATCHES[0])
    assert all(map(torch.equal, got, step(net, BATCHES[0])))


def test_no_copy_outlives_its_weight_or_the_context() -> None:
    net = Net()
    with weight_cache():
        step(net, BATCHES[0])
        entries = cached_weights._active
        assert entries is not None
        assert len(entries) == 4
        size = sum(e.nbytes + s.nbytes for each in entries.values() for _, (e, s) in each.values())
        # 1 + 1/32 bytes of either copy, and where an axis is no multiple of 32 the scales of partial blocks.
        assert 2.06 <= size / sum(p.numel() for p in net.parameters()) <= 2.08
        del net.experts
        gc.collect()
        assert len(entries) == 3
    assert cached_weights._active is None
    del net
    gc.collect()
    assert len(entries) == 0


@looped("what", ["a weight that is computed", "inference mode", "no gradient"])
def test_only_parameters_in_training_are_cached(what: str) -> None:
    parameter, x = torch.nn.Parameter(values(2, 64, 48)), values(2, 5, 48)
    with weight_cache():
        if what == "a weight that is computed":
            ops.linear_train(x, parameter * 2).sum().backward()
        elif what == "inference mode":
            with torch.inference_mode():
                ops.linear_train(x, parameter.clone())
        else:
            ops.linear_train(x, parameter.detach())
        assert not cached_weights._active


def test_a_trace_of_the_backward_pass_holds_the_quantization() -> None:
    weight, x = torch.nn.Parameter(values(64, 48)), values(5, 48)
    gradient = lambda x: torch.autograd.grad(ops.linear_train(x, weight).sum(), x)  # noqa: E731
    with weight_cache():
        gradient(x.requires_grad_())
        traced = make_fx(gradient)(x)
    assert [node.target for node in traced.graph.nodes].count(ops.quantize.default) == 2, "of dy and of the weight"


def test_a_compiled_module_has_the_same_bits_within_the_context() -> None:
    net = Net()
    wanted = step(net, BATCHES[0])
    with weight_cache():
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(2):
            net.zero_grad()
            y = compiled(BATCHES[0])
            y.square().sum().backward()
            got = [y.detach(), *(p.grad for p in net.parameters())]
            assert all(map(torch.equal, got, wanted))
