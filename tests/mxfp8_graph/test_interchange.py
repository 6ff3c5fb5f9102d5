"""safetensors: what is written is what others expect, and what is read are the same bytes."""

import functools
import json
from pathlib import Path
from typing import Any

import checkpoints as ck
import ml_dtypes
import models as b
import numpy as np
import onnx
import properties
import pytest
import safetensors
import safetensors.torch
import torch
from grids import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_programs import export

import mxfp8_graph
from mxfp8_graph.packed import safetensors as file_format
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import ContractError

CONVENTIONS = [("compressed-tensors", "weight_scale"), ("scale-inv", "weight_scale_inv")]
"""Their names, and how names of scales end."""


@functools.cache
def chain() -> onnx.ModelProto:
    return rewritten(b.chain_model())


def rewritten(model: Any, recipe: Any = "mxfp8") -> Any:
    return mxfp8_graph.rewrite(model, recipe)[0]


# --- What is written -------------------------------------------------------------------------------------------------


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """Returns what the safetensors package reads."""
    return dict(safetensors.torch.load_file(path))


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata())


def config(path: Path) -> dict[str, Any]:
    return dict(json.loads(metadata(path)["quantization_config"]))


NAMES = st.lists(
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8), min_size=1, max_size=3, unique=True
)
SHAPES = st.sampled_from([(32, 32), (33, 40), (70, 64), (2, 64, 40), (31, 96), (64, 1)])
RECIPES = st.builds(
    Recipe,
    min_dim=st.just(1),
    activations=st.sampled_from(["e4m3", "unchanged"]),
    weight_format=st.sampled_from(["e4m3", "e5m2"]),
    scale_rounding=st.sampled_from(["ceil", "floor", "even"]),
)


@st.composite
def models(draw: Any) -> onnx.ModelProto:
    """Draws a model of weights with any names and shapes, each multiplied with an input of its own."""
    nodes, inputs, outputs, weights = [], {}, {}, {}
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    for index, name in enumerate(draw(NAMES)):
        shape = draw(SHAPES)
        inputs[f"x{index}"] = (dtype, [*shape[:-2], "m", shape[-2]])
        outputs[f"y{index}"] = (dtype, [*shape[:-2], "m", shape[-1]])
        product = onnx.helper.make_node("MatMul", [f"x{index}", f"{name}.weight"], [f"h{index}"], name=f"matmul{index}")
        nodes += [product, b.node("Relu", f"h{index}", f"y{index}")]
        weights[f"{name}.weight"] = draw(properties.values(shape, dtype, finite=True, calm=True))
    return b.model(nodes, inputs, outputs, weights)


@settings(max_examples=20)
@given(models(), RECIPES, st.sampled_from(["compressed-tensors", "scale-inv"]))
def test_a_round_trip_keeps_every_bit_and_writes_the_same_file_again(
    tmp_path: Path, graph: onnx.ModelProto, recipe: Recipe, convention: str
) -> None:
    model, path = rewritten(graph, recipe), tmp_path / "a.safetensors"
    mxfp8_graph.export_safetensors(model, path, convention=convention, overwrite=True)
    written = path.read_bytes()
    before, after = mxfp8_graph.unpack(model), mxfp8_graph.import_safetensors(path)
    assert after.keys() == before.keys() == {tensor.name for tensor in graph.graph.initializer}
    for name, weight in before.items():
        found = after[name]
        assert (found.shape, found.element_format) == (weight.shape, weight.element_format)
        assert found.elements.tobytes() == weight.elements.tobytes()
        assert found.scales.tobytes() == weight.scales.tobytes()
        assert found.dequantize().tobytes() == weight.dequantize().tobytes()
    mxfp8_graph.export_safetensors(model, path, convention=convention, overwrite=True)
    assert path.read_bytes() == written


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
        assert (config(path)["quant_method"], config(path)["weight_block_size"]) == ("mxfp8", [1, 32])
    model = b.save(chain(), tmp_path / f"{suffix}.onnx", external=True)
    external = mxfp8_graph.export_safetensors(model, tmp_path / f"b{suffix}", convention=convention)
    assert external.read_bytes() == path.read_bytes()


class Tied(torch.nn.Module):
    """An embedding and an output projection that share one weight, and a linear between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.relu(self.inner(self.embed(ids))))


def in_onnx(program: Any) -> onnx.ModelProto:
    return torch.onnx.export(program, dynamo=True, verbose=False).model_proto


@pytest.mark.parametrize("front_end", ["torch", "to_onnx", "onnx"])
def test_tensors_are_called_as_in_the_module_and_tied_ones_told_apart(front_end: str, tmp_path: Path) -> None:
    program = export(Tied(), torch.zeros(2, 3, dtype=torch.int64))
    model = rewritten(in_onnx(program) if front_end == "onnx" else program, Recipe(output_projections=True))
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
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).to(torch.bfloat16)
    model = rewritten(export(module, torch.zeros(2, 64, dtype=torch.bfloat16)))
    tensors = theirs(mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors"))
    assert torch.equal(tensors["1.weight"], module[1].weight.detach())
    assert torch.equal(tensors["0.bias"], module[0].bias.detach().float())  # the kernels take it in float32


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("table_f32", torch.arange(64.0).to(torch.float16))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x)) * self.table_f32


@pytest.mark.parametrize("front_end", [lambda program: program, in_onnx], ids=["torch", "onnx"])
def test_only_names_of_biases_that_were_copied_lose_their_suffix(front_end: Any, tmp_path: Path) -> None:
    program = export(Table().half(), torch.zeros(2, 64, dtype=torch.float16))
    model = rewritten(front_end(program), Recipe(output_projections=True))
    tensors = theirs(mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors"))
    assert sorted(tensors) == ["linear.bias", "linear.weight", "linear.weight_scale", "table_f32"]
    assert tensors["linear.bias"].dtype == torch.float32


def test_the_quantization_config_says_which_modules_quantize_activations(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"rules": [{"name": r"layers\.0", "activations": "unchanged"}]})
    model = rewritten(b.chain_model(), recipe)
    found = config(mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors"))
    assert (found["quant_method"], found["format"]) == ("compressed-tensors", "mxfp8-quantized")
    first, second = found["config_groups"].values()
    assert (first["targets"], first["input_activations"]["dynamic"]) == (["layers.1"], True)
    assert (second["targets"], second["input_activations"]) == (["layers.0"], None)
    for group in (first, second):
        weights = group["weights"]
        assert (weights["num_bits"], weights["type"], weights["strategy"]) == (8, "float", "group")
        assert (weights["group_size"], weights["scale_dtype"]) == (32, "torch.uint8")


def test_the_recipe_is_recorded_and_tensors_are_aligned_to_their_dtype(tmp_path: Path) -> None:
    model = rewritten(b.language_model(), Recipe(min_dim=1, scale_rounding="floor"))
    path = mxfp8_graph.export_safetensors(model, tmp_path / "a.safetensors")
    assert json.loads(metadata(path)["mxfp8_graph.recipe"])["scale_rounding"] == "floor"
    for tensor in file_format.read(path)[0].values():
        assert tensor.offset % file_format.DTYPES[tensor.dtype].itemsize == 0
    packed = mxfp8_graph.export_safetensors(model, tmp_path / "b.safetensors", weights_only=True)
    assert {"wte", "wpe", "lm_head.weight"} == theirs(path).keys() - theirs(packed).keys()


def test_an_export_that_fails_leaves_nothing_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    source = b.save(chain(), tmp_path / "a.onnx", external=True)
    (tmp_path / "a.onnx.data").unlink()
    for model, said in ((chain(), "exists already"), (source, "cannot read external file")):
        with pytest.raises(ContractError, match=said):
            mxfp8_graph.export_safetensors(model, path, overwrite=model is source)
    with pytest.raises(ContractError, match="model: no packed weights; expected a rewritten model"):
        mxfp8_graph.export_safetensors(b.chain_model(), path, overwrite=True)
    with pytest.raises(ContractError, match="convention: 'gguf'; expected one of compressed-tensors, scale-inv"):
        mxfp8_graph.export_safetensors(chain(), path, convention="gguf", overwrite=True)
    assert path.read_text() == "mine"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.onnx", path.name]


# --- What is read ----------------------------------------------------------------------------------------------------


def test_fp8_weights_with_one_scale_per_tensor_are_left_out(tmp_path: Path) -> None:
    up = ck.codes(96, 64)
    others = {
        "model.up.bias": np.zeros(96, ml_dtypes.bfloat16),
        "model.fp8.weight": np.zeros((4, 4), ml_dtypes.float8_e4m3fn),
        "model.fp8.weight_scale": np.ones(1, np.float32),
    }
    weights = mxfp8_graph.import_safetensors(ck.save(tmp_path / "a.safetensors", {"model.up.weight": up}, **others))
    assert [(w.name, w.module) for w in weights.values()] == [("model.up.weight", "model.up")]
    ck.check_bytes(weights, {"model.up.weight": up})


def with_header(path: Path, header: bytes, data: bytes = bytes(4 * 64 + 4 * 2)) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


WEIGHT = {"dtype": "F8_E4M3", "shape": [4, 64], "data_offsets": [0, 256]}
SCALES = {"dtype": "U8", "shape": [4, 2], "data_offsets": [256, 264]}


@looped(
    "header, message",
    [
        ({"up.weight": WEIGHT, "up.weight_scale": SCALES}, ""),
        ({"up.weight": {**WEIGHT, "shape": [4, 63]}, "up.weight_scale": SCALES}, "invalid shape, data type, or offset"),
        ({"up.weight": {**WEIGHT, "data_offsets": [1000, 1256]}, "up.weight_scale": SCALES}, "invalid offset"),
        ({"up.weight": WEIGHT}, "incomplete metadata, file not fully covered"),
        ({"__metadata__": {"a": 1}, "up.weight": WEIGHT, "up.weight_scale": SCALES}, "integer `1`, expected a string"),
        ([WEIGHT], "invalid JSON in header: invalid type: sequence"),
        ("oops", "invalid type: string"),
    ],
)
def test_a_header_that_safetensors_refuses_is_an_error(header: Any, message: str, tmp_path: Path) -> None:
    path = with_header(tmp_path / "a.safetensors", json.dumps(header).encode())
    if not message:
        assert mxfp8_graph.import_safetensors(path)["up.weight"].elements.shape == (4, 64)
        return
    with pytest.raises(
        ContractError, match=f"{message}.*; expected a safetensors file; check that it is one"
    ) as caught:
        mxfp8_graph.import_safetensors(path)
    assert str(caught.value).count("a.safetensors: ") == 1


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    path = mxfp8_graph.export_safetensors(chain(), tmp_path / "a.safetensors")
    for content, said in (
        (path.read_bytes()[:-1], "file not fully covered; expected a safetensors file"),
        (b"short", "expected a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "header too large; expected a safetensors file"),
        (None, "No such file"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ContractError, match=said):
            mxfp8_graph.import_safetensors(path)
    ck.save(path, {}, **{"x.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ContractError, match=r"no MXFP8 weight; expected X\.weight of float8"):
        mxfp8_graph.import_safetensors(path)


# --- Indexes ---------------------------------------------------------------------------------------------------------


@looped("text", ["{}", "[]", "[[", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_json_that_is_no_index_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ContractError, match="not the index of a checkpoint; expected JSON with a weight_map"):
        mxfp8_graph.import_safetensors(path)
