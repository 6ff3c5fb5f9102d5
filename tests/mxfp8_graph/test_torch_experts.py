"""Mixtures of experts in programs: stacks of weights [E, N, K], of which each row of X meets one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from grids import looped
from oracle import Expected

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import (  # noqa: E402
    DYNAMIC,
    OUTPUTS_TOO,
    TOKENS,
    Apply,
    as_numpy,
    count,
    export,
    kept,
    mixtral,
    predict,
    relative_l2,
    values,
)

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops import numpy_nodes, ort  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402

STACK = values(4, 48, 70, seed=1)
"""[E, N, K], as transformers stores experts."""
X = values(6, 70, seed=2)
IDS = torch.tensor([3, 0, 0, 2, 1, 3])
ENDS = torch.tensor([1, 1, 4, 6], dtype=torch.int32)


def by_rows(parts: list[Expected]) -> Expected:
    return Expected(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("y", "bound")))


def one_gemm_per_row(x: Tensor, ids: Tensor, *, activations: str = "e4m3") -> Expected:
    """Returns what y[i] = x[i] @ STACK[ids[i]] transposed is in MXFP8."""
    return by_rows([predict(x[i : i + 1], STACK[e], activations=activations) for i, e in enumerate(ids.tolist())])


def packed(function: Any, stack: Tensor, *inputs: Tensor, rows: Any = None, activations: str = "e4m3") -> Any:
    """Returns the rewritten program of a function of a module with `stack`, and the report; `rows` are its shapes."""
    recipe = OUTPUTS_TOO.model_copy(update={"activations": activations})
    return mxfp8_graph.rewrite(export(Apply(function, {"stack": stack}), *inputs, dynamic=rows), recipe)


PICKED: dict[str, Callable[..., Tensor]] = {
    "weight on the left": lambda m, x, i: torch.bmm(m.stack[i], x.unsqueeze(-1)).squeeze(-1),
    "weight on the right": lambda m, x, i: torch.bmm(x.unsqueeze(1), m.stack[i].transpose(-2, -1)).squeeze(1),
    "transposed first": lambda m, x, i: torch.bmm(x.unsqueeze(1), m.stack.mT[i]).squeeze(1),
    "index_select": lambda m, x, i: (x.unsqueeze(1) @ m.stack.index_select(0, i).permute(0, 2, 1)).squeeze(1),
    "a copy": lambda m, x, i: (x.unsqueeze(1) @ m.stack[i].contiguous().mT).squeeze(1),
}


SIDES = {"weight on the left": "unchanged", "weight on the right": "bfloat16", "index_select": "unchanged"}


@looped("name, activations", [*((name, "e4m3") for name in PICKED), *SIDES.items()])
def test_experts_picked_at_run_time_are_picked_packed(name: str, activations: str, tmp_path: Path) -> None:
    any_rows = (({0: DYNAMIC}, {0: DYNAMIC}),)
    rewritten, report = packed(PICKED[name], STACK, X, IDS, activations=activations, rows=any_rows)
    (site,) = report.rewritten
    assert (site.decision.site.weight, site.decision.site.n, site.decision.site.k) == ("stack", 48, 70)
    assert count(rewritten, "mxfp8.gemm" if activations == "e4m3" else "mxfp8.weight_gemm") == 1
    assert count(rewritten, "aten.bmm") == count(rewritten, "aten.matmul") == 0
    assert set(rewritten.state_dict) == {"stack_mxfp8", "stack_mxfp8_scales"}
    for ids in (IDS, IDS[:2], *([torch.tensor([-1, 1, -4])] if name != "index_select" else [])):
        x = X[: len(ids)]
        one_gemm_per_row(x, ids, activations=activations).check(as_numpy(rewritten.module()(x, ids)))
    with pytest.raises(IndexError, match="out of range"):
        rewritten.module()(X[:2], torch.tensor([0, 4]))
    if activations == "bfloat16":
        return
    path = tmp_path / f"{name} {activations}.onnx"
    for y in onnx_outputs(rewritten, path, (X[:4], IDS[:4]))[0]:
        one_gemm_per_row(X[:4], IDS[:4], activations=activations).check(as_numpy(y))
    graph = onnx.load(path).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("MXFP8GroupedGemm" if activations == "e4m3" else "MXFP8GroupedWeightGemm") == 1
    assert "Gather" not in ops
    assert {tuple(t.dims) for t in graph.initializer if t.name.startswith("stack")} == {(4, 48, 70), (4, 48, 3)}


def onnx_outputs(program: Any, path: Path, *samples: tuple[Tensor, ...]) -> list[list[Tensor]]:
    """Returns what a program computes of each sample once it is ONNX: with our kernels, and on stock ONNX Runtime."""
    mxfp8_graph.to_onnx(program, path)
    names = [port.name for port in onnx.load(path).graph.input]
    sessions = ort.session(path), onnxruntime.InferenceSession(path)
    feeds = [dict(zip(names, map(as_numpy, inputs), strict=True)) for inputs in samples]
    return [[torch.from_numpy(session.run(None, feed)[0]) for session in sessions] for feed in feeds]


def test_two_products_that_pick_alike_share_the_packed_weight() -> None:
    def function(m: Any, x: Tensor, i: Tensor) -> Tensor:
        first, second = (torch.bmm(y.unsqueeze(1), m.stack[i].mT).squeeze(1) for y in (x, x * 2.0))
        return first + second

    rewritten, report = packed(function, STACK, X, IDS)
    assert len(report.rewritten) == 2
    assert len(rewritten.state_dict) == 2


def test_what_is_picked_is_decided_where_the_program_decides_it() -> None:
    def function(m: Any, x: Tensor, i: Tensor) -> Tensor:
        ids = i + 0
        weight = m.stack[ids]
        ids.zero_()
        return torch.bmm(x.unsqueeze(1), weight.mT).squeeze(1) + ids.sum()

    rewritten, _ = packed(function, STACK, X, IDS)
    one_gemm_per_row(X, IDS).check(as_numpy(rewritten.module()(X, IDS)))


def test_the_axis_of_the_experts_must_stay_first() -> None:
    square = values(6, 6, 70, seed=3)  # so that no size tells the axes apart
    module = Apply(lambda m, x, i: x @ m.stack[i].transpose(0, 1).mT, {"stack": square})
    assert "both operands are computed at run time" in kept(export(module, values(6, 5, 70, seed=4), IDS))[0]


def grouped(m: Any, x: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, m.stack.transpose(-2, -1), ends)


@looped("activations", ["e4m3", "bfloat16", "unchanged"])
def test_grouped_experts_become_one_grouped_gemm(activations: str) -> None:
    stack, x = STACK[:, :, :64].bfloat16(), X[:, :64].bfloat16()  # what torch's own kernel takes
    rewritten, report = packed(grouped, stack, x, ENDS, activations=activations, rows=(({0: DYNAMIC}, None),))
    assert len(report.rewritten) == count(rewritten, "mxfp8.grouped_gemm") == 1
    assert count(rewritten, "mxfp8.quantize") == (activations == "e4m3")
    assert set(rewritten.state_dict) == {"stack_mxfp8", "stack_mxfp8_scales"}
    result = rewritten.module()(x, ENDS)
    assert result.dtype == torch.bfloat16
    groups = zip(x.tensor_split(ENDS[:-1].long()), stack, strict=True)
    parts = [predict(part, w, activations=activations, dtype="bfloat16") for part, w in groups if len(part)]
    by_rows(parts).check(as_numpy(result))


def test_grouped_weights_that_are_computed_are_kept_with_a_reason() -> None:
    stack, x = values(4, 64, 48, seed=5).bfloat16(), X[:, :64].bfloat16()
    module = Apply(lambda m, x, e: torch._grouped_mm(x, m.stack * 2, e), {"stack": stack})
    assert "weights are computed at run time; expected one stored stack" in kept(export(module, x, ENDS))[0]


def test_packed_experts_are_saved_and_unpacked(tmp_path: Path) -> None:
    picked, _ = packed(PICKED["weight on the right"], STACK, X, IDS)
    loaded = mxfp8_graph.load(mxfp8_graph.save(picked, tmp_path / "experts.pt2"))
    assert torch.equal(loaded.module()(X, IDS), picked.module()(X, IDS))
    weight = mxfp8_graph.unpack(loaded)["stack"]
    elements, scales = numpy_nodes.quantize(as_numpy(STACK))
    assert weight.shape == (4, 48, 70)
    assert np.array_equal(weight.elements.view(np.uint8), elements.view(np.uint8))
    assert np.array_equal(weight.scales, scales)


def test_a_bias_beside_picked_experts_is_added_in_onnx(tmp_path: Path) -> None:
    bias = values(48, seed=6)
    rewritten, _ = packed(lambda m, x, i: (x.unsqueeze(1) @ m.stack[i].mT).squeeze(1) + bias, STACK, X, IDS)
    expected = rewritten.module()(X, IDS)
    for y in onnx_outputs(rewritten, tmp_path / "experts.onnx", (X, IDS))[0]:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@looped("activations", ["e4m3", "unchanged"])
def test_grouped_experts_become_a_grouped_gemm_of_onnx(activations: str, tmp_path: Path) -> None:
    def function(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        return grouped(m, x.bfloat16(), ends).float()

    x = X[:, :64]
    rewritten, _ = packed(function, STACK[:, :, :64].bfloat16(), x, ENDS, activations=activations)
    samples = [(x, ends) for ends in (ENDS, ENDS - 1, torch.zeros_like(ENDS))]
    outputs = onnx_outputs(rewritten, tmp_path / f"{activations}.onnx", *samples)
    for (_, ends), results in zip(samples, outputs, strict=True):
        expected = rewritten.module()(x, ends)
        for got in results:
            assert (got[int(ends[-1]) :] == 0).all()
            torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-4)  # one rounding to bfloat16


# --- Training ----------------------------------------------------------------------------------------------------

GROUPS = torch.tensor([1, 1, 38, 40], dtype=torch.int32)
ROWS = values(42, 64, seed=2, dtype=torch.bfloat16)
TRAIN, GROUPED = "mxfp8.grouped_linear_train", "aten._grouped_mm"


def experts(*, stored_k_last: bool = True) -> ExportedProgram:
    """Returns relu(x @ up[e]^T) @ down[e]^T of rows in groups, each stack stored [E, N, K] or [E, K, N]."""

    def function(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        for stack in (m.up, m.down):
            x = torch.relu(torch._grouped_mm(x, stack.mT if stored_k_last else stack, ends))
        return x

    stacks = {"up": values(4, 96, 64, seed=1) / 8, "down": values(4, 64, 96, seed=1) / 8}
    parameters = {n: (t if stored_k_last else t.mT.contiguous()).bfloat16() for n, t in stacks.items()}
    return export(Apply(function, parameters), ROWS, GROUPS, dynamic=(({0: DYNAMIC}, None),))


def gradients(program: ExportedProgram) -> dict[str, Tensor]:
    """Returns the gradients of both stacks and of x."""
    module, x = program.module(), ROWS.clone().requires_grad_()
    module(x, GROUPS)[:40].float().square().sum().backward()
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
        # E5M2 has 2 mantissa bits, and up to three products lie behind a gradient.
        assert relative_l2(got[name].float(), wanted.float()) < 0.2, name
    packed, report = mxfp8_graph.rewrite(tuned, Recipe(fp8_format="HYBRID"))
    assert [site.decision.site.op for site in report.rewritten] == ["_grouped_mm"] * 2
    untrained, _ = mxfp8_graph.rewrite(program, Recipe(fp8_format="HYBRID"))
    assert packed.state_dict.keys() == untrained.state_dict.keys()
    with torch.no_grad():
        results = [each.module()(ROWS, GROUPS) for each in (packed, untrained, tuned)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_program_that_survives_a_file_becomes_what_it_was_where_a_recipe_keeps_it(tmp_path: Path) -> None:
    program = experts()
    tuned, _ = mxfp8_graph.rewrite(program, training=True)
    loaded = mxfp8_graph.load(mxfp8_graph.save(tuned, tmp_path / "tuned.pt2"))
    assert torch.equal(loaded.module()(ROWS, GROUPS), tuned.module()(ROWS, GROUPS))
    with pytest.warns(UserWarning, match="Recipe type changed"):
        kept, _ = mxfp8_graph.rewrite(loaded, Recipe(name="one", exclude=("^_grouped_mm_1$",)), training=True)
    assert (count(kept, TRAIN), count(kept, GROUPED)) == (1, 1)
    kept.run_decompositions({})
    with pytest.raises(ContractError, match=r"mxfp8.grouped_linear_train, which is for training and has no ONNX form"):
        mxfp8_graph.to_onnx(kept, tmp_path / "tuned.onnx")
    with pytest.warns(UserWarning, match="Recipe type changed"):
        packed, _ = mxfp8_graph.rewrite(kept, Recipe(name="other", exclude=("^_grouped_mm$",)))
    assert (count(packed, "mxfp8.grouped_gemm"), count(packed, GROUPED), count(packed, TRAIN)) == (1, 1, 0)


def test_the_gradients_of_a_mixtral_are_near_those_in_float32() -> None:
    program = mixtral()
    tuned, _ = mxfp8_graph.rewrite(copy.deepcopy(program), Recipe(fp8_format="HYBRID"), training=True)
    assert count(tuned, TRAIN) == 2
    tokens, steps = torch.randint(0, TOKENS, (16, 25), generator=torch.Generator().manual_seed(1)), []
    for module in (tuned.module(), program.module()):
        loss = nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        steps.append([loss, torch.cat([gradient.flatten() for gradient in gradients])])
    (loss, got), (exact_loss, exact) = steps
    assert relative_l2(loss, exact_loss) < 0.005
    assert relative_l2(got, exact) < 0.2
