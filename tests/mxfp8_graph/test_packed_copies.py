"""Packed weights copied and pickled, and the weights of fused gemms."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mxfp8_graph
from mxfp8_graph.packed import PackedWeight
from mxfp8_ops import contract, numpy_nodes, onnx_functions
from mxfp8_ops.errors import ContractError


def weight(shape: tuple[int, ...], read: Callable[[np.ndarray], np.ndarray] = np.copy) -> PackedWeight:
    """Returns a weight of that shape with values of many magnitudes, of which each reading calls `read`."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))
    elements, scales = numpy_nodes.quantize(values.astype(np.float32))
    return PackedWeight(
        name="w",
        module="layer",
        shape=shape,
        element_format="e4m3",
        weight_only=False,
        read_elements=lambda: read(elements),
        read_scales=lambda: read(scales),
    )


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return mxfp8_graph.rewrite(builders.chain_model())[0]


@pytest.fixture
def saved(model: onnx.ModelProto, tmp_path: Path) -> dict[str, PackedWeight]:
    return dict(mxfp8_graph.unpack(builders.save(model, tmp_path / "a.onnx", external=True)))


def check_same(got: PackedWeight, expected: PackedWeight) -> None:
    fields = ("name", "module", "shape", "element_format", "weight_only", "parameter")
    assert [getattr(got, field) for field in fields] == [getattr(expected, field) for field in fields]
    np.testing.assert_array_equal(got.elements, expected.elements)
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(got.dequantize(), expected.dequantize())


def pickled(whatever: Any) -> Any:
    return pickle.loads(pickle.dumps(whatever))


def test_a_copy_of_a_models_weight_is_the_weight(model: onnx.ModelProto, saved: dict[str, PackedWeight]) -> None:
    for weights in (saved, mxfp8_graph.unpack(model)):
        for make, weight in itertools.product((copy.copy, copy.deepcopy, pickled), weights.values()):
            check_same(make(weight), weight)
            check_same(make(make(weight)), weight)


def test_a_copy_of_a_memory_mapped_weight(tmp_path: Path) -> None:
    def mapped(codes: np.ndarray) -> np.ndarray:
        path = tmp_path / f"{codes.shape[-1]}.bin"
        if not path.exists():
            path.write_bytes(codes.tobytes())
        return np.memmap(path, np.uint8, "r", shape=codes.shape)

    for make in (copy.copy, copy.deepcopy, pickled):
        check_same(make(weight((8, 96), mapped)), weight((8, 96)))


def test_deep_copies_need_no_file_and_copies_read_where_the_weight_does(
    saved: dict[str, PackedWeight], tmp_path: Path
) -> None:
    deep = [make(saved) for make in (copy.deepcopy, pickled)]
    copied = copy.copy(mxfp8_graph.unpack(tmp_path / "a.onnx")["layers.0.weight"])  # which was not read yet
    expected = {name: weight.dequantize() for name, weight in saved.items()}
    (tmp_path / "a.onnx.data").unlink()
    for name, weight in ((name, kept[name]) for kept in deep for name in expected):
        np.testing.assert_array_equal(weight.dequantize(), expected[name])
        assert type(weight.elements) is np.ndarray
        assert not weight.elements.flags.writeable
    with pytest.raises(ContractError, match="No such file"):
        _ = copied.elements


def test_the_weights_of_a_program_are_pickled_as_they_are_now() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU()).eval()
    packed, _ = mxfp8_graph.rewrite(torch.export.export(module, (torch.randn(2, 64),)))
    ((name, weight),) = mxfp8_graph.unpack(packed).items()
    before, kept = weight.dequantize(), copy.deepcopy(weight)
    check_same(pickled(weight), weight)
    for buffer in packed.state_dict.values():
        buffer.zero_()
    assert not weight.elements.any(), name
    np.testing.assert_array_equal(kept.dequantize(), before)


def test_another_process_reads_a_pickled_weight(saved: dict[str, PackedWeight], tmp_path: Path) -> None:
    weight = saved["layers.0.weight"]
    (tmp_path / "w.pickle").write_bytes(pickle.dumps(weight))
    expected = float(weight.dequantize().sum(dtype=np.float64))
    (tmp_path / "a.onnx.data").unlink()
    code = "import pickle; w = pickle.load(open('w.pickle', 'rb')); print(w.dequantize().sum(dtype='float64'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected


# --- Fused gemms ---

FUSED = [name for name, op in contract.OPS.items() if op.is_gemm and "epilogue" in op.attributes]
SHAPES = {"X": ["rows", 40], "A": ["rows", 40], "A_scales": ["rows", 2], "factor": ["rows", 5]}


def one_gemm(name: str, codes: tuple[np.ndarray, np.ndarray]) -> onnx.ModelProto:
    """Returns a model of a node whose other inputs are the model's."""
    op = contract.OPS[name]
    names = [port.name for port in op.inputs if not port.optional]
    stored = [
        helper.make_tensor(f"w/{port}", op.inputs[op.at(port)].dtypes[0], array.shape, array.tobytes(), raw=True)
        for port, array in zip(("B", "B_scales"), codes, strict=True)
    ]
    inputs = [
        helper.make_tensor_value_info(port.name, port.dtypes[0], SHAPES[port.name])
        for port in op.inputs
        if port.name in names and port.name not in {"B", "B_scales"}
    ]
    given = [f"w/{port}" if port in {"B", "B_scales"} else port for port in names]
    made = [port.name for port in op.outputs]
    node = helper.make_node(name, given, made, domain=contract.DOMAIN, **op.attributes)
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["rows", 5])
    graph = helper.make_graph([node], "gemm", inputs, [output], stored)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(onnx_functions.functions(model))
    return model


def test_unpack_finds_the_weights_of_fused_gemms() -> None:
    assert len(FUSED) == 5
    codes = numpy_nodes.quantize(np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32))
    for name in FUSED:
        (found,) = mxfp8_graph.unpack(one_gemm(name, codes)).values()
        assert found.weight_only is contract.OPS[name].weight_only, name
        np.testing.assert_array_equal(found.dequantize(), numpy_nodes.dequantize(*codes))
