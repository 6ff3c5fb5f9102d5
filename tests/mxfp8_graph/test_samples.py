"""Samples: what a user may give as inputs, and what is said when it does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxfp8_graph.running.inputs import InputSpec, Signature
from mxfp8_graph.running.samples import Samples, make_samples
from mxfp8_ops.errors import BackendError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")

ONE = Signature("model", [InputSpec("x", np.dtype(np.float32), ("batch", 2))], {})


def lines(*texts: Any) -> str:
    Path("data.jsonl").write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    return "data.jsonl"


def refusal(inputs: Any, signature: Signature = ONE, kind: type[Exception] = ShapeError) -> str:
    with pytest.raises(kind) as caught:
        make_samples(signature, {"inputs": inputs})
    return str(caught.value)


def test_an_npz_file_is_one_sample() -> None:
    np.savez("data.npz", x=np.ones((3, 2), np.float32))
    samples = make_samples(ONE, {"inputs": "data.npz"})
    assert (len(samples), str(samples), samples.synthesised) == (1, "x float32 [3, 2], from data.npz", False)


def test_a_folder_of_npz_files_is_read_in_the_order_of_names() -> None:
    Path("data").mkdir()
    for name, size in (("b", 1), ("a", 4)):
        np.savez(f"data/{name}.npz", x=np.ones((size, 2), np.float32))
    Path("data/notes.txt").write_text("no sample")
    samples = make_samples(ONE, {"inputs": Path("data")})
    assert [feeds["x"].shape for feeds in samples.feeds] == [(4, 2), (1, 2)]
    assert samples.names == (str(Path("data/a.npz")), str(Path("data/b.npz")))
    assert str(samples) == "2 samples, from data; the first: x float32 [4, 2]"


def test_mappings_in_python() -> None:
    x = np.ones((1, 2), np.float32)
    assert len(make_samples(ONE, {"inputs": {"x": x}})) == 1
    assert len(make_samples(ONE, {"inputs": ({"x": x} for _ in range(3))})) == 3
    assert refusal([3]).startswith("given inputs sample 1: a int; expected a mapping")


def test_synthesised_samples_differ_and_say_what_they_are() -> None:
    samples = make_samples(ONE, {"shapes": {"batch": 4}, "seed": 1}, count=2)
    assert samples.synthesised
    assert str(samples) == "2 samples, synthesised; the first: x float32 [4, 2]"
    first, second = (feeds["x"] for feeds in samples.feeds)
    assert not np.array_equal(first, second)
    assert np.array_equal(second, make_samples(ONE, {"shapes": {"batch": 4}, "seed": 2}).feeds[0]["x"])


def of_tokens(tokens: int | str = "seq", batch: int | str = "n", **caches: Any) -> Signature:
    names = ("position_ids", "input_ids", "attention_mask", "token_type_ids")
    specs = [InputSpec(name, np.dtype(np.int64), (batch, tokens)) for name in names]
    specs += [InputSpec(name, np.dtype(np.float32), dims) for name, dims in caches.items()]
    return Signature("hub/onnx/model.onnx", specs, {})


def samples_of_texts(signature: Signature, *texts: Any, max_length: int | None = None) -> Samples:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "[SEP]": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=9)  # as tokenizer.json of all-MiniLM-L6-v2 asks for
    if max_length:
        tokenizer.enable_truncation(max_length)
    Path("hub/onnx").mkdir(parents=True)
    tokenizer.save("hub/tokenizer.json")
    return make_samples(signature, {"inputs": lines(*texts)})


def test_each_line_of_text_is_a_sample_of_its_tokens() -> None:
    samples = samples_of_texts(of_tokens(past_key=("n", 2, "past", 4)), {"text": "a b c"}, "b")
    first, second = samples.feeds
    assert {name: array.tolist() for name, array in first.items() if array.size} == {
        "position_ids": [[0, 1, 2]],
        "input_ids": [[2, 3, 1]],
        "attention_mask": [[1, 1, 1]],
        "token_type_ids": [[0, 0, 0]],
    }
    assert first["past_key"].shape == (1, 2, 0, 4)
    assert second["input_ids"].tolist() == [[3]]
    assert samples.names == ("data.jsonl line 1", "data.jsonl line 2")
    texts = make_samples(of_tokens(past_key=("n", 2, "past", 4)), {"inputs": ["a b c", "b"]})
    assert texts.names == ("text 1", "text 2")
    np.testing.assert_equal(texts.feeds, samples.feeds)


def test_texts_have_the_fixed_sizes_of_a_model() -> None:
    short, long = samples_of_texts(of_tokens(4, 2), "a", "b b b b b").feeds
    assert short["input_ids"].tolist() == [[2, 0, 0, 0]] * 2
    assert short["attention_mask"].tolist() == [[1, 0, 0, 0]] * 2
    assert long["input_ids"].tolist() == [[3, 3, 3, 3]] * 2


@pytest.mark.parametrize(("limit", "length"), [(3, 3), (None, 512)])
def test_a_long_text_is_cut(limit: int | None, length: int) -> None:
    (feeds,) = samples_of_texts(of_tokens(), "a " * 600, max_length=limit).feeds
    assert feeds["input_ids"].shape == (1, length)


def test_a_mask_without_room_for_the_tokens_is_refused() -> None:
    signature = of_tokens()
    signature.specs[2] = InputSpec("attention_mask", np.dtype(np.int64), ("n", 2))
    with pytest.raises(ShapeError, match="attention_mask has no room for 3 tokens"):
        samples_of_texts(signature, "a b b")


@pytest.mark.parametrize("line", [{"input_ids": [[1]]}, [1], {"text": 3}], ids=str)
def test_a_line_without_a_text_is_refused(line: Any) -> None:
    with pytest.raises(ShapeError, match=r'data.jsonl line 2: no text in .*; expected {"text": "..."} or a string'):
        samples_of_texts(of_tokens(), "a", line)


def test_a_tokenizer_that_is_missing_or_damaged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    assert "no tokenizer.json beside it or one folder above" in refusal(lines("a"), of_tokens())
    assert "no input called 'input_ids' for texts" in refusal(lines("a"))
    Path("hub/onnx").mkdir(parents=True)
    Path("hub/tokenizer.json").write_text("{}")
    assert "tokenizer.json: " in refusal(lines("a"), of_tokens())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        assert refusal(lines("a"), of_tokens(), BackendError).endswith("expected tokenizers; pip install tokenizers")


def npz(path: str, *arrays: Any, save: Any = np.savez) -> str:
    with Path(path).open("wb") as file:  # a name that numpy would complete with .npz stays as it is
        save(file, *arrays)
    return path


def test_files_without_samples_are_refused() -> None:
    Path("empty").mkdir()
    for inputs in ("empty", []):
        assert ": no samples; expected samples for the model" in refusal(inputs)
    for name, kind in (("none.jsonl", ".jsonl"), ("none.npz", ".npz")):
        assert refusal(name) == f"{name}: No such file or directory; expected a readable {kind} file; check the path"
    Path("nothing.npz").write_bytes(b"")
    Path("zip.npz").write_bytes(b"PK\x03\x04broken")
    array = npz("array.npz", np.zeros(3), save=np.save)
    pickle = npz("pickle.npz", np.array([{"a": 1}], object))
    for path in ("nothing.npz", "zip.npz", array, pickle):
        message = refusal(path)
        assert message.startswith(f"{path}: not an .npz file")
        assert message.endswith("one per input, or texts in a .jsonl file; save it with numpy.savez")


# --- What does not fit -----------------------------------------------------------------------------------------------
