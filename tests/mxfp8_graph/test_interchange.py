"""safetensors: what is written is what others expect, and what is read are the same bytes."""

import functools
import json
from pathlib import Path
from typing import Any

import builders
import numpy as np
import onnx
import pytest
import safetensors
import safetensors.torch
import torch
from grids import looped, pairwise

import mxfp8_graph
from mxfp8_graph.packed import safetensors as file_format
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops import numpy_nodes
from mxfp8_ops.errors import ContractError

CONVENTIONS = [("compressed-tensors", "weight_scale"), ("scale-inv", "weight_scale_inv")]
"""Their names, and how names of scales end."""


@functools.cache
def chain(recipe: Any = "mxfp8", sizes: tuple[int, ...] = (64, 128, 64)) -> onnx.ModelProto:
    return mxfp8_graph.rewrite(builders.chain_model(sizes), recipe)[0]


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """Returns what the safetensors package reads."""
    return dict(safetensors.torch.load_file(path))


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata())


def config(path: Path) -> dict[str, Any]:
    return dict(json.loads(metadata(path)["quantization_config"]))


@looped("suffixes, element_format, k", pairwise(suffixes=CONVENTIONS, element_format=["e4m3", "e5m2"], k=[64, 80, 33]))
def test_a_round_trip_keeps_every_bit(suffixes: Any, element_format: str, k: int, tmp_path: Path) -> None:
    model, path = chain.__wrapped__(Recipe(weight_format=element_format), (k, 40, 64)), tmp_path / "a.safetensors"
    mxfp8_graph.export_safetensors(model, path, convention=suffixes[0], overwrite=True)
    before, after = mxfp8_graph.unpack(model), mxfp8_graph.import_safetensors(path)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert (after[name].shape, after[name].element_format) == (weight.shape, weight.element_format)
        np.testing.assert_array_equal(after[name].elements, weight.elements)
        np.testing.assert_array_equal(after[name].scales, weight.scales)
        np.testing.assert_array_equal(after[name].dequantize(), weight.dequantize())


def test_stacked_weights_stay_stacked(tmp_path: Path) -> None:
    nodes = [builders.node("MatMul", "x w", "h"), builders.node("Relu", "h", "y")]
    shapes = {"x": (np.float32, [4, "m", 64])}, {"y": (np.float32, [4, "m", 96])}
    model, _ = mxfp8_graph.rewrite(builders.model(nodes, *shapes, {"w": builders.weight(4, 64, 96)}))
    path = mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors")
    assert mxfp8_graph.import_safetensors(path)["w"].shape == (4, 96, 64)


@looped("convention, suffix", CONVENTIONS)
def test_the_safetensors_package_reads_the_same(convention: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{suffix}.safetensors"
    tensors = theirs(mxfp8_graph.export_safetensors(chain(), path, convention=convention))
    for name, weight in mxfp8_graph.unpack(chain()).items():
        elements, scales = tensors[name], tensors[name.removesuffix("weight") + suffix]
        assert (elements.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.uint8)
        np.testing.assert_array_equal(elements.view(torch.uint8).numpy(), weight.elements)
        np.testing.assert_array_equal(scales.numpy(), weight.scales)
    if convention == "scale-inv":
        assert config(path)["quant_method"] == "mxfp8"
        assert config(path)["weight_block_size"] == [1, 32]
    external = mxfp8_graph.export_safetensors(
        builders.save(chain(), tmp_path / f"{suffix}.onnx", external=True), tmp_path / "b", convention=convention,
        overwrite=True,
    )  # fmt: skip
    assert external.read_bytes() == path.read_bytes()


@looped("suffix, dtype", [("_scale", torch.uint8), ("_scale_inv", torch.float8_e8m0fnu), ("_scale_inv", torch.uint8)])
def test_checkpoints_of_others_are_read(suffix: str, dtype: Any, tmp_path: Path) -> None:
    values = builders.weight(64, 96).T
    elements, scales = (torch.from_numpy(codes) for codes in numpy_nodes.quantize(values))
    tensors = {
        "model.up.weight": elements.view(torch.float8_e4m3fn),
        f"model.up.weight{suffix}": scales.view(dtype),
        "model.up.bias": torch.zeros(96, dtype=torch.bfloat16),
        "model.fp8.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "model.fp8.weight_scale": torch.ones(1),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    weights = mxfp8_graph.import_safetensors(tmp_path / "a.safetensors")
    assert [(w.name, w.module) for w in weights.values()] == [("model.up.weight", "model.up")]
    np.testing.assert_array_equal(weights["model.up.weight"].elements, elements.numpy())
    np.testing.assert_array_equal(weights["model.up.weight"].scales, scales.numpy())


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path) -> None:
    whole = theirs(mxfp8_graph.export_safetensors(chain(), tmp_path / "whole.safetensors"))
    shards = {name: f"shard-{'scale' in name}.safetensors" for name in whole}
    for shard in set(shards.values()):
        held = {name: tensor for name, tensor in whole.items() if shards[name] == shard}
        safetensors.torch.save_file(held, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    weights = mxfp8_graph.import_safetensors(index)
    for name, weight in mxfp8_graph.unpack(chain()).items():
        np.testing.assert_array_equal(weights[name].elements, weight.elements)
        np.testing.assert_array_equal(weights[name].scales, weight.scales)


class Tied(torch.nn.Module):
    """An embedding and an output projection that share one weight, and a linear between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.relu(self.inner(self.embed(ids))))


@pytest.fixture(scope="module")
def tied() -> Any:
    return torch.export.export(Tied().eval(), (torch.zeros(2, 3, dtype=torch.int64),))


@pytest.mark.parametrize("front_end", ["torch", "to_onnx", "onnx"])
def test_tensors_are_called_as_in_the_module_and_tied_ones_told_apart(
    front_end: str, tied: Any, tmp_path: Path
) -> None:
    program = model = tied
    if front_end == "onnx":
        model = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    model, _ = mxfp8_graph.rewrite(model, Recipe(output_projections=True))
    if front_end == "to_onnx":
        model = mxfp8_graph.to_onnx(model, tmp_path / "a.onnx")
    tensors = theirs(mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors"))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "embed.weight": (torch.float32, (100, 64)),
        "head.weight": (torch.float8_e4m3fn, (100, 64)),
        "head.weight_scale": (torch.uint8, (100, 2)),
        "inner.bias": (torch.float32, (64,)),
        "inner.weight": (torch.float8_e4m3fn, (64, 64)),
        "inner.weight_scale": (torch.uint8, (64, 2)),
    }
    np.testing.assert_array_equal(tensors["embed.weight"], program.state_dict["embed.weight"].detach())


def test_parameters_keep_their_16_bit_dtypes(tmp_path: Path) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

        def forward(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    module = Norm().to(torch.bfloat16)
    program = torch.export.export(module, (torch.zeros(2, 64, dtype=torch.bfloat16),))
    model, _ = mxfp8_graph.rewrite(program)
    tensors = theirs(mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors"))
    assert torch.equal(tensors["norm.weight"], module.norm.weight.detach())
    assert torch.equal(tensors["linear.bias"], module.linear.bias.detach().float())  # the kernels take it in float32


@pytest.mark.parametrize("front_end", ["torch", "onnx"])
def test_only_names_of_biases_that_were_copied_lose_their_suffix(front_end: str, tmp_path: Path) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)
            self.register_buffer("table_f32", torch.arange(64.0).to(torch.float16))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.linear(x)) * self.table_f32

    model: Any = torch.export.export(Table().half(), (torch.zeros(2, 64, dtype=torch.float16),))
    if front_end == "onnx":
        model = torch.onnx.export(model, dynamo=True, verbose=False).model_proto
    rewritten, _ = mxfp8_graph.rewrite(model, Recipe(output_projections=True))
    tensors = theirs(mxfp8_graph.export_safetensors(rewritten, tmp_path / "a.safetensors"))
    assert sorted(tensors) == ["linear.bias", "linear.weight", "linear.weight_scale", "table_f32"]
    assert tensors["linear.bias"].dtype == torch.float32


def test_the_quantization_config_says_which_modules_quantize_activations(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"rules": [{"name": r"layers\.0", "activations": "unchanged"}]})
    path = mxfp8_graph.export_safetensors(chain.__wrapped__(recipe), tmp_path / "a.safetensors")
    found = config(path)
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "mxfp8-quantized")
    first, second = found["config_groups"].values()
    assert (first["targets"], first["input_activations"]["dynamic"]) == (["layers.1"], True)
    assert (second["targets"], second["input_activations"]) == (["layers.0"], None)
    for group in (first, second):
        weights = group["weights"]
        assert (weights["num_bits"], weights["type"], weights["strategy"]) == (8, "float", "group")
        assert (weights["group_size"], weights["scale_dtype"]) == (32, "torch.uint8")


def test_the_recipe_is_recorded_and_tensors_are_aligned_to_their_dtype(tmp_path: Path) -> None:
    model, _ = mxfp8_graph.rewrite(builders.language_model(), Recipe(min_dim=1, scale_rounding="floor"))
    path = mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors")
    assert json.loads(metadata(path)["mxfp8_graph.recipe"])["scale_rounding"] == "floor"
    for tensor in file_format.read(path)[0].values():
        assert tensor.offset % file_format.DTYPES[tensor.dtype].itemsize == 0
    packed = mxfp8_graph.export_safetensors(model, tmp_path / "b.safetensors", weights_only=True)
    assert {"wte", "wpe", "lm_head.weight"} == theirs(path).keys() - theirs(packed).keys()


def test_what_is_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ContractError, match="model: no packed weights; expected a rewritten model"):
        mxfp8_graph.export_safetensors(builders.chain_model(), path)
    with pytest.raises(ContractError, match="convention: 'gguf'; expected one of compressed-tensors, scale-inv"):
        mxfp8_graph.export_safetensors(chain(), path, convention="gguf")


def test_an_existing_file_is_replaced_only_on_request_and_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    with pytest.raises(ContractError, match="exists already"):
        mxfp8_graph.export_safetensors(chain(), path)
    mxfp8_graph.export_safetensors(chain(), path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    source = builders.save(chain(), tmp_path / "a.onnx", external=True)
    (tmp_path / "a.onnx.data").unlink()
    with pytest.raises(ContractError, match="cannot read external file"):
        mxfp8_graph.export_safetensors(source, tmp_path / "b.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.onnx", path.name]


SWIZZLED = {
    "x.weight": torch.zeros(96, 64, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "x.weight_scale": torch.zeros(128, 4, dtype=torch.uint8),
}


@looped(
    "tensors, message",
    [
        ({"x.weight": torch.zeros(2, 2)}, "no MXFP8 weight; expected X.weight of float8"),
        (SWIZZLED, r"scales of shape \[128, 4\], not \[96, 2\].*unswizzled"),
    ],
)
def test_checkpoints_without_plain_mxfp8_are_refused(tensors: Any, message: str, tmp_path: Path) -> None:
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.import_safetensors(tmp_path / "a.safetensors")


@looped(
    "content",
    [b"", b"short", b"\xff" * 64, (4).to_bytes(8, "little") + b"oops", (2).to_bytes(8, "little") + b"[]"],
)
def test_files_of_another_kind_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ContractError, match="expected a safetensors file; check that it is one") as caught:
        mxfp8_graph.import_safetensors(tmp_path / "a.safetensors")
    assert str(caught.value).count("a.safetensors: ") == 1


def test_truncated_and_missing_files_and_what_is_no_index_are_refused(tmp_path: Path) -> None:
    path = mxfp8_graph.export_safetensors(chain(), tmp_path / "a.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ContractError, match="file not fully covered; expected a safetensors file"):
        mxfp8_graph.import_safetensors(path)
    with pytest.raises(ContractError, match="No such file"):
        mxfp8_graph.import_safetensors(tmp_path / "none.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ContractError, match="not the index of a checkpoint; expected JSON with a weight_map"):
        mxfp8_graph.import_safetensors(tmp_path / "config.json")
