"""The node table is consistent in itself, with ONNX, and with the numerics it names."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto

from mxfp8_ops import contract, formats, numerics
from mxfp8_ops.contract import Op, Port

OPS = pytest.mark.parametrize("op", contract.OPS.values(), ids=contract.OPS)


def ports(op: Op) -> Iterator[Port]:
    yield from op.inputs
    yield from op.outputs


def test_dtype_codes_are_those_of_onnx() -> None:
    for name in ("FLOAT", "UINT8", "INT32", "INT64", "BOOL", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"):
        assert getattr(contract, name) == getattr(TensorProto, name), name


def test_elements_are_the_formats() -> None:
    assert tuple(fmt.onnx_dtype for fmt in formats.ELEMENT_FORMATS.values()) == contract.ELEMENTS


def test_values_are_the_dtypes_of_numerics() -> None:
    assert tuple(contract.VALUE_NAMES) == contract.VALUES
    assert tuple(contract.VALUE_NAMES.values()) == tuple(numerics.VALUE_DTYPES)


@OPS
def test_names_within_an_op_are_unique(op: Op) -> None:
    names = [port.name for port in ports(op)] + list(op.attributes)
    assert len(set(names)) == len(names), names
    assert op.name.startswith("MXFP8")
    assert contract.OPS[op.name] is op


@OPS
def test_optional_ports_come_last(op: Op) -> None:
    for side in (op.inputs, op.outputs):
        optional = [port.optional for port in side]
        assert optional == sorted(optional)
    assert not op.outputs[0].optional


@OPS
def test_what_shares_a_dtype_names_an_input_with_one_of_its_own(op: Op) -> None:
    for port in ports(op):
        if port.like:
            other = op.inputs[op.at(port.like)]  # type: ignore[index]
            assert (other.dtypes, other.like) == (port.dtypes, ""), port.name


@OPS
def test_every_port_accepts_known_dtypes(op: Op) -> None:
    for port in ports(op):
        assert port.dtypes, port.name
        known = {*contract.VALUES, *contract.ELEMENTS, *contract.SCALES, *contract.INDICES, contract.BOOL}
        assert set(port.dtypes) <= known, port.name


@OPS
def test_attribute_defaults_are_legal(op: Op) -> None:
    for name, default in op.attributes.items():
        if name == "output_dtype":
            assert default in op.outputs[0].dtypes
        elif name == "activation_dtype":
            assert default == contract.FLOAT
            assert default in contract.ACTIVATIONS
        elif name == "scale_rounding":
            assert default in formats.SCALE_ROUNDINGS
        elif name == "block_size":
            assert default == formats.BLOCK_SIZE
        elif name == "axis":
            assert default == -1
        elif name in {"q_num_heads", "kv_num_heads"}:
            assert default == 1
        elif name in {"is_causal", "nan_guard", "scale"}:
            assert default == 0
        else:
            pytest.fail(f"{op.name} has an attribute this test does not know: {name}")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        contract.QUANTIZE.attributes["axis"] = 0  # type: ignore[index]
    with pytest.raises(TypeError):
        contract.OPS["MXFP8Other"] = contract.GEMM  # type: ignore[index]


# --- Who multiplies what -------------------------------------------------------------------------------------------


def test_gemms_say_where_their_operands_are() -> None:
    names = ("A", "A_scales", "B", "B_scales", "bias", "experts")
    at = {name: tuple(map(op.at, names)) for name, op in contract.OPS.items()}
    assert at["MXFP8Gemm"] == (0, 1, 2, 3, 4, None)
    assert at["MXFP8WeightGemm"] == (None, None, 1, 2, 3, None)
    assert at["MXFP8GroupedGemm"] == (0, 1, 2, 3, None, 4)
    assert at["MXFP8GroupedWeightGemm"] == (None, None, 1, 2, None, 3)
    gemms = {"MXFP8Gemm", "MXFP8WeightGemm", "MXFP8GroupedGemm", "MXFP8GroupedWeightGemm"}
    assert {name for name, op in contract.OPS.items() if op.is_gemm} == gemms
    assert {name for name, op in contract.OPS.items() if op.weight_only} == {
        "MXFP8WeightGemm",
        "MXFP8GroupedWeightGemm",
    }


def test_nodes_say_where_their_packed_weight_is() -> None:
    at = {name: op.packed_at for name, op in contract.OPS.items()}
    assert at == {
        "MXFP8Quantize": None, "MXFP8Dequantize": 0, "MXFP8Gemm": 2, "MXFP8WeightGemm": 1, "MXFP8Embedding": 1,
        "MXFP8GroupedGemm": 2, "MXFP8GroupedWeightGemm": 1, "MXFP8Attention": None,
    }  # fmt: skip
    for name, index in at.items():
        if index is not None:
            elements, scales = contract.OPS[name].inputs[index : index + 2]
            assert (elements.dtypes, scales.dtypes) == (contract.ELEMENTS, contract.SCALES), name


def test_torch_ops_are_those_that_are_registered() -> None:
    torch = pytest.importorskip("torch")
    from mxfp8_ops import torch_ops

    assert {f"mxfp8::{op.name}" for op in torch_ops.OPS} == set(contract.TORCH_OPS)
    for op in contract.TORCH_OPS.values():
        arguments = {a.name for a in getattr(torch.ops.mxfp8, op.name).default._schema.arguments}
        assert {*(op.weight or ())} <= arguments, op.name


def test_every_node_but_those_of_onnx_alone_has_one_torch_op() -> None:
    exported = [op.node for op in contract.TORCH_OPS.values() if op.node is not None]
    of_onnx_alone = (contract.GROUPED_WEIGHT_GEMM, contract.ATTENTION)
    assert exported == [op for op in contract.OPS.values() if op not in of_onnx_alone]
    assert {"mxfp8::gemm", "mxfp8::weight_gemm", "mxfp8::grouped_gemm", "mxfp8::embedding"} == contract.PACKED_OPS
    assert {"mxfp8::linear_train"} == contract.TRAINING_OPS
    assert (contract.PACKED_OPS | contract.TRAINING_OPS) - {"mxfp8::embedding"} == contract.TORCH_GEMMS


# --- C++ ---------------------------------------------------------------------------------------------------------

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"
"""The checkout: an installed package has no sources."""


def generator() -> Any:
    """Returns custom_ops/contract_header.py, which is not installed."""
    path = CUSTOM_OPS / "contract_header.py"
    spec = importlib.util.spec_from_file_location("contract_header", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_header_for_cpp_is_current() -> None:
    text = (CUSTOM_OPS / "mxfp8_ops" / "src" / "contract.h").read_text(encoding="utf-8")
    assert text == generator().header(), "run python custom_ops/contract_header.py"
