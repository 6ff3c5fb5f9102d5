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
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.recipe import Recipe, load_recipe
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
def test_the_recipe_auto_is_the_preset_that_measured_best_here(isa: str) -> None:
    with cpu.forced_isa(isa):
        better = presets.BETTER[presets.DEFAULT].get(isa)
        assert load_recipe("auto").name == (better.preset if better else "mxfp8")
        assert bool(better_preset(Recipe())) == bool(better)
        assert not better_preset(load_recipe("mxint8"))


@looped("isa", cpu.available_isas())
def test_activations_in_bfloat16_are_advised_where_they_are_faster(isa: str) -> None:
    measured = isa in presets.BETTER[presets.DEFAULT]
    with cpu.forced_isa(isa):
        for name, other in presets.WEIGHT_ONLY.items():
            faster = isa in presets.BETTER[other]
            assert (f"--recipe {name} is " in better_preset(load_recipe(other))) == faster
            no_faster = better_preset(load_recipe(name)).endswith(f": {name} is no faster than {other}")
            assert no_faster == (measured and not faster)


@pytest.mark.usefixtures("own_folder")
def test_a_rewrite_advises_a_better_preset_and_auto_takes_it() -> None:
    better = presets.BETTER[presets.DEFAULT]
    isa = next((isa for isa in cpu.available_isas() if isa in better), None)
    if isa is None:
        pytest.skip("no preset measured better on this processor")
    with cpu.forced_isa(isa):
        model, wanted = save(b.chain_model()), better[isa].preset
        assert f"--recipe {wanted} is " in " ".join(run("rewrite", model).stdout.split())
        done = run("rewrite", model, "--recipe", "auto", "-o", "auto.onnx")
        assert f"with recipe {wanted}" in done.stdout
        assert "advice" not in done.stdout


def test_advice_has_the_numbers_that_were_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks/results"
    data = json.loads((results / "presets.json").read_text())
    measured: dict[str, dict[str, presets.Better]] = {name: {} for name in presets.BETTER}
    for isa, name, *cells in data["rows"]:
        row = dict(zip(data["columns"][2:], cells, strict=True))
        other, column = ("mxfp8", "mxfp8") if name == "mxint8" else (presets.WEIGHT_ONLY.get(name), "weight-only")
        if other:
            better = presets.Better(name, float(row[f"x {column}"]), float(row[f"of the error of {column}"]))
            if better.speed > presets.AS_FAST or better.error < 1:
                measured[other][isa] = better
    rows = json.loads((results / "minilm.intel.json").read_text())["rows"]
    ms = {name: float(cell) for workload, name, cell, *_ in rows if workload == "8 x 128, default opset"}
    speed = round(ms["mxfp8-weight-only"] / ms["mxfp8-bf16"], 2)
    measured["mxfp8-weight-only"]["amx_bf16"] = presets.Better("mxfp8-bf16", speed, 1.0)  # of one mean cosine
    assert measured == presets.BETTER


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
