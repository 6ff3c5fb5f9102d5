"""Einsums: what is a matmul with a static side is rewritten, all else is kept with the reason.

Integers up to 8 are exact in E4M3, and so are sums of their products in float32: whatever the order of the axes, the
rewritten model must give what NumPy does, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from contrib_models import integers
from grids import looped
from models import neg_model, text_model
from oracle import GEMM, initializers, kinds, refusal, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule

F32 = np.float32

pytestmark = pytest.mark.usefixtures("runtime")


@dataclass
class Case:
    """An equation, the shapes of x and w, and the product that it is."""

    equation: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    n: int = 96
    k: int = 70
    nodes: dict[str, int] = field(default_factory=dict)
    """The views around the gemm."""
    left: bool = False
    """The weight comes first."""


TURNED, BOTH = {"Transpose": 1}, {"Transpose": 2}
CASES = {
    "linear": Case("bsk,kn->bsn", (2, 3, 70), (70, 96)),
    "linear, [N, K]": Case("bsk,nk->bsn", (2, 3, 70), (96, 70)),
    "spaces": Case(" b s k , k n -> b s n", (2, 3, 70), (70, 96)),
    "implied result": Case("ak,kn", (3, 70), (70, 96)),
    "ellipsis": Case("...k,kn->...n", (2, 3, 70), (70, 96)),
    "ellipsis, implied result": Case("...k,kn", (2, 3, 70), (70, 96)),
    "two ellipses": Case("...mk,...kn->...mn", (3, 5, 70), (3, 70, 96)),
    "ellipsis that stands for nothing": Case("mk,...kn->...mn", (5, 70), (70, 96)),
    "vector": Case("k,nk->n", (70,), (96, 70)),
    "transposed activation": Case("bks,kn->bsn", (2, 70, 3), (70, 96), nodes=TURNED),
    "transposed result": Case("bsk,kn->bns", (2, 3, 70), (70, 96), nodes=TURNED),
    "weight first": Case("kn,bsk->bsn", (2, 3, 70), (70, 96), left=True),
    "weight first, transposed result": Case("nk,bks->bns", (2, 70, 3), (96, 70), nodes=BOTH, left=True),
    "heads at once": Case("bsk,khd->bshd", (2, 3, 70), (70, 4, 24), nodes={"Reshape": 1}),
    "heads first": Case("bsk,hdk->bhsd", (2, 3, 70), (4, 24, 70), nodes={"Reshape": 1, **TURNED}),
    "heads around K": Case("bsk,hkd->bshd", (2, 3, 70), (4, 70, 24), nodes={"Reshape": 1}),
    "contraction over heads": Case("bshd,hdn->bsn", (2, 3, 4, 24), (4, 24, 64), 64, 96, {"Reshape": 1}),
    "over heads that stand apart": Case("bhsd,hdn->bsn", (2, 4, 3, 24), (4, 24, 64), 64, 96, {**TURNED, "Reshape": 1}),
    "contraction in another order": Case("bsdh,hdn->bsn", (2, 3, 24, 4), (4, 24, 64), 64, 96, {**TURNED, "Reshape": 1}),
    "one matrix per expert": Case("esk,enk->esn", (3, 5, 70), (3, 96, 70)),
    "one matrix per expert, in the middle": Case("sek,enk->sen", (5, 3, 70), (3, 96, 70), nodes=BOTH),
    "one matrix per head for every batch": Case("bhsk,hkn->bhsn", (2, 3, 5, 70), (3, 70, 96), nodes=BOTH),
    "one row per expert": Case("ek,enk->en", (3, 70), (3, 96, 70), nodes={"Reshape": 2}),
}


def einsum_model(equation: str, x: tuple[int, ...], w: tuple[int, ...], inputs: str = "x w") -> onnx.ModelProto:
    """y = -einsum(equation, inputs), with a weight w and x of unknown sizes."""
    shapes = {"x": x, "w": w}
    rank = np.einsum(equation, *(np.zeros(shapes[name]) for name in inputs.split())).ndim
    symbolic = [f"d{axis}" for axis in range(len(x))]
    return neg_model("Einsum", symbolic, [None] * rank, {"w": integers(*w)}, inputs, equation=equation)


WEIGHT_ONLY = ("linear", "transposed result", "weight first", "heads first", "one matrix per expert")


@looped("name, recipe", [*((n, "mxfp8") for n in CASES), *((n, "mxfp8-weight-only") for n in WEIGHT_ONLY)])
def test_an_einsum_that_is_a_matmul_is_rewritten(name: str, recipe: str) -> None:
    case = CASES[name]
    inputs = "w x" if case.left else "x w"
    rewritten, report = rewrite(einsum_model(case.equation, case.x, case.w, inputs), recipe)
    site = report.sites[0].decision.site
    assert (site.op, site.role, site.n, site.k) == ("Einsum", "linear", case.n, case.k)
    gemm = {"MXFP8WeightGemm": 1} if recipe == "mxfp8-weight-only" else GEMM
    assert {op: n for op, n in kinds(rewritten).items() if op != "Constant"} == {**gemm, "Neg": 1, **case.nodes}
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]
    x = integers(*case.x, seed=1)
    arguments = {"x": x, "w": integers(*case.w)}
    expected = -np.einsum(case.equation, *(arguments[name] for name in inputs.split()))
    assert np.array_equal(run(rewritten, {"x": x})[0], expected)


@looped(
    "equation, order, n, rows",
    [("bsk,kn->bsn", "b h", (96,), 3), ("bsk,khd->bshd", "h b", (4, 24), 3), ("bsk,kn->bns", "h b", (96,), 96)],
)
def test_a_bias_is_absorbed_or_added_behind_the_reshape(
    equation: str, order: str, n: tuple[int, ...], rows: int
) -> None:
    w, b, x = integers(70, *n), integers(*n, seed=2), integers(2, rows, 70, seed=1)
    y = -(np.einsum(equation, x, w) + b)
    nodes = f"linear:Einsum x w>h|equation={equation!r}; Add {order}>s; Neg s>y"
    proto = text_model(nodes, ("b", "s", 70), [None] * y.ndim, w=w, b=b)
    rewritten, report = rewrite(proto)
    absorbed = equation == "bsk,kn->bsn"
    assert report.sites[0].decision.site.has_bias == absorbed
    assert not absorbed or kinds(rewritten) == {**GEMM, "Neg": 1}
    assert np.array_equal(run(rewritten, {"x": x})[0], y)


def test_a_weight_that_a_matmul_uses_too_is_packed_once() -> None:
    nodes = "Einsum x w>h|equation='mk,kn->mn'; MatMul x w>g; Sub h g>d; Neg d>y"
    proto = text_model(nodes, ("m", 70), w=integers(70, 96))
    rewritten, report = rewrite(proto)
    assert [entry.decision.site.shared_with for entry in report.sites] == [1, 1]
    assert initializers(rewritten) == ["w_mxfp8", "w_mxfp8_scales"]


KEPT = {
    "mk,mk->mk": "it is no matmul: it sums over no label of both operands",
    "mk,n->mkn": "it is no matmul: it sums over no label of both operands",
    "mk,k->m": "it is no matmul: its second operand has no label of its own",
    "mmk,kn->mn": "it takes a diagonal; expected each label once per operand",
    "bsk,kn->bn": "it sums over 's' of one operand; expected a sum over labels of both",
}


@looped("equation", KEPT)
def test_an_einsum_that_is_no_matmul_is_kept_with_the_reason(equation: str) -> None:
    sizes = dict(zip("bmskn", (2, 3, 3, 40, 40), strict=True))
    x, w = (tuple(sizes[label] for label in term) for term in equation.partition("->")[0].split(","))
    assert refusal(einsum_model(equation, x, w)) == f"equation {equation!r}: {KEPT[equation]}"


def test_three_operands_a_label_that_comes_twice_and_an_unknown_rank_are_kept() -> None:
    nodes = "linear:Einsum x v w>h|equation='mk,kj,jn->mn'; Neg h>y"
    proto = text_model(nodes, y=("m", 64), v=integers(64, 64), w=integers(64, 64))
    assert refusal(proto) == "equation 'mk,kj,jn->mn': it has 3 operands; expected 2; split it"
    proto = einsum_model("mk,kn->mn", (3, 64), (64, 64))
    proto.graph.node[0].attribute[0].s = b"mk,kn->mnn"
    assert refusal(proto).startswith("equation 'mk,kn->mnn': ")
    proto = einsum_model("...k,kn->...n", (2, 64), (64, 64))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert refusal(proto).endswith("the rank behind an ellipsis is unknown; give the model shape information")


def test_an_einsum_of_one_operand_is_no_site() -> None:
    nodes = "Einsum x>t|equation='km->mk'; linear:MatMul t w>h; Neg h>y"
    _, report = rewrite(text_model(nodes, (64, 3), (3, 96)))
    assert [entry.decision.site.name for entry in report.sites] == ["linear"]


def of_activations(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> onnx.ModelProto:
    """Returns y = -einsum(equation, x, b), x of the shape a."""
    y = np.einsum(equation, np.zeros(a), np.zeros(b)).shape
    return text_model(f"product:Einsum x b>h|equation={equation!r}; Neg h>y", a, y, inputs={"b": (F32, b)})


@looped("equation", ["bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk"])
def test_a_rule_quantizes_two_activations_along_k(equation: str) -> None:
    a, b = (integers(2, 3, 4, 64, seed=seed) for seed in (1, 2))
    if equation.startswith("bq"):
        a, b = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (a, b))
    recipe = Recipe(name="all", min_dim=1, rules=(Rule(op="Einsum"),))
    rewritten, _ = rewrite(of_activations(equation, a.shape, b.shape), recipe)
    assert kinds(rewritten)["MXFP8Quantize"] == 2
    assert np.array_equal(run(rewritten, {"x": a, "b": b})[0], -np.einsum(equation, a, b))


def test_labels_of_two_activations_that_must_be_merged_are_kept_with_the_reason() -> None:
    proto = of_activations("bhqd,hkd->bhqk", (2, 3, 4, 64), (3, 5, 64))
    assert refusal(proto).endswith("both operands are computed at run time; expected one label each for M, N and K")


def test_einsums_around_a_softmax_have_the_roles_of_scores_and_values() -> None:
    nodes = (
        "scores:Einsum x k>s|equation='bqhd,bkhd->bhqk'; Softmax s>p; "
        "values:Einsum p v>a|equation='bhqk,bkhd->bqhd'; Neg a>y"
    )
    shape = ["b", "s", 2, 64]
    with pytest.raises(mxfp8_graph.NothingEligibleError) as caught:
        mxfp8_graph.rewrite(text_model(nodes, shape, shape, inputs=dict.fromkeys("kv", (F32, shape))))
    assert [decision.site.role for decision in caught.value.decisions] == ["attention_scores", "attention_values"]
