"""Models are read without their large data and written piece by piece: nothing differs from what protobuf does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from builders import chain_model, language_model, matmul_model, model, node, save, weight
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

import mxfp8_graph
from mxfp8_graph.onnx_model import wire
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.tensor_data import inside, refer
from mxfp8_ops.errors import ContractError
from tests.fuzz import onnx_models

LEAST = 16
"""Bytes of raw data that stay in what is read: small, so that small models have larger ones."""


def read(data: bytes, path: Path, least: int = LEAST) -> bytes:
    path.write_bytes(data)
    with path.open("rb") as file:
        return wire.without_data(file, least, lambda *place: refer(*place).SerializeToString())


@pytest.fixture(scope="module")
def seeds() -> list[bytes]:
    return onnx_models.seeds()


def parsed(data: bytes) -> onnx.ModelProto | None:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        return None


def referring(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields the tensors with references, without asking how the module finds tensors."""
    tensors = [*proto.graph.initializer, *(a.t for n in proto.graph.node for a in n.attribute if a.HasField("t"))]
    return (tensor for tensor in tensors if inside(tensor))


def whole(data: bytes, path: Path) -> tuple[onnx.ModelProto | None, int]:
    """Returns the model in `data` as the module reads it, with what references say in their places; how many."""
    proto = parsed(read(data, path))
    count = 0
    for tensor in referring(proto) if proto is not None else ():
        offset, length = inside(tensor)
        assert length > LEAST
        del tensor.external_data[-1]
        tensor.raw_data = data[offset : offset + length]
        count += 1
    return proto, count


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return bytes([number << 3, content])  # of one byte each
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


TENSOR = field(1, 8) + field(2, 1) + field(8, b"w")
"""float32 [8] called w, without data."""
RAW = field(9, bytes(range(32)))
OTHER = field(9, bytes(32))
ATTRIBUTE = field(1, b"value") + b"\xa0\x01\x04"
"""Called value, of type TENSOR."""


def model_of(graph: bytes) -> bytes:
    return field(1, 10) + wire.key(7, len(graph)) + graph


def initializer(tensor: bytes) -> bytes:
    return model_of(field(5, tensor))


def constant(attribute: bytes) -> bytes:
    return model_of(field(1, field(2, b"c") + field(4, b"Constant") + field(5, attribute)))


class TestReading:
    def test_initializers_and_constants_of_the_main_graph_are_left_out(self, tmp_path):
        constant_node = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(weight(64, 64), "c"))
        proto = matmul_model(64, 96)
        proto.graph.node.append(constant_node)
        data = proto.SerializeToString()
        path = tmp_path / "m.onnx"
        assert len(read(data, path, 4096)) < 2000 < len(data)
        assert whole(data, path) == (proto, 2)
        opened = open_model(path)
        assert opened.byte_size == len(data)
        assert not opened.uses_external_data

    def test_broken_models_are_read_as_protobuf_reads_them(self, tmp_path, seeds):
        """Bytes changed, cut out, doubled; fields dropped, doubled and retyped: equal, or both no model."""
        for index, seed in enumerate(seeds):
            rng = random.Random(index)
            referred = 0
            for _ in range(60):
                data = onnx_models.mutate(seed, rng)
                found, count = whole(data, tmp_path / "m.onnx")
                assert found == parsed(data), index
                referred += count
            assert referred or not whole(seed, tmp_path / "m.onnx")[1], index

    def test_a_file_cut_anywhere_is_read_as_protobuf_reads_it(self, tmp_path):
        data = matmul_model(4, 4).SerializeToString()
        for end in range(len(data)):
            assert whole(data[:end], tmp_path / "m.onnx")[0] == parsed(data[:end]), end

    MERGED: ClassVar = {
        "data last": (initializer(TENSOR + RAW), 1),
        "data first": (initializer(RAW + TENSOR), 1),
        "says it is inside": (initializer(TENSOR + RAW + field(14, 0)), 1),
        "data twice": (initializer(TENSOR + RAW + OTHER), 0),
        "no data behind data": (initializer(TENSOR + RAW + field(9, b"")), 0),
        "data of a number": (initializer(TENSOR + RAW + field(9, 5)), 0),
        "external too": (initializer(TENSOR + RAW + field(14, 1)), 0),
        "external without saying so": (initializer(TENSOR + RAW + field(13, field(1, b"location"))), 0),
        "strings": (initializer(TENSOR + RAW + field(2, 8)), 0),
        "two graphs": (initializer(TENSOR + RAW) + initializer(TENSOR + OTHER), 0),
        "a group": (initializer(TENSOR + RAW + b"\x83\x01\x84\x01"), 0),
        "in a Constant": (constant(ATTRIBUTE + field(5, TENSOR + RAW)), 1),
        "type last": (constant(field(5, TENSOR + RAW) + ATTRIBUTE), 1),
        "tensor twice": (constant(ATTRIBUTE + field(5, TENSOR + RAW) + field(5, OTHER)), 0),
        "type changed": (constant(ATTRIBUTE + field(5, TENSOR + RAW) + b"\xa0\x01\x01"), 0),
        "no type": (constant(field(1, b"value") + field(5, TENSOR + RAW)), 0),
        "long tag": (model_of(b"\xaa\x80\x00" + bytes([len(TENSOR + RAW)]) + TENSOR + RAW), 1),
        "long length": (model_of(b"\x2a" + bytes([len(TENSOR + RAW) | 0x80, 0x80, 0]) + TENSOR + RAW), 1),
    }
    """Models, and how many references are made of them."""

    def test_what_protobuf_merges_or_takes_otherwise_stays(self, tmp_path):
        for name, (data, references) in self.MERGED.items():
            assert parsed(data) is not None, name
            assert whole(data, tmp_path / "m.onnx") == (parsed(data), references), name

    NO_MESSAGES: ClassVar = {
        "past the end": model_of(b"\x2a\x7f" + TENSOR + RAW),
        "of 2^62": initializer(TENSOR + b"\x4a\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(32)),
        "of no end": initializer(TENSOR + b"\x4a" + b"\xff" * 11 + bytes(32)),
        "a group that does not end": initializer(TENSOR + b"\x4b" + bytes(32)),
        "wire type 7": initializer(TENSOR + b"\x4f" + bytes(32)),
        "number 0": initializer(TENSOR + b"\x02" + bytes([32]) + bytes(32)),
    }

    def test_what_is_no_message_is_left_to_protobuf(self, tmp_path):
        path = tmp_path / "m.onnx"
        for name, data in self.NO_MESSAGES.items():
            assert parsed(data) is None, name
            assert read(data, path) == data, name
            with pytest.raises(ContractError, match="not a complete ONNX file"):
                mxfp8_graph.rewrite(path)

    def test_more_fields_than_anybody_waits_for_are_left_to_protobuf(self, tmp_path, monkeypatch):
        data = initializer(TENSOR + RAW) + b"\x98\x3e\x00" * 50
        assert whole(data, tmp_path / "m.onnx") == (parsed(data), 1)
        monkeypatch.setattr(wire, "_MOST_FIELDS", 40)
        assert read(data, tmp_path / "m.onnx") == data

    def test_no_model_can_make_a_reference(self, tmp_path):
        """What would point a tensor at bytes of the file is taken for what it is: an entry that nothing asks for."""
        proto = matmul_model(64, 96)
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.external_data.add(key="mxfp8-graph:0123456789abcdef", value=f"0 {64 * 96 * 4}")
        tensor.doc_string = "x" * (64 * 96 * 4)
        path = save(proto, tmp_path / "m.onnx")
        with pytest.raises(ContractError, match="has 0 entries of float_data; expected 6144"):
            mxfp8_graph.rewrite(path)

    def test_a_wrong_size_is_told_in_the_same_words_as_before(self, tmp_path):
        proto = matmul_model(64, 96)
        proto.graph.initializer[0].raw_data = bytes(20_000)
        path = save(proto, tmp_path / "m.onnx")
        with pytest.raises(ContractError) as caught:
            mxfp8_graph.rewrite(path)
        assert str(caught.value) == (
            f"{path}: tensor 'w': has 20000 bytes; expected 24576 for float [64, 96]; export the model again"
        )

    def test_a_file_that_is_gone_or_changed_before_its_data_is_read_is_an_error(self, tmp_path):
        path = save(mxfp8_graph.rewrite(matmul_model(256, 256))[0], tmp_path / "m.onnx")
        [packed] = mxfp8_graph.unpack(path).values()
        path.rename(tmp_path / "moved.onnx")
        with pytest.raises(ContractError) as caught:
            packed.dequantize()
        assert str(caught.value) == (
            f"{path}: tensor 'w_mxfp8': cannot read it any more: No such file or directory; "
            "expected the model, which is read again for each tensor; leave it where it was"
        )
        path.write_bytes((tmp_path / "moved.onnx").read_bytes() + b"\x98\x3e\x00")
        with pytest.raises(ContractError, match="changed while it was read"):
            packed.dequantize()

    def test_a_model_with_another_name_on_the_disk_is_read(self, tmp_path):
        """External data must have one name; a model may have several, or one that is no text."""
        path = save(matmul_model(64, 96), tmp_path / "m.onnx")
        (tmp_path / "again.onnx").hardlink_to(path)
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "link.onnx").symlink_to(path)
        odd = tmp_path / "m\udcff.onnx"
        odd.hardlink_to(path)
        expected = mxfp8_graph.rewrite(path)[0].read_bytes()
        for other in (tmp_path / "again.onnx", tmp_path / "deep" / "link.onnx", odd):
            assert mxfp8_graph.rewrite(other)[0].read_bytes() == expected


class TestWriting:
    def test_the_bytes_are_those_of_protobuf(self, seeds):
        for index, seed in enumerate(seeds):
            proto = onnx.ModelProto.FromString(seed)
            written = wire.Serialized(proto, {})
            assert b"".join(written.pieces()) == proto.SerializeToString(), index
            assert written.byte_size == proto.ByteSize()

    def test_data_that_is_given_late_is_where_protobuf_writes_it(self):
        proto = chain_model((64, 96, 64))
        proto.graph.initializer[0].doc_string = "behind the data"
        proto.graph.initializer[0].metadata_props.add(key="k", value="v")
        expected = proto.SerializeToString()
        late = {}
        for tensor in proto.graph.initializer:
            data = tensor.raw_data
            tensor.ClearField("raw_data")
            late[tensor.name] = wire.Data(len(data), lambda data=data: iter([memoryview(data)]))
        written = wire.Serialized(proto, late)
        assert b"".join(written.pieces()) == expected
        assert written.byte_size == len(expected)

    @pytest.mark.parametrize(("build", "external"), [(language_model, False), (matmul_model, True)])
    def test_a_file_has_the_bytes_of_a_model_that_was_in_memory_throughout(self, tmp_path, build, external):
        path = save(build(), tmp_path / "m.onnx", external=external)
        in_memory, _ = mxfp8_graph.rewrite(build())
        written, report = mxfp8_graph.rewrite(path, external_data="never")
        assert written.read_bytes() == in_memory.SerializeToString()
        assert report.bytes_after == written.stat().st_size

    @pytest.mark.parametrize("external", [False, True])
    def test_a_constant_of_an_older_opset_keeps_its_data_wherever_it_lies(self, tmp_path, external):
        """The converter of onnx 1.18, not that of 1.23, drops where data lies."""
        nodes = [
            helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight(64, 96), "w")),
            helper.make_node("Constant", [], ["kept"], value=numpy_helper.from_array(weight(48, 96), "kept")),
            node("MatMul", "x w", "h", "linear"),
            helper.make_node("Concat", ["h", "kept"], ["both"], axis=0),
            helper.make_node("Softmax", ["both"], ["y"], axis=-1),
        ]
        proto = model(nodes, {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["n", 96])}, opset=12)
        recipe = mxfp8_graph.Recipe(name="r", output_projections=True)
        expected = mxfp8_graph.rewrite(proto, recipe)[0]
        path = tmp_path / "m.onnx"
        onnx.save(
            proto, path, save_as_external_data=external, location="m.data", size_threshold=0, convert_attribute=True
        )
        written, _ = mxfp8_graph.rewrite(path, recipe, external_data="never")
        assert onnx.load(written) == expected
        [kept] = [a.t for n in onnx.load(written).graph.node for a in n.attribute if "kept" in n.output]
        np.testing.assert_array_equal(numpy_helper.to_array(kept), weight(48, 96))

    def test_a_model_that_protobuf_could_not_read_is_not_written(self, tmp_path, monkeypatch):
        path = save(matmul_model(64, 96), tmp_path / "m.onnx")
        monkeypatch.setattr(wire, "MOST_BYTES", 4_000)
        with pytest.raises(ContractError, match=r"does not fit into one protobuf file \(2 GB\)"):
            mxfp8_graph.rewrite(path)
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]

    def test_new_tensors_of_subgraphs_have_their_data(self, tmp_path):
        results = [helper.make_tensor_value_info("b", 1, ["m", 96])]
        nodes = [node("MatMul", "x w", "h", "inner"), node("Relu", "h", "b")]
        inner = helper.make_graph(nodes, "b", [], results, [numpy_helper.from_array(weight(64, 96), "w")])
        choose = helper.make_node("If", ["yes"], ["y"], "if", then_branch=inner, else_branch=inner)
        ends = {"x": (np.float32, ["m", 64])}, {"y": (np.float32, ["m", 96])}
        proto = model([choose], *ends, {"yes": np.array(True)})
        written, _ = mxfp8_graph.rewrite(save(proto, tmp_path / "m.onnx"), "mxfp8")
        assert written.read_bytes() == mxfp8_graph.rewrite(proto, "mxfp8")[0].SerializeToString()
