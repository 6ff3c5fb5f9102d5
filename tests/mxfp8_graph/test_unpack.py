"""unpack: every packed weight under the name it had, with the bytes the model holds, read only when asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch
from onnx import TensorProto, helper
from releases import release

import mxfp8_graph
from mxfp8_graph.onnx_model import tensor_data as external
from mxfp8_graph.packed import PackedWeight, from_onnx
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops import contract, numerics
from mxfp8_ops.errors import ContractError, ShapeError


def rewritten(model: onnx.ModelProto, recipe: Any = "mxfp8") -> onnx.ModelProto:
    return mxfp8_graph.rewrite(model, recipe)[0]


def check(weight: PackedWeight, values: np.ndarray, element_format: str = "e4m3") -> None:
    """Fails unless `weight` is `values` [..., N, K], quantized."""
    elements, scales = numerics.quantize(values, element_format=element_format)
    assert weight.shape == values.shape
    assert weight.element_format == element_format
    np.testing.assert_array_equal(weight.elements, elements)
    np.testing.assert_array_equal(weight.scales, scales)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


def program(module: torch.nn.Module, *inputs: Any, recipe: Any = "mxfp8") -> Any:
    return mxfp8_graph.rewrite(torch.export.export(module.eval(), inputs), recipe)[0]


# --- From every kind of model ------------------------------------------------------------------------------------

CHAIN = {"layers.0.weight": builders.weight(64, 128).T, "layers.1.weight": builders.weight(128, 64, seed=1).T}


def as_path(folder: Path) -> Path:
    return builders.save(rewritten(builders.chain_model()), folder / "a.onnx")


def as_external(folder: Path) -> Path:
    return builders.save(rewritten(builders.chain_model()), folder / "a.onnx", external=True)


def as_proto(folder: Path) -> onnx.ModelProto:
    return rewritten(builders.chain_model())


def as_graph(folder: Path) -> gs.Graph:
    return gs.import_onnx(rewritten(builders.chain_model()))


@pytest.mark.parametrize("make", [as_path, as_external, as_proto, as_graph])
def test_onnx_models(make: Callable[[Path], Any], tmp_path: Path) -> None:
    weights = mxfp8_graph.unpack(make(tmp_path))
    assert list(weights) == list(CHAIN)
    for name, values in CHAIN.items():
        check(weights[name], values)


@pytest.mark.parametrize("saved", [False, True], ids=["program", "pt2"])
def test_exported_programs(saved: bool, tmp_path: Path) -> None:
    block = Block()
    model = program(block, torch.randn(2, 64))
    weights = mxfp8_graph.unpack(mxfp8_graph.save(model, tmp_path / "a.pt2") if saved else model)
    assert [(w.name, w.module) for w in weights.values()] == [("up.weight", "up"), ("down.weight", "down")]
    for name in ("up", "down"):
        check(weights[f"{name}.weight"], block.get_submodule(name).weight.detach().numpy())


def test_both_front_ends_unpack_alike(tmp_path: Path) -> None:
    model = program(Block(), torch.randn(2, 64))
    ours, theirs = mxfp8_graph.unpack(model), mxfp8_graph.unpack(mxfp8_graph.to_onnx(model, tmp_path / "a.onnx"))
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        assert (a.name, a.module, a.shape, a.element_format) == (b.name, b.module, b.shape, b.element_format)
        np.testing.assert_array_equal(a.elements, b.elements)
        np.testing.assert_array_equal(a.scales, b.scales)


def test_a_model_that_was_not_rewritten_has_none() -> None:
    assert not mxfp8_graph.unpack(builders.chain_model())


def test_anything_else_is_refused() -> None:
    with pytest.raises(ContractError, match="unpack: a Linear; expected a path"):
        mxfp8_graph.unpack(torch.nn.Linear(2, 2))


# --- One weight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", numerics.VALUE_DTYPES)
def test_dequantize_gives_the_values_in_the_dtype_asked_for(dtype: str) -> None:
    weight = mxfp8_graph.unpack(as_proto(Path()))["layers.0.weight"]
    codes = numerics.quantize(CHAIN["layers.0.weight"])
    values = weight.dequantize(dtype)
    assert values.dtype.name == dtype
    np.testing.assert_array_equal(values, numerics.dequantize(*codes, dtype=dtype))


def test_dequantize_refuses_other_dtypes() -> None:
    with pytest.raises(ShapeError, match="'float64'; expected one of float32"):
        mxfp8_graph.unpack(as_proto(Path()))["layers.0.weight"].dequantize("float64")


def test_e5m2_and_any_k() -> None:
    model = rewritten(builders.chain_model((80, 40, 64)), Recipe(weight_format="e5m2"))
    check(mxfp8_graph.unpack(model)["layers.0.weight"], builders.weight(80, 40).T, "e5m2")


def test_whether_activations_are_quantized_is_known() -> None:
    recipe = Recipe.model_validate({"rules": [{"name": r"layers\.0", "activations": "unchanged"}]})
    weights = mxfp8_graph.unpack(rewritten(builders.chain_model(), recipe))
    assert [weight.weight_only for weight in weights.values()] == [True, False]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = as_external(tmp_path), []

    def recorded(tensor: onnx.TensorProto, *where: Any) -> bytes:
        read.append(tensor.name)
        return external.raw(tensor, *where)

    monkeypatch.setattr(from_onnx, "raw", recorded)
    weights = mxfp8_graph.unpack(path)
    assert read == []
    assert weights["layers.1.weight"].scales.size
    assert read == ["layers.1.weight_mxfp8_scales"]


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    path = as_external(tmp_path)
    (tmp_path / "a.onnx.data").unlink()
    # onnx before 1.20 also puts the table in a node's function body there.
    tensor = "tensor 'layers.0.weight_mxfp8'" if release("onnx") >= (1, 20) else "a tensor without a name"
    with pytest.raises(ContractError, match=rf"{tensor}: cannot read external file .*a.onnx.data"):
        _ = mxfp8_graph.unpack(path)["layers.0.weight"].elements


def test_scales_that_do_not_fit_are_refused() -> None:
    model = as_proto(Path())
    scales = next(t for t in model.graph.initializer if t.name == "layers.0.weight_mxfp8_scales")
    scales.CopyFrom(helper.make_tensor(scales.name, TensorProto.UINT8, [128, 1], bytes(128), raw=True))
    with pytest.raises(ContractError, match=r"scales of shape \[128, 1\]; expected \[128, 2\]"):
        _ = mxfp8_graph.unpack(model)["layers.0.weight"].scales


# --- Names -------------------------------------------------------------------------------------------------------


def test_a_shared_weight_is_listed_once() -> None:
    nodes = [builders.node("MatMul", "x w", "h"), builders.node("MatMul", "h w", "g"), builders.node("Relu", "g", "y")]
    shape = {"x": (np.float32, ["m", 64])}
    model = builders.model(nodes, shape, {"y": (np.float32, ["m", 64])}, {"w": builders.weight(64, 64)})
    assert list(mxfp8_graph.unpack(rewritten(model))) == ["w"]


def test_a_weight_packed_in_two_ways_is_listed_twice() -> None:
    nodes = [builders.node("MatMul", "x w", "h", "a"), builders.node("MatMul", "h w", "g", "b")]
    nodes.append(builders.node("Relu", "g", "y"))
    shape = {"x": (np.float32, ["m", 64])}
    model = builders.model(nodes, shape, {"y": (np.float32, ["m", 64])}, {"w": builders.weight(64, 64)})
    recipe = Recipe.model_validate({"rules": [{"name": "^b$", "weight_format": "e5m2"}]})
    weights = mxfp8_graph.unpack(rewritten(model, recipe))
    assert {name: weight.element_format for name, weight in weights.items()} == {"w": "e4m3", "w_2": "e5m2"}


def test_a_weight_that_the_exporter_renamed_is_known_by_its_module() -> None:
    model = builders.matmul_model()
    scopes = "['', 'model.up', 'linear']"
    next(n for n in model.graph.node if n.name == "linear").metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value=scopes
    )
    weight = mxfp8_graph.unpack(rewritten(model))["w"]
    assert (weight.name, weight.module, weight.parameter) == ("w", "model.up", "model.up.weight")


@pytest.mark.parametrize("front_end", ["onnx", "torch"])
def test_weights_inside_control_flow(front_end: str, tmp_path: Path) -> None:
    class Choice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, self.yes, self.no, (x,))

    module = Choice()
    model = program(module, torch.randn(2, 64), recipe=Recipe(output_projections=True))
    if front_end == "onnx":
        model = mxfp8_graph.to_onnx(model, tmp_path / "a.onnx")
    weights = mxfp8_graph.unpack(model)
    for name in ("yes", "no"):
        check(weights[f"{name}.weight"], module.get_submodule(name).weight.detach().numpy())


# --- TensorRT's nodes --------------------------------------------------------------------------------------------


def trt_model(elements: TensorProto, scales: TensorProto, **attributes: int) -> onnx.ModelProto:
    """x @ transpose(dequantized w), as modelopt and TransformerEngine write it."""
    nodes = [
        helper.make_node("TRT_MXFP8DequantizeLinear", ["w", "w_scale"], ["values"], domain="trt", **attributes),
        builders.node("Transpose", "values", "turned", perm=[1, 0]),
        builders.node("MatMul", "x turned", "y"),
    ]
    graph = helper.make_graph(
        nodes,
        "trt",
        [builders.value("x", np.float32, ["m", elements.dims[1]])],
        [builders.value("y", np.float32, ["m", elements.dims[0]])],
        [elements, scales],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("trt", 1)])


def tensor(name: str, dtype: int, data: np.ndarray) -> TensorProto:
    return helper.make_tensor(name, dtype, data.shape, data.tobytes(), raw=True)


def test_tensorrt_s_weights_are_not_packed_again() -> None:
    elements, scales = numerics.quantize(builders.weight(64, 96).T)
    stored = tensor("w", TensorProto.FLOAT8E4M3FN, elements), tensor("w_scale", TensorProto.UINT8, scales)
    with pytest.raises(ContractError, match=r"MXFP8 already, as trt; .* mxfp8-graph convert MODEL --to mxfp8"):
        mxfp8_graph.rewrite(trt_model(*stored, axis=-1), Recipe(output_projections=True))


def test_the_weights_of_modelopt() -> None:
    values = builders.weight(64, 96).T
    codes = numerics.quantize(values)
    stored = tensor("w", TensorProto.FLOAT8E4M3FN, codes[0]), tensor("w_scale", TensorProto.UINT8, codes[1])
    weights = mxfp8_graph.unpack(trt_model(*stored, axis=-1, block_size=32, output_dtype=1))
    assert weights["w"].weight_only is None
    check(weights["w"], values)


def test_the_weights_of_transformer_engine() -> None:
    values = builders.weight(64, 96).T
    elements, scales = numerics.quantize(values)
    padded = np.full((128, 4), 255, np.uint8)
    padded[:96, :2] = scales
    stored = tensor("w", TensorProto.UINT8, elements), tensor("w_scale", TensorProto.UINT8, padded)
    check(mxfp8_graph.unpack(trt_model(*stored))["w"], values)


def test_weights_blocked_along_the_first_axis_come_with_k_last() -> None:
    values = builders.weight(64, 96)  # [K, N]
    elements, scales = numerics.quantize(values, axis=0)
    stored = tensor("w", TensorProto.FLOAT8E4M3FN, elements), tensor("w_scale", TensorProto.UINT8, scales)
    check(mxfp8_graph.unpack(trt_model(*stored, axis=0))["w"], values.T)


def test_the_shapes_say_which_axis_has_the_blocks() -> None:
    values = builders.weight(64, 96)  # [K, N]
    elements, scales = numerics.quantize(values, axis=0)
    stored = tensor("w", TensorProto.FLOAT8E4M3FN, elements), tensor("w_scale", TensorProto.UINT8, scales)
    check(mxfp8_graph.unpack(trt_model(*stored))["w"], values.T)
    with pytest.raises(ContractError, match=r"has scales \[2, 96\] for elements \[64, 96\]; expected one for 32"):
        mxfp8_graph.unpack(trt_model(*stored, axis=1))


def test_our_own_dequantize_node_is_read_too() -> None:
    values = builders.weight(64, 96).T
    elements, scales = numerics.quantize(values, element_format="e5m2")
    node = helper.make_node(
        contract.DEQUANTIZE.name, ["w_mxfp8", "s"], ["y"], domain="mxfp8", **contract.DEQUANTIZE.attributes
    )
    stored = [tensor("w_mxfp8", TensorProto.FLOAT8E5M2, elements), tensor("s", TensorProto.UINT8, scales)]
    graph = helper.make_graph([node], "g", [], [builders.value("y", np.float32, values.shape)], stored)
    weights = mxfp8_graph.unpack(helper.make_model(graph))
    check(weights["w"], values, "e5m2")
