"""Where the result is written: external data, refusals, and never half a file."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import attention_models
import models as b
import numpy as np
import onnx
import pytest
from full_disk import files, files_of_at_most
from grids import looped
from models import chain_model, language_model, matmul_model, model, node, save, steps, weight
from onnx import external_data_helper, numpy_helper
from oracle import expect, kinds, normal, run

import mxfp8_graph
from mxfp8_graph.onnx_pass import save as onnx_save
from mxfp8_graph.onnx_pass.protos import iter_graphs
from mxfp8_ops.errors import ContractError

F32 = np.float32


def message(source: Any, **options: Any) -> str:
    with pytest.raises(ContractError) as caught:
        mxfp8_graph.rewrite(source, **options)
    return str(caught.value)


def check_result(path: Path, source: onnx.ModelProto) -> None:
    """Fails unless the file at `path` computes what rewriting `source` in memory does, to the bit."""
    onnx.checker.check_model(path, full_check=True)
    feeds = {
        i.name: np.zeros((2, 3), np.int64) if i.type.tensor_type.elem_type == 7 else normal(2, 3, 64)
        for i in source.graph.input
    }
    in_memory, _ = mxfp8_graph.rewrite(source)
    for got, expected in zip(run(str(path), feeds), run(in_memory, feeds), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("source", [False, True])
def test_tensors_go_where_external_data_says(tmp_path: Path, source: bool) -> None:
    proto = language_model()
    path = save(proto, tmp_path / "m.onnx", external=source)
    for choice, external in (("auto", source), ("always", True), ("never", False)):
        out, report = mxfp8_graph.rewrite(path, output=tmp_path / f"{choice}.onnx", external_data=choice)
        assert (tmp_path / f"{choice}.onnx.data").exists() == external, choice
        content = onnx.load(out, load_external_data=False)
        big = {t.name: t for t in content.graph.initializer if math.prod(t.dims) > 4096}
        assert all((t.data_location == onnx.TensorProto.EXTERNAL) == external for t in big.values()), choice
        assert report.bytes_after == sum(p.stat().st_size for p in tmp_path.glob(f"{choice}.onnx*"))
        check_result(out, proto)


def test_external_tensors_start_at_page_boundaries(tmp_path: Path) -> None:
    path = save(chain_model((33, 65, 97)), tmp_path / "m.onnx", external=True)
    out, _ = mxfp8_graph.rewrite(path)
    tensors = onnx.load(out, load_external_data=False).graph.initializer
    info = [external_data_helper.ExternalDataInfo(t) for t in tensors]
    assert len(info) == 4
    assert all(i.location == "m.mxfp8.onnx.data" and i.offset % 4096 == 0 for i in info)
    assert [i.length for i in info] == [65 * 33, 65 * 2, 97 * 65, 97 * 3]


def test_a_weight_behind_4_gib_of_a_file_is_read(tmp_path: Path) -> None:
    path = save(matmul_model(64, 96), tmp_path / "m.onnx", external=True)
    data, offset = tmp_path / "m.onnx.data", 5 << 30
    content = data.read_bytes()
    with data.open("r+b") as file:
        file.truncate(0)
        file.seek(offset)
        file.write(content)
    if data.stat().st_blocks * 512 > 1 << 20:
        pytest.skip("this file system has no sparse files")
    proto = onnx.load(path, load_external_data=False)
    (entry,) = (each for each in proto.graph.initializer[0].external_data if each.key == "offset")
    entry.value = str(offset)
    path.write_bytes(proto.SerializeToString())
    check_result(mxfp8_graph.rewrite(path)[0], matmul_model(64, 96))


def test_data_without_offset_and_length_in_a_folder_below_the_model_are_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    path = tmp_path / "m.onnx"
    onnx.save(matmul_model(64, 96), path, save_as_external_data=True, location="weights/w.bin", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    entries = proto.graph.initializer[0].external_data
    del entries[next(i for i, entry in enumerate(entries) if entry.key == "location") + 1 :]
    assert [entry.key for entry in entries] == ["location"]
    path.write_bytes(proto.SerializeToString())
    out, _ = mxfp8_graph.rewrite(path)
    assert files(tmp_path) == ["m.mxfp8.onnx", "m.mxfp8.onnx.data", "m.onnx", "weights"]
    check_result(out, matmul_model(64, 96))


@looped("where, choice", [("constant", "always"), ("subgraph", "never"), ("function", "always")])
def test_external_tensors_outside_the_main_graph_follow(
    tmp_path_factory: pytest.TempPathFactory, choice: str, where: str
) -> None:
    """The output is in another folder, and its data file has the name of the old one."""
    tensor = numpy_helper.from_array(np.arange(96, dtype=F32), "c")
    constant, branch = node("Constant", "", "c", value=tensor), b.subgraph("Add n c>b", c=np.arange(96, dtype=F32))
    last = {
        "constant": [constant, node("Add", "n c", "y")],
        "subgraph": [b.choose(branch, branch, "y")],
        "function": steps("Shift n>y"),
    }
    nodes = [*steps("linear:MatMul x w>h; Neg h>n"), *last[where]]
    stored = {"w": weight(64, 96), "yes": np.array(True)}
    proto = model(nodes, {"x": (F32, [3, 64])}, {"y": (F32, [3, 96])}, stored, checked=False)
    proto = b.calling(proto, b.local_function("Shift", "a", [constant, node("Add", "a c", "r")]))
    source, target = tmp_path_factory.mktemp("in") / "m.onnx", tmp_path_factory.mktemp("out") / "m.onnx"
    store_all(proto, source)
    out, _ = mxfp8_graph.rewrite(source, output=target, external_data=choice)
    shutil.rmtree(source.parent)
    x = normal(3, 64)
    y = expect(x, weight(64, 96).T)
    type(y)(np.arange(96) - y.y, y.bound).check(run(str(out), {"x": x})[0], roundings=1)


def store_all(proto: onnx.ModelProto, path: Path) -> None:
    """Writes the model with every float tensor, in whichever graph, in m.onnx.data."""
    parts = [*iter_graphs(proto.graph), *proto.functions]
    tensors = [tensor for graph in iter_graphs(proto.graph) for tensor in graph.initializer]
    tensors += [a.t for part in parts for n in part.node for a in n.attribute if a.HasField("t")]
    with path.with_name("m.onnx.data").open("wb") as file:
        file.write(bytes(4096))  # so that offsets differ from those of the result
        for tensor in tensors:
            if tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.external_data.add(key="location", value="m.onnx.data")
                tensor.external_data.add(key="offset", value=str(file.tell()))
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
    path.write_bytes(proto.SerializeToString())


def test_no_room_in_one_protobuf_file_turns_auto_into_external_and_never_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(matmul_model(64, 96), tmp_path / "m.onnx")
    monkeypatch.setattr(onnx_save, "INLINE_LIMIT", 5_000)
    out = tmp_path / "m.mxfp8.onnx"
    assert message(path, external_data="never") == (
        f"{out}: the model does not fit into one protobuf file (2 GB); expected external data; "
        'pass external_data="always"'
    )
    assert files(tmp_path) == ["m.onnx"]
    mxfp8_graph.rewrite(path)
    assert files(tmp_path) == ["m.mxfp8.onnx", "m.mxfp8.onnx.data", "m.onnx"]
    check_result(out, matmul_model(64, 96))


def test_values_of_constants_go_to_the_data_file_if_they_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = matmul_model()
    for tensor in (numpy_helper.from_array(weight(64, 96, seed=seed)) for seed in (1, 2)):
        name = f"k{len(proto.graph.output)}"
        proto.graph.node.append(node("Constant", "", name, value=tensor))
        proto.graph.output.append(b.value(name, F32, [64, 96]))
    path = save(proto, tmp_path / "m.onnx")
    monkeypatch.setattr(onnx_save, "INLINE_LIMIT", 40_000)
    out, _ = mxfp8_graph.rewrite(path)
    assert files(tmp_path) == ["m.mxfp8.onnx", "m.mxfp8.onnx.data", "m.onnx"]
    assert out.stat().st_size < 40_000
    check_result(out, proto)
    again, _ = mxfp8_graph.rewrite(out, output=tmp_path / "again.onnx", external_data="always")
    check_result(again, proto)


def test_small_external_tensors_are_read_at_once(tmp_path: Path) -> None:
    """onnx_ir, onnx and ONNX Runtime take no shape from a data file."""
    proto, path = attention_models.attention(), tmp_path / "m.onnx"
    in_memory, _ = mxfp8_graph.rewrite(proto)
    feeds = attention_models.feeds(proto)
    onnx.save(proto, path, save_as_external_data=True, location="m.data", size_threshold=0, convert_attribute=True)
    out, _ = mxfp8_graph.rewrite(path)
    assert kinds(onnx.load(out)) == kinds(in_memory)
    for got, expected in zip(run(str(out), feeds), run(in_memory, feeds), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_proto_can_go_to_a_file_and_always_needs_one(tmp_path: Path) -> None:
    assert message(matmul_model(), external_data="always") == (
        "model: external_data 'always' without an output; expected a path to put it next to; pass output"
    )
    out, report = mxfp8_graph.rewrite(matmul_model(), output=tmp_path / "o.onnx", external_data="always")
    assert out == tmp_path / "o.onnx"
    assert report.output == str(out)
    check_result(out, matmul_model())


# --- Refusals; tests/mxfp8_graph/test_files.py has those of every kind of file ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(matmul_model(), tmp_path / "m.onnx")


def test_neither_the_input_nor_its_data_is_ever_the_output(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    expected = f"{path}: is an input; expected another file; pass another path"
    assert message(path, output=path, overwrite=True) == expected
    assert path.read_bytes() == before
    onnx.save(matmul_model(), path, save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    for output in ("out.onnx.data", "out.onnx"):  # the data of out.onnx would be out.onnx.data
        assert "is an input" in message(path, output=tmp_path / output, overwrite=True)


def test_data_that_exist_beside_a_new_output_are_kept(path: Path, tmp_path: Path) -> None:
    data = tmp_path / "out.onnx.data"
    data.write_text("precious")
    assert message(path, output=tmp_path / "out.onnx", external_data="always").startswith(f"{data}: exists already; ")
    mxfp8_graph.rewrite(path, output=tmp_path / "out.onnx", external_data="never")
    assert data.read_text() == "precious"


def test_a_dry_run_writes_nothing_and_fails_where_the_run_would(path: Path, tmp_path: Path) -> None:
    result, report = mxfp8_graph.rewrite(path, dry_run=True)
    assert (result, report.dry_run) == (None, True)
    out = tmp_path / "out.onnx"
    out.touch()
    for output in (path, tmp_path, tmp_path / "none" / "o.onnx", "/proc/self/o.onnx"):
        assert message(path, output=output, dry_run=True) == message(path, output=output)
    assert mxfp8_graph.rewrite(path, output=out, dry_run=True)[0] is None  # it replaces nothing
    assert out.read_bytes() == b""
    assert files(tmp_path) == ["m.onnx", "out.onnx"]


# --- Interruptions ---


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path = save(chain_model((256, 512, 256)), tmp_path / "m.onnx")
    for choice in ("always", "never"):
        with files_of_at_most(50_000):
            said = message(path, external_data=choice)
        assert said == (
            f"{tmp_path / 'm.mxfp8.onnx'}: cannot be written: File too large; expected a writable folder with "
            "enough space; free some space or pass another path"
        )
        assert files(tmp_path) == ["m.onnx"]


@looped("error", [RuntimeError("stopped"), KeyboardInterrupt("stopped"), OSError(28, "stopped")])
def test_an_error_or_an_interrupt_leaves_the_old_result_and_no_temporary_file(
    tmp_path: Path, error: BaseException
) -> None:
    path, out = save(chain_model(), tmp_path / "m.onnx"), tmp_path / "m.mxfp8.onnx"
    mxfp8_graph.rewrite(path, overwrite=True)
    before = out.read_bytes()

    def stop(*_: Any) -> None:
        assert len(files(tmp_path)) == 3
        raise error

    with pytest.raises(type(error), match="stopped"):
        mxfp8_graph.rewrite(path, external_data="always", overwrite=True, progress=stop)
    assert files(tmp_path) == ["m.mxfp8.onnx", "m.onnx"]
    assert out.read_bytes() == before


def test_progress_is_called_after_each_weight(tmp_path: Path) -> None:
    path = save(chain_model((64, 128, 64)), tmp_path / "m.onnx")
    calls: list[tuple[str, int, int]] = []
    mxfp8_graph.rewrite(path, progress=lambda *call: calls.append(call))
    assert calls == [("layers.0.linear", 32768, 65536), ("layers.1.linear", 65536, 65536)]
