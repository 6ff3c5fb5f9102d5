"""Samples: the inputs of several runs of a model, from the user or synthesised. All are in memory.

data.npz            one sample, an array per input
folder/             one sample per .npz file, in the order of their names
data.jsonl          one text per line, {"text": "A sentence."} or a string: see `_texts`
arrays in Python    a mapping is one sample, an iterable of mappings is several
texts in Python     a list of texts, as the lines of a .jsonl file
nothing             synthesised, see `inputs.py`, and marked as such wherever they are described
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np

from mxfp8_graph.naming import first_line
from mxfp8_graph.running.inputs import Array, Inputs, Signature, check_inputs, describe, make_inputs
from mxfp8_ops.errors import BackendError, Option, ShapeError

SampleSource = str | Path | Mapping[str, Array] | Iterable[Mapping[str, Array]] | Sequence[str] | None
"""The types of `inputs` in the Python API."""

_TOKENS: Final = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Inputs with a column for each token; a tokenizer makes the first three."""


class SampleOptions(TypedDict, total=False):
    """The options of every function that runs a model on samples."""

    inputs: SampleSource
    """A file, a folder, arrays by input name, or an iterable of these; see `running.samples`.
    Default: None, which synthesises them, and results say so."""
    shapes: Mapping[str, int] | None
    """Sizes of free dimensions of synthesised inputs, by dim_param or INPUT.AXIS; see `inputs.Sizes`. Default: None."""
    seed: int
    """Seed of the first synthesised sample; each further sample adds 1. Default: 0."""


@dataclass(frozen=True)
class Samples:
    """Inputs that fit a model, one mapping per run; all of them are in memory."""

    feeds: tuple[Inputs, ...]
    source: str
    """Their origin in words: "from data.npz", "synthesised"."""
    names: tuple[str, ...]
    """Name of each sample in messages: data.jsonl line 3."""
    synthesised: bool = False

    @property
    def largest(self) -> Inputs:
        """The sample with most numbers, the first of equals; it is the one that is timed."""
        return max(self.feeds, key=lambda feeds: sum(array.size for array in feeds.values()))

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.feeds)

    def __str__(self) -> str:
        """Returns the samples as results describe them: x float32 [2, 64], synthesised."""
        first = describe(self.feeds[0])
        return (
            f"{first}, {self.source}" if len(self) == 1 else f"{len(self)} samples, {self.source}; the first: {first}"
        )


def make_samples(
    signature: Signature,
    options: SampleOptions,
    *,
    count: int = 1,
    run: Callable[[Inputs], object] = lambda feeds: None,
) -> Samples:
    """Returns the samples of the user, checked, or `count` synthesised ones.

    Exported decoders often have a fixed batch of one inside, for example in the tables of a rotary embedding. So free
    batch dimensions are 1 if `run` fails on the first synthesised sample.

    Raises:
        BackendError: `run` fails on synthesised samples, also with a batch of 1; or tokenizers is not installed.
        ShapeError: a sample does not fit the model, the user passed no sample, or a file is unreadable.
    """
    inputs, shapes, seed = options.get("inputs"), options.get("shapes") or {}, options.get("seed", 0)
    if inputs is not None:
        texts = _lines(inputs)
        # Arrays have sizes of their own, so a --dim would have no effect.
        if shapes and texts is None:
            what, advice = f"sizes {', '.join(shapes)} with given inputs", ("drop ", Option("shapes"))
            raise ShapeError(signature.name, what, expected="one or the other", advice=advice)
        source = str(inputs) if isinstance(inputs, (str, Path)) else "given inputs"
        # Checked one by one, so that an error names the sample that does not fit.
        named = _named(inputs) if texts is None else _texts(texts, signature, shapes)
        checked = {name: check_inputs(arrays, signature.specs, name) for name, arrays in named}
        if not checked:
            raise ShapeError(source, "no samples", expected="samples for the model", advice="give at least one")
        return Samples(tuple(checked.values()), f"from {source}", tuple(checked))
    source, batch = "synthesised", 2
    try:
        run(make_inputs(signature, shapes, seed))
    except BackendError as error:
        source, batch = "synthesised; batches of 1, since the model does not run with 2", 1
        try:
            run(make_inputs(signature, shapes, seed, batch=batch))
        except BackendError:
            raise error from None
    feeds = tuple(make_inputs(signature, shapes, seed + number, batch=batch) for number in range(count))
    return Samples(feeds, source, tuple(f"sample {number + 1}" for number in range(count)), synthesised=True)


def _named(inputs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (name of a sample, its arrays)."""
    if isinstance(inputs, Mapping):
        yield "given inputs", inputs
    elif not isinstance(inputs, (str, Path)):
        for number, arrays in enumerate(inputs, 1):
            name = f"given inputs sample {number}"
            if not isinstance(arrays, Mapping):
                what, expected = f"a {type(arrays).__name__}", "a mapping of input names to arrays"
                raise ShapeError(name, what, expected=expected, advice="yield a dict")
            yield name, arrays
    else:
        files = sorted(Path(inputs).glob("*.npz")) if Path(inputs).is_dir() else [Path(inputs)]
        yield from ((str(file), _arrays(file)) for file in files)


def _arrays(path: Path) -> Inputs:
    """Returns the arrays of an .npz file."""
    try:
        with path.open("rb") as source, np.load(source, allow_pickle=False) as loaded:
            return dict(loaded)
    except OSError as error:
        raise ShapeError.unreadable(path, error, "a readable .npz file") from None
    except Exception as error:  # zipfile and NumPy raise many classes for damaged files, such as zlib.error, TypeError
        # NumPy takes any other file for a pickle, and its message would be about pickles.
        why = f": {first_line(error)}" if zipfile.is_zipfile(path) else ""
        what, expected = f"not an .npz file{why}", "plain arrays, one per input, or texts in a .jsonl file"
        raise ShapeError(path, what, expected=expected, advice="save it with numpy.savez") from None


def _lines(inputs: Any) -> list[tuple[str, str]] | None:
    """Returns (name, text) of each sample of texts: the lines of a .jsonl file, or texts in a list; else None."""
    if isinstance(inputs, (str, Path)):
        return list(_lines_of(Path(inputs))) if Path(inputs).suffix == ".jsonl" else None
    if isinstance(inputs, (list, tuple)) and inputs and all(isinstance(each, str) for each in inputs):
        return [(f"text {number}", text) for number, text in enumerate(inputs, 1)]
    return None


def _lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of the lines of a .jsonl file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ShapeError.unreadable(path, error, "a readable .jsonl file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"{path} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            expected, advice = '{"text": "..."} or a string', "write numbers to .npz files, a sample in each"
            raise ShapeError(name, f"no text in {line[:60]}", expected=expected, advice=advice)
        yield name, text


def _texts(
    lines: Iterable[tuple[str, str]], signature: Signature, shapes: Mapping[str, int]
) -> Iterator[tuple[str, Inputs]]:
    """Yields a sample per text: its tokens after an empty cache; other inputs are synthesised, in `shapes`.

    A text is cut at the fixed length of the model, or else at the limit in tokenizer.json, or else at 512 tokens. It is
    padded only for a model with a fixed length.
    """
    tokenizer = _tokenizer(signature)
    for name, text in lines:
        yield name, _encoded(tokenizer.encode(text), signature, shapes)


def _encoded(encoding: Any, signature: Signature, shapes: Mapping[str, int]) -> Inputs:
    count, shapes = len(encoding.ids), dict(shapes)
    for spec in signature.specs:
        for axis, dim in enumerate(spec.dims):
            place = f"{spec.name}.{axis}" if dim is None else dim
            if isinstance(place, str) and spec.name in _TOKENS and len(spec.dims) <= 2:
                shapes[place] = count if axis == len(spec.dims) - 1 else 1
            elif isinstance(place, str) and "past" in spec.name.lower() and axis == 2:
                shapes[place] = 0
    feeds = make_inputs(signature, shapes, batch=1)
    for name, row in zip(_TOKENS, (encoding.ids, encoding.attention_mask, encoding.type_ids), strict=False):
        if name in feeds and feeds[name].ndim <= 2:
            # Tokens take the last columns, after the columns of the cache. A mask with more axes keeps its ones.
            if count > feeds[name].shape[-1]:
                what, advice = f"{name} has no room for {count} tokens", "write arrays to .npz files, a sample in each"
                raise ShapeError(signature.name, what, expected="a column for each", advice=advice)
            feeds[name][..., feeds[name].shape[-1] - count :] = row
    return feeds


def _tokenizer(signature: Signature) -> Any:
    """Returns the tokenizer of tokenizer.json beside the model or one folder above (the hub has onnx/model.onnx)."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        advice = "pip install tokenizers"
        raise BackendError("samples of text", str(error), expected="tokenizers", advice=advice) from None
    dims = next((spec.dims for spec in signature.specs if spec.name == "input_ids"), ())
    places = [folder / "tokenizer.json" for folder in list(Path(signature.name).absolute().parents)[:2]]
    path = next((path for path in places if path.exists()), None)
    if path is None or not dims:
        what = "no tokenizer.json beside it or one folder above" if dims else "no input called 'input_ids' for texts"
        advice = "copy the tokenizer.json of the model there, or pass arrays in .npz files"
        raise ShapeError(signature.name, what, expected="a model of tokens with its tokenizer.json", advice=advice)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own
        expected, advice = "a file of the library tokenizers", "copy it again"
        raise ShapeError(path, first_line(error), expected=expected, advice=advice) from None
    fixed = dims[-1] if isinstance(dims[-1], int) else None
    tokenizer.enable_truncation(fixed or (tokenizer.truncation or {"max_length": 512})["max_length"])
    if fixed is None:
        tokenizer.no_padding()
    else:
        tokenizer.enable_padding(**{**(tokenizer.padding or {}), "length": fixed})
    return tokenizer
