"""INT8 elements (MXINT8) from a recipe to a result: both front ends, checkpoints, and what refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models as b
import numpy as np
import onnx
import oracle
import pytest
import safetensors
import torch
from grids import looped

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.policy.plan import Rule
from mxfp8_graph.running.sessions import Session
from mxfp8_ops import numpy_nodes
from mxfp8_ops.errors import ContractError, RecipeError


def relative(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(y.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def formats_of(model: Any) -> dict[str, str]:
    return {name: weight.element_format for name, weight in mxfp8_graph.unpack(model).items()}


def sums(a: np.ndarray, b: np.ndarray, **formats: str | None) -> np.ndarray:
    """Returns the product a [.., K] @ b [K, N] of the operands as these formats hold them, in float64."""
    blocked = {"x": a, "w": np.ascontiguousarray(b.T)}
    for name, element_format in formats.items():
        if element_format is not None:
            codes = numpy_nodes.quantize(blocked[name], element_format=element_format, scale_rounding="floor")
            blocked[name] = numpy_nodes.dequantize(*codes, element_format=element_format)
    return blocked["x"].astype(np.float64) @ blocked["w"].astype(np.float64).T


@looped("recipe, activations, k", [("mxint8", "int8", 64), ("mxint8", "int8", 70), ("mxint8-weight-only", None, 70)])
def test_a_matmul_multiplies_int8_elements_with_floor_scales(recipe: str, activations: str | None, k: int) -> None:
    model = b.matmul_model(k, 33)
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    x = oracle.normal(5, k)
    rewritten, _ = mxfp8_graph.rewrite(model, recipe)
    assert set(formats_of(rewritten).values()) == {"int8"}
    (y,) = oracle.run(rewritten, {"x": x[None]})
    expected = np.maximum(sums(x, w, x=activations, w="int8"), 0)  # the model ends with a Relu
    assert relative(y[0], expected) < 1e-6  # a float32 sum


@looped("dtype", [np.float32, np.float16])
def test_the_kernels_of_fused_gemms_give_what_their_function_bodies_give(dtype: Any) -> None:
    model = b.matmul_model(dtype=np.float16) if dtype == np.float16 else b.chain_model()
    rewritten, _ = mxfp8_graph.rewrite(model, "mxint8")
    name, shape = rewritten.graph.input[0].name, [2, 5, 64] if dtype == np.float16 else [5, 64]
    feeds = {name: oracle.normal(*shape, dtype=dtype)}
    bodies, kernels = (Session(rewritten, kernels=kernels).run(feeds)["y"] for kernels in (False, True))
    # Where a result lies between two elements, another order of the sum gives the other one.
    assert relative(kernels, bodies) < 2e-3


def test_the_error_of_int8_is_less_than_half_of_the_error_of_e4m3_and_both_mixed_are_between() -> None:
    model, x = b.chain_model((256, 256, 256)), oracle.normal(8, 256)
    mixed = Recipe(name="mixed", rules=[Rule(name=r"layers\.0", weight_format="int8", activations="int8")])
    models = [mxfp8_graph.rewrite(model, recipe)[0] for recipe in ("mxint8", mixed, "mxfp8")]
    assert sorted(formats_of(models[1]).values()) == ["e4m3", "int8"]
    (expected,) = oracle.run(model, {"x": x})
    int8, both, e4m3 = (relative(oracle.run(each, {"x": x})[0], expected) for each in models)
    assert 2 * int8 < e4m3
    assert int8 < both < e4m3


def test_a_text_has_the_same_vector_alone_and_in_any_batch() -> None:
    """Fused attention and linears: no row's sums depend on other texts, odd ones included."""
    rewritten, _ = mxfp8_graph.rewrite(b.attention_model(), "mxint8")
    assert "MXFP8Attention" in {node.op_type for node in rewritten.graph.node}
    session, x = Session(rewritten, kernels=True), oracle.normal(6, 20, 64)
    x[1] *= 2.0**-90
    x[2, :, :32] *= 2.0**50
    together = session.run({"x": x})["y"]
    for text, expected in zip(x, together, strict=True):
        np.testing.assert_array_equal(session.run({"x": text[None]})["y"][0], expected)


def test_a_program_and_its_export_agree(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64), torch.nn.ReLU()
    ).eval()
    x = torch.randn(5, 64)
    packed, _ = mxfp8_graph.rewrite(torch.export.export(module, (x,)), "mxint8")
    assert formats_of(packed) == {"0.weight": "int8", "2.weight": "int8"}
    with torch.no_grad():
        y, expected = packed.module()(x).numpy(), module(x).numpy()
    assert relative(y, expected) < 0.02
    exported = onnx.load(mxfp8_graph.to_onnx(packed, tmp_path / "m.onnx"))
    assert formats_of(exported).keys() == formats_of(packed).keys()
    name = exported.graph.input[0].name
    assert relative(oracle.run(exported, {name: x.numpy()})[0], y) < 2e-3


def test_training_refuses_int8() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    program = torch.export.export(module, (torch.randn(2, 64),))
    with pytest.raises(RecipeError, match="int8 for 'linear'; expected e4m3, since training takes its formats from"):
        mxfp8_graph.rewrite(program, "mxint8", training=True)


def test_a_checkpoint_has_int8_tensors_and_gives_the_same_model(tmp_path: Path) -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model((64, 96, 64)), "mxint8")
    path = mxfp8_graph.export_safetensors(rewritten, tmp_path / "model.safetensors")
    with safetensors.safe_open(path, "numpy") as file:
        config = json.loads(file.metadata()["quantization_config"])
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    assert {dtypes[name] for name in formats_of(rewritten)} == {"I8"}
    (group,) = config["config_groups"].values()
    actual = config["format"], group["weights"]["type"], group["input_activations"]["num_bits"]
    assert actual == ("mxint8-quantized", "int", 8)
    assert {w.element_format for w in mxfp8_graph.import_safetensors(path).values()} == {"int8"}
    again, _ = mxfp8_graph.rewrite(b.chain_model((64, 96, 64)), "mxint8", weights=path)
    x = {"x": oracle.normal(5, 64)}
    assert (oracle.run(again, x)[0] == oracle.run(rewritten, x)[0]).all()


def test_a_convention_of_float8_refuses_int8(tmp_path: Path) -> None:
    rewritten, _ = mxfp8_graph.rewrite(b.chain_model(), "mxint8")
    with pytest.raises(ContractError, match=r"has int8 elements; expected float8 elements, .*compressed-tensors"):
        mxfp8_graph.export_safetensors(rewritten, tmp_path / "m.safetensors", convention="scale-inv")
