"""The node table is consistent in itself, with ONNX, and with the numerics it names."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grids import looped
from onnx import TensorProto

from mxfp8_ops import contract, formats, numerics
from mxfp8_ops.contract import Op, Port
from mxfp8_ops.nodes import fused_gemm
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS

OPS = looped("op", contract.OPS.values())


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


def test_epilogues_are_those_of_the_reference() -> None:
    assert tuple(FUNCTIONS) == contract.EPILOGUES


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
def test_a_port_is_like_an_input_that_it_shares_all_dtypes_with(op: Op) -> None:
    for port in ports(op):
        if port.like:
            index = op.at(port.like)
            assert index is not None
            assert not op.inputs[index].like
            assert op.inputs[index].dtypes == port.dtypes


@OPS
def test_every_port_accepts_known_dtypes(op: Op) -> None:
    for port in ports(op):
        assert port.dtypes, port.name
        known = {*contract.VALUES, *contract.ELEMENTS, *contract.SCALES, *contract.INDICES, contract.BOOL}
        assert set(port.dtypes) <= known, port.name


LEGAL = {
    "activation_dtype": [contract.FLOAT],
    "scale_rounding": formats.SCALE_ROUNDINGS,
    "block_size": [formats.BLOCK_SIZE],
    "axis": [-1],
    "epilogue": contract.EPILOGUES,
    **dict.fromkeys(("q_num_heads", "kv_num_heads"), (1,)),
    **dict.fromkeys(("is_causal", "nan_guard", "scale"), (0,)),
}


@OPS
def test_attribute_defaults_are_legal(op: Op) -> None:
    assert contract.FLOAT in contract.ACTIVATIONS
    for name, default in op.attributes.items():
        assert default in {**LEGAL, "output_dtype": op.outputs[0].dtypes}[name], name


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        contract.QUANTIZE.attributes["axis"] = 0  # type: ignore[index]
    with pytest.raises(TypeError):
        contract.OPS["MXFP8Other"] = contract.GEMM  # type: ignore[index]


# --- Who multiplies what -------------------------------------------------------------------------------------------


def test_gemms_say_where_their_operands_are() -> None:
    names = ("A", "A_scales", "B", "B_scales", "bias", "experts", "factor")
    at = {name: tuple(map(op.at, names)) for name, op in contract.OPS.items()}
    for name in ("MXFP8Gemm", "MXFP8FusedGemm"):
        assert at[name] == (0, 1, 2, 3, 4, None, None), name
    for name in ("MXFP8WeightGemm", "MXFP8FusedWeightGemm"):
        assert at[name] == (None, None, 1, 2, 3, None, None), name
    assert at["MXFP8GroupedGemm"] == (0, 1, 2, 3, None, 4, None)
    assert at["MXFP8GroupedWeightGemm"] == (None, None, 1, 2, None, 3, None)
    assert at["MXFP8GatedGemm"] == (0, 1, 2, 3, 5, None, 4)
    assert at["MXFP8GatedWeightGemm"] == (None, None, 1, 2, 4, None, 3)
    kinds = ("", "Grouped", "Fused", "Gated")
    gemms = {f"MXFP8{kind}Gemm" for kind in kinds}
    weight_gemms = {f"MXFP8{kind}WeightGemm" for kind in kinds}
    assert {name for name, op in contract.OPS.items() if op.is_gemm} == gemms | weight_gemms
    assert {name for name, op in contract.OPS.items() if op.weight_only} == weight_gemms


def test_nodes_say_where_their_packed_weight_is() -> None:
    at = {name: op.packed_at for name, op in contract.OPS.items()}
    assert at == {
        "MXFP8Quantize": None, "MXFP8Dequantize": 0, "MXFP8Gemm": 2, "MXFP8WeightGemm": 1, "MXFP8Embedding": 1,
        "MXFP8GroupedGemm": 2, "MXFP8GroupedWeightGemm": 1, "MXFP8FusedGemm": 2, "MXFP8FusedWeightGemm": 1,
        "MXFP8GatedGemm": 2, "MXFP8GatedWeightGemm": 1,
        "MXFP8Attention": None,
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
    onnx_only = {
        contract.GROUPED_WEIGHT_GEMM.name,
        contract.ATTENTION.name,
        *(op.name for op in fused_gemm.OPS),
    }
    assert exported == [op for name, op in contract.OPS.items() if name not in onnx_only]
    inference = {"mxfp8::gemm", "mxfp8::weight_gemm", "mxfp8::grouped_gemm", "mxfp8::embedding"}
    assert inference | {"mxfp8::linear_packed"} == contract.PACKED_OPS
    training = {f"mxfp8::{name}" for name in ("linear_train", "grouped_linear_train", "linear_packed", "product")}
    assert training == contract.TRAINING_OPS
    assert (contract.PACKED_OPS | contract.TRAINING_OPS) - {"mxfp8::embedding"} == contract.TORCH_GEMMS


# --- C++ ---------------------------------------------------------------------------------------------------------

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"
"""The checkout: an installed package has no sources."""


def generator() -> Any:
    """Returns custom_ops/generate.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("generate", CUSTOM_OPS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("path", "writer"), [("HEADER", "header"), ("C_ABI", "c_abi"), ("PAGE", "page")])
def test_what_is_generated_is_current(path: str, writer: str) -> None:
    script = generator()
    assert getattr(script, path).read_text(encoding="utf-8") == getattr(script, writer)(), (
        "run python custom_ops/generate.py"
    )


def test_the_page_has_every_node() -> None:
    page = generator().page()
    assert not [op for op in contract.OPS if f"### {op}\n" not in page]


def test_the_page_names_every_attribute_and_word_that_a_node_may_have() -> None:
    text = generator().PAGE.read_text(encoding="utf-8").partition("## The nodes")[0]
    words = {name for op in contract.OPS.values() for name in op.attributes}
    quoted = {*formats.SCALE_ROUNDINGS, *contract.EPILOGUES}
    missing = [f"`{w}`" for w in words if f"`{w}`" not in text] + [f'"{w}"' for w in quoted if f'"{w}"' not in text]
    assert not missing
    assert f"`{contract.DOMAIN}`, its opset version is {contract.VERSION}." in text
    assert f"imported at {contract.MIN_OPSET} or later" in text
