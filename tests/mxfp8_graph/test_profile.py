"""`run --profile`: which kernel each node ran, what it multiplied, and how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_driver_emulation
import models as b
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from commands import run
from grids import looped

from mxfp8_graph import Recipe, rewrite
from mxfp8_graph.running.profile import NodeProfile, of_session
from mxfp8_graph.running.runner import run_model
from mxfp8_ops import cpu, native
from mxfp8_ops.errors import BackendError


def profile(model, **options) -> dict[str, NodeProfile]:
    """Returns what nodes did, by name."""
    return {node.name: node for node in run_model(model, repeat=2, profile=True, **options).nodes}


@pytest.mark.parametrize(
    ("recipe", "operands"),
    [
        ("mxfp8", "e4m3 x e4m3"),
        ("mxfp8-bf16", "bfloat16 x e4m3"),
        ("mxfp8-weight-only", "float32 x e4m3"),
        (Recipe(activations="e5m2"), "e5m2 x e4m3"),
    ],
)
def test_what_a_node_multiplied(recipe, operands):
    rewritten, _ = rewrite(b.chain_model(), recipe=recipe)
    assert profile(rewritten)["layers.0.linear"].operands == operands


@pytest.mark.cuda
def test_on_a_gpu_the_kernel_is_the_row_of_the_dispatch_table(monkeypatch):
    with cuda_driver_emulation.machine(monkeypatch):
        rewritten, _ = rewrite(b.chain_model(), recipe="mxfp8")
        report = run_model(rewritten, repeat=1, profile=True, device="cuda-copies")
    assert report.isa == "cuda-copies"
    kernels = {(node.op, node.kernel, node.isa) for node in report.nodes if node.isa}
    assert ("MXFP8Gemm", "skinny", "cuda") in kernels, kernels


def test_a_device_that_cannot_be_used_is_an_error(monkeypatch):
    rewritten, _ = rewrite(b.chain_model())
    with pytest.raises(BackendError, match=r"device 'gpu'; expected one of cpu, cuda, cuda-copies"):
        run_model(rewritten, device="gpu")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match=r"device 'cuda': onnxruntime .* has no CUDAExecutionProvider"):
        run_model(rewritten, device="cuda")


@looped(
    "calls, kernels",
    [
        (["skinny", "large"] * 2, {"G_1": "skinny", "G_2": "large"}),
        (["skinny", "large", "large"] * 2, {"G_1": "skinny, large", "G_2": "skinny, large"}),  # one is in a loop
        ([], {"G_1": "", "G_2": ""}),
    ],
)
def test_nodes_of_inlined_bodies_are_found_by_their_place(calls, kernels):
    op = "MXFP8WeightGemm"
    made = [cpu.Call(op, "", "cuda", (kernel,), 1e-6) for kernel in calls]
    types = [{dtype: [2, 2]} for dtype in ("float", "Float8E4M3FN", "uint8")]
    events = [event("model_run", ts, 5, "Session") for ts in (0, 10)]
    nodes = [(f"G_{i}_kernel_time", start + i) for start in (0, 10) for i in (1, 2)]
    events += [event(name, ts, 1, op_name=op, input_type_shape=types) for name, ts in nodes]
    profiled = of_session(ir.from_proto(b.chain_model()), events, made, runs=2)
    assert {node.name: node.kernel for node in profiled} == kernels
    assert {node.isa for node in profiled} == ({"cuda"} if calls else {""})
    assert {node.operands for node in profiled} == {""}, "their values may be rounded"


def event(name: str, ts: int, dur: int, category: str = "Node", **args: Any) -> dict[str, Any]:
    """Returns an entry of a profile of ONNX Runtime: times in microseconds."""
    return {"name": name, "cat": category, "ts": ts, "dur": dur, "args": args}


@looped(
    "op, dtypes, operands",
    [
        ("MatMul", ["float", "float"], "float32 x float32"),
        ("QMoE", ["float16", "float", "uint8", "float16"], "float16 x uint8"),
        ("QLinearMatMul", ["uint8", "float", "uint8", "int8", "float", "int8"], "uint8 x int8"),
        ("Add", ["float", "float"], ""),
    ],
)
def test_what_an_op_of_onnx_runtime_multiplied(op, dtypes, operands):
    shapes = [{dtype: [2, 2]} for dtype in dtypes]
    run = event("n_kernel_time", 1, 1, op_name=op, input_type_shape=shapes)
    (node,) = of_session(ir.from_proto(b.chain_model()), [event("model_run", 0, 5, "Session"), run], [], runs=1)
    assert node.operands == operands


def test_which_kernel_ran_depends_on_the_rows():
    model = b.matmul_model(64, 520)  # a smaller weight has one kernel for any number of rows
    rewritten, _ = rewrite(model)
    weight_only, _ = rewrite(model, recipe="mxfp8-weight-only")
    wide = np.ones((1, 2, 64), np.float32)
    wide[0, 0, :2] = 2.0**100, 2.0**-100  # values that span 2^97 do not fit into what gemm_skinny_f32 packs
    with native.forced_isa("portable"):
        few = profile(rewritten, shapes={"batch": 1, "seq": 4})["linear"]
        many = profile(rewritten, shapes={"batch": 1, "seq": 40})["linear"]
        second = profile(weight_only, inputs={"x": wide})["linear"]
    assert {node.isa for node in (few, many, second)} == {"portable"}
    assert [node.kernel for node in (few, many, second)] == ["gemm_skinny_f32", "gemm_f32", "gemm_f32"]


def test_what_stays_in_float32_has_no_kernel_of_ours_and_names_come_through_as_they_are():
    model = b.chain_model()
    model.graph.node[0].name = name = "a\\n b\n'c'\t\\"
    rewritten, _ = rewrite(model, recipe=Recipe(exclude=("layers.1",)))
    nodes = profile(rewritten)
    kept = nodes["layers.1.linear"]
    assert (kept.operands.split(" x ")[0], kept.kernel, kept.isa) == ("float32", "", "")
    assert nodes[name].isa == native.isa()
    assert nodes[name].kernel


def test_times_are_the_median_of_the_counted_runs():
    """A warm-up of 9 us, then runs of 2 + 1, 90 + 1 and 3 + 1: when each began, and for how long its two calls took."""
    events = [event("model_run", 100 * run, 95, "Session") for run in range(4)]
    for start, dur in zip((0, 100, 200, 300), (9, 2, 90, 3), strict=True):
        events += [event("x_kernel_time", start + at, us, op_name="Relu") for at, us in ((1, dur), (92, 1))]
    (node,) = of_session(ir.from_proto(b.chain_model()), events, [], runs=3)
    assert (node.name, node.op, node.operands, node.kernel, node.isa) == ("x", "Relu", "", "", "")
    assert node.seconds == pytest.approx(4e-6)


def test_nodes_in_bodies_of_branches_are_counted():
    y = onnx.helper.make_empty_tensor_value_info("y")
    stored = [onnx.numpy_helper.from_array(b.weight(64, 96), "w")]
    branch = onnx.helper.make_graph(b.steps("inner:MatMul x w>y"), "branch", [], [y], stored)
    choose = b.node("If", "c", "h", "choose", then_branch=branch, else_branch=branch)
    inputs = {"x": (np.float32, ["batch", 64]), "c": (np.bool_, [])}
    model = b.model([choose, *b.steps("Relu h>z")], inputs, {"z": (np.float32, ["batch", 96])})
    nodes = profile(rewrite(model)[0])
    assert "choose" not in nodes
    (kernel,) = (node.kernel for node in nodes.values() if node.operands == "e4m3 x e4m3")
    assert kernel in {"gemm_f32", "gemm_skinny_f32", "gemm_bf16", "gemm_amx"}  # as the processor has it


def test_programs_have_the_same_profile():
    torch = pytest.importorskip("torch")
    from torch_programs import export

    nn = torch.nn
    module = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64))
    packed, _ = rewrite(export(module, torch.randn(4, 64)), recipe=Recipe(exclude=("^2$",)))
    nodes = run_model(packed, repeat=2, profile=True).nodes
    seen = [(node.op, node.operands, node.kernel) for node in nodes if node.operands]
    assert [row[:2] for row in seen] == [("mxfp8::gemm", "e4m3 x e4m3"), ("linear", "float32 x float32")]
    assert seen[0][2].startswith("gemm_")
    assert all(node.seconds > 0 for node in nodes)


def test_nothing_is_written_down_unless_asked():
    with cpu.profiled() as log:
        cpu.quantize(np.ones((1, 32), np.float32))
    assert len(log.calls()) == 0
    with cpu.profiled() as log:
        cpu.quantize(np.ones((1, 32), np.float32))
        assert [(call.op, call.isa, call.gemms) for call in log.calls()] == [("", native.isa(), ())]


@pytest.mark.usefixtures("own_folder")
def test_the_command():
    b.save(b.chain_model(), Path("m.onnx"))
    assert run("rewrite", "m.onnx").exit_code == 0
    result = run("run", "m.mxfp8.onnx", "--repeat", "2", "--profile")
    assert result.exit_code == 0, result.output
    assert "layers.0.linear" in result.stdout
    assert "e4m3 x e4m3" in result.stdout
    assert "gemm_" in result.stdout
    assert "share" not in run("run", "m.mxfp8.onnx", "--repeat", "1").stdout
