"""The benchmarks: make runs each, contenders get the same inputs, and tables compare them rightly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from releases import release

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
NEEDS_8_BITS = pytest.mark.skipif(
    release("onnxruntime") < (1, 24), reason="before ONNX Runtime 1.24 MatMulNBits has no 8 bits"
)
SHARED = {"contenders", "conv_models", "exports", "floors", "harness", "peers", "settings"}
SHARED |= {"conformance_peers", "llama_peer", "openvino_peer", "ort_peer"}
SHARED |= {"arm_predictions"}  # measures nothing, and needs LLVM's tools


def test_make_runs_every_benchmark():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("gpu_")} - SHARED
    (listed,) = re.findall(r"for script in ([a-z_0-9 ]+);", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(listed.split()) == scripts


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_published_result_names_the_setting_of_each_peer_and_comes_from_an_idle_machine(path, benchmarks):
    from settings import named

    result = json.loads(path.read_text(encoding="utf-8"))
    peers = named(cell for row in (result["columns"], *result["rows"]) for cell in row)
    missing = [name for name, setting in peers.items() if f"{name}: {setting}." not in result["notes"]]
    assert not missing
    assert not [note for note in result["notes"] if "Busy machine" in note]


def test_a_peer_without_a_setting_is_refused(benchmarks):
    import harness

    with pytest.raises(ValueError, match="'ORT int4': a peer without its setting"):
        harness.publish("trial", "A trial", ["contender", "ms"], [["ORT int4", 1.0]], keep=False)


def test_a_busy_machine_publishes_nothing(benchmarks, monkeypatch, tmp_path, capsys):
    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "LOAD", 2.0 * harness.THREADS)
    with pytest.raises(SystemExit):
        harness.publish("trial", "A trial", ["contender", "ms"], [["mxint8", 1.0]])
    assert not list(tmp_path.iterdir())
    assert "Busy machine" in capsys.readouterr().out


@pytest.fixture
def small_linears(benchmarks, tmp_path):
    exports = pytest.importorskip("exports", reason="needs torch")
    onnx.save(exports.linears(64, 64, layers=2), tmp_path / "linears.onnx")
    return tmp_path / "linears.onnx"


def rows(count):
    return {f"x{i}": np.random.default_rng(i).standard_normal((count, 64), np.float32) for i in range(2)}


def test_the_overhead_of_an_op_is_measured_over_its_own_kernel(benchmarks):
    torch = pytest.importorskip("torch")
    import op_overhead

    ops, kernels = op_overhead.ops(), op_overhead.kernels()
    for name in ("gemm", "weight_gemm"):
        op_overhead.y.zero_()
        assert kernels[name]() == 0
        assert torch.equal(op_overhead.y, ops[name]())
    elements, _ = op_overhead.a
    expected = elements.clone()
    elements.zero_()
    assert kernels["quantize"]() == 0
    assert torch.equal(elements, expected)
    assert kernels["dequantize"]() == 0
    assert torch.equal(op_overhead.back, ops["dequantize"]())
    rows = op_overhead.table("enable_grad", op_overhead.measure("enable_grad", rounds=1, least_seconds=0))
    assert [row[:2] for row in rows] == [[name, "enable_grad"] for name in kernels]


@NEEDS_8_BITS
def test_all_contenders_run_the_same_inputs_in_as_many_heats_as_the_memory_needs(small_linears):
    import contenders
    import settings

    from mxfp8_graph import Recipe

    names = ("mxint8", "mxint8, never")
    recipes = dict.fromkeys(names, Recipe(output_projections=True))
    field = contenders.Field(small_linears, recipes, together=2)
    workload = contenders.Workload("few rows", [rows(3), rows(5)], rounds=2)
    outcomes = field.race([workload])[workload.label]
    expected = [settings.STOCK, *names, settings.BITS8, settings.INT8, settings.BEST]
    heats = dict.fromkeys(expected, 1) | {settings.STOCK: 3}  # it is in each heat
    assert {name: len(outcome.timings) for name, outcome in outcomes.items()} == heats
    assert outcomes[settings.STOCK].cosines.min() > 1 - 1e-6
    assert 0.99 < outcomes["mxint8"].cosines.min() < 1 - 1e-6
    np.testing.assert_allclose(outcomes["mxint8, never"].cosines, outcomes["mxint8"].cosines, atol=1e-6)
    field = contenders.Field(small_linears, {}, openvino="/bin/false")
    assert settings.STOCK in field.race([workload])[workload.label]
    assert field.notes[0] == "linears: OpenVINO bf16 does not run: the process ended without output"


def test_a_row_has_its_ratios_and_the_target_that_it_meets_or_misses(benchmarks):
    import contenders
    import settings
    from harness import Timing

    def outcome(speed):
        return contenders.Outcome([Timing(0.1 / speed, 0)], [speed], np.array([1.0, 0.5]))

    outcomes = {settings.STOCK: outcome(1.0), "ours": outcome(2.0), settings.BITS8: outcome(2.5)}
    for target, cell in ((1.9, "2.00 >= 1.9"), (2.1, "2.00 < 2.1")):
        workload = contenders.Workload("decode", [], 1, {"ours": {settings.STOCK: target}})
        table = contenders.table(workload, outcomes, {"ours": None})
        stock, ours, bits8 = (dict(zip(contenders.COLUMNS, row, strict=True)) for row in table)
        assert (ours["x ORT fp32"], ours["x ORT MatMulNBits 8"]) == (cell, "0.80 < 1")
        assert (stock["x ORT fp32"], bits8["x ORT fp32"], bits8["x ORT MatMulNBits 8"]) == ("1.00", "2.50", "")
        assert (ours["ms"], ours["mean cosine"], ours["worst cosine"]) == ("50", "0.75000", "0.50000")


@NEEDS_8_BITS
def test_every_case_in_stock_onnx_runtime_is_the_same_product(benchmarks):
    pytest.importorskip("exports", reason="needs torch")
    import stock_linears

    cases = stock_linears.cases(64, 64)
    x = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    fused = release("onnxruntime") >= (1, 31)
    errors = {name: case.error(x) for name, case in cases.items()}
    limits = {**dict.fromkeys(cases, 1e-6), "nbits": 1e-2, "qdq": 1e-2 if fused else 1e-6}
    assert {name: error for name, error in errors.items() if error >= limits[name]} == {}


@pytest.fixture
def conv_models(benchmarks):
    return pytest.importorskip("conv_models", reason="needs matplotlib")


def test_a_convolution_is_run_by_all_quantizers_and_its_row_has_their_errors(conv_models, tmp_path):
    import convolutions as table

    layer = conv_models.Layer(32, 16, 3, (6, 5), stride=2)
    field = table.Field(
        layer.network(tmp_path), table.Run(tmp_path, threads=1, openvino=None, rounds=1), table.ONE_NODE
    )
    [row] = table.layer_rows(layer, field)
    assert (field.notes, row["layer"], row["M MAC"]) == ([], "32-16 k3 s2 6x5", f"{9 * 16 * 9 * 32 / 1e6:.0f}")
    errors = {name: float(row[f"error {name}"].split()[0]) for name in (table.OURS, table.STATIC, table.DYNAMIC)}
    assert {name: error for name, error in errors.items() if not 1e-4 < error < 0.03} == {}


def test_overlapping_boxes_count_once_and_each_has_one_partner(conv_models):
    output = np.zeros((5, 4), np.float32)  # x, y, width, height and a score of each place
    output[:, 0], output[:, 1], output[:, 2] = (5, 5, 4, 4, 0.8), (5, 5, 4, 4.2, 0.9), (20, 5, 4, 4, 0.2)
    [box] = conv_models.detections(output)
    np.testing.assert_allclose(box, (3, 2.9, 7, 7.1), rtol=1e-6)
    assert conv_models.matches([box], [box, box]) == 1


def test_a_line_is_read_the_same_at_its_place_only(conv_models):
    from read_page import same

    corners = np.array([[0, 0], [80, 0], [80, 20], [0, 20]])
    expected = [(corners, "amount due"), (corners + np.array([0, 30]), "page 2")]
    moved = [(corners + 2, "amountdue"), (corners + np.array([0, 60]), "page 2")]
    assert same(expected, moved, spaces=False) == [True, False]
    assert same(expected, moved, spaces=True) == [False, False]


def test_another_process_answers_as_a_session_of_this_one(small_linears):
    from peers import Peer

    peer = Peer("ort_peer.py", {"model": str(small_linears), "ours": False})
    try:
        peer.feed(rows(3) | {"of another model": np.zeros(1)})
        assert peer() > 0
        expected = onnxruntime.InferenceSession(small_linears).run(["y0"], rows(3))[0]
        np.testing.assert_allclose(peer.output(), expected, rtol=1e-5, atol=1e-4)
        assert peer.memory() > 2 * 64 * 64 * 4
    finally:
        peer.close()
    with pytest.raises(RuntimeError, match=r"no\.onnx"):  # the last line of its error
        Peer("ort_peer.py", {"model": "no.onnx", "ours": False})


def test_a_cliff_is_a_step_above_the_smooth_curve(benchmarks):
    growth = pytest.importorskip("growth", reason="needs torch, matplotlib and scipy")
    from harness import Timing

    sizes = [(1, tokens) for tokens in growth.TOKENS]
    smooth = {size: 3 + 0.1 * size[1] + 0.001 * size[1] ** 2 for size in sizes}
    steep = {size: seconds * (1.5 if size[1] >= 256 else 1) for size, seconds in smooth.items()}
    series = {size: {"smooth": (Timing(smooth[size], 0), 10), "steep": (Timing(steep[size], 0), 10)} for size in sizes}
    flat, cliff = growth.cliffs(growth.rows_of("one sequence", series))
    assert flat.startswith("smooth: no cliff")
    assert cliff.startswith("steep: A CLIFF; the largest step, to 1 x 256 (one sequence), is 1.")


def test_a_training_step_is_timed_by_part_and_its_memory_counted(benchmarks):
    pytest.importorskip("torch")
    import training

    steps = training.contenders(2, 33, width=64, layers=1)
    linears, everything = training.saved(steps[training.BASE])
    inputs = 2 * 33 * 4 * (3 * 64 + 256)  # of qkv, out, up and down, in float32
    assert linears == inputs < everything
    ours, _ = training.saved(steps[training.OURS])
    assert ours == inputs // 4 + inputs // 4 // 66 * 3  # 66 rows have three scales per column
    table = {row[1]: dict(zip(training.COLUMNS, row, strict=True)) for row in training.rows_of("2x33", steps, rounds=1)}
    assert list(table) == [training.BASE, training.BF16, training.OURS, training.DPA]
    assert table[training.BASE]["step x torch fp32"] == "1.00"
    assert table[training.OURS]["of torch fp32"] == "0.26 <= 0.27"
    assert training.judged(0.98, 1.0, least=True) == "0.98 < 1"
    (ours, *_), (base, *_) = (training.shares(steps[name]) for name in (training.OURS, training.BASE))
    assert ours > 0 == base


def test_a_quantizer_is_compared_under_the_nearest_rule_and_its_first_difference_is_shown(benchmarks):
    import conformance as table

    from mxfp8_ops import formats, numpy_nodes

    blocks = table.Blocks.of("boundaries")

    def cells(*answer):
        row = table.row("theirs", "1", dict.fromkeys(formats.SCALE_ROUNDINGS, [answer] * 2), [blocks] * 2)
        return row[2], row[3], row[-1]

    for rounding in formats.SCALE_ROUNDINGS:
        exact = numpy_nodes.quantize(blocks.x, scale_rounding=rounding)
        assert cells(*exact) == (rounding, "0", "")
        assert cells(numpy_nodes.dequantize(*exact)) == (rounding, "-", "")
    # One bit above 448 * 2^-127, which its product with 1 / 448 loses.
    assert cells(*table.transformer_engine(blocks.x)) == ("ceil", "1", "2.63310753e-36: 0 7e, not 1 76")


def test_the_page_of_numerics_has_the_rule_of_each_measured_quantizer():
    content = json.loads((BENCHMARKS / "results/conformance.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    table = page.partition("| nearest rule |")[2].splitlines()[2:]
    told = [[re.findall(r"[\w.-]+", cell) for cell in line.split("|")[1:4]] for line in table]
    for name, version, rule, *differences in content["rows"]:
        if name.startswith("ours"):
            assert differences == ["0"] * 5 + [""], name
        else:
            words = name.partition(":")[0].split()
            row = [
                cells for cells in told if {*words} <= {*cells[0]} and version in {"", *cells[1]} and rule in cells[2]
            ]
            assert len(row) == 1, name


def test_predictions_are_of_inner_loops(benchmarks):
    import arm_predictions as arm

    lines = ["fmla v0.4s, v1.4s, v2.4s", "smmla v3.4s, v4.16b, v5.16b", "b.ne 0x4 <f+0x4>", "b.eq 0x14 <f+0x14>"]
    [loop] = arm.inner_loops([(4 * i, line) for i, line in enumerate([*lines, "b 0x0 <f>"])])
    assert loop.lines == lines[1:3]
    assert (loop.multiply_adds("smmla"), loop.multiply_adds("fmla")) == (32, 0)
