"""The node table is consistent in itself, with ONNX and torch, and with what is generated from it."""

from pathlib import Path

import pytest
from grids import looped
from node_examples import generator
from onnx import TensorProto

from mxfp8_ops import contract, formats
from mxfp8_ops.contract import Op
from mxfp8_ops.nodes import fused_gemm
from mxfp8_ops.nodes.fused_gemm import FUNCTIONS


def test_dtype_codes_are_those_of_onnx() -> None:
    for name in ("FLOAT", "UINT8", "INT32", "INT64", "BOOL", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"):
        assert getattr(contract, name) == getattr(TensorProto, name), name


LEGAL = {
    "activation_dtype": contract.ACTIVATIONS,
    "scale_rounding": formats.SCALE_ROUNDINGS,
    "block_size": [formats.BLOCK_SIZE],
    "axis": [-1],
    "epilogue": tuple(FUNCTIONS),
    **dict.fromkeys(("q_num_heads", "kv_num_heads"), (1,)),
    **dict.fromkeys(("is_causal", "nan_guard", "scale", "alpha", "beta"), (0,)),
    **dict.fromkeys(("strides", "dilations"), ((1,),)),
    "pads": [(0,)],
    "group": [1],
    "x_dtype": contract.ELEMENTS,
    "residual_at": ["before"],
}


@looped("op", contract.OPS.values())
def test_a_row_is_consistent(op: Op) -> None:
    ports = [*op.inputs, *op.outputs]
    names = [port.name for port in ports] + list(op.attributes)
    assert len(set(names)) == len(names), "a name stands for two things"
    for side in (op.inputs, op.outputs):
        optional = [port.optional for port in side]
        assert optional == sorted(optional), "an optional port comes before one that is not"
    for port in ports:
        if port.like:
            other = op.inputs[op.at(port.like)]  # type: ignore[index]
            assert (other.like, other.dtypes) == ("", port.dtypes), f"{port.name} is like {port.like}"
    for name, default in op.attributes.items():
        assert default in {**LEGAL, "output_dtype": op.outputs[0].dtypes}[name], name
    if (at := op.packed_at) is not None:
        elements, scales = op.inputs[at : at + 2]
        assert (elements.dtypes, scales.dtypes) == (contract.ELEMENTS, contract.SCALES)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        contract.QUANTIZE.attributes["axis"] = 0  # type: ignore[index]
    with pytest.raises(TypeError):
        contract.OPS["MXFP8Other"] = contract.GEMM  # type: ignore[index]


def test_torch_ops_are_those_that_are_registered() -> None:
    torch = pytest.importorskip("torch")
    from mxfp8_ops import torch_ops

    assert {f"mxfp8::{op.name}" for op in torch_ops.OPS} == set(contract.TORCH_OPS)
    for op in contract.TORCH_OPS.values():
        arguments = {a.name for a in getattr(torch.ops.mxfp8, op.name).default._schema.arguments}
        assert {*(op.weight or ())} <= arguments, op.name


def test_a_node_has_one_torch_op_unless_it_is_of_onnx_alone() -> None:
    exported = [op.node for op in contract.TORCH_OPS.values() if op.node is not None]
    onnx_only = {
        contract.GROUPED_WEIGHT_GEMM.name,
        contract.ATTENTION.name,
        *(op.name for op in fused_gemm.OPS),
    }
    assert exported == [op for name, op in contract.OPS.items() if name not in onnx_only]


# --- C++ ---------------------------------------------------------------------------------------------------------

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"
"""The checkout: an installed package has no sources."""


@pytest.mark.parametrize(
    ("path", "writer"), [("HEADER", "header"), ("FORMATS", "element_formats"), ("C_ABI", "c_abi"), ("PAGE", "page")]
)
def test_what_is_generated_is_current(path: str, writer: str) -> None:
    script = generator()
    assert getattr(script, path).read_text(encoding="utf-8") == getattr(script, writer)(), (
        "run python custom_ops/generate.py"
    )


def test_the_page_names_every_attribute_and_word_that_a_node_may_have() -> None:
    text = generator().PAGE.read_text(encoding="utf-8").partition("## The nodes")[0]
    words = {name for op in contract.OPS.values() for name in op.attributes}
    quoted = {*formats.SCALE_ROUNDINGS, *contract.EPILOGUES}
    missing = [f"`{w}`" for w in words if f"`{w}`" not in text] + [f'"{w}"' for w in quoted if f'"{w}"' not in text]
    assert not missing
    assert f"`{contract.DOMAIN}`, its opset version is {contract.VERSION}." in text
    assert f"imported at {contract.MIN_OPSET} or later" in text
