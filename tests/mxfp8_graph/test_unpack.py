"""unpack: every packed weight under the name it had, with the bytes the model holds, read only when asked for."""

from pathlib import Path
from typing import Any

import models as builders
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import pytest
import torch
from dialect_models import made, stored, trt
from onnx import TensorProto, helper
from torch_programs import export

import mxfp8_graph
from mxfp8_graph.packed import PackedWeight
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops import contract, numerics, numpy_nodes
from mxfp8_ops.errors import ContractError, ShapeError


def rewritten(model: onnx.ModelProto, recipe: Any = "mxfp8") -> onnx.ModelProto:
    return mxfp8_graph.rewrite(model, recipe)[0]


def check(weight: PackedWeight, values: np.ndarray, element_format: str = "e4m3") -> None:
    """Fails unless `weight` is `values` [..., N, K], quantized."""
    elements, scales = numpy_nodes.quantize(values, element_format=element_format)
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


CHAIN = {"layers.0.weight": builders.weight(64, 128).T, "layers.1.weight": builders.weight(128, 64, seed=1).T}


@pytest.fixture(scope="module")
def proto() -> onnx.ModelProto:
    return rewritten(builders.chain_model())


def test_onnx_models_in_every_form_are_unpacked(proto: onnx.ModelProto, tmp_path: Path) -> None:
    path, external = (builders.save(proto, tmp_path / name, external=name == "b.onnx") for name in ("a.onnx", "b.onnx"))
    for model in (proto, path, external, gs.import_onnx(proto)):
        weights = mxfp8_graph.unpack(model)
        assert list(weights) == list(CHAIN)
        for name, values in CHAIN.items():
            check(weights[name], values)
    assert not mxfp8_graph.unpack(builders.chain_model())
    with pytest.raises(ContractError, match="unpack: a Linear; expected a path"):
        mxfp8_graph.unpack(torch.nn.Linear(2, 2))


def test_programs_and_what_to_onnx_makes_of_them_are_unpacked(tmp_path: Path) -> None:
    packed, _ = mxfp8_graph.rewrite(export(Block(), torch.randn(2, 64)))
    saved, exported = mxfp8_graph.save(packed, tmp_path / "a.pt2"), tmp_path / "a.onnx"
    for model in (packed, saved, mxfp8_graph.to_onnx(packed, exported)):
        weights = mxfp8_graph.unpack(model)
        assert [(w.name, w.module) for w in weights.values()] == [("up.weight", "up"), ("down.weight", "down")]
        for name in ("up", "down"):
            check(weights[f"{name}.weight"], Block().get_submodule(name).weight.detach().numpy())


def test_dequantize_gives_the_values_in_the_dtype_asked_for(proto: onnx.ModelProto) -> None:
    weight = mxfp8_graph.unpack(proto)["layers.0.weight"]
    codes = numpy_nodes.quantize(CHAIN["layers.0.weight"])
    for dtype in numerics.VALUE_DTYPES:
        values = weight.dequantize(dtype)
        assert values.dtype.name == dtype
        np.testing.assert_array_equal(values, numpy_nodes.dequantize(*codes, dtype=dtype))
    with pytest.raises(ShapeError, match="'float64'; expected one of float32"):
        weight.dequantize("float64")


def test_a_weight_has_its_format_its_module_and_whether_activations_are_quantized() -> None:
    model = builders.chain_model((80, 40, 64))
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model.up', 'linear']")
    rules = [{"name": r"model\.up", "activations": "unchanged", "weight_format": "e5m2"}]
    first, second = mxfp8_graph.unpack(rewritten(model, Recipe.model_validate({"rules": rules}))).values()
    check(first, builders.weight(80, 40).T, "e5m2")
    assert (first.name, first.module, first.parameter) == ("layers.0.weight", "model.up", "model.up.weight")
    assert (first.weight_only, second.weight_only) == (True, False)


def test_nothing_is_read_before_it_is_asked_for(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = builders.save(proto, tmp_path / "a.onnx", external=True), []
    numpy = ir.ExternalTensor.numpy
    monkeypatch.setattr(ir.ExternalTensor, "numpy", lambda tensor: (read.append(tensor.name), numpy(tensor))[1])
    weights = mxfp8_graph.unpack(path)
    assert read == []
    assert weights["layers.1.weight"].elements.size
    assert read == ["layers.1.weight_mxfp8"]
    (tmp_path / "a.onnx.data").unlink()
    with pytest.raises(ContractError, match=r"tensor 'layers.0.weight_mxfp8': .*No such file.*a.onnx.data"):
        _ = weights["layers.0.weight"].elements
    with pytest.raises(ContractError, match=r"tensor '.*': cannot read external file .*a.onnx.data"):
        mxfp8_graph.unpack(path)


def test_scales_that_do_not_fit_are_refused(proto: onnx.ModelProto) -> None:
    model = onnx.ModelProto.FromString(proto.SerializeToString())
    scales = next(t for t in model.graph.initializer if t.name == "layers.0.weight_mxfp8_scales")
    scales.CopyFrom(stored(scales.name, TensorProto.UINT8, np.zeros((128, 1), np.uint8)))
    with pytest.raises(ContractError, match=r"scales of shape \[128, 1\]; expected \[128, 2\]"):
        _ = mxfp8_graph.unpack(model)["layers.0.weight"].scales


def test_a_shared_weight_is_listed_once_unless_it_is_packed_in_two_ways() -> None:
    nodes, shape = builders.steps("a:MatMul x w>h; b:MatMul h w>g; Relu g>y"), (np.float32, ["m", 64])
    model = builders.model(nodes, {"x": shape}, {"y": shape}, {"w": builders.weight(64, 64)})
    assert list(mxfp8_graph.unpack(rewritten(model))) == ["w"]
    recipe = Recipe.model_validate({"rules": [{"name": "^b$", "weight_format": "e5m2"}]})
    weights = mxfp8_graph.unpack(rewritten(model, recipe))
    assert {name: weight.element_format for name, weight in weights.items()} == {"w": "e4m3", "w_2": "e5m2"}


def test_weights_inside_control_flow_are_listed_where_they_run() -> None:
    y = builders.value("y0", np.float32, ["m", 64])
    tensors = [onnx.numpy_helper.from_array(builders.weight(64, 64), "w")]
    body = helper.make_graph(builders.steps("MatMul x w>y0"), "then", [], [y], tensors)
    other = helper.make_graph(builders.steps("Identity x>y0"), "else", [], [y])
    nodes = [builders.node("If", "c", "h", then_branch=body, else_branch=other), *builders.steps("MatMul h v>y")]
    ends = {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 64])}
    model = builders.model(nodes, *ends, {"v": builders.weight(64, 64, seed=1), "c": np.array(True)})
    assert list(mxfp8_graph.unpack(rewritten(model, Recipe(output_projections=True)))) == ["w", "v"]


VALUES = builders.weight(64, 96)  # [K, N]


def trt_model(codes: tuple[np.ndarray, np.ndarray], dtype: int = TensorProto.FLOAT8E4M3FN, **axes: int) -> Any:
    """x @ transpose(dequantized w), as modelopt and TransformerEngine write it."""
    nodes = [trt("DequantizeLinear", "w w_scale", "values", **axes)]
    nodes += builders.steps("Transpose values>turned|perm=[1,0]; MatMul x turned>y")
    return made(nodes, [stored("w", dtype, codes[0]), stored("w_scale", TensorProto.UINT8, codes[1])])


def test_the_weights_of_modelopt_and_transformer_engine_are_unpacked_and_not_packed_again() -> None:
    codes = numpy_nodes.quantize(VALUES.T)
    weights = mxfp8_graph.unpack(trt_model(codes, axis=-1, block_size=32, output_dtype=1))
    assert weights["w"].weight_only is None
    check(weights["w"], VALUES.T)
    with pytest.raises(ContractError, match=r"MXFP8 already, as trt; .* mxfp8-graph convert MODEL --to mxfp8"):
        mxfp8_graph.rewrite(trt_model(codes, axis=-1), Recipe(output_projections=True))
    padded = np.full((128, 4), 255, np.uint8)
    padded[:96, :2] = codes[1]
    check(mxfp8_graph.unpack(trt_model((codes[0], padded), TensorProto.UINT8))["w"], VALUES.T)


def test_our_own_dequantize_node_is_read_too() -> None:
    elements, scales = numpy_nodes.quantize(VALUES.T, element_format="e5m2")
    settings = contract.DEQUANTIZE.attributes
    node = builders.node(contract.DEQUANTIZE.name, "w_mxfp8 s", "y", domain="mxfp8", **settings)
    tensors = [stored("w_mxfp8", TensorProto.FLOAT8E5M2, elements), stored("s", TensorProto.UINT8, scales)]
    graph = helper.make_graph([node], "g", [], [builders.value("y", np.float32, elements.shape)], tensors)
    check(mxfp8_graph.unpack(helper.make_model(graph))["w"], VALUES.T, "e5m2")


def test_weights_blocked_along_the_first_axis_come_with_k_last() -> None:
    codes = numpy_nodes.quantize(VALUES, axis=0)
    for axes in ({"axis": 0}, {}):  # the shapes say which axis has the blocks
        check(mxfp8_graph.unpack(trt_model(codes, **axes))["w"], VALUES.T)
    with pytest.raises(ContractError, match=r"uint8 scales \[2, 96\] for elements \[64, 96\]; expected uint8,"):
        mxfp8_graph.unpack(trt_model(codes, axis=1))
