"""Packed weights cut into parts, copied and pickled: whole blocks with their scales, or an error."""

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
from grids import looped
from onnx import TensorProto, helper

import mxfp8_graph
from mxfp8_graph.packed import PackedWeight
from mxfp8_ops import contract, numerics, onnx_functions
from mxfp8_ops.errors import ContractError, ShapeError


def weight(shape: tuple[int, ...], read: Callable[[np.ndarray], np.ndarray] = np.copy) -> PackedWeight:
    """Returns a weight of that shape with values of many magnitudes, of which each reading calls `read`."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))
    elements, scales = numerics.quantize(values.astype(np.float32))
    return PackedWeight(
        name="w",
        module="layer",
        shape=shape,
        element_format="e4m3",
        weight_only=False,
        read_elements=lambda: read(elements),
        read_scales=lambda: read(scales),
    )


# --- Parts -----------------------------------------------------------------------------------------------------------


PARTS = {
    (8, 96): [
        np.s_[2:5], np.s_[:, 32:64], np.s_[::-2, -32:], np.s_[..., 64:], np.s_[3], np.s_[np.int64(-1), :32],
        np.s_[:, 32:32], np.s_[:, 64:32], np.s_[...], (),
    ],
    (8, 70): [np.s_[1:3, 64:70], np.s_[:, 32:], np.s_[:, :1000]],
    (3, 8, 96): [np.s_[1], np.s_[2, 1:3, 32:96], np.s_[..., 5, 0:32], np.s_[0, ..., :]],
    (96,): [np.s_[32:]],
}  # fmt: skip


@looped("shape, index", [(shape, index) for shape, indices in PARTS.items() for index in indices])
def test_a_part_is_that_part_of_the_values(shape: tuple[int, ...], index: Any) -> None:
    whole = weight(shape)
    cut = whole[index]
    expected = whole.dequantize()[index]
    assert cut.shape == cut.elements.shape == expected.shape
    assert (cut.name, cut.module, cut.element_format, cut.weight_only) == ("w", "layer", "e4m3", False)
    np.testing.assert_array_equal(cut.dequantize(), expected)


def test_parts_of_parts_and_the_matrices_of_a_stack() -> None:
    whole = weight((3, 8, 96))
    np.testing.assert_array_equal(whole[1][2:, 32:][:, 32:].dequantize(), whole.dequantize()[1, 2:, 64:])
    assert [each.shape for each in whole] == [(8, 96)] * 3
    np.testing.assert_array_equal([each.dequantize() for each in whole], whole.dequantize())


GRID = "expected along K a slice from and to multiples of 32, where blocks begin, or to the end; cut there, or cut what"
BASIC = "expected integers, slices and at most one ...; index elements and scales with NumPy"


@looped(
    "index, text, expected",
    [
        (np.s_[:, 16:48], ":, 16:48", GRID),
        (np.s_[:, :48], ":, :48", GRID),
        (np.s_[..., 1:], "..., 1:", GRID),
        (np.s_[:, -16:], ":, -16:", GRID),
        (np.s_[:, 32:69], ":, 32:69", GRID),
        (np.s_[:, ::2], ":, ::2", GRID),
        (np.s_[:, ::-1], ":, ::-1", GRID),
        (np.s_[0, 32], "0, 32", GRID),
        ([0, 1], "[0, 1]", BASIC),
        (np.array([0, 1]), "[0 1]", BASIC),
        (None, "None", BASIC),
        (True, "True", BASIC),
        (np.s_[..., ...], "..., ...", BASIC),
        ("w", "w", BASIC),
    ],
)
def test_what_is_no_part_is_refused(index: Any, text: str, expected: str) -> None:
    with pytest.raises(ShapeError) as caught:
        weight((8, 70))[index]
    assert str(caught.value).startswith(f"weight 'w': part [{text}] of [8, 70]; {expected}")


@looped("index", [np.s_[8], np.s_[-9], np.s_[0, :, 0], np.s_[0, ..., 0, 0], np.s_[::0], np.s_["a":]])
def test_what_is_not_there_is_refused(index: Any) -> None:
    with pytest.raises(
        ShapeError, match=r"^weight 'w': part \[.*\] of \[8, 70\]: .*; expected indices within the shape"
    ):
        weight((8, 70))[index]


def test_a_raw_pair_that_cuts_blocks_goes_unnoticed_which_is_why_weights_are_cut() -> None:
    whole = weight((8, 96))
    wrong = numerics.dequantize(whole.elements[:, 16:48], whole.scales[:, :1])
    assert np.abs(wrong - whole.dequantize()[:, 16:48]).max() > 1


def test_a_part_is_read_when_it_is_asked_for() -> None:
    read: list[tuple[int, ...]] = []

    def counted(codes: np.ndarray) -> np.ndarray:
        read.append(codes.shape)
        return codes

    cut = weight((8, 96), counted)[:4, 32:]
    assert read == []
    assert cut.scales.shape == (4, 2)
    assert read == [(8, 3)]


# --- Copies ----------------------------------------------------------------------------------------------------------


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
            check_same(make(weight[1:3, 32:]), weight[1:3, 32:])
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
    deep, copied = [make(saved) for make in (copy.deepcopy, pickled)], copy.copy(saved["layers.0.weight"])
    expected = {name: weight.dequantize() for name, weight in saved.items()}
    (tmp_path / "a.onnx.data").unlink()
    for name, weight in ((name, kept[name]) for kept in deep for name in expected):
        np.testing.assert_array_equal(weight.dequantize(), expected[name])
        assert type(weight.elements) is np.ndarray
        assert not weight.elements.flags.writeable
    with pytest.raises(ContractError, match="cannot read external file"):
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
    bodies = onnx_functions.functions(23, [name])
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=bodies)


def test_unpack_finds_the_weights_of_fused_gemms() -> None:
    assert len(FUSED) == 5
    codes = numerics.quantize(np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32))
    for name in FUSED:
        (found,) = mxfp8_graph.unpack(one_gemm(name, codes)).values()
        assert found.weight_only is contract.OPS[name].weight_only, name
        np.testing.assert_array_equal(found.dequantize(), numerics.dequantize(*codes))
