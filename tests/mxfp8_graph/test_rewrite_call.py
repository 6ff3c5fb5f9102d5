"""The call of rewrite: modules, function bodies, the recipe for this processor, and the types that it returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import models as b
import numpy as np
import onnx
import onnxruntime
import pytest
from commands import run, save
from grids import looped

import mxfp8_graph
from mxfp8_graph.doctor import diagnose
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_graph.report.build import better_preset
from mxfp8_ops import contract, cpu, ort
from mxfp8_ops.errors import ContractError

torch = pytest.importorskip("torch")


class Scaled(torch.nn.Module):
    """A linear whose result is scaled by the second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x: Any, scale: Any) -> Any:
        """Returns the normalized product."""
        return self.norm(self.up(x) * scale)


X, ONE = torch.ones(4, 64), torch.ones(())


@looped("inputs", [(X, ONE), [X, ONE], {"x": X, "scale": ONE}])
def test_a_module_is_exported_with_its_example_inputs(inputs: Any) -> None:
    module = Scaled().eval()
    call, report = mxfp8_graph.rewrite(module, "mxint8", example_inputs=inputs)
    assert isinstance(call.eval().program, torch.export.ExportedProgram)
    assert [(site.name, site.kept, site.reason) for site in report.sites] == [
        ("linear", False, "linear, by recipe 'mxint8'")
    ]
    result = call(**inputs) if isinstance(inputs, dict) else call(*inputs)
    with torch.no_grad():
        np.testing.assert_allclose(result.numpy(), module(X, ONE).numpy(), atol=0.05)


def test_dynamic_shapes_are_passed_on() -> None:
    shapes = {"x": {0: torch.export.Dim("batch", min=1)}, "scale": None}
    module, _ = mxfp8_graph.rewrite(Scaled().eval(), example_inputs=(X, ONE), dynamic_shapes=shapes)
    assert module(torch.ones(7, 64), ONE).shape == (7, 64)


@looped("rows", [1, 2, 4])
def test_the_batch_of_a_module_is_dynamic(rows: int) -> None:
    module, report = mxfp8_graph.rewrite(Scaled().eval(), example_inputs=(X[:rows], ONE))
    assert [module(torch.ones(n, 64), ONE).shape[0] for n in (1, 2, 7)] == [1, 2, 7]
    assert not [note for note in report.notes if "batch" in note]


def test_a_batch_that_the_module_fixes_is_noted() -> None:
    class Fixed(Scaled):
        def forward(self, x: Any, scale: Any) -> Any:
            return super().forward(x, scale) if x.shape[0] == 4 else x

    module, report = mxfp8_graph.rewrite(Fixed().eval(), example_inputs=(X, ONE))
    assert module(X, ONE).shape == (4, 64)
    assert any("the batch is fixed" in note for note in report.notes)


@looped("training", [False, True])
def test_a_rewritten_module_shares_nothing_with_the_original(training: bool) -> None:
    module = Scaled()
    rewritten, _ = mxfp8_graph.rewrite(module, example_inputs=(X, ONE), training=training)
    rewritten.half()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in rewritten.parameters():
            parameter.fill_(7)
    assert not any((p == 7).all() for p in module.parameters())


def test_a_module_prepared_for_training_has_gradients_and_its_program_is_saved(tmp_path: Path) -> None:
    module, _ = mxfp8_graph.rewrite(Scaled(), example_inputs=(X, ONE), training=True)
    module(torch.randn(3, 64), ONE)[:, 0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters() if p.dim() == 2)
    with torch.no_grad():
        module.get_parameter("up.weight").add_(1.0)
    packed, _ = mxfp8_graph.rewrite(module.program)
    path = mxfp8_graph.save(packed, tmp_path / "m.pt2")
    wanted = module(X, ONE).detach().numpy()
    np.testing.assert_allclose(mxfp8_graph.load(path).module()(X, ONE).detach().numpy(), wanted, atol=1e-5)


@looped(
    "model, settings, message",
    [
        (Scaled(), {}, r"model is a Scaled; .*; pass example_inputs=\(x,\) too"),
        (Scaled(), {"example_inputs": X}, r"example_inputs is a Tensor; expected a tuple of arguments.*; pass \(x,\)"),
        (Scaled(), {"example_inputs": (X,)}, r"Scaled: torch.export refuses it: TypeError: .*scale"),
        (b.matmul_model(), {"example_inputs": (X,)}, "example inputs or dynamic shapes of a model that is exported"),
        (object(), {}, "model is a object; .*; load the model first"),
        (
            Scaled(),
            {"example_inputs": (X, ONE), "bodies": "tiny"},
            "rewrite: bodies is 'tiny', an option of ONNX files",
        ),
        (
            Path("m.pt2"),
            {"external_data": "always"},
            "m.pt2: external_data is 'always', .* leave out external_data, or",
        ),
        (b.matmul_model(), {"bodies": "tiny"}, "bodies: 'tiny'; expected one of folded, small, none; correct the name"),
        (mxfp8_graph.rewrite(b.matmul_model())[0], {"bodies": "tiny"}, "bodies: 'tiny'; expected one of folded"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(model: Any, settings: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.rewrite(model, **settings)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxint8-weight-only"])
def test_small_bodies_compute_the_same_and_keep_weights_in_8_bits(recipe: str, tmp_path: Path) -> None:
    x = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
    results, sizes = [], []
    for bodies in ("folded", "small"):
        model, _ = mxfp8_graph.rewrite(b.chain_model(), recipe, bodies=bodies)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / f"{bodies}.onnx")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        results.append(session.run(None, x)[0])
        weight = max(onnx.load(options.optimized_model_filepath).graph.initializer, key=lambda t: len(t.raw_data))
        sizes.append(len(weight.raw_data) // int(np.prod(weight.dims)))
    np.testing.assert_array_equal(*results)
    assert sizes == [4, 1], "bytes of a value of the weights in a session"


def test_a_file_without_bodies_runs_with_our_library_only(tmp_path: Path) -> None:
    path, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), tmp_path / "m.onnx"), bodies="none")
    whole, _ = mxfp8_graph.convert(onnx.load(path), "mxfp8")
    functions = [{function.domain for function in model.functions} for model in (onnx.load(path), whole)]
    assert functions == [set(), {contract.DOMAIN}]
    ort.session(path)
    with pytest.raises(Exception, match="mxfp8:MXFP8"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@looped("isa", cpu.available_isas())
def test_every_tool_gives_the_answer_of_auto(isa: str) -> None:
    with cpu.forced_isa(isa):
        taken = load_recipe("auto")
        assert taken.name == presets.best(isa)
        answer = presets.answer(isa)
        [doctor] = [check.detail for check in diagnose() if check.name == "recipe"]
        assert doctor.startswith(answer)
        assert better_preset(load_recipe("mxfp8")) == (answer if taken.name != "mxfp8" else "")
        assert not better_preset(taken)


@looped(
    "isa, name, advised",
    [
        ("avx512_bf16", "mxfp8", True),
        ("avx512_bf16", "mxint8-weight-only", True),  # mxint8-bf16 is as accurate and faster
        ("avx512_bf16", "mxint8-bf16", False),  # mxint8 is faster and less accurate: a choice
        ("avx2", "mxfp8-weight-only", True),
        ("avx2", "mxint8-weight-only", False),
        ("amx_bf16", "mxfp8", False),
        ("neon_dot", "mxfp8", False),  # nothing was measured
    ],
)
def test_a_preset_is_advised_that_is_faster_or_more_accurate_and_neither_slower_nor_less_accurate(
    isa: str, name: str, advised: bool
) -> None:
    assert presets.advice(isa, name) == (presets.answer(isa) if advised else "")


@pytest.mark.usefixtures("own_folder")
def test_a_rewrite_advises_a_better_preset_and_auto_takes_it() -> None:
    isa = next((isa for isa in cpu.available_isas() if presets.best(isa) != "mxfp8"), None)
    if isa is None:
        pytest.skip("no preset measured better on this processor")
    with cpu.forced_isa(isa):
        model, wanted = save(b.chain_model()), presets.best(isa)
        assert f"Fastest: --recipe {wanted}, " in " ".join(run("rewrite", model).stdout.split())
        assert f"Fastest: --recipe {wanted}, " in " ".join(run("analyze", model).stdout.split())
        done = run("rewrite", model, "--recipe", "auto", "-o", "auto.onnx")
        assert f"with recipe {wanted}" in done.stdout
        assert "advice" not in done.stdout


def test_the_numbers_of_presets_are_those_that_were_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results"
    measured: dict[str, dict[str, presets.Measured]] = {}
    for file in ("presets.json", "presets.avx2.json"):
        for isa, name, _, speed, error in json.loads((results / file).read_text())["rows"]:
            # For AVX2 those of a processor with AVX2 alone: the float32 of the other one uses AVX-512.
            if isa != "portable" or file == "presets.json":
                measured.setdefault(isa, {})[name] = presets.Measured(float(speed), float(error))
    intel = json.loads((results / "minilm.intel.json").read_text())
    speeds = {row[1]: row[intel["columns"].index("x ORT fp32")].split()[0] for row in intel["rows"][::-1]}
    of_amx = presets.MEASURED["amx_bf16"]
    assert {name: each.speed for name, each in of_amx.items()} == {name: float(speeds[name]) for name in of_amx}
    assert {"amx_bf16": of_amx, **measured} == presets.MEASURED


def test_type_checkers_know_the_presets() -> None:
    assert {*get_args(presets.Preset)} == {*presets.PRESETS, presets.AUTO, "MXFP8BlockScaling"}


SCRIPT = """
import onnx
import torch
import mxfp8_graph
from mxfp8_ops import ort

path, report = mxfp8_graph.rewrite("model.onnx", "mxint8")
reveal_type(path)
reveal_type(report)
reveal_type(mxfp8_graph.rewrite(mxfp8_graph.load("p.pt2"))[0])
reveal_type(mxfp8_graph.rewrite(onnx.load("m"), training=False)[0])
reveal_type(mxfp8_graph.rewrite(torch.nn.Linear(64, 64), example_inputs=(torch.zeros(2, 64),))[0])
reveal_type(mxfp8_graph.distributed)
print(ort.session(path).run(None, {}))
"""
MISTAKES = """
mxfp8_graph.rewrite("model.onnx", "mxint9")
mxfp8_graph.rewrite("model.onnx", bodies="nonsense")
mxfp8_graph.Recipe(activations="fp16")
mxfp8_graph.Rule(name="mlp", weight_format="e3m4")
mxfp8_graph.Recipe(embedding=True)
"""


@pytest.mark.slow
def test_mypy_knows_what_a_rewrite_returns_and_takes(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SCRIPT + MISTAKES)
    command = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-calls", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    types = [line.split('"')[1].split(".")[-1] for line in done.stdout.splitlines() if "Revealed type" in line]
    expected = ["Path", "RewriteReport", "ExportedProgram", "ModelProto", "RewrittenModule", "ModuleType"]
    assert types == expected, done.stdout
    mistakes = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line]
    first = len(SCRIPT.splitlines())
    assert mistakes == [*range(first + 2, first + 7)], done.stdout
