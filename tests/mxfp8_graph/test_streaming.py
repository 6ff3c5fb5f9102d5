"""Weights stream: however large the model, the memory it takes is at most one and a half times its largest tensor.

A result in one file is in memory until it is written, packed: a quarter of a float32 model. Nothing else is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import matmul_model, save, write_large
from onnx import helper, numpy_helper

import mxfp8_graph
from mxfp8_ops import numpy_nodes

FACTOR, FIXED = 1.5, 200 << 20
"""Limit of the bytes over a bare process: FACTOR times the largest tensor, plus FIXED."""

CODE = """
    import sys, mxfp8_graph
    from pathlib import Path
    for path in sys.argv[2:]:
        mxfp8_graph.rewrite(path, overwrite=True, external_data=sys.argv[1])
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def peak_bytes(*paths: Path, external_data: str = "auto") -> int:
    """Returns the peak size of a process that rewrites `paths`. Not by ru_maxrss, which exec carries over."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(CODE), external_data, *map(str, paths)]
    return 1024 * int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def over_bare(path: Path, tmp_path: Path, external_data: str = "auto") -> int:
    """Returns by how much rewriting `path` raises the peak of a process that has rewritten something tiny."""
    tiny = save(matmul_model(), tmp_path / "tiny.onnx", external=True)
    return peak_bytes(tiny, path, external_data=external_data) - peak_bytes(tiny)


def write_inline(path: Path, *, layers: int, k: int = 4096, constants: bool = False) -> Path:
    """Writes the model of `write_large` as one file; with `constants`, its weights are the values of Constant nodes."""
    proto = onnx.load(write_large(path, layers=layers, k=k, n=k))
    path.with_name(f"{path.name}.data").unlink()
    if constants:
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in proto.graph.initializer]
        nodes += proto.graph.node
        del proto.graph.initializer[:], proto.graph.node[:]
        proto.graph.node.extend(nodes)
    onnx.save(proto, path)
    return path


def check_last_weight(path: Path, layer: int) -> None:
    """Fails unless the packed weight of `layer` is that of the source, to the byte; reads 64 rows of it."""
    source = {t.name: t for t in onnx.load(path, load_external_data=False).graph.initializer}
    result = {t.name: t for t in onnx.load(path.with_suffix(".mxfp8.onnx"), load_external_data=False).graph.initializer}
    weight = source[f"layers.{layer}.weight"]
    k, n = weight.dims
    packed = result[f"{weight.name}_mxfp8"]
    assert list(packed.dims) == [n, k]

    def mapped(tensor: onnx.TensorProto, dtype: type) -> np.ndarray:
        info = {e.key: e.value for e in tensor.external_data}
        return np.memmap(path.parent / info["location"], dtype, "r", int(info["offset"]), tuple(tensor.dims))

    rows = np.ascontiguousarray(mapped(weight, np.float32)[:, -64:].T)
    elements, scales = numpy_nodes.quantize(rows)
    np.testing.assert_array_equal(mapped(packed, np.uint8)[-64:], elements)
    np.testing.assert_array_equal(mapped(result[f"{weight.name}_mxfp8_scales"], np.uint8)[-64:], scales)


@contextmanager
def room(folder: Path, size: int) -> Iterator[None]:
    """Skips a test where the disk has no room for files of so many bytes; removes what it has written."""
    if shutil.disk_usage(folder).free < 1.5 * size:
        pytest.skip(f"needs {size / 1e9:.0f} GB of disk")
    try:
        yield
    finally:
        shutil.rmtree(folder)


def test_one_large_tensor_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    with room(tmp_path, 256 << 20):
        path = write_large(tmp_path / "m.onnx", layers=1, k=16384)
        assert over_bare(path, tmp_path) <= 0.75 * (256 << 20)
        check_last_weight(path, 0)


@pytest.mark.parametrize("constants", [False, True])
def test_a_model_in_one_file_is_not_in_memory_as_a_whole(tmp_path: Path, constants: bool) -> None:
    with room(tmp_path, 320 << 20):
        path = write_inline(tmp_path / "m.onnx", layers=5, constants=constants)
        size = path.stat().st_size
        grown = over_bare(path, tmp_path)
        result = path.with_suffix(".mxfp8.onnx").stat().st_size
        assert result < 0.27 * size
        assert grown <= result + FACTOR * size / 5 + FIXED // 4


def test_a_result_in_one_file_is_in_memory_once(tmp_path: Path) -> None:
    with room(tmp_path, 640 << 20):
        path = write_large(tmp_path / "m.onnx", layers=10, k=4096, n=4096)
        grown = over_bare(path, tmp_path, "never")
        result = path.with_suffix(".mxfp8.onnx").stat().st_size
        assert grown <= result + FACTOR * (64 << 20) + FIXED // 4


@pytest.mark.slow
def test_of_8_gigabytes_at_most_the_largest_tensor_is_in_memory(tmp_path: Path) -> None:
    with room(tmp_path, 8 << 30):
        path = write_large(tmp_path / "m.onnx", layers=16, k=8192, n=16384)
        assert over_bare(path, tmp_path) <= FACTOR * (512 << 20) + FIXED
        check_last_weight(path, 15)


def test_typed_data_are_packed_like_raw_data() -> None:
    proto = matmul_model()
    values = numpy_helper.to_array(proto.graph.initializer[0])
    raw, _ = mxfp8_graph.rewrite(proto)
    proto.graph.initializer[0].CopyFrom(onnx.helper.make_tensor("w", 1, values.shape, values.reshape(-1)))
    typed, _ = mxfp8_graph.rewrite(proto)
    assert list(raw.graph.initializer) == list(typed.graph.initializer)
