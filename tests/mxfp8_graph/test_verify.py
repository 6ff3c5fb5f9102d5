"""verify(): the errors it reports, what it lets pass, and that it catches wrong kernels, NaN and wrong models."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import ml_dtypes
import models as b
import numpy as np
import onnx
import pytest
from grids import looped
from onnx import helper, numpy_helper

import mxfp8_graph
from mxfp8_graph import Recipe, Rule, load_recipe
from mxfp8_graph.policy import presets
from mxfp8_graph.running import node_check
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.report import VerifyReport, plausible
from mxfp8_graph.running.runner import run_model
from mxfp8_graph.running.verify import verify
from mxfp8_ops.errors import BackendError, ContractError, ShapeError


def rewritten(model: onnx.ModelProto, recipe: str = "mxfp8") -> onnx.ModelProto:
    return mxfp8_graph.rewrite(model, recipe)[0]


def check(model: onnx.ModelProto, recipe: str = "mxfp8", **settings: Any) -> VerifyReport:
    return verify(model, rewritten(model, recipe), **settings)


def set_initializer(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes the values of an initializer in place."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor).copy()
    change(array)
    dtype, dims = tensor.data_type, list(tensor.dims)
    tensor.CopyFrom(helper.make_tensor(name, dtype, dims, array.tobytes(), raw=True))


NAN, INF = np.nan, np.inf


@looped(
    "reference, result, expected",
    [
        ([3.0, 4.0], [3.0, 4.5], {"relative_l2": 0.1, "max_abs": 0.5, "nonfinite": 0, "compared": 2}),
        ([3.0, 4.0], [3.0, 4.5], {"cosine": pytest.approx((9 + 18) / (5 * np.hypot(3, 4.5)))}),
        ([0.0, 0.0], [0.0, 0.0], {"relative_l2": 0.0, "cosine": 1.0}),
        ([0.0, 0.0], [0.0, 1.0], {"relative_l2": INF, "cosine": 0.0}),
        ([1.0, 0.0], [0.0, 0.0], {"relative_l2": 1.0, "cosine": 0.0}),
        ([], [], {"relative_l2": 0.0, "cosine": 1.0}),
        ([2.0], [-2.0], {"relative_l2": 2.0, "cosine": -1.0}),
        ([NAN, INF], [NAN, INF], {"relative_l2": pytest.approx(NAN, nan_ok=True), "nonfinite": 0}),
        ([NAN, INF], [NAN, INF], {"cosine": pytest.approx(NAN, nan_ok=True)}),
        ([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], {"nonfinite": 0, "compared": 1, "relative_l2": 0.0}),
        ([NAN, 2.0], [1.0, 2.0], {"nonfinite": 1}),
        ([NAN, 2.0], [INF, 2.0], {"nonfinite": 1}),
        ([NAN, 2.0], [-INF, NAN], {"nonfinite": 2}),
        ([True, False], [True, True], {"max_abs": 1}),
        ([3], [5], {"max_abs": 2}),
    ],
)
def test_the_difference_of_two_arrays(reference: list[Any], result: list[Any], expected: dict[str, Any]) -> None:
    found = difference(np.array(reference), np.array(result))
    assert {name: getattr(found, name) for name in expected} == expected


@looped(
    "model, recipe",
    [
        (b.chain_model(), "mxfp8"),
        (b.attention_model(), "all"),
        (b.language_model(), "ocp"),
        (b.gemm_model(), "mxfp8-bf16"),
        (b.matmul_model(dtype=np.float16, bias=True), "mxfp8-weight-only"),
        (b.attention_model(dtype=np.float16), "all"),  # ONNX Runtime has its softmax in float32 only
    ],
)
def test_a_rewrite_passes(model: onnx.ModelProto, recipe: str) -> None:
    report = check(model, recipe)
    assert report.failures == ()
    # Two roundings to 4 significant bits give 2^-5 * sqrt(2/3) per gemm; three gemms in a row at most double it.
    assert 0 < report.worst_relative_l2 < 0.1


CARRIED = [b.value(*each) for each in (("i", np.int64, []), ("go", np.bool_, []), ("h0", np.float32, None))]
UNKNOWN_RANK: dict[str, onnx.NodeProto | str] = {
    "Loop": b.node("Loop", "rounds yes x", "h", body=b.subgraph("Relu h0>h1; Identity go>on", "on h1", CARRIED)),
    "If": b.choose("Unsqueeze x zeros>a", "Identity x>c", yes="no"),
    "Squeeze": "Unsqueeze x axes>u; Squeeze u>h",
    "Squeeze, axes at run time": "Unsqueeze x ones>u; Squeeze u axes>h",
    "Reshape": "Reshape x to>h",
    "Expand": "Expand x to>h",
    "SequenceAt": "Unsqueeze x zeros>u; SequenceConstruct u x>q; SequenceAt q one>h",
}
"""What makes h [4, 2, 64] of x, so that ONNX Runtime infers no rank."""


@looped("producer, recipe", itertools.product(UNKNOWN_RANK, ["mxfp8", "mxint8"]))
def test_activations_of_unknown_rank_pass(producer: str, recipe: str) -> None:
    maker = UNKNOWN_RANK[producer]
    nodes = b.steps(maker) if isinstance(maker, str) else [maker]
    constants = {"zeros": np.int64([0]), "ones": np.int64([1]), "one": 1, "rounds": 2, "yes": True, "no": False}
    feeds = {"x": b.weight(4, 2, 64), "to": np.array([4, 2, 64]), "axes": np.array([1])}
    read = b.read_by(nodes)
    specs = {name: (np.int64, ["n"]) for name in feeds.keys() & read - {"x"}}
    stored = {name: array for name, array in constants.items() if name in read}
    model = b.text_model([*nodes, *b.steps("MatMul h w>m; Relu m>y")], [4, 2, 64], [None] * 3, inputs=specs, **stored)
    report = check(model, recipe, inputs={name: array for name, array in feeds.items() if name in read})
    assert report.failures == ()
    assert [node.op for node in report.nodes] == ["MXFP8Quantize", "MXFP8FusedGemm"]


def test_in_how_many_sessions_nodes_are_checked_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = b.attention_model()
    checks = []
    for at_once in (5, 100):  # 12 nodes
        monkeypatch.setattr(node_check, "_AT_ONCE", at_once)
        checks.append([node.to_dict() for node in check(model, "all").nodes])
    assert checks[0] == checks[1]
    assert Counter(node["op"] for node in checks[0]) == {"MXFP8Quantize": 6, "MXFP8Gemm": 6}


@pytest.mark.parametrize("linked", [(), ("model",), ("model", "m.onnx.data")], ids=["data is none", "one file", "both"])
def test_a_file_behind_a_link_is_checked(linked: tuple[str, ...], tmp_path: Path) -> None:
    """Weights in a file stay there for the sessions that check nodes, which read through no link."""
    model, stored = b.chain_model(), tmp_path / "stored"
    stored.mkdir()
    b.save(rewritten(model), stored / "m.onnx", external=linked != ("model",))
    (tmp_path / "link.onnx").symlink_to(stored / "m.onnx")
    if linked[1:]:
        (tmp_path / "m.onnx.data").symlink_to(stored / "m.onnx.data")
    elif not linked:
        (stored / "m.onnx.data").rename(tmp_path / "m.onnx.data")
    report = verify(model, tmp_path / "link.onnx")
    assert report.failures == ()
    assert report.nodes


def test_heavy_tailed_data_stay_within_the_bound() -> None:
    model = b.chain_model((4096, 64, 64))
    x = np.random.default_rng(0).standard_t(2, (8, 4096)).astype(np.float32)
    report = check(model, inputs={"x": x})
    assert report.failures == ()
    first = next(node for node in report.nodes if node.has_bound)
    assert 0 < first.excess < 1


def test_the_original_is_the_reference() -> None:
    model = b.matmul_model()
    x = np.random.default_rng(1).standard_normal((1, 3, 64), np.float32)
    (output,) = check(model, inputs={"x": x}).outputs
    expected = np.maximum(x @ b.weight(64, 96), 0)
    result = run_model(rewritten(model), inputs={"x": x}).timing.outputs["y"]
    # verify's reference is ONNX Runtime's matmul: float32, so equal to NumPy's to a few units in the last place.
    assert output.rewritten.relative_l2 == pytest.approx(difference(expected, result).relative_l2, rel=1e-4)
    assert (output.name, output.dtype, output.shape) == ("y", "float32", (1, 3, 96))


def test_an_empty_batch() -> None:
    report = check(b.chain_model(), shapes={"batch": 0})
    assert (report.failures, report.outputs[0].shape) == ((), (0, 64))
    assert (report.passed, report.kernels_agree, report.outputs_close) == (False, True, None)
    assert report.answer().startswith("Not judged: 0 of 1 outputs")
    assert "output 'y' is not judged: it has no values" in report.notes
    assert {node.kernel for node in report.nodes if node.has_bound} == {""}, "none ran"


def twice(factor: float) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Returns a model, and the rewrite of another: its first weight is larger by a factor."""
    other = b.chain_model()
    set_initializer(other, "layers.0.weight", lambda w: w.__imul__(factor))
    return b.chain_model(), rewritten(other)


@looped(
    "recipe, expected",
    [
        (Recipe(), ("E4M3", 0.3)),
        (load_recipe("mxint8"), ("INT8", 0.2)),
        (load_recipe("mxint8").setting(["activations=e5m2"]), ("E5M2", 0.5)),
        (Recipe(**presets.PRESETS["mxint8"], rules=(Rule(name="a", weight_format="e4m3"),)), ("E4M3", 0.3)),
        (None, ("", 0.5)),
    ],
)
def test_the_default_limit_follows_the_least_accurate_format(
    recipe: Recipe | None, expected: tuple[str, float]
) -> None:
    usual = plausible(recipe and recipe.to_record())
    assert (usual.formats, usual.limit) == expected


def test_outputs_of_another_model_fail_though_its_kernels_are_right() -> None:
    report = verify(*twice(2))
    assert (report.passed, report.kernels_agree, report.outputs_close) == (False, True, False)
    error = report.outputs[0].rewritten.relative_l2
    assert report.failures == (f"output 'y': relative L2 {error:.3g} is above the limit 0.3",)
    assert (report.to_dict()["kernels_agree"], report.to_dict()["outputs_close"]) == (True, False)


@pytest.mark.parametrize("limit", [1.1, np.inf])
def test_a_limit_of_the_users_own_replaces_the_default(limit: float) -> None:
    report = verify(*twice(2), max_rel_l2=limit)
    assert report.answer().startswith("Passed: 4 kernels agree")
    assert report.answer().endswith(
        f"{report.worst_relative_l2:.3g}, limit {limit:g}; of E4M3 at most 0.15 is typical."
    )


def ending_in(node: onnx.NodeProto, dtype: Any, shape: b.Shape, **constants: np.ndarray) -> onnx.ModelProto:
    """Returns a chain of two linears with one node more, from y to the output of the model."""
    model = b.chain_model()
    model.graph.node.append(node)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.graph.output[0].CopyFrom(b.value(node.output[0], dtype, shape))
    return model


def test_integers_are_judged_only_where_the_user_sets_a_limit() -> None:
    """A label says nothing by its distance from another one, and noise as input makes labels of near ties."""
    model = ending_in(b.node("Cast", "y", "label", to=onnx.TensorProto.INT64), np.int64, [None, 64])
    other = rewritten(model)
    set_initializer(other, next(t.name for t in other.graph.initializer if t.data_type == 2), lambda s: s.__iadd__(2))
    report = verify(model, other)
    assert (report.failures, report.outputs_close, report.outputs[0].rewritten.relative_l2 > 0.5) == ((), None, True)
    assert (report.passed, report.to_dict()["passed"]) == (False, False)
    assert "output 'label' is not judged: int64, and no limit is set" in report.notes
    judged = verify(model, other, max_rel_l2=0.5)
    assert (judged.passed, len(judged.failures)) == (False, 1)


def test_of_several_samples_the_worst_is_shown_with_the_means_of_all() -> None:
    model = b.chain_model()
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((2, 64), np.float32)} for _ in range(3)]
    (found,) = check(model, inputs=samples).outputs
    alone = [check(model, inputs=sample).outputs[0].rewritten for sample in samples]
    worst = max(range(3), key=lambda i: alone[i].relative_l2)
    assert (found.sample, found.rewritten) == (f"given inputs sample {worst + 1}", alone[worst])
    assert found.mean_relative_l2 == pytest.approx(np.mean([d.relative_l2 for d in alone]), rel=1e-12)
    assert found.mean_cosine == pytest.approx(np.mean([d.cosine for d in alone]), rel=1e-12)


def test_an_error_of_one_sample_above_the_limit_names_it() -> None:
    model = b.chain_model()
    other = b.chain_model()
    set_initializer(other, "layers.0.weight", lambda w: w[63].__imul__(100))  # only inputs that use it will tell
    samples = [{"x": np.ones((1, 64), np.float32)} for _ in range(3)]
    for sample in (samples[0], samples[2]):
        sample["x"][:, 63] = 0
    (failure,) = verify(model, rewritten(other), inputs=samples, max_rel_l2=0.2).failures
    assert failure.startswith("output 'y' of given inputs sample 2: relative L2 ")


def test_a_nan_in_only_one_model() -> None:
    model = b.matmul_model()
    broken = rewritten(model)
    scales = next(t.name for t in broken.graph.initializer if t.data_type == onnx.TensorProto.UINT8)
    set_initializer(broken, scales, lambda s: s.__setitem__((5, 0), 255))
    report = verify(model, broken, shapes={"batch": 1, "seq": 4})
    assert report.failures == ("output 'y': NaN or Inf in only one of rewritten and original at 4 of 384 positions",)


def tamper(model: onnx.ModelProto, op: str, at: str, change: str, by: float) -> None:
    """Makes the function body of `op` change (Mul, Add) what goes into its first node of type `at`."""
    function = next(f for f in model.functions if f.name == op)
    index, node = next((i, n) for i, n in enumerate(function.node) if n.op_type == at)
    constant = helper.make_node("Constant", [], ["tampered"], value_float=by)
    changed = helper.make_node(change, [node.input[0], "tampered"], ["tampered_value"])
    node.input[0] = "tampered_value"
    nodes = [*function.node[:index], constant, changed, *function.node[index:]]
    del function.node[:]
    function.node.extend(nodes)


NEGATIVE_ZERO = np.ones((1, 1, 512), np.float32)
NEGATIVE_ZERO[0, 0, 7] = -0.0


@looped(
    "op, at, change, by, least, most, failure",
    [
        # 1.001 of the result is above the bound of (512 + 2) * 2^-24 of the sum of magnitudes, at least somewhere.
        ("MXFP8Gemm", "MatMul", "Mul", 1.001, 1, INF, "MXFP8Gemm 'linear': kernel and function body differ by * bound"),
        ("MXFP8Quantize", "QuantizeLinear", "Mul", 1.5, 257, 512, "differ in * values; expected none"),
        # -0 and 0 are equal numbers and different bytes; adding 0 makes one of the other.
        ("MXFP8Quantize", "QuantizeLinear", "Add", 0.0, 1, 1, "differ in 1 values; expected none"),
    ],
)
def test_a_kernel_that_disagrees_with_its_function_body_fails(
    *, op: str, at: str, change: str, by: float, least: float, most: float, failure: str
) -> None:
    model = b.matmul_model(k=512)
    broken, _ = mxfp8_graph.rewrite(model, Recipe(fuse=False))
    tamper(broken, op, at, change, by)
    report = verify(model, broken, inputs={"x": NEGATIVE_ZERO})
    (node,) = [node for node in report.nodes if not node.passed]
    assert (node.op, least <= node.excess <= most) == (op, True), node.excess
    assert fnmatch(report.failures[0], f"*{failure}"), report.failures


def test_another_output_shape() -> None:
    report = verify(b.chain_model((64, 32)), b.chain_model((64, 96)))
    assert report.failures == (
        "output 'y': [2, 96] float32 with kernels; expected [2, 32] float32",
        "output 'y': [2, 96] float32 with function bodies; expected [2, 32] float32",
    )


def scaled(factor: float) -> onnx.ModelProto:
    """Returns a model whose output is multiplied by a factor."""
    return ending_in(b.node("Mul", "y factor", "z"), np.float32, ["batch", 64], factor=np.array(factor, np.float32))


def test_notes_say_what_the_comparison_cannot_see() -> None:
    model = b.chain_model()
    notes = ["model is not rewritten: this compares a model with another, not with its rewrite"]
    assert list(verify(model, model).notes) == notes
    x = np.full((1, 2, 64), np.inf, np.float32)
    x[0, 1] = 1
    notes = list(check(b.matmul_model(), inputs={"x": x}).notes)
    assert "output 'y': only 96 of 192 positions are finite in both models and compared" in notes
    notes = list(check(scaled(0)).notes)
    assert any(note.startswith("output 'z' is zero everywhere in the original model") for note in notes), notes


def test_a_file_and_a_copy_of_it_are_equal() -> None:
    """By function bodies one would differ from the other by as much as the error of the rewrite."""
    model = rewritten(b.attention_model())
    (output,) = verify(model, model).outputs
    assert output.kernel is not None
    assert (output.rewritten.relative_l2, output.kernel.relative_l2 > 0) == (0, True)


def test_swapped_models_are_an_error() -> None:
    model = b.chain_model()
    for other in (rewritten(model), mxfp8_graph.convert(rewritten(model), "standard")[0]):
        with pytest.raises(ContractError, match=r"model: is rewritten, and model is not; .*; swap the two"):
            verify(other, model)


@looped(
    "old, message",
    [
        ("x", "model: inputs z float32 [batch, 64]; expected those of model, x float32 [batch, 64]; "),
        ("y", "model: outputs z; expected those of model, y; "),
    ],
)
def test_models_with_different_signatures_are_refused(old: str, message: str) -> None:
    other = b.chain_model()
    ends = [*other.graph.input, *other.graph.output]
    for end in ends:
        end.name = "z" if end.name == old else end.name
    for node in other.graph.node:
        node.input[:] = ["z" if name == old else name for name in node.input]
        node.output[:] = ["z" if name == old else name for name in node.output]
    with pytest.raises(ShapeError) as caught:
        verify(b.chain_model(), other)
    assert str(caught.value).startswith(message)


def test_a_model_that_onnx_runtime_refuses_is_an_error() -> None:
    model = b.matmul_model()
    model.graph.node[0].domain = "none"
    model.opset_import.add(domain="none", version=1)
    with pytest.raises(BackendError, match=r"^the original model \(.*\): ONNX Runtime [\d.]+ refuses the model; "):
        verify(model, model)


def test_inputs_that_the_model_fails_on_are_an_error() -> None:
    nodes = b.steps("Reshape x shape>h; MatMul h w>m; Relu m>y")
    weights = {"shape": np.array([-1, 64]), "w": b.weight(64, 64)}
    model = b.model(nodes, {"x": (np.float32, ["n"])}, {"y": (np.float32, [None, 64])}, weights)
    blameless = r"^the original model \(the rewrite is not to blame\): ONNX Runtime cannot run it on x \[2\]; "
    with pytest.raises(BackendError, match=blameless):
        check(model)
    assert check(model, shapes={"n": 128}).passed


def test_a_model_that_holds_a_batch_of_one_is_run_with_one() -> None:
    """Exported decoders often do, in the tables of a rotary embedding for example."""
    model = ending_in(b.node("Reshape", "y one", "z"), np.float32, [1, 64], one=np.array([1, 64]))
    report = check(model)
    assert report.passed
    assert report.inputs == "x float32 [1, 64], synthesised; batches of 1, since the model does not run with 2"
    with pytest.raises(BackendError, match=r"cannot run it on x \[2, 64\]"):
        check(model, shapes={"batch": 2})


def test_bfloat16_results_come_back_as_bfloat16() -> None:
    bf16 = (ml_dtypes.bfloat16, [3])
    model = b.model(b.steps("Cast x>y|to=1; Cast y>z|to=16"), {"x": bf16}, {"z": bf16})
    x = np.array([1.5, -2, 3], ml_dtypes.bfloat16)
    z = run_model(model, inputs={"x": x}, repeat=1).timing.outputs["z"]
    assert (z.dtype, z.tolist()) == (x.dtype, x.tolist())


def test_an_output_without_a_finite_value_fails(tmp_path: Path) -> None:
    report = check(scaled(np.nan))
    assert report.failures == ("output 'z': no position is finite in both models: nothing is compared",)
    assert (report.kernels_agree, report.outputs_close, np.isnan(report.worst_relative_l2)) == (True, False, True)
    written = json.loads(report.write(tmp_path / "verify.json").read_text(encoding="utf-8"))
    assert [written["outputs"][0][mean] for mean in ("mean_relative_l2", "mean_cosine")] == [None, None]


def test_a_sample_without_a_finite_value_is_the_worst_and_fails() -> None:
    x = np.ones((2, 1, 64), np.float32)
    x[1] = np.nan
    report = check(b.chain_model(), inputs=[{"x": x[0]}, {"x": x[1]}])
    assert report.failures == (
        "output 'y' of given inputs sample 2: no position is finite in both models: nothing is compared",
    )
    assert np.isnan(report.outputs[0].mean_cosine)


def test_a_model_without_an_output_to_compare_is_an_error() -> None:
    model = ending_in(b.node("SequenceConstruct", "y", "all"), np.float32, None)
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    model.graph.output[0].CopyFrom(helper.make_value_info("all", kind))
    with pytest.raises(BackendError, match=r"has no output that is a tensor of numbers: all seq\(tensor\(float\)\);"):
        check(model)
