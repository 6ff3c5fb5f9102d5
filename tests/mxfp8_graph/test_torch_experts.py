"""Mixtures of experts in exported programs: stacks of weights [E, N, K], of which each row of X meets one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch")

from grids import looped  # noqa: E402
from torch import Tensor  # noqa: E402
from torch_programs import DYNAMIC, Apply, Prediction, as_numpy, count, export, predict, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402
from mxfp8_ops import numpy_nodes, ort  # noqa: E402

OUTPUTS_TOO = Recipe(name="outputs too", output_projections=True)
STACK = values(4, 48, 70, seed=1)
"""[E, N, K], as transformers stores experts."""
X = values(6, 70, seed=2)
IDS = torch.tensor([3, 0, 0, 2, 1, 3])
ENDS = torch.tensor([1, 1, 4, 6], dtype=torch.int32)


def seen_as(activations: str, x: Tensor, weight: Tensor, **settings: str) -> Prediction:
    """Returns x @ weight.T after the conversion of x."""
    return predict(x, weight, weight_only=activations == "unchanged", activations=activations, **settings)


def one_gemm_per_row(x: Tensor, ids: Tensor, *, activations: str = "e4m3") -> Prediction:
    """Returns what y[i] = x[i] @ STACK[ids[i]] transposed is in MXFP8."""
    rows = [seen_as(activations, x[i : i + 1], STACK[e]) for i, e in enumerate(ids.tolist())]
    return Prediction(np.concatenate([r.exact for r in rows]), np.concatenate([r.bound for r in rows]))


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
    module = Apply(PICKED[name], {"stack": STACK})
    program = export(module, X, IDS, dynamic=(({0: DYNAMIC}, {0: DYNAMIC}),))
    recipe = OUTPUTS_TOO.model_copy(update={"activations": activations})
    rewritten, report = mxfp8_graph.rewrite(program, recipe)
    (site,) = report.rewritten
    assert (site.decision.site.weight, site.decision.site.n, site.decision.site.k) == ("stack", 48, 70)
    assert count(rewritten, "mxfp8.gemm" if activations == "e4m3" else "mxfp8.weight_gemm") == 1
    assert count(rewritten, "aten.bmm") == count(rewritten, "aten.matmul") == 0
    assert set(rewritten.state_dict) == {"stack_mxfp8", "stack_mxfp8_scales"}
    for ids in (IDS, IDS[:2], *([torch.tensor([-1, 1, -4])] if name != "index_select" else [])):
        x = X[: len(ids)]
        one_gemm_per_row(x, ids, activations=activations).check(rewritten.module()(x, ids))
    with pytest.raises(IndexError, match="out of range"):
        rewritten.module()(X[:2], torch.tensor([0, 4]))
    if activations == "bfloat16":
        return
    path = tmp_path / f"{name} {activations}.onnx"
    for y in onnx_outputs(rewritten, path, (X[:4], IDS[:4]))[0]:
        one_gemm_per_row(X[:4], IDS[:4], activations=activations).check(y)
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

    rewritten, report = mxfp8_graph.rewrite(export(Apply(function, {"stack": STACK}), X, IDS), OUTPUTS_TOO)
    assert len(report.rewritten) == 2
    assert len(rewritten.state_dict) == 2


def test_what_is_picked_is_decided_where_the_program_decides_it() -> None:
    def function(m: Any, x: Tensor, i: Tensor) -> Tensor:
        ids = i + 0
        weight = m.stack[ids]
        ids.zero_()
        return torch.bmm(x.unsqueeze(1), weight.mT).squeeze(1) + ids.sum()

    rewritten, _ = mxfp8_graph.rewrite(export(Apply(function, {"stack": STACK}), X, IDS), OUTPUTS_TOO)
    one_gemm_per_row(X, IDS).check(rewritten.module()(X, IDS))


def test_the_axis_of_the_experts_must_stay_first() -> None:
    square = values(6, 6, 70, seed=3)  # so that no size tells the axes apart
    module = Apply(lambda m, x, i: x @ m.stack[i].transpose(0, 1).mT, {"stack": square})
    x = values(6, 5, 70, seed=4)
    program = export(module, x, IDS)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    assert "both operands are computed at run time" in caught.value.decisions[0].reason


def grouped(m: Any, x: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, m.stack.transpose(-2, -1), ends)


@looped("activations", ["e4m3", "bfloat16", "unchanged"])
def test_grouped_experts_become_one_grouped_gemm(activations: str) -> None:
    stack = STACK[:, :, :64].bfloat16()  # what torch's own kernel takes
    x = X[:, :64].bfloat16()
    program = export(Apply(grouped, {"stack": stack}), x, ENDS, dynamic=(({0: DYNAMIC}, None),))
    recipe = OUTPUTS_TOO.model_copy(update={"activations": activations})
    rewritten, report = mxfp8_graph.rewrite(program, recipe)
    assert len(report.rewritten) == count(rewritten, "mxfp8.grouped_gemm") == 1
    assert count(rewritten, "mxfp8.quantize") == (activations == "e4m3")
    assert set(rewritten.state_dict) == {"stack_mxfp8", "stack_mxfp8_scales"}
    result = rewritten.module()(x, ENDS)
    assert result.dtype == torch.bfloat16
    start = 0
    for expert, stop in enumerate(ENDS.tolist()):
        part = seen_as(activations, x[start:stop], stack[expert], dtype="bfloat16")
        if stop > start:
            part.check(result[start:stop])
        start = stop


def test_grouped_weights_that_are_computed_are_kept_with_a_reason() -> None:
    w = values(4, 64, 48, seed=5).bfloat16()
    program = export(Apply(lambda m, x, w, e: torch._grouped_mm(x, w, e), {}), X[:, :64].bfloat16(), w, ENDS)
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    assert "weights are computed at run time; expected one stored stack" in caught.value.decisions[0].reason


def test_packed_experts_are_saved_and_unpacked(tmp_path: Path) -> None:
    program = export(Apply(PICKED["weight on the right"], {"stack": STACK}), X, IDS)
    picked, _ = mxfp8_graph.rewrite(program, OUTPUTS_TOO)
    loaded = mxfp8_graph.load(mxfp8_graph.save(picked, tmp_path / "experts.pt2"))
    assert torch.equal(loaded.module()(X, IDS), picked.module()(X, IDS))
    weight = mxfp8_graph.unpack(loaded)["stack"]
    elements, scales = numpy_nodes.quantize(as_numpy(STACK))
    assert weight.shape == (4, 48, 70)
    assert np.array_equal(weight.elements.view(np.uint8), elements.view(np.uint8))
    assert np.array_equal(weight.scales, scales)


def test_a_bias_beside_picked_experts_is_added_in_onnx(tmp_path: Path) -> None:
    bias = values(48, seed=6)
    rewritten, _ = mxfp8_graph.rewrite(
        export(Apply(lambda m, x, i: (x.unsqueeze(1) @ m.stack[i].mT).squeeze(1) + bias, {"stack": STACK}), X, IDS),
        OUTPUTS_TOO,
    )
    expected = rewritten.module()(X, IDS)
    for y in onnx_outputs(rewritten, tmp_path / "experts.onnx", (X, IDS))[0]:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@looped("activations", ["e4m3", "unchanged"])
def test_grouped_experts_become_a_grouped_gemm_of_onnx(activations: str, tmp_path: Path) -> None:
    stack = STACK[:, :, :64].bfloat16()

    def function(m: Any, x: Tensor, ends: Tensor) -> Tensor:
        return grouped(m, x.bfloat16(), ends).float()

    program = export(Apply(function, {"stack": stack}), X[:, :64], ENDS)
    rewritten, _ = mxfp8_graph.rewrite(program, OUTPUTS_TOO.model_copy(update={"activations": activations}))
    samples = [(X[:, :64], ends) for ends in (ENDS, ENDS - 1, torch.zeros_like(ENDS))]
    for (x, ends), results in zip(
        samples, onnx_outputs(rewritten, tmp_path / f"{activations}.onnx", *samples), strict=True
    ):
        expected = rewritten.module()(x, ends)
        for got in results:
            assert (got[int(ends[-1]) :] == 0).all()
            torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-4)  # one rounding to bfloat16
