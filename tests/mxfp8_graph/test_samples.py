"""Samples: what a user may give as inputs, and what is said when it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxfp8_graph.running.inputs import InputSpec, Signature
from mxfp8_graph.running.samples import make_samples
from mxfp8_ops.errors import ContractError, ShapeError

pytestmark = pytest.mark.usefixtures("own_folder")

ONE = Signature("model", [InputSpec("x", np.dtype(np.float32), ("batch", 2))], {})
TWO = Signature(
    "model",
    [InputSpec("ids", np.dtype(np.int64), ("batch", None)), InputSpec("mask", np.dtype(bool), ("batch", None))],
    {},
)


def lines(*objects: Any, name: str = "data.jsonl") -> str:
    Path(name).write_text("\n".join(o if isinstance(o, str) else json.dumps(o) for o in objects), encoding="utf-8")
    return name


def module(name: str, code: str) -> str:
    """Writes a module of its own name, so that no other test has imported it."""
    Path(f"{name}.py").write_text(code, encoding="utf-8")
    return name


def refusal(inputs: Any, signature: Signature = ONE, kind: type[Exception] = ShapeError) -> str:
    with pytest.raises(kind) as caught:
        make_samples(signature, {"inputs": inputs})
    return str(caught.value)


# --- What is taken ---------------------------------------------------------------------------------------------------


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


def test_lines_of_named_lists() -> None:
    name = lines({"ids": [[1, 2]], "mask": [[True, False]]}, "", {"mask": [[True]], "ids": [[3]]})
    samples = make_samples(TWO, {"inputs": name})
    assert [feeds["ids"].tolist() for feeds in samples.feeds] == [[[1, 2]], [[3]]]
    assert samples.feeds[0]["mask"].dtype == bool
    assert samples.names[1] == "data.jsonl line 3"


def test_numbers_of_a_line_are_rounded_to_the_dtype_of_a_float_input() -> None:
    signature = Signature("model", [InputSpec("x", np.dtype(ml_dtypes.bfloat16), (2,))], {})
    assert make_samples(signature, {"inputs": lines({"x": [0.1, 3]})}).feeds[0]["x"].tolist() == [
        ml_dtypes.bfloat16(0.1),
        3,
    ]


def test_a_function_of_the_current_folder_yields_samples() -> None:
    code = "import numpy as np\ndef feeds():\n    yield from ({'x': np.full((n, 2), n, np.float32)} for n in (1, 2))\n"
    samples = make_samples(ONE, {"inputs": module("yields_samples", code) + ":feeds"})
    assert [feeds["x"].shape for feeds in samples.feeds] == [(1, 2), (2, 2)]


def test_mappings_in_python() -> None:
    x = np.ones((1, 2), np.float32)
    assert len(make_samples(ONE, {"inputs": {"x": x}})) == 1
    assert len(make_samples(ONE, {"inputs": ({"x": x} for _ in range(3))})) == 3


def test_synthesised_samples_differ_and_say_what_they_are() -> None:
    samples = make_samples(ONE, {"shapes": {"batch": 4}, "seed": 1}, count=2)
    assert samples.synthesised
    assert str(samples) == "2 samples, synthesised; the first: x float32 [4, 2]"
    first, second = (feeds["x"] for feeds in samples.feeds)
    assert not np.array_equal(first, second)
    assert np.array_equal(second, make_samples(ONE, {"shapes": {"batch": 4}, "seed": 2}).feeds[0]["x"])


# --- What is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data.jsonl line 1: not JSON: "),
        ([1], "data.jsonl line 1: a list; expected"),
        ({"ids": [[1, 2], [3]], "mask": [[True]]}, "data.jsonl line 1: 'ids' is not an array of numbers"),
        ({"ids": [["a"]], "mask": [[True]]}, "data.jsonl line 1: 'ids' is not an array of numbers"),
        ({"ids": [[1.5]], "mask": [[True]]}, "data.jsonl line 1: 'ids' has a value that int64 cannot hold"),
        ({"ids": [[2**63]], "mask": [[True]]}, "data.jsonl line 1: 'ids' has a value that int64 cannot hold"),
        ({"ids": [[1]], "mask": [[2]]}, "data.jsonl line 1: 'mask' has a value that bool cannot hold"),
        ({"ids": [[1]]}, "data.jsonl line 1: no array for input 'mask'"),
        ({"ids": [[1]], "mask": [[True]], "x": 1}, "data.jsonl line 1: no input called 'x'"),
        ({"ids": [1], "mask": [[True]]}, "data.jsonl line 1: 'ids' has shape [1]; expected ids int64 [batch, ?]"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("data") else "",
)
def test_a_line_that_does_not_fit(line: Any, message: str) -> None:
    assert refusal(lines(line), TWO).startswith(message)


def test_a_number_that_a_float_input_cannot_hold() -> None:
    assert refusal(lines({"x": [[1e300, 0]]})).startswith("data.jsonl line 1: 'x' has a value that float32 cannot hold")


def test_no_samples() -> None:
    Path("empty").mkdir()
    for inputs in ("empty", lines("", ""), []):
        assert ": no samples; expected samples for the model" in refusal(inputs)


def test_a_missing_file() -> None:
    assert refusal("none.jsonl") == (
        "none.jsonl: No such file or directory; expected a readable .jsonl file; check the path"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "has no function called 'feeds'; expected module:function"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def feeds():\n    yield 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def feeds():\n    return 3", "raised TypeError: 'int' object is not iterable"),
    ],
    ids=["no function", "import", "while it yields", "no iterable"],
)
def test_a_function_that_fails(code: str, message: str) -> None:
    name = module(f"fails_{abs(hash(code))}", code)
    assert message in refusal(f"{name}:feeds", kind=ContractError)


def test_a_function_that_yields_no_mapping() -> None:
    name = module("yields_numbers", "def feeds():\n    yield 3\n")
    assert refusal(f"{name}:feeds").startswith("yields_numbers:feeds sample 1: a int; expected a mapping")
