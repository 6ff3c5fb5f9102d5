"""Packed weights cut into parts, copied and pickled: whole blocks with their scales, or an error."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest

import mxfp8_graph
from mxfp8_graph.packed import PackedWeight
from mxfp8_ops import numerics
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


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((8, 96), np.s_[2:5]),
        ((8, 96), np.s_[:, 32:64]),
        ((8, 96), np.s_[::-2, -32:]),
        ((8, 96), np.s_[..., 64:]),
        ((8, 96), np.s_[3]),
        ((8, 96), np.s_[np.int64(-1), :32]),
        ((8, 96), np.s_[:, 32:32]),
        ((8, 96), np.s_[:, 64:32]),
        ((8, 96), np.s_[...]),
        ((8, 96), ()),
        ((8, 70), np.s_[1:3, 64:70]),
        ((8, 70), np.s_[:, 32:]),
        ((8, 70), np.s_[:, :1000]),
        ((3, 8, 96), np.s_[1]),
        ((3, 8, 96), np.s_[2, 1:3, 32:96]),
        ((3, 8, 96), np.s_[..., 5, 0:32]),
        ((3, 8, 96), np.s_[0, ..., :]),
        ((96,), np.s_[32:]),
    ],
    ids=str,
)
def test_a_part_is_that_part_of_the_values(shape: tuple[int, ...], index: Any) -> None:
    whole = weight(shape)
    cut = whole[index]
    expected = whole.dequantize()[index]
    assert cut.shape == cut.elements.shape == expected.shape
    assert (cut.name, cut.module, cut.element_format, cut.weight_only) == ("w", "layer", "e4m3", False)
    np.testing.assert_array_equal(cut.dequantize(), expected)


def test_a_part_of_a_part() -> None:
    whole = weight((3, 8, 96))
    np.testing.assert_array_equal(whole[1][2:, 32:][:, 32:].dequantize(), whole.dequantize()[1, 2:, 64:])


def test_the_matrices_of_a_stack() -> None:
    whole = weight((3, 8, 96))
    assert [each.shape for each in whole] == [(8, 96)] * 3
    np.testing.assert_array_equal([each.dequantize() for each in whole], whole.dequantize())


GRID = "expected along K a slice from and to multiples of 32, where blocks begin, or to the end; cut there, or cut what"
BASIC = "expected integers, slices and at most one ...; index elements and scales with NumPy"


@pytest.mark.parametrize(
    ("index", "text", "expected"),
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
    ids=str,
)
def test_what_is_no_part_is_refused(index: Any, text: str, expected: str) -> None:
    with pytest.raises(ShapeError) as caught:
        weight((8, 70))[index]
    assert str(caught.value).startswith(f"weight 'w': part [{text}] of [8, 70]; {expected}")


@pytest.mark.parametrize(
    "index", [np.s_[8], np.s_[-9], np.s_[0, :, 0], np.s_[0, ..., 0, 0], np.s_[::0], np.s_["a":]], ids=str
)
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


def saved(folder: Path, *, external: bool) -> dict[str, PackedWeight]:
    model, _ = mxfp8_graph.rewrite(builders.chain_model())
    return dict(mxfp8_graph.unpack(builders.save(model, folder / "a.onnx", external=external)))


def check_same(got: PackedWeight, expected: PackedWeight) -> None:
    fields = ("name", "module", "shape", "element_format", "weight_only", "parameter")
    assert [getattr(got, field) for field in fields] == [getattr(expected, field) for field in fields]
    np.testing.assert_array_equal(got.elements, expected.elements)
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(got.dequantize(), expected.dequantize())


def pickled(whatever: Any) -> Any:
    return pickle.loads(pickle.dumps(whatever))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("external", [False, True])
def test_a_copy_of_a_models_weight_is_the_weight(make: Any, external: bool, tmp_path: Path) -> None:
    for weight in saved(tmp_path, external=external).values():
        check_same(make(weight), weight)
        check_same(make(weight[1:3, 32:]), weight[1:3, 32:])
        check_same(make(make(weight)), weight)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_memory_mapped_weight(make: Any, tmp_path: Path) -> None:
    def mapped(codes: np.ndarray) -> np.ndarray:
        path = tmp_path / f"{codes.shape[-1]}.bin"
        if not path.exists():
            path.write_bytes(codes.tobytes())
        return np.memmap(path, np.uint8, "r", shape=codes.shape)

    check_same(make(weight((8, 96), mapped)), weight((8, 96)))


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_deep_copies_need_no_file_and_are_apart(make: Any, tmp_path: Path) -> None:
    weights = saved(tmp_path, external=True)
    kept = make(weights)
    expected = {name: weight.dequantize() for name, weight in weights.items()}
    (tmp_path / "a.onnx.data").unlink()
    for name, weight in kept.items():
        np.testing.assert_array_equal(weight.dequantize(), expected[name])
        assert type(weight.elements) is np.ndarray
        assert not weight.elements.flags.writeable


def test_a_copy_reads_where_the_weight_does(tmp_path: Path) -> None:
    copied = copy.copy(saved(tmp_path, external=True)["layers.0.weight"])
    (tmp_path / "a.onnx.data").unlink()
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


def test_another_process_reads_a_pickled_weight(tmp_path: Path) -> None:
    weight = saved(tmp_path, external=True)["layers.0.weight"]
    (tmp_path / "w.pickle").write_bytes(pickle.dumps(weight))
    expected = float(weight.dequantize().sum(dtype=np.float64))
    (tmp_path / "a.onnx.data").unlink()
    code = "import pickle; w = pickle.load(open('w.pickle', 'rb')); print(w.dequantize().sum(dtype='float64'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected
