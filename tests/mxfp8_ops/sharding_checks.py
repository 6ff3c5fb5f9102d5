"""What each process of a pool checks; `test_torch_sharding.py` names the checks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import tensors
import torch
import torch.distributed as dist
from grids import pairwise
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

import mxfp8_ops.torch_ops.sharding  # noqa: F401
from mxfp8_ops import numpy_nodes
from mxfp8_ops.errors import ShapeError

OPS = torch.ops.mxfp8
R, S = Replicate(), Shard
values = functools.partial(tensors.values, spread=0)  # normal: sums of few outliers would depend on no order
ENDS = torch.tensor([8, 8, 40, 60])
SUMS = {"gemm", "weight_gemm", "linear_packed", "linear_train", "product"}
SUMS |= {"grouped_gemm", "grouped_linear_train", "grouped_wgrad"}
REDUCED = 1e-6
"""Bound of the relative L2 error of float32 sums of the same terms in another order."""


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(tensors: Iterable[Tensor], places: Iterable[Any], on: DeviceMesh | None = None) -> list[Any]:
    """Returns each tensor with its placement, or its list of them."""
    on = on or mesh()
    pairs = zip(tensors, places, strict=True)
    return [t if p is None else distribute_tensor(t, on, p if isinstance(p, list) else [p]) for t, p in pairs]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def calls(name: str) -> Iterator[tuple[Tensor | None, ...]]:
    """Yields the operands of calls of an op: with shards of whole blocks, and with some that are not."""
    for size in (128, 96):
        x, weight = values(4, 64, size), values(64, size, seed=1)
        codes, packed, bias = OPS.quantize(x), OPS.quantize(weight), values(64, seed=2)
        stack = OPS.quantize(values(4, 64, size, seed=3))
        yield from {
            "quantize": [(x,), (x, 1), (x.view(2, 2, 1, 64, size),)],
            "quantize_both": [(x[0],), (x[0, :, :80],)],
            "dequantize": [codes, (*OPS.quantize(x, 1), 1)],
            "gemm": [(*codes, *packed, bias), (*codes, *stack), (codes[0][0, 0], codes[1][0, 0], *packed)],
            "weight_gemm": [(x, *packed, bias), (x[:1], *stack)],
            "embedding": [(torch.arange(32).view(4, 8) - 5, *packed)],
            "grouped_gemm": [
                (codes[0][0], codes[1][0], *stack, ENDS),
                (x[0], None, *stack, torch.tensor([0, 30, 40, 64])),
            ],
            "conv": [
                (x, *OPS.quantize(values(6, 3, 64)), bias[:6]),
                (x.view(4, 64, -1, 8), *OPS.quantize(values(6, 3, 1, 64))),
            ],
            "quantize_groups": [(x[0], ENDS)],
            "grouped_wgrad": [
                (*OPS.quantize_groups(x[1, :, :64], ENDS), *OPS.quantize_groups(x[0], ENDS), ENDS),
            ],
            "grouped_linear_train": [(x[0], values(4, 64, size, seed=3), ENDS)],
            "linear_train": [(x, weight, bias)],
            "linear_packed": [(x, *packed, bias)],
            "product": [(x, weight)],
        }[name]


def placements(tensor: Any) -> list[Placement | None]:
    return [R, *(S(axis) for axis in range(tensor.dim()))] if isinstance(tensor, Tensor) else [None]


def any_placement_gives_the_result_of_one_process(name: str) -> None:
    op = getattr(OPS, name)
    for args in calls(name):
        wanted = op(*args)
        for places in pairwise(**{str(at): placements(arg) for at, arg in enumerate(args)}):
            got = op(*placed(args, places))
            for result, one in zip(results(got), results(wanted), strict=True):
                assert isinstance(result, DTensor), places
                # The kernels sum in an order that depends on the number of rows.
                bound = 0 if one.dtype is torch.uint8 or name not in SUMS else REDUCED
                assert (whole(result).double() - one.double()).norm() <= bound * one.double().norm(), places


def results(result: Any) -> tuple[Any, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def sums_of_bfloat16_are_float32() -> None:
    """Halves of the sums cancel: if they were rounded to bfloat16, results would be off by more than the bound."""
    x, weight = values(32, 256), values(64, 256, seed=1)
    x, weight = torch.cat([x, x], 1).bfloat16(), torch.cat([weight, values(64, 256, seed=2) / 8 - weight], 1).bfloat16()
    wide = [OPS.dequantize(*OPS.quantize(t)) for t in (x, weight)]
    exact = wide[0].double() @ wide[1].double().mT
    of_sum = torch.from_numpy(numpy_nodes.gemm_error_bound(*(t.numpy() for t in wide)))
    bound = of_sum + 2**-8 * (exact.abs() + of_sum)  # half of the distance of two values with 8 bits
    for places in ((S(1), S(1)), (R, S(1))):
        y = OPS.linear_train(*placed((x, weight), places))
        assert y.dtype is torch.bfloat16
        assert y.placements == (R,)
        assert ((whole(y).double() - exact).abs() <= bound).all(), places
    halves = [OPS.linear_train(a, b) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    assert ((sum(halves).double() - exact).abs() > bound).any(), "the data has no sums that tell the two apart"


def float32_sums_are_reduced_where_they_are_needed() -> None:
    y = OPS.linear_train(*placed((values(32, 128), values(64, 128)), (S(1), S(1))))
    assert y.placements == (Partial(),)


TRAINED: dict[str, tuple[Placement, Placement, Placement, Placement]] = {
    "column": (R, S(0), S(0), S(2)),
    "row": (S(2), S(1), R, R),
    "batch": (S(0), R, R, S(0)),
    "sequence, column": (S(1), S(0), S(0), S(2)),
    "sequence, row": (S(2), S(1), R, S(1)),
    "sequence": (S(1), R, R, S(1)),
}
"""Placements of x, weight, bias and the gradient of the result."""


def train(op: Any, operands: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Returns the result and the gradients."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in operands]
    y = op(*leaves)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]


def layer(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns x, weight, bias and the gradient of the result."""
    shapes = ((4, 64, 256), (128, 256), (128,), (4, 64, 128))
    return [values(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def gradients_are_those_of_one_process(way: str, dtype: torch.dtype) -> None:
    *operands, grad = layer(dtype)
    one = train(OPS.linear_train, operands, grad)
    *operands, grad = placed((*operands, grad), TRAINED[way])
    got = train(OPS.linear_train, operands, grad)
    # A float32 sum in another order may round to the other bfloat16: a few of the results differ, by 2^-8.
    bound = REDUCED if dtype is torch.float32 else 1e-3
    for name, result, wanted in zip(("y", "dx", "dw", "db"), got, one, strict=True):
        difference = (whole(result) - wanted).double().norm() / wanted.double().norm()
        # A shard of columns is computed as the whole is.
        exact = (way, name) in {("column", "y"), ("column", "dw"), ("column", "db"), ("row", "dx"), ("row", "dw")}
        assert difference <= (0 if exact else bound), f"{name}: {difference}"
        assert dtype is torch.float32 or name == "db" or not result.placements[0].is_partial(), name


def packed_weights_pass_gradients_on() -> None:
    x, weight, _, grad = layer()
    operands = (x, *OPS.quantize(weight))
    one = train(OPS.linear_packed, operands, grad)
    for x_place, place, grad_place in ((R, S(0), S(2)), (S(2), S(1), R)):
        *sharded, sharded_grad = placed((*operands, grad), (x_place, place, place, grad_place))
        for result, wanted in zip(train(OPS.linear_packed, sharded, sharded_grad), one, strict=True):
            assert (whole(result) - wanted).norm() <= REDUCED * wanted.norm(), (place, result.placements)


class Collectives(TorchDispatchMode):
    """Records (name, dtype, number of values) of each tensor that a process sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it is taken apart first
        if func.namespace == "_c10d_functional" and func._schema.name.split("::")[1].startswith("all_"):
            self.sent.append((func._schema.name.split("::")[1], args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def sequences_are_gathered_as_codes(way: str) -> None:
    *operands, grad = placed(layer(), TRAINED[way])
    with Collectives() as collectives:
        train(OPS.linear_train, operands, grad)
    gathered = operands[0] if way == "sequence, column" else grad
    # Elements and scales along either axis, and nothing else: no values, and no weight.
    assert {dtype for _, dtype, _ in collectives.sent} == {torch.uint8}
    bytes_sent = sum(count for _, _, count in collectives.sent)
    assert bytes_sent == 2 * gathered.to_local().numel() * 33 // 32, collectives.sent


def weights_stay(place: int) -> None:
    """However many more values the activations have."""
    x, *weight = placed((values(512, 256), *OPS.quantize(values(64, 256, seed=1))), (S(0), S(place), S(place)))
    with Collectives() as collectives:
        OPS.gemm(*OPS.quantize(x), *weight)
    assert sum(count for _, _, count in collectives.sent) == x.numel() // 2 * 33 // 32, collectives.sent


def other_tensors_are_refused_unless_they_are_replicated() -> None:
    x, weight = values(8, 64), distribute_tensor(values(64, 64), mesh(), [S(0)])
    wanted = OPS.linear_train(x, whole(weight))
    with pytest.raises(ShapeError, match=r"plain tensors; expected DTensors on one mesh; distribute them with"):
        OPS.product(x, weight)
    with implicit_replication():
        assert torch.equal(whole(OPS.product(x, weight)), wanted)


def compiles() -> None:
    operands = placed((values(32, 128), values(64, 128)), (R, S(0)))
    compiled: Callable[..., Tensor] = torch.compile(OPS.linear_train, backend="aot_eager")
    assert torch.equal(whole(compiled(*operands)), whole(OPS.linear_train(*operands)))


def meshes_of_two_dimensions_shard_two_axes() -> None:
    on = init_device_mesh("cpu", (2, 2))
    *operands, grad = layer()
    one = train(OPS.linear_train, operands, grad)
    for ways in itertools.product(TRAINED, repeat=2):
        places = [[*pair] for pair in zip(TRAINED[ways[0]], TRAINED[ways[1]], strict=True)]
        *sharded, sharded_grad = placed((*operands, grad), places, on)
        got = train(OPS.linear_train, sharded, sharded_grad)
        for name, result, wanted in zip(("y", "dx", "dw", "db"), got, one, strict=True):
            assert (whole(result) - wanted).norm() <= REDUCED * wanted.norm(), (ways, name, result.placements)
