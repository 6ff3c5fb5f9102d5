"""What a user can get wrong, and the message of the error; and what ONNX Runtime tolerates and is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models as b
import numpy as np
import onnx
import onnx_ir
import pytest
from grids import looped
from models import chain_model, matmul_model, node, save, steps, text_model, value, weight
from onnx import TensorProto, helper, numpy_helper
from oracle import run

import mxfp8_graph
from mxfp8_graph import NothingEligibleError, Recipe
from mxfp8_graph.onnx_pass import run as run_onnx
from mxfp8_graph.running.runner import run_model
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError

F32, F16 = np.float32, np.float16


def message(source: Any, error: type[Mxfp8Error] = ContractError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        mxfp8_graph.rewrite(source, **options)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(matmul_model(64, 96), tmp_path / "m.onnx", external=True)


OUTSIDE = "external file {!r}; expected a file inside {folder}; move the data next to the model"
NO_NUMBER = "external offset or length is not a number; expected integers from 0 on; export the model again"
ENTRIES = {
    **{
        ("location", place): OUTSIDE.replace("{!r}", repr(place))
        for place in ("", "../secret", "/etc/passwd", "a/../../b")
    },
    ("length", "100"): "external data of 100 bytes; expected 24576 for its shape and dtype; export the model again",
    ("location", "m.onnx.data\0.txt"): OUTSIDE.replace("{!r}", r"'m.onnx.data\x00.txt'"),
    ("offset", "many"): NO_NUMBER,
    ("length", "many"): NO_NUMBER,
    ("offset", "-4096"): NO_NUMBER,
    ("offset", "4096"): (
        "needs bytes 4096 to 28672 of {folder}/m.onnx.data, which has 24576; expected the whole file; "
        "copy the external data again"
    ),
}


@looped("entry", ENTRIES)
def test_an_entry_of_external_data_that_cannot_be_is_refused(path: Path, entry: tuple[str, str]) -> None:
    proto = onnx.load(path, load_external_data=False)
    changed = onnx.ModelProto.FromString(proto.SerializeToString())
    (pair,) = (each for each in changed.graph.initializer[0].external_data if each.key == entry[0])
    pair.value = entry[1]
    other = path.with_name("changed.onnx")
    other.write_bytes(changed.SerializeToString())
    assert message(other) == f"{other}: tensor 'w': {ENTRIES[entry].format(folder=path.parent)}"


def test_external_data_that_cannot_be_read_is_refused(path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = path.with_name("m.onnx.data")
    content = data.read_bytes()
    data.write_bytes(content[:1000])
    assert message(path) == (
        f"{path}: tensor 'w': needs bytes 0 to 24576 of {data}, which has 1000; expected the whole file; copy the "
        "external data again"
    )
    data.unlink()
    assert message(path) == (
        f"{path}: tensor 'w': cannot read external file {data}: No such file or directory; expected the file next "
        "to the model; copy it there"
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "data"
    elsewhere.write_bytes(content)
    data.symlink_to(elsewhere)
    assert "expected a file inside" in message(path)


def test_external_data_of_a_model_in_memory_is_refused(path: Path) -> None:
    assert message(onnx.load(path, load_external_data=False)) == (
        "model: tensor 'w': lies in external file 'm.onnx.data', and a model in memory has no folder to look in; "
        "expected a path; pass the model's path instead"
    )


def test_links_of_model_and_data_into_one_folder_are_followed(path: Path, tmp_path: Path) -> None:
    """The cache of Hugging Face has such links."""
    snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, blob in (("m.onnx", "aaa"), ("m.onnx.data", "bbb")):
        (tmp_path / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    out, report = mxfp8_graph.rewrite(snapshot / "m.onnx")
    assert (out, len(report.rewritten)) == (snapshot / "m.mxfp8.onnx", 1)
    run(str(out), {"x": np.zeros((1, 1, 64), F32)})


def test_a_model_in_which_nothing_is_eligible_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingEligibleError) as caught:
        mxfp8_graph.rewrite(matmul_model(8, 96))
    assert [d.reason for d in caught.value.decisions] == [
        "tiny: K = 8 is below min_dim = 32; lower min_dim to quantize it"
    ]
    path = save(chain_model((64, 64, 64)), tmp_path / "m.onnx")
    recipe = Recipe(name="none", exclude=("layers",))
    adapt = "is eligible; expected at least one; see the reasons and adapt the recipe"
    assert message(path, NothingEligibleError, recipe=recipe) == f"{path}: none of its 2 matmuls {adapt}"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def with_value(proto: onnx.ModelProto, value: float, *at: tuple[int, ...]) -> onnx.ModelProto:
    """Returns the model with that value at those places of its first weight."""
    tensor = proto.graph.initializer[0]
    array = numpy_helper.to_array(tensor).copy()
    for index in at:
        array[index] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return proto


def behind(op: str, w: np.ndarray, x: Any, dtype: Any = F32, more: Any = (), **attributes: Any) -> onnx.ModelProto:
    before = [node(op, " ".join(["w", *dict(more)]), "seen", **attributes)]
    return b.neg_model("MatMul", x, [*x[:-1], 96], {"w": w, **dict(more)}, "x seen", dtype=dtype, before=before)


NAN, INF = float("nan"), float("inf")
BATCHED = b.neg_model("MatMul", [3, 5, 64], [3, 5, 96], {"w": weight(3, 64, 96)})


NON_FINITE = {
    "nan": (with_value(matmul_model(64, 96), NAN, (5, 40), (60, 3)), [5, 40]),
    "-inf, on the left": (with_value(matmul_model(64, 96, left=True), -INF, (5, 40), (60, 3)), [5, 40]),
    "nan behind a Transpose": (with_value(behind("Transpose", weight(96, 64), [3, 64]), NAN, (90, 7)), [90, 7]),
    "inf behind a Reshape": (
        with_value(behind("Reshape", weight(2, 64, 96), [3, 128], more={"to": np.array([128, 96])}), INF, (1, 63, 95)),
        [1, 63, 95],
    ),
    "inf that only a Cast makes": (
        with_value(behind("Cast", weight(64, 96), [3, 64], F16, to=onnx.TensorProto.FLOAT16), 1e30, (3, 4)), [3, 4],
    ),
    "nan of a batch": (with_value(BATCHED, NAN, (2, 0, 95)), [2, 0, 95]),
}  # fmt: skip


@looped("name", NON_FINITE)
def test_a_weight_that_is_not_finite_is_refused_by_its_name_and_stored_index(name: str) -> None:
    proto, index = NON_FINITE[name]
    value = name.partition(",")[0].partition(" ")[0]
    assert message(proto) == (
        f"weight 'w': {value} at index {index}; expected finite values; repair the checkpoint, or pass "
        "allow_nonfinite=True to let its block become NaN"
    )


def test_a_weight_that_is_kept_may_hold_anything() -> None:
    proto = with_value(chain_model((64, 64, 64)), NAN, (0, 0))
    _, report = mxfp8_graph.rewrite(proto, Recipe(name="some", exclude=(r"layers\.0",)))
    assert len(report.rewritten) == 1


def test_a_value_that_is_not_finite_and_allowed_makes_its_block_nan_and_no_other() -> None:
    proto = with_value(matmul_model(64, 96), INF, (5, 40))
    rewritten, report = mxfp8_graph.rewrite(proto, allow_nonfinite=True)
    elements, scales = (numpy_helper.to_array(t).view(np.uint8) for t in rewritten.graph.initializer)
    assert (elements[40, :32] == 0x7F).all()
    assert np.argwhere(scales == 255).tolist() == [[40, 0]]
    assert np.count_nonzero(elements == 0x7F) == 32
    assert 0 < report.sites[0].relative_l2 < 0.05
    y = run(rewritten, {"x": np.ones((1, 1, 64), F32)})[0]
    assert np.isnan(y[0, 0]).nonzero()[0].tolist() == [40]


# --- A model that is rewritten already ---


def test_a_record_that_cannot_be_read_or_is_missing_is_a_mismatch_too() -> None:
    rewritten, _ = mxfp8_graph.rewrite(matmul_model())
    (record,) = (entry for entry in rewritten.metadata_props if entry.key == "mxfp8_graph.recipe")
    for content in ('{"name": "future", "unheard_of": 1}', "not JSON", "[]", ""):
        record.value = content
        name = "'future'" if "future" in content else "'an unrecorded recipe'"
        assert f"packed with {name}, asked for 'mxfp8'" in message(rewritten, RecipeError), content
    del rewritten.metadata_props[:]
    assert "packed with 'an unrecorded recipe', asked for 'mxfp8'" in message(rewritten, RecipeError)


# --- What is refused when a model is loaded, and what is not ---

Change = Callable[[onnx.ModelProto], Any]
ONCE, DEFINED = "expected each name once", "expected an input, an initializer or an output of a node"


def linear(change: Change, **stored: np.ndarray) -> onnx.ModelProto:
    """Returns y = relu(x @ w) after a change, which onnx.checker need not accept."""
    proto = text_model("linear:MatMul x w>h; relu:Relu h>y", ("n", 64), ("n", 96), **stored)
    change(proto)
    return proto


def beside(text: str, **stored: np.ndarray) -> onnx.ModelProto:
    return linear(lambda proto: proto.graph.node.extend(steps(text)), **stored)


def called(*bodies: str) -> onnx.ModelProto:
    """Returns a model that calls F, with the local functions F, G, ..., which have these bodies."""
    proto = linear(lambda p: p.graph.node.append(node("F", "x", "z", domain="local")))
    proto.functions.extend(b.local_function(name, "a", body) for name, body in zip("FG", bodies, strict=False))
    for each in (n for f in proto.functions for n in f.node if n.op_type in "FG"):
        each.domain = "local"
    proto.opset_import.append(helper.make_opsetid("local", 1))
    return proto


def refers_to_a_function() -> onnx.NodeProto:
    softmax = node("Softmax", "x", "z", axis=1)
    softmax.attribute[0].ref_attr_name = "a"
    return softmax


def packed_by_16() -> onnx.ModelProto:
    proto, _ = mxfp8_graph.rewrite(matmul_model())
    next(each for each in proto.graph.node[0].attribute if each.name == "block_size").i = 16
    return proto


SHADOW = b.choose(b.subgraph("Neg x>b", w=weight(64, 96)), "Abs x>a", "z", "if", "c")
REFUSED: dict[str, onnx.ModelProto] = {
    "not an ONNX model (no IR version or no graph); expected an ONNX model": onnx.ModelProto(),
    "the graph has no outputs; expected at least one": linear(lambda p: p.graph.ClearField("output")),
    f"output 'q' is not defined; {DEFINED}": linear(lambda p: setattr(p.graph.output[0], "name", "q")),
    f"node 'Neg_z' (Neg): input 'q' is not defined; {DEFINED}": beside("Neg q>z"),
    f"an initializer called 'w' is defined twice; {ONCE}": linear(
        lambda p: p.graph.initializer.append(p.graph.initializer[0])
    ),
    f"an initializer has no name; {ONCE}": linear(lambda p: p.graph.initializer.add(data_type=1, dims=[0])),
    "if/then_branch: the initializer 'w' has the name of a value of a graph around it; expected another name": linear(
        lambda p: p.graph.node.append(SHADOW), c=np.array(True)
    ),
    "node 'Neg_p' (Neg): it needs its own result; expected no cycle": beside("Neg q>p; Abs p>q"),
    "imports the default domain in versions 18 and 21; expected one version": linear(
        lambda p: p.opset_import.append(helper.make_opsetid("ai.onnx", 18))
    ),
    "local function 'F' is defined twice; expected each once": linear(
        lambda p: p.functions.extend([called("Neg a>r").functions[0]] * 2)
    ),
    f"function 'F': node 'Neg_r' (Neg): input 'q' is not defined; {DEFINED}": called("Neg q>r"),
    "tensor 'w': unknown dtype 99; expected a dtype of onnx": linear(
        lambda p: setattr(p.graph.initializer[0], "data_type", 99)
    ),
    "tensor 'w': dims [0, 2305843009213693952]; expected dims from 0 on, of a tensor that memory can hold": linear(
        lambda p: p.graph.initializer[0].CopyFrom(onnx.TensorProto(name="w", data_type=1, dims=[0, 1 << 61]))
    ),
    "tensor 's': strings as external data; expected strings in the model": beside(
        "Identity s>z", s=np.array(["text"], object)
    ),
    "node 'Softmax_z' (Softmax): attribute 'axis' refers to attribute 'a' of a function; expected a value outside of "
    "functions": linear(lambda p: p.graph.node.append(refers_to_a_function())),
    "tensor 'c': unknown dtype 99; expected a dtype of onnx": linear(
        lambda p: p.graph.node.append(node("Constant", "", "z", value=onnx.TensorProto(name="c", data_type=99)))
    ),
    "tensor 'w': has 24576 bytes; expected 24192 for float [63, 96]": linear(
        lambda p: p.graph.initializer[0].dims.__setitem__(0, 63)
    ),
    "node 'x_mxfp8_quantize' (MXFP8Quantize): block_size 16; expected 32, the only one that runs": packed_by_16(),
}  # fmt: skip


for _tensor in (t for p in REFUSED.values() for t in p.graph.initializer if t.name == "s"):
    _tensor.data_location = onnx.TensorProto.EXTERNAL
    _tensor.external_data.add(key="location", value="s.bin")


@looped("said", REFUSED)
def test_a_damaged_model_is_refused_in_one_line(said: str) -> None:
    assert message(REFUSED[said]).removeprefix("model: ").rpartition("; ")[0] == said


READERS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "rewrite": mxfp8_graph.rewrite,
    "convert": lambda model: mxfp8_graph.convert(model, "qdq"),
    "verify": lambda model: mxfp8_graph.verify(model, chain_model()),
    "verify, rewritten": lambda model: mxfp8_graph.verify(chain_model(), model),
    "run": run_model,
    "compare": mxfp8_graph.compare,
    "analyze": mxfp8_graph.analyze,
    "tune": lambda model: mxfp8_graph.tune(model, "cosine>=0.9"),
    "unpack": mxfp8_graph.unpack,
}


@looped("reader", READERS)
def test_a_model_that_onnx_checker_refuses_is_to_blame_for_an_unexpected_exception(reader: str) -> None:
    proto = linear(lambda p: p.graph.node.append(b.choose("Neg x>b", "Abs x>a", "z", "if", "c")), c=np.array(True))
    proto.graph.node[-1].attribute.append(proto.graph.node[-1].attribute[0])
    said = r"node 'if' \(If\): Attribute '\w+' appeared multiple times; expected a model that passes onnx\.checker"
    with pytest.raises(ContractError, match=f"model: {said}; export the model again"):
        READERS[reader](proto)


def test_a_dtype_that_onnx_has_before_onnx_ir_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxfp8_graph.onnx_pass.check._DTYPES", frozenset({onnx.TensorProto.INT64}))
    said = f"tensor 'w': dtype FLOAT, which onnx_ir {onnx_ir.__version__} lacks; expected a dtype that it has"
    assert message(linear(lambda proto: None)).removeprefix("model: ") == f"{said}; upgrade onnx-ir"


def test_functions_that_call_each_other_are_refused_with_the_error_of_onnx_checker() -> None:
    with pytest.raises(ContractError, match=r"must not be recursive; expected a model that passes onnx\.checker"):
        mxfp8_graph.rewrite(called("G a>r", "F a>r"))


@looped("error", [MemoryError, KeyError])
def test_a_sound_model_and_a_lack_of_memory_are_not_blamed(
    error: type[Exception], monkeypatch: Any, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run_onnx, "find_and_plan", fail)
    constant = node("Constant", "", "k", value=numpy_helper.from_array(weight(64, 96)))  # in a file, external to it
    path = save(linear(lambda p: p.graph.node.insert(0, constant)), tmp_path / "m.onnx")
    with pytest.raises(error):
        mxfp8_graph.rewrite(path)


def test_a_name_that_is_no_unicode_is_refused() -> None:
    content = beside("Neg h>ZZZZ").SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc")
    with pytest.raises(ContractError, match="onnx_ir cannot write it"):
        mxfp8_graph.rewrite(onnx.ModelProto.FromString(content))


def of_ir_version_3(proto: onnx.ModelProto) -> None:
    proto.ir_version = 3
    proto.graph.input.extend(value(t.name, F32, t.dims) for t in proto.graph.initializer)


BITS = (
    TensorProto(name="b", data_type=TensorProto.BOOL, dims=[2], int32_data=[0, 1]),
    TensorProto(name="half", data_type=TensorProto.FLOAT16, dims=[1], int32_data=[0x3C00]),
    TensorProto(name="four", data_type=TensorProto.INT4, dims=[3], int32_data=[33, 3]),
)
TOLERATED: dict[str, Change] = {
    "a size of -1": lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -1),
    "a declared shape that is wrong": lambda p: p.graph.value_info.append(value("h", F32, ["n", 7])),
    "nodes out of order": lambda p: p.graph.node.insert(0, p.graph.node.pop()),
    "an empty optional input": lambda p: p.graph.node.append(helper.make_node("Clip", ["h", "", "top"], ["z"])),
    "a domain that is not imported": lambda p: p.graph.node.append(node("Gelu", "h", "z", domain="com.microsoft")),
    "weights among the inputs": of_ir_version_3,
    "an output of unknown shape": lambda p: p.graph.output[0].type.tensor_type.ClearField("shape"),
    "no name of the graph": lambda p: p.graph.ClearField("name"),
    "an output twice": lambda p: p.graph.output.append(p.graph.output[0]),
    "an input as output": lambda p: p.graph.output.append(p.graph.input[0]),
    "an empty initializer": lambda p: p.graph.initializer.append(numpy_helper.from_array(np.ones((0, 3), F32), "e")),
    "bool, float16 and int4 as integers": lambda p: p.graph.initializer.extend(BITS),
    "a sequence": lambda p: p.graph.node.append(node("SequenceConstruct", "h h", "z")),
    "training information": lambda p: p.training_info.add().algorithm.node.append(node("Nothing", "q", "r")),
}
"""ONNX Runtime runs models with these changes, so they are rewritten, and their results run too."""


@looped("name", TOLERATED)
def test_a_model_that_onnx_runtime_tolerates_is_rewritten_and_runs(name: str) -> None:
    proto = linear(TOLERATED[name], top=np.array(1, F32))
    x = {"x": np.random.default_rng(0).standard_normal((3, 64), F32)}
    expected = run(proto, x)[0]
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 1
    assert np.linalg.norm(run(rewritten, x)[0] - expected) < 0.05 * np.linalg.norm(expected)
