"""quantize_(): a module packed in place has the bytes, the outputs and the reasons of the rewritten program."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

import test_torch_models as whole  # noqa: E402
from safetensors.torch import load_model, save_model  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch_programs import export, relative_l2, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph import Recipe, pack, quantize_, rewrite, te  # noqa: E402
from mxfp8_graph.eager.modules import Packed  # noqa: E402
from mxfp8_ops.errors import ContractError, RecipeError  # noqa: E402

PRODUCTS = {"attention_scores", "attention_values", "product"}
INT8_ALL = Recipe(weight_format="int8", activations="int8", embeddings=True, output_projections=True)


class Residual(nn.Module):
    """Two convolutions, each with its normalization; the second reads no other than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding="same", groups=1), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


def randomized(model: nn.Module) -> nn.Module:
    """Returns the model with statistics that are no identity."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for each in (module.running_mean, module.weight, module.bias):
                nn.init.normal_(each)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def residual() -> nn.Module:
    stem, pool = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)], [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return randomized(nn.Sequential(*stem, Residual(), nn.Conv2d(32, 64, 1, 2), *pool, nn.Linear(64, 40)))


def resnet() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 40}
    return randomized(transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)))


def built(name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Returns a model, its program and inputs by name."""
    if name in {"residual", "resnet"}:
        model = residual() if name == "residual" else resnet()
        inputs = {"input" if name == "residual" else "pixel_values": torch.randn(2, 3, 32, 32)}
        return model, export(model, **inputs), inputs
    model, _, experts = name.partition(" of ")
    return whole.build(model, experts)


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def assert_same(result: Any, expected: Any) -> None:
    for ours, theirs in zip(tensors(result), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def reasons(report: mxfp8_graph.RewriteReport) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for site in report.sites:
        if site.decision.site.role not in PRODUCTS and "gate" not in site.decision.site.module.split("."):
            result.setdefault(site.decision.site.module, set()).add(site.reason)
    return result


NETWORK = Recipe(convolutions=True, min_channels=3)
NO_ATTENTION = Recipe(name="no attention", exclude=("self_attn",))
"""nn.MultiheadAttention multiplies by parameters of its own."""
PRESETS = ("mxfp8", "mxint8", "mxint8-bf16", "mxint8-weight-only")
CASES: list[tuple[str, Any]] = [
    *((name, recipe) for name in ("bert", "vit", "t5", "llama", "mixtral of grouped_mm") for recipe in PRESETS),
    *(("residual", recipe) for recipe in ("mxint8", "mxint8-weight-only", "all")),
    *((name, INT8_ALL) for name in ("llama tied", "gpt2", "resnet", "residual")),
    ("mixtral of batched_mm", "mxint8"),
    ("encoder", NO_ATTENTION),
]


@pytest.mark.parametrize(("name", "recipe"), CASES, ids=lambda each: getattr(each, "name", each))
def test_outputs_bytes_and_reasons_are_those_of_the_rewritten_program(name: str, recipe: Any) -> None:
    model, program, inputs = built(name)
    rewritten, expected = rewrite(program, recipe)
    model = copy.deepcopy(model)
    report = quantize_(model, recipe)
    with torch.no_grad():
        result, wanted = model(**inputs), rewritten.module()(**inputs)
    if name == "encoder":  # torch has another kernel for its attention in eager mode
        assert relative_l2(result, wanted) < 1e-6
    else:
        assert_same(result, wanted)
        ours, theirs = reasons(report), reasons(expected)
        assert {name: ours.get(name) for name in theirs} == theirs
    codes = [
        {t.numpy().tobytes() for n, t in state.items() if "_mxfp8" in n}
        for state in (model.state_dict(), rewritten.state_dict)
    ]
    assert codes[0] == codes[1]
    assert len(report.rewritten) == len(expected.rewritten)


def files(folder: Path, *programs: Any) -> list[onnx.ModelProto]:
    pytest.importorskip("onnxscript")
    models = [onnx.load(mxfp8_graph.to_onnx(each, folder / f"{i}.onnx")) for i, each in enumerate(programs)]
    for node in (node for model in models for node in model.graph.node):
        del node.metadata_props[:]  # the classes of the modules
    return models


def test_the_export_is_a_rewritten_program_and_its_file_the_same(tmp_path: Path) -> None:
    model, program, inputs = built("bert")
    quantize_(model := copy.deepcopy(model), "mxint8")
    result = export(model, dynamic=dict.fromkeys(inputs, whole.TOKENS), **inputs)
    assert rewrite(result, "mxint8")[1].already_rewritten
    first, second = files(tmp_path, result, rewrite(program, "mxint8")[0])
    assert first == second


def test_the_file_of_a_network_has_the_same_nodes_and_weights(tmp_path: Path) -> None:
    model, program, inputs = built("residual")
    quantize_(model := copy.deepcopy(model), "mxint8")
    first, second = files(tmp_path, export(model, **inputs), rewrite(program, "mxint8")[0])
    ops = [[(node.op_type, *node.attribute) for node in each.graph.node] for each in (first, second)]
    assert ops[0] == ops[1]
    assert [*first.graph.initializer] == [*second.graph.initializer]


def test_a_strict_export_has_the_record_too() -> None:
    quantize_(model := residual(), "mxint8")
    x = torch.randn(1, 3, 16, 16)
    program = torch.export.export(model, (x,), strict=True)
    assert rewrite(program, "mxint8")[1].already_rewritten
    assert_same(program.module()(x), model(x))


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)).eval()


X = values(5, 64)


def test_copies_and_saved_states_give_the_same_bits(tmp_path: Path) -> None:
    quantize_(model := linears(), "mxint8")
    y = model(X)
    assert_same(copy.deepcopy(model)(X), y)
    torch.save(model, stream := io.BytesIO())
    assert_same(torch.load(io.BytesIO(stream.getvalue()), weights_only=False)(X), y)
    quantize_(
        fresh := linears().apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None), "mxint8"
    )
    save_model(model, tmp_path / "m.safetensors")
    load_model(fresh, tmp_path / "m.safetensors")
    assert_same(fresh(X), y)
    with torch.device("meta"):
        empty = linears()
    quantize_(empty, "mxint8")
    empty.load_state_dict(model.state_dict(), assign=True)
    assert_same(empty(X), y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_reaches_results_and_weights(dtype: Any) -> None:
    quantize_(model := linears(), "mxint8")
    model.to(dtype)
    assert model(X.to(dtype)).dtype == model[0].weight.dtype == dtype
    assert model[0].weight_mxfp8.dtype == torch.uint8
    quantize_(other := linears().to(dtype), "mxint8")
    assert_same(
        other(X.to(dtype)), rewrite(linears().to(dtype), "mxint8", example_inputs=(X.to(dtype),))[0](X.to(dtype))
    )
    with torch.autocast("cpu", dtype):
        assert linears()[0](X).dtype == model.float()[0](X).dtype == dtype


def test_in_inference_mode_the_bits_are_the_same() -> None:
    quantize_(model := linears(), "mxint8")
    y = model(X)
    with torch.inference_mode():
        assert_same(model(X), y)


def test_a_training_model_runs_in_distributed_data_parallel(tmp_path: Path) -> None:
    quantize_(model := linears(), training=True)
    y = model(X)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(X).sum().backward()
        assert_same(parallel(X), y)
    finally:
        torch.distributed.destroy_process_group()
    assert float(model[0].weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["linears", "mixtral"])
def test_a_compiler_sees_one_graph(name: str) -> None:
    model, inputs = (linears(), {"input": X}) if name == "linears" else built(name)[::2]
    quantize_(model := copy.deepcopy(model), "mxint8")
    explained = torch._dynamo.explain(model)(**inputs)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    torch._dynamo.reset()


def test_gradients_pass_through_packed_weights_and_keep_the_bits() -> None:
    quantize_(model := linears(), "mxint8")
    expected = model(X)
    model[0].bias.requires_grad_()
    model[3].weight.requires_grad_()
    y = model(x := X.clone().requires_grad_())
    assert_same(y.detach(), expected)
    y.square().sum().backward()
    assert all(float(t.grad.abs().sum()) > 0 for t in (x, model[0].bias, model[3].weight))


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_training_is_that_of_the_program_and_pack_gives_its_bytes(name: str) -> None:
    model, program, inputs = built(name)
    trained, _ = rewrite(program, training=True)
    quantize_(model := copy.deepcopy(model), training=True)
    y = model(**inputs)
    assert_same(y, trained.module()(**inputs))
    tensors(y)[0].sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], 0.1).step()
    plain = copy.deepcopy(whole.build(name).model)
    plain.load_state_dict(model.state_dict())
    pack(model)
    quantize_(plain, "mxfp8")
    assert_same(model.state_dict(), plain.state_dict())
    assert not any(isinstance(module, te.Linear) for module in model.modules())


def test_a_layer_of_training_follows_an_autocast_of_te() -> None:
    quantize_(model := linears(), training=True)
    with te.autocast(recipe="ocp"):
        result = model(X)
    quantize_(other := linears(), "ocp", training=True)
    assert_same(result, other(X))
    assert not torch.equal(result, model(X))


class Mlp(nn.Module):
    """A network whose code torch.fx can trace; its names tell nothing."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.branch = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), branch

    def forward(self, x: Tensor) -> Tensor:
        if self.branch and x.sum() > 0:  # torch.fx cannot trace this
            x = -x
        picked = torch.topk(self.b(x), 1).indices
        return self.c(torch.gather(self.a(x), -1, picked).expand(-1, 64)).softmax(-1)


def named(**modules: nn.Module) -> nn.Module:
    model = Mlp(branch=True)
    del model.a, model.b, model.c
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def linear() -> nn.Linear:
    return nn.Linear(64, 64)


ROLES = {
    "its graph": (Mlp(), {"a": "linear", "b": "router", "c": "output_projection"}),
    "its names": (
        named(gate=linear(), up=linear(), head=nn.Sequential(linear(), nn.Tanh(), linear())),
        {"gate": "router", "up": "linear", "head.0": "linear", "head.2": "output_projection"},
    ),
    "a wrapper": (
        named(model=named(up=linear(), fc=linear())),
        {"model.up": "linear", "model.fc": "output_projection"},
    ),
}
"""What tells the roles -> a model, and the role of each of its linears."""


@pytest.mark.parametrize("told_by", ROLES)
def test_roles_come_from(told_by: str) -> None:
    model, expected = ROLES[told_by]
    report = quantize_(copy.deepcopy(model))
    assert {site.name: site.decision.site.role for site in report.sites} == expected


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def replaced() -> nn.Module:
    linear = nn.Linear(64, 64)
    linear.forward = lambda x: x
    return linear


KEPT = {
    "computed at run time": parametrized,
    "Scaled may compute another way": lambda: Scaled(64, 64),
    "replaced in this instance": replaced,
    "multiplies by parameters of its own": lambda: nn.MultiheadAttention(64, 2),
    "padding_mode 'circular'": lambda: nn.Conv1d(32, 32, 3, padding=1, padding_mode="circular"),
    "max_norm": lambda: nn.Embedding(64, 64, max_norm=1.0),
    "expected float32, float16 or bfloat16": lambda: nn.Linear(64, 64, dtype=torch.float64),
    "depthwise": lambda: nn.Conv2d(32, 32, 3, groups=32),
}


@pytest.mark.parametrize("reason", KEPT)
def test_a_module_that_cannot_be_packed_stays_with_a_reason(reason: str) -> None:
    model = nn.ModuleDict({"odd": KEPT[reason](), "plain": nn.Linear(64, 64)})
    report = quantize_(model, INT8_ALL)
    assert [site.name for site in report.rewritten] == ["plain"]
    assert reason in next(site.reason for site in report.kept if site.name == "odd")


@pytest.mark.parametrize(("recipe", "training"), [("mxint8", False), ("mxfp8", True)])
def test_an_encoder_of_torch_takes_no_fast_path_in_float(recipe: str, training: bool) -> None:
    """With a padding mask its fast path has nested tensors, and reads the weights of its linears."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 1).eval()
    quantize_(encoder, recipe, training=training)
    mask = torch.tensor([[False] * 6 + [True] * 2, [False] * 8])
    with torch.no_grad():
        fast = encoder(x := torch.randn(2, 8, 64), src_key_padding_mask=mask)
    encoder.layers[0].norm1.weight.requires_grad_()  # a model that trains takes the slow path
    assert relative_l2(fast[~mask], encoder(x, src_key_padding_mask=mask)[~mask]) < 1e-6


def test_a_second_call_packs_the_rest() -> None:
    model = nn.ModuleDict({"encoder": linear(), "decoder": linear()})
    quantize_(model["encoder"], "mxint8")
    assert [site.name for site in quantize_(model, "mxint8").rewritten] == ["decoder"]
    assert quantize_(model, "mxint8").already_rewritten


def test_calls_after_one_that_was_interrupted_pack_what_one_call_does() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(*linears(), nn.Linear(64, 64))  # the last is a head, which stays
    quantize_(whole := copy.deepcopy(model), "mxint8")
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, "mxint8", progress=interrupt)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for _ in range(2):  # in the second call the head is the only linear that is left
        quantize_(model, "mxint8")
    assert_same(model.state_dict(), whole.state_dict())


def test_tied_weights_stay_tied() -> None:
    model, *_ = built("llama tied")
    quantize_(model := copy.deepcopy(model), INT8_ALL)
    assert model.lm_head.weight_mxfp8.data_ptr() == model.model.embed_tokens.weight_mxfp8.data_ptr()


class OneNorm(nn.Module):
    """A convolution, and its normalization in a module of its own. What reads them besides is up to `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(32, 32, 1), nn.Sequential(nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.conv(x))


class ReadBetween(OneNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.inner(y)


class ReadAgain(OneNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.conv(x)) + self.inner(x)


class ReadScale(OneNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.conv(x)) + self.inner[0].weight[:, None, None]


class ReadLayers(nn.Module):
    """A Sequential of which another module reads each layer, as in a loss over features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return first + self.layers[1](first)


def hooked() -> nn.Module:
    model = OneNorm()
    model.conv.register_forward_hook(lambda module, inputs, result: result * 2)
    return model


NORMS = {"alone": (OneNorm, True), "hook": (hooked, False)}
NORMS |= {kind.__name__: (kind, False) for kind in (ReadBetween, ReadAgain, ReadScale, ReadLayers)}


@pytest.mark.parametrize("name", NORMS)
def test_a_normalization_is_folded_only_if_it_alone_reads_the_convolution(name: str) -> None:
    build, folds = NORMS[name]
    model, x = randomized(build()), values(2, 32, 4, 4)
    expected = model(x)
    quantize_(model, "mxint8")
    assert relative_l2(model(x), expected) < 0.02
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) is not folds
    assert any(isinstance(module, Packed) for module in model.modules())


def test_the_report_names_folded_normalizations_in_training_mode() -> None:
    model = randomized(OneNorm())
    model.inner.train()
    assert "normalizations in training mode" in " ".join(quantize_(model, "mxint8").notes)
    assert not quantize_(randomized(OneNorm()), "mxint8").notes


@pytest.mark.parametrize("recipe", ["mxint8", "mxint8-weight-only"])
def test_a_convolution_takes_an_input_without_a_batch(recipe: str) -> None:
    quantize_(model := nn.Conv2d(32, 32, 3), recipe)
    assert_same(model(x := values(32, 4, 4)), model(x[None])[0])


class Counting(nn.Module):
    """A module whose code changes its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.seen, self.last = nn.Linear(64, 64), nn.Buffer(torch.zeros(())), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.result = self.up(x)
        self.last.append(self.result)
        return self.result.relu()


def test_no_code_of_the_model_runs_on_it() -> None:
    quantize_(model := Counting(), "mxint8")
    assert (float(model.seen), model.last, hasattr(model, "result")) == (0, [], False)


def unchanged(model: nn.Module, call: Any, error: type[Exception], text: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=text):
        call(model)
    assert_same(model.state_dict(), before)


def test_an_error_leaves_the_model_as_it_is() -> None:
    model = linears()
    model[2].weight.data[3, 4] = torch.nan
    unchanged(model, lambda m: quantize_(m, "mxint8"), ContractError, "weight '2.weight': values from nan to nan")
    network = residual()
    network[1].running_var[5] = torch.nan
    unchanged(network, lambda m: quantize_(m, NETWORK), ContractError, "the normalization behind '0': a factor")
    large = nn.Sequential(nn.Conv2d(32, 32, 1), residual())
    large[1][2].conv1.weight.data.fill_(1e30)
    large[1][2].bn1.weight.data.fill_(1e30)
    unchanged(large, lambda m: quantize_(m, "mxint8"), ContractError, "behind '1.2.conv1': a factor that makes")
    unused = Recipe(exclude=("layer9",))
    unchanged(linears(), lambda m: quantize_(m, unused), RecipeError, "'layer9' matches none")
    little = nn.Sequential(nn.Linear(8, 8))
    unchanged(little, quantize_, mxfp8_graph.NothingEligibleError, "none of its 1 matmul is eligible")
    unchanged(linears(), pack, ContractError, "no layer of quantize_")
    unchanged(linears(), lambda m: quantize_(m, "mxint8", training=True), RecipeError, "int8 for '0'")
    quantize_(packed := linears(), "mxint8")
    unchanged(packed, quantize_, RecipeError, "Recipe mismatch for '0'")
    unchanged(packed, lambda m: quantize_(m, "mxint8", training=True), ContractError, "'0' is packed")
    assert quantize_(packed, "mxint8").already_rewritten
    with pytest.raises(ContractError, match=r"model is a str; expected a torch\.nn\.Module"):
        quantize_("model.onnx")  # type: ignore[arg-type]
    lazy = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(ContractError, match=r"'1\.weight' has no shape yet; .* call the model once"):
        quantize_(lazy)
    assert type(lazy[0]) is nn.Linear


def test_weights_with_nan_are_packed_on_request() -> None:
    model = linears()
    model[0].weight.data[0, 0] = torch.nan
    quantize_(model, "mxint8", allow_nonfinite=True)
    assert np.isnan(model[0].weight.numpy()[0, :32]).all()


def test_the_weight_is_dequantized_when_its_values_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 reads the dtype of a weight at each call."""
    quantize_(model := linears(), "mxint8")
    plain = model[0].dequantized()
    monkeypatch.setattr(Packed, "dequantized", lambda self: calls.append(self) or plain)
    calls: list[Any] = []
    weight = model[0].weight
    assert (weight.dtype, weight.shape, isinstance(weight, Tensor)) == (plain.dtype, plain.shape, True)
    assert not calls
    assert_same(functional.linear(X, weight), functional.linear(X, plain))
    assert_same([weight.T, weight[0], copy.deepcopy(weight)], [plain.T, plain[0], plain])
    assert np.array_equal(np.asarray(weight), plain)
    assert weight.tolist() == plain.tolist()


CHANGES: dict[str, Any] = {
    "in place": lambda weight: weight.add_(1),
    "in place, by data": lambda weight: weight.data.add_(1),
    "by assignment to data": lambda weight: setattr(weight, "data", torch.zeros(96, 64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_packed_weight_is_an_error(change: str) -> None:
    """`weight.data += delta` merges an adapter; it was lost."""
    quantize_(model := linears(), "mxint8")
    with pytest.raises(ContractError, match="weight: is packed, so a change would be lost"), torch.no_grad():
        CHANGES[change](model[0].weight)
