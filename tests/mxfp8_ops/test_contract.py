"""The node table is consistent in itself, with ONNX, and with the numerics it names."""

from collections.abc import Iterator

import pytest
from onnx import TensorProto

from mxfp8_ops import contract, formats, numerics
from mxfp8_ops.contract import Op, Port

OPS = pytest.mark.parametrize("op", contract.OPS.values(), ids=contract.OPS)


def ports(op: Op) -> Iterator[Port]:
    yield from op.inputs
    yield from op.outputs


def test_dtype_codes_are_those_of_onnx() -> None:
    for name in ("FLOAT", "UINT8", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"):
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
def test_optional_inputs_come_last(op: Op) -> None:
    optional = [port.optional for port in op.inputs]
    assert optional == sorted(optional)
    assert not any(port.optional for port in op.outputs)


@OPS
def test_every_port_accepts_known_dtypes(op: Op) -> None:
    for port in ports(op):
        assert port.dtypes, port.name
        assert set(port.dtypes) <= {*contract.VALUES, *contract.ELEMENTS, *contract.SCALES}, port.name


@OPS
def test_attribute_defaults_are_legal(op: Op) -> None:
    for name, default in op.attributes.items():
        if name == "output_dtype":
            assert default in op.outputs[0].dtypes
        elif name == "scale_rounding":
            assert default in formats.SCALE_ROUNDINGS
        elif name == "block_size":
            assert default == formats.BLOCK_SIZE
        elif name == "axis":
            assert default == -1
        else:
            pytest.fail(f"{op.name} has an attribute this test does not know: {name}")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        contract.QUANTIZE.attributes["axis"] = 0  # type: ignore[index]
    with pytest.raises(TypeError):
        contract.OPS["MXFP8Other"] = contract.GEMM  # type: ignore[index]
