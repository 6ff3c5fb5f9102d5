"""`weight_cache`: weights are quantized once per step of an optimizer, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from grids import looped
from tensors import assert_equal, step, values

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


A, B = (values(40, 48, seed=seed) for seed in (7, 8))
"""Two micro-batches."""
TRANSPOSED = [(64, 80), (80, 64)]
ALL = sorted([(64, 48), (48, 64), *TRANSPOSED, (2, 96, 80), (2, 80, 96), (3, 48, 96), (3, 96, 48)])
"""Shapes of the two copies of each weight, blocked along the last axis."""


def quantized(net: Net, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Returns the shapes of the weights that a step quantizes."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step(net, net, x)
    events = [e for e in profile.events() if e.name == "mxfp8::quantize"]
    return sorted(shape for e in events if (shape := tuple(e.input_shapes[0])) in ALL)


def test_the_second_micro_batch_quantizes_no_weight_and_has_the_same_bits() -> None:
    net = Net()
    wanted = [step(net, net, x) for x in (A, B)]
    assert quantized(net, A) == ALL
    with weight_cache():
        for x, one in zip((A, B), wanted, strict=True):
            assert_equal(step(net, net, x), one)
        with weight_cache():
            assert quantized(net, B) == []
        assert quantized(net, B) == [], "an inner context ended"
    assert quantized(net, B) == ALL


def test_after_a_step_of_an_optimizer_weights_are_quantized_again() -> None:
    net, twin = Net(), Net()
    with weight_cache():
        for each in (torch.optim.SGD, torch.optim.AdamW):
            for trained in (net, twin):
                step(trained, trained, A)
                each(trained.parameters(), lr=0.1).step()
            assert quantized(net, A) == ALL
        got = step(net, net, B)
    assert_equal(got, step(twin, twin, B))


def test_a_weight_that_changes_in_place_is_quantized_again_alone() -> None:
    net = Net()
    with weight_cache():
        step(net, net, A)
        with torch.no_grad():
            net.transposed.mul_(2)
        assert quantized(net, A) == TRANSPOSED
        got = step(net, net, A)
    assert_equal(got, step(net, net, A))


def test_a_step_in_memory_whose_changes_are_not_counted_empties_the_cache() -> None:
    """FSDP2 gathers weights so, after a step of the optimizer on their shards."""
    net = Net()
    shard = torch.nn.Parameter(torch.ones(3))
    shard.grad = torch.ones(3)
    with weight_cache():
        step(net, net, A)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(net.parameters())):
            net.linear.mul_(2)
        torch.optim.SGD([shard], lr=0.1).step()
        got = step(net, net, A)
    assert_equal(got, step(net, net, A))


def test_no_copy_outlives_its_weight_or_the_context() -> None:
    net = Net()
    with weight_cache():
        step(net, net, A)
        entries = cached_weights._active
        assert entries is not None
        assert len(entries) == 4
        size = sum(e.nbytes + s.nbytes for each in entries.values() for _, (e, s) in each.values())
        # 1 + 1/32 bytes of either copy, and where an axis is no multiple of 32 the scales of partial blocks.
        assert 2.06 <= size / sum(p.numel() for p in net.parameters()) <= 2.08
        del net.experts
        assert len(entries) == 3
    assert cached_weights._active is None
    del net
    assert len(entries) == 0


UNCACHED: dict[str, Callable[[Any], Any]] = {
    "a weight that is computed": lambda w: w * 2,
    "inference mode": lambda w: w.clone(),
    "no gradient": lambda w: w.detach(),
}


@looped("what", UNCACHED)
def test_only_parameters_in_training_are_cached(what: str) -> None:
    parameter, x = torch.nn.Parameter(values(2, 64, 48)), values(2, 5, 48)
    with weight_cache(), torch.inference_mode(what == "inference mode"):
        y = ops.linear_train(x, UNCACHED[what](parameter))
        if y.requires_grad:
            y.sum().backward()
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
    wanted = step(net, net, A)
    with weight_cache():
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(2):
            assert_equal(step(compiled, net, A), wanted)
