"""Programs that take a cache of transformers: read, rewritten and run without trusting their files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")
if not hasattr(exporter, "register_pytree_node"):
    pytest.skip(f"transformers {transformers.__version__} registers no containers", allow_module_level=True)

from torch import Tensor  # noqa: E402
from torch.export import ExportedProgram  # noqa: E402
from torch_programs import SAMPLES, Apply, export, records, values, write  # noqa: E402
from transformers.exporters.exporter_dynamo import register_pytree_node  # noqa: E402
from transformers.integrations.executorch import register_dynamic_cache_export_support  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402


def decoder(cache: Any) -> ExportedProgram:
    """Returns a Llama that continues three tokens of which `cache` makes an empty cache."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).eval()
    past = cache(config)
    with torch.no_grad():
        model(input_ids=torch.arange(4)[None], past_key_values=past, use_cache=True)
    inputs = {"input_ids": torch.arange(4, 7)[None], "past_key_values": past, "use_cache": True}
    return torch.export.export(model, (), inputs, strict=False)


@pytest.fixture(scope="module")
def dynamic() -> ExportedProgram:
    register_dynamic_cache_export_support()
    return decoder(lambda config: transformers.DynamicCache(config=config))


@pytest.fixture(scope="module")
def static() -> ExportedProgram:
    """As transformers' own exporter registers caches."""
    register_pytree_node(transformers.StaticCache)
    return decoder(lambda config: transformers.StaticCache(config=config, max_cache_len=16))


@pytest.mark.parametrize(
    ("cache", "save"),
    [
        pytest.param("dynamic", torch.export.save, id="a dynamic cache in torch's file"),
        pytest.param("static", mxfp8_graph.save, id="a static cache in ours"),
    ],
)
def test_samples_are_what_they_were(cache: str, save: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program: ExportedProgram = request.getfixturevalue(cache)
    save(program, tmp_path / "model.pt2")
    loaded = mxfp8_graph.load(tmp_path / "model.pt2")
    before, after = (p.example_inputs[1]["past_key_values"] for p in (program, loaded))
    assert type(after) is type(before)
    assert [type(layer) for layer in after.layers] == [type(layer) for layer in before.layers]
    assert torch.equal(after.layers[0].keys, before.layers[0].keys)
    assert loaded.call_spec.in_spec == program.call_spec.in_spec


def test_the_command_line_in_new_processes_trusts_nothing(dynamic: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(dynamic, tmp_path / "model.pt2")
    for command in ("rewrite model.pt2", "verify model.pt2 model.mxfp8.pt2"):
        code, printed = forked.run(["mxfp8-graph", *command.split()], tmp_path)
        assert code == 0, printed


def test_saved_samples_are_plain(dynamic: ExportedProgram, tmp_path: Path) -> None:
    path = mxfp8_graph.save(dynamic, tmp_path / "model.pt2")
    leaves, keywords = torch.load(io.BytesIO(records(path)[SAMPLES]), weights_only=True)
    assert ([type(leaf) for leaf in leaves], keywords) == ([Tensor, Tensor, Tensor, bool], {})
    assert dynamic.example_inputs[1].keys() == {"input_ids", "past_key_values", "use_cache"}


def test_samples_of_a_class_that_its_owner_registers(tmp_path: Path) -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="test_torch_caches.Pair")
    program = export(Apply(lambda m, x: x.a + x.b, {}), Pair(values(2, 3), values(2, 3)))
    loaded = mxfp8_graph.load(mxfp8_graph.save(program, tmp_path / "pair.pt2"))
    assert isinstance(loaded.example_inputs[0][0], Pair)


def test_a_file_with_another_number_of_samples_is_refused(dynamic: ExportedProgram, tmp_path: Path) -> None:
    path = mxfp8_graph.save(dynamic, tmp_path / "model.pt2")
    content = records(path)
    leaves, keywords = torch.load(io.BytesIO(content[SAMPLES]), weights_only=True)
    torch.save((leaves[:-1], keywords), buffer := io.BytesIO())
    with pytest.raises(ContractError, match="cannot read the program"):
        mxfp8_graph.load(write(path, {**content, SAMPLES: buffer.getvalue()}))
