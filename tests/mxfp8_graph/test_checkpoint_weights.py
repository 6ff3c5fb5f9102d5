"""rewrite(weights=...): packed bytes come from a checkpoint, whoever wrote it, and are never quantized again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import checkpoints as ck
import commands
import ml_dtypes
import models as b
import numpy as np
import onnx
import oracle
import pytest
from grids import looped
from safetensors.numpy import save_file

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops.errors import ContractError

NAMES = ("layers.0.weight", "layers.1.weight")
WEIGHTS = {NAMES[0]: ck.codes(128, 64), NAMES[1]: ck.codes(96, 128, seed=1)}
SIZES = (64, 128, 96)
X = np.random.default_rng(5).standard_normal((4, 64), np.float32)


def chain(**settings: Any) -> onnx.ModelProto:
    return b.chain_model(SIZES, **settings)


def rewritten(path: Path, model: Any = None, **settings: Any) -> tuple[Any, mxfp8_graph.RewriteReport]:
    return mxfp8_graph.rewrite(model or chain(), weights=path, **settings)


def check(path: Path, model: Any = None, weights: Any = None, **settings: Any) -> mxfp8_graph.RewriteReport:
    """Fails unless a model rewritten with a checkpoint has its bytes; returns the report."""
    model, report = rewritten(path, model, **settings)
    ck.check_bytes(mxfp8_graph.unpack(model), WEIGHTS if weights is None else weights)
    return report


@pytest.fixture(autouse=True)
def nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*args: Any, **settings: Any) -> Any:
        raise AssertionError("a weight was quantized")

    monkeypatch.setattr("mxfp8_ops.cpu.pack", pack)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ck.save(tmp_path / "a.safetensors", WEIGHTS)


def sharded(folder: Path, **placed: str) -> Path:
    """Writes each weight into a shard, and an index that places the tensors, with others as `placed` says."""
    folder.mkdir()
    shards = {}
    for number, (name, codes) in enumerate(WEIGHTS.items(), 1):
        ck.save(folder / f"{number}.safetensors", {name: codes})
        shards |= dict.fromkeys((name, f"{name}_scale"), f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**shards, **placed}}))
    return folder


def test_the_bytes_are_those_of_the_checkpoint(tmp_path: Path, path: Path) -> None:
    report = check(path)
    assert report.notes == (f"2 matmuls take the bytes of 2 weights of {path}",)
    reasons = [f"the checkpoint has it in MXFP8, as {name!r}" for name in NAMES]
    assert [(s.decision.reason, s.relative_l2) for s in report.sites] == [(reason, None) for reason in reasons]
    check(ck.save(tmp_path / "inv.safetensors", WEIGHTS, "_scale_inv"))
    stored = ck.tensors(WEIGHTS) | {"norm.weight": np.ones(64, ml_dtypes.bfloat16)}
    stored[f"{NAMES[0]}_scale"] = stored[f"{NAMES[0]}_scale"].view(ml_dtypes.float8_e8m0fnu)
    save_file(stored, tmp_path / "e8m0.safetensors")
    check(tmp_path / "e8m0.safetensors")
    check(mxfp8_graph.export_safetensors(rewritten(path)[0], tmp_path / "ours.safetensors"))
    check(sharded(tmp_path / "folder"))


def test_an_index_says_which_shard_has_a_tensor(tmp_path: Path) -> None:
    for wrong, said in (({"extra": "2.safetensors"}, r"no 'extra' in 2\.safetensors"), ({NAMES[0]: "gone"}, "gone")):
        with pytest.raises(ContractError, match=said):
            rewritten(sharded(tmp_path / said, **wrong))
    folder = sharded(tmp_path / "folder")
    others = ck.tensors({NAMES[0]: ck.codes(128, 64, seed=9)})  # which the index places in the first file
    ck.save(folder / "2.safetensors", {NAMES[1]: WEIGHTS[NAMES[1]]}, **others)
    check(folder)


def test_a_result_does_not_replace_the_checkpoint(tmp_path: Path, path: Path) -> None:
    names, data = tmp_path / "names.json", tmp_path / "out.onnx.data"
    names.write_text("{}")
    before = path.read_bytes()
    data.write_bytes(before)
    for given, output in ((path, path), (path, names), (data, tmp_path / "out.onnx")):
        with pytest.raises(ContractError, match="is a file of the checkpoint"):
            rewritten(given, output=output, overwrite=True, weight_names=names)
    assert (path.read_bytes(), data.read_bytes(), names.read_text()) == (before, before, "{}")


def test_a_weight_that_two_prefixes_fit_is_an_error(tmp_path: Path) -> None:
    model = b.model(
        b.steps("MatMul x vision.q.weight>y; MatMul x text.q.weight>z"),
        {"x": (np.float32, [4, 64])},
        {name: (np.float32, [4, 96]) for name in "yz"},
        {f"{name}.q.weight": b.weight(64, 96, seed=i) for i, name in enumerate(("vision", "text"))},
    )
    path = ck.save(tmp_path / "a.safetensors", {"q.weight": ck.codes(96, 64)})
    recipe = Recipe(output_projections=True)
    with pytest.raises(ContractError, match="expected one prefix for all"):
        mxfp8_graph.rewrite(model, recipe, weights=path)
    _, report = mxfp8_graph.rewrite(model, recipe, weights=path, weight_names={"text.q.weight": "q.weight"})
    assert [site.decision.quantize for site in report.sites] == [False, True]


def test_torchaos_tensors_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    from safetensors.torch import save_file as save_torch
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(64, 128), torch.nn.Linear(128, 96)])})
    settings = dict.fromkeys(("activation_dtype", "weight_dtype"), torch.float8_e4m3fn)
    settings["kernel_preference"] = KernelPreference.EMULATED
    quantize_(module.bfloat16(), formats.MXDynamicActivationMXWeightConfig(**settings))
    state = {name: getattr(value, "data", value) for name, value in module.state_dict().items()}
    assert state[NAMES[0]].is_swizzled_scales
    stored, metadata = support.flatten_tensor_state_dict(state)
    save_torch(stored, tmp_path / "a.safetensors", metadata=metadata)
    packed = mxfp8_graph.unpack(rewritten(tmp_path / "a.safetensors")[0])
    for name in NAMES:
        np.testing.assert_array_equal(packed[name].elements, state[name].qdata.view(torch.uint8).numpy())
        np.testing.assert_array_equal(packed[name].dequantize(), state[name].dequantize(torch.float32).numpy())


@pytest.mark.parametrize("weight_only", [False, True])
def test_outputs_are_those_of_the_dequantized_weight(weight_only: bool, tmp_path: Path, runtime: Any) -> None:
    codes = ck.codes(96, 64)
    path = ck.save(tmp_path / "a.safetensors", {"w": codes})
    recipe = "mxfp8-weight-only" if weight_only else "mxfp8"
    model, _ = rewritten(path, b.matmul_model(), recipe=recipe)
    x, w = X[None], ck.values(codes)
    np.testing.assert_array_equal(oracle.quantized(w), w)  # so the oracle multiplies with these values
    (y,) = oracle.run(model, {"x": x})
    oracle.expect(x, w, weight_only=weight_only).then(oracle.relu).check(y)


def test_the_checkpoint_overrules_the_default_policy_and_the_recipe_its_activations(tmp_path: Path) -> None:
    weights = {NAMES[1]: WEIGHTS[NAMES[1]]}
    path = ck.save(tmp_path / "a.safetensors", weights, **{NAMES[0]: np.ones((128, 64), np.float32)})
    report = check(path, chain(head=True), weights, recipe=Recipe(activations="bfloat16"))
    first, second = (site.decision for site in report.sites)
    assert (first.quantize, first.rule) == (False, "checkpoint")
    assert first.reason == "the checkpoint does not have it in MXFP8, and nothing else is quantized"
    assert (second.site.role, second.quantize, second.rule) == ("output_projection", True, "checkpoint")
    assert second.activations == "bfloat16"


def test_what_the_recipe_excludes_stays_and_what_the_model_keeps_is_named(tmp_path: Path) -> None:
    path = ck.save(tmp_path / "a.safetensors", WEIGHTS, **{"layers.0.bias": np.ones(1, np.float32)})
    report = check(path, weights={NAMES[1]: WEIGHTS[NAMES[1]]}, recipe=Recipe(exclude=["layers.0"]))
    assert report.sites[0].decision.rule == "exclude"
    assert report.notes[1] == f"the model keeps its own values for what is not MXFP8 in {path}: layers.0.bias"


def test_tables_are_taken_too(tmp_path: Path) -> None:
    nodes = b.steps("Gather table ids>e; MatMul e w>h; Relu h>y")
    shapes = {"ids": (np.int64, ["n"])}, {"y": (np.float32, ["n", 32])}
    model = b.model(nodes, *shapes, {"table": b.weight(50, 64), "w": b.weight(64, 32)})
    weights = {"table": ck.codes(50, 64), "w": ck.codes(32, 64, seed=1)}
    check(ck.save(tmp_path / "a.safetensors", weights), model, weights)


def renamed(**parts: str) -> onnx.ModelProto:
    """Returns the chain whose weights, nodes and modules have names with their number for "{}"."""
    model = chain()
    for number in range(2):
        tensor, node = model.graph.initializer[number], model.graph.node[2 * number]
        tensor.name = node.input[1] = parts["weight"].format(number)
        node.name = parts.get("node", node.name).format(number)
        if "module" in parts:
            scopes = f"['', '{parts['module'].format(number)}', 'linear']"
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    return model


def test_names_may_have_one_prefix_more_or_less_that_is_the_same_for_all(tmp_path: Path, path: Path) -> None:
    inner = ck.save(tmp_path / "b.safetensors", {f"model.{name}": codes for name, codes in WEIGHTS.items()})
    assert check(inner).sites[0].decision.reason.endswith(f", as 'model.{NAMES[0]}'")
    _, report = rewritten(path, renamed(weight="outer.layers.{}.weight"))
    assert [site.decision.reason[-len(NAMES[0]) - 2 :] for site in report.sites] == [repr(name) for name in NAMES]
    several = {f"part{i}.{name}": WEIGHTS[name] for i, name in enumerate(NAMES)}
    said = r"match the model's with several prefixes: 'part0.', 'part1.'; expected one prefix for all"
    with pytest.raises(ContractError, match=said):
        rewritten(ck.save(tmp_path / "c.safetensors", several))


@looped(
    "parts",
    [
        {"weight": "onnx::MatMul_{}", "node": "/layers.{}/MatMul"},  # torch's older exporter
        {"weight": "val_{}", "node": "node_linear_{}", "module": "layers.{}"},  # torch's newer exporter
    ],
)
def test_weights_that_lost_their_names_are_found_by_their_nodes_or_modules(parts: Any, path: Path) -> None:
    result, _ = rewritten(path, renamed(**parts))
    for name, weight in zip(NAMES, mxfp8_graph.unpack(result).values(), strict=True):
        np.testing.assert_array_equal(weight.elements, WEIGHTS[name][0])


def test_explicit_names_come_as_a_mapping_or_in_a_file(tmp_path: Path) -> None:
    path = ck.save(tmp_path / "a.safetensors", {"a": WEIGHTS[NAMES[0]], "b": WEIGHTS[NAMES[1]]})
    names = {NAMES[0]: "a", "layers.1.linear": "b"}  # a weight, and a node
    file = tmp_path / "names.json"
    file.write_text(json.dumps(names))
    for each in (names, file):
        check(path, weight_names=each)


@looped(
    "names, message",
    [
        (
            {NAMES[0]: "c"},
            "'layers.0.weight' is mapped to 'c'; expected a weight, matmul or module of the model, .*MXFP8 weights",
        ),
        ({"up": NAMES[0]}, "'up' is mapped to 'layers.0.weight'; expected a weight, matmul or module of the model"),
        ({NAMES[0]: 1}, "'layers.0.weight': 1 is not text; expected a mapping of names"),
    ],
)
def test_explicit_names_that_are_wrong(names: Any, message: str, path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        rewritten(path, weight_names=names)


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    def refused(weights: Any, **others: Any) -> str:
        path = ck.save(tmp_path / "a.safetensors", weights, **others)
        with pytest.raises(ContractError) as caught:
            rewritten(path)
        return str(caught.value).removeprefix(f"{path}: ")

    assert refused({**WEIGHTS, "q.weight": ck.codes(4, 32), "k.weight": ck.codes(4, 32)}) == (
        "'k.weight' matches nothing in the model; 'q.weight' matches nothing in the model; expected a matmul "
        "of that name and shape for each weight; name them with weight_names. Weights of the model: layers.0.weight, "
        "layers.1.weight"
    )
    said = refused({NAMES[0]: ck.codes(64, 128), NAMES[1]: ck.codes(96, 64)})
    for number, found, expected in ((0, "[64, 128]", "[128, 64]"), (1, "[96, 64]", "[96, 128]")):
        where = f"'layers.{number}.weight' for 'layers.{number}.linear'"
        assert f"{where}: {found}, and the model multiplies with [..., N, K] = {expected}" in said
    said = refused({NAMES[0]: (WEIGHTS[NAMES[0]][0], np.zeros((128, 4), np.uint8))})
    assert "has scales of shape [128, 4], not [128, 2]; expected one scale per 32" in said
    others = {
        "fp8.weight": np.zeros((4, 32), ml_dtypes.float8_e4m3fn),
        "fp8.weight_scale": np.ones(1, np.float32),
        "fp4.weight_packed": np.zeros((4, 16), np.uint8),
    }
    listed = "fp4.weight_packed (U8 [4, 16]), fp8.weight (F8_E4M3 [4, 32]), fp8.weight_scale (F32 [1])"
    assert f"3 tensors are quantized in another way: {listed}; expected" in refused(WEIGHTS, **others)


@looped(
    "name, known",
    [
        ("layers.0.input_scale", False),  # a static scale of activations: modelopt, ComfyUI
        ("layers.0.weight_scale_2", False),  # NVFP4's second scale
        ("layers.0.g_idx", False),  # GPTQ
        ("layers.0.qzeros", False),  # GPTQ, AWQ
        ("layers.0.input_quantizer._amax", False),  # modelopt before its export
        ("diffusion.scaled_fp8", False),  # ComfyUI's older form, once a file
        ("w_zero_point", False),
        ("layers.0.bias", True),
        ("layers.0._extra_state", True),  # TransformerEngine's: it has no state for MXFP8
        ("layers.0.lora_A.weight", True),  # what a model is made of is checked where it is rewritten
        ("layers.0.weight_2", True),  # as `export_safetensors` tells tensors of one name apart
        ("layers.scale", True),
        ("w_bias", True),
    ],
)
def test_a_tensor_of_an_unknown_quantization_beside_a_weight_is_refused(name: str, known: bool, tmp_path: Path) -> None:
    weights = {**WEIGHTS, "w": ck.codes(64, 32)}
    path = ck.save(tmp_path / "a.safetensors", weights, **{name: np.ones(1, np.float32)})
    if known:
        ck.check_bytes(mxfp8_graph.import_safetensors(path), weights)
        return
    for read in (rewritten, mxfp8_graph.import_safetensors):
        with pytest.raises(ContractError, match=re.escape(f"'{name}' (F32 [1]) of an unknown quantization")):
            read(path)


@looped("told", ['{"quant_method": "awq"}', "{}", "[", '{"quant_method": []}'])
def test_metadata_of_another_quantization_are_refused(told: str, tmp_path: Path) -> None:
    save_file(ck.tensors(WEIGHTS), tmp_path / "a.safetensors", {"quantization_config": told})
    with pytest.raises(ContractError, match="'quantization_config' of the file"):
        mxfp8_graph.import_safetensors(tmp_path / "a.safetensors")


def test_a_weight_that_the_model_scales_is_refused(tmp_path: Path) -> None:
    path = ck.save(tmp_path / "a.safetensors", {"w": ck.codes(96, 64)})
    said = r"the model uses 0\.5 times the weight, which packed bytes cannot express"
    with pytest.raises(ContractError, match=said):
        rewritten(path, b.gemm_model(alpha=0.5))


@looped("what, index", [("element", 0), ("scale", 1)])
def test_values_that_are_not_finite_are_refused(what: str, index: int, tmp_path: Path) -> None:
    codes = [np.array(each) for each in WEIGHTS[NAMES[0]]]
    codes[index][100, 1] = 0xFF
    weights = {**WEIGHTS, NAMES[0]: (codes[0], codes[1])}
    path = ck.save(tmp_path / f"{what}.safetensors", weights)
    with pytest.raises(ContractError, match=f"weight 'layers.0.weight': a {what} that is NaN or Inf"):
        rewritten(path)
    check(path, weights=weights, allow_nonfinite=True)


def test_packed_models_names_alone_and_folders_without_a_checkpoint_are_refused(path: Path, tmp_path: Path) -> None:
    model, _ = rewritten(path)
    with pytest.raises(ContractError, match="has MXFP8 weights already; expected a model in high precision"):
        rewritten(path, model)
    with pytest.raises(ContractError, match=r"names of weights without a checkpoint; .*; pass weights too"):
        mxfp8_graph.rewrite(chain(), weight_names={"a": "b"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContractError, match=r"a folder without a checkpoint; expected model\.safetensors"):
        rewritten(tmp_path / "empty")


def test_the_command_line(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands.save(chain())
    names = tmp_path / "names.json"
    names.write_text(json.dumps({NAMES[0]: NAMES[0]}))
    planned = commands.run("rewrite", "m.onnx", "--weights", str(path), "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "the checkpoint has it in MXFP8, as 'layers.0.weight'" in planned.stdout
    done = commands.run("rewrite", "m.onnx", "--weights", str(path), "--weight-names", str(names))
    assert done.exit_code == 0, done.output
    assert "2 matmuls take the bytes of 2 weights" in done.stdout.replace("\n", " ")
    ck.check_bytes(mxfp8_graph.unpack("m.mxfp8.onnx"), WEIGHTS)
    message = commands.refused("rewrite", "m.onnx", "--weight-names", str(names))
    assert message.endswith("expected a checkpoint; pass --weights too")


def test_programs_take_the_same_bytes(path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_programs import export

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(64, 128, bias=False), torch.nn.ReLU(), torch.nn.Linear(128, 96, bias=False)
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x).relu()

    original = export(Chain(), torch.from_numpy(X))
    names = {"layers.2": NAMES[1]}
    program, report = rewritten(path, original, weight_names=names)
    assert report.notes[0].startswith("2 matmuls take the bytes of 2 weights")
    (expected,) = oracle.run(rewritten(path)[0], {"x": X})
    np.testing.assert_allclose(program.module()(torch.from_numpy(X)).numpy(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ContractError, match="weights of a checkpoint for training"):
        mxfp8_graph.rewrite(original, weights=path, training=True)
