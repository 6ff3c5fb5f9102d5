"""Whole models: every linear is found, is rewritten or has a reason, and the outputs stay near those in float32.

The bound on the outputs: one E4M3 rounding with a power-of-two block scale has a relative error of about 2.6% in root
mean square (half a unit in the last place of 3 mantissa bits is at most 6.25%), of weights and of activations alike,
so one linear of independent errors is off by about 3.7%. The models here are one to three blocks deep, with residual
connections: errors of a few linears in a row add up in squares. 12% is three linears' worth with a margin of two.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from releases import release

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import DYNAMIC, count, export, relative_l2  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_graph.policy.recipe import Recipe  # noqa: E402

OUTPUT_ERROR = 0.12
TOKENS = {0: DYNAMIC, 1: DYNAMIC}


def encoder() -> tuple[nn.Module, dict[str, Any], Any]:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, {"src": torch.randn(2, 10, 64)}, {"src": TOKENS}


def convolutional() -> tuple[nn.Module, dict[str, Any], Any]:
    features = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*features, nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 40))
    return model, {"input": torch.randn(4, 3, 8, 8)}, {"input": {0: DYNAMIC}}


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"vocab_size": 128, "use_cache": False}
DECODER = {**SMALL, **TEXT, "num_key_value_heads": 1, "max_position_embeddings": 64}
GPT2 = {**TEXT, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
T5 = {**TEXT, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {**SMALL, "vocab_size": 128}),
    "llama": ("LlamaForCausalLM", DECODER),
    "llama tied": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "t5": ("T5ForConditionalGeneration", T5),
    "vit": ("ViTForImageClassification", {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 40}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""name -> model and settings."""


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Any], Any]:
    transformers = pytest.importorskip("transformers")
    model, settings = HUGGING_FACE[name]
    kind = getattr(transformers, model)
    built = kind(kind.config_class(**settings))
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return built, {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}, {"pixel_values": {0: DYNAMIC}}
    ids = torch.randint(0, 128, (2, 8), generator=generator)
    more = {"bert": {"attention_mask": torch.ones_like(ids)}, "t5": {"decoder_input_ids": ids.clone()}}
    inputs = {"input_ids": ids, **more.get(name, {})}
    return built, inputs, None if name == "mixtral" else dict.fromkeys(inputs, TOKENS)


class Built(NamedTuple):
    model: nn.Module
    program: ExportedProgram
    inputs: dict[str, Any]


@functools.cache
def build(name: str, experts: str = "") -> Built:
    """Returns a model, its program and inputs: each is exported once, and no test changes them."""
    torch.manual_seed(0)
    own = {"encoder": encoder, "convolutional": convolutional}
    model, inputs, dynamic = own[name]() if name in own else hugging_face(name)
    if experts:
        model.set_experts_implementation(experts)
    return Built(model.eval(), export(model, dynamic=dynamic, **inputs), inputs)


def linear_modules(model: nn.Module) -> set[str]:
    """Returns the paths of linears and convolutions; attention's own projections count as one."""
    kinds = {"Linear", "Conv1D", "Conv2d", "NonDynamicallyQuantizableLinear", "MixtralTopKRouter"}
    paths = {name for name, module in model.named_modules() if type(module).__name__ in kinds}
    return {path.removesuffix(".out_proj") if "self_attn.out_proj" in path else path for path in paths}


KEPT = {"classifier", "lm_head", "gate", "7"}
"""Last names of the linears that the default policy keeps: output projections, and the router."""


@pytest.mark.parametrize("name", ["encoder", "convolutional", *HUGGING_FACE])
def test_every_linear_is_found_and_decided(name: str) -> None:
    model, program, inputs = build(name)
    rewritten, report = mxfp8_graph.rewrite(program)
    decisions = [s.decision for s in report.sites]
    weighted = [d for d in decisions if d.site.weight and d.site.role != "embedding"]
    if release("transformers") < (5, 20):  # multiplies positions and frequencies as matrices
        weighted = [d for d in weighted if "rotary" not in d.site.module]
    assert linear_modules(model) == {d.site.module for d in weighted if "experts" not in d.site.module}
    assert all(d.reason for d in decisions)
    for d in weighted:
        kept = d.site.module.rpartition(".")[2] in KEPT or d.site.blocker or d.site.role == "convolution"
        assert d.quantize is not bool(kept), d
    assert count(rewritten, "mxfp8.gemm") + count(rewritten, "mxfp8.grouped_gemm") == len(report.rewritten)
    with torch.no_grad():
        expected, got = model(**inputs), rewritten.module()(**inputs)
    assert 1e-3 < relative_l2(got, expected) < OUTPUT_ERROR


def test_decomposed_programs_give_the_same_decisions() -> None:
    program = build("vit").program
    wanted = outcomes(program)
    assert outcomes(program.run_decompositions({})) == wanted
    core = program.run_decompositions()
    assert outcomes(core) == wanted, "core ATen, which turns some linears into expand and bmm"
    _, report = mxfp8_graph.rewrite(core)
    assert report.notes[0].startswith("core ATen input: 1 linear(s) came as expand and bmm and were recognized (")


def outcomes(program: ExportedProgram) -> list[tuple[str, str, bool]]:
    _, report = mxfp8_graph.rewrite(program)
    return sorted((d.site.module, d.reason, d.quantize) for d in (s.decision for s in report.sites))


def test_tied_embedding_stays_and_the_head_packs_a_copy() -> None:
    model, program, inputs = build("llama tied")
    rewritten, report = mxfp8_graph.rewrite(program, Recipe(name="heads", output_projections=True))
    head = next(s for s in report.sites if s.decision.site.module == "lm_head")
    assert head.decision.quantize
    assert head.packed in rewritten.state_dict
    names = {"model.embed_tokens.weight", "lm_head.weight"} & {*rewritten.state_dict}
    assert len(names) == 1, "the embedding keeps one of the two names; the other went away"
    assert relative_l2(rewritten.module()(**inputs), model(**inputs)) < OUTPUT_ERROR


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_attention_products(name: str) -> None:
    """Attention is one node until a recipe wants its products quantized; masks, causality and shared heads survive."""
    model, program, inputs = build(name)
    rewritten, report = mxfp8_graph.rewrite(program, Recipe(name="attention", fp8_dpa=True, min_dim=1))
    roles = [s.decision.site.role for s in report.rewritten]
    assert roles.count("attention_scores") == roles.count("attention_values") == 1
    assert count(rewritten, "aten.scaled_dot_product_attention") == 0
    for batch, length in ((2, 8), (3, 5)):
        other = {key: value.repeat(2, 2)[:batch, :length] for key, value in inputs.items()}
        assert relative_l2(rewritten.module()(**other), model(**other)) < OUTPUT_ERROR


class Hidden(nn.Module):
    """A model that returns the first of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)[0]


def test_a_bert_without_the_output_of_its_pooler_goes_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, _, inputs = build("bert")
    packed, report = mxfp8_graph.rewrite(export(Hidden(model), **inputs), "mxfp8-weight-only")
    assert any("pooler" in s.decision.site.module for s in report.rewritten)
    path = mxfp8_graph.to_onnx(packed, tmp_path / "bert.onnx")
    found = mxfp8_graph.verify(packed, path, inputs={name: tensor.numpy() for name, tensor in inputs.items()})
    assert found.outputs[0].rewritten.relative_l2 < 1e-5


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_the_experts_of_a_mixture_are_rewritten(form: str) -> None:
    model, program, inputs = build("mixtral", form)
    rewritten, report = mxfp8_graph.rewrite(program)
    experts = [s.decision for s in report.sites if "experts" in s.decision.site.module]
    assert [d.quantize for d in experts] == [True, True]
    assert count(rewritten, "mxfp8.grouped_gemm") == (2 if form == "grouped_mm" else 0)
    assert not any("experts" in name and "mxfp8" not in name for name in rewritten.state_dict)
    with torch.no_grad():
        assert relative_l2(rewritten.module()(**inputs), model(**inputs)) < OUTPUT_ERROR
