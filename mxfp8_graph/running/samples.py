"""Samples: the inputs of several runs of a model, as a user gives them or synthesised.

    data.npz            one sample, an array per input
    folder/             one sample per .npz file, in the order of their names
    data.jsonl          one sample per line: {"input_ids": [[101, 2023, 102]], "attention_mask": [[1, 1, 1]]}
    module:function     one sample per mapping that function() yields. This runs the user's code
    arrays in Python    a mapping is one sample, an iterable of mappings is several
    nothing             synthesised, see `inputs.py`, and marked as such wherever they are described

All samples are in memory.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np

from mxfp8_graph.running.inputs import (
    Array,
    Inputs,
    InputSpec,
    Signature,
    Sizes,
    check_inputs,
    describe,
    load_arrays,
    make_inputs,
)
from mxfp8_ops.errors import BackendError, ContractError, Option, ShapeError

SampleSource = str | Path | Mapping[str, Array] | Iterable[Mapping[str, Array]] | None
"""The types of `inputs` in the Python API."""


class SampleOptions(TypedDict, total=False):
    """The options of every function that runs a model on samples."""

    inputs: SampleSource
    """A file, a folder, "module:function", arrays by input name, or an iterable of these; see `running.samples`.
    Default: None, which synthesises them, and results say so."""
    shapes: Mapping[str, int] | None
    """Sizes of free dimensions of synthesised inputs, by dim_param or INPUT.AXIS; see `inputs.Sizes`. Default: None."""
    seed: int
    """Of the first synthesised sample; those that follow have the numbers that follow. Default: 0."""


REFERENCE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Name of a function: my_data:feeds, or package.module:function."""

_Named = Iterator[tuple[str, Mapping[str, Any]]]
"""Pairs of (name of a sample, its arrays)."""


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
        """Returns how many samples there are."""
        return len(self.feeds)

    def __str__(self) -> str:
        """Returns them as results describe them: x float32 [2, 64], synthesised."""
        first = describe(self.feeds[0])
        if len(self) == 1:
            return f"{first}, {self.source}"
        return f"{len(self)} samples, {self.source}; the first: {first}"


def make_samples(
    signature: Signature,
    options: SampleOptions,
    *,
    count: int = 1,
    run: Callable[[Inputs], object] = lambda feeds: None,
) -> Samples:
    """Returns the given samples, checked, or `count` synthesised ones.

    Exported decoders often hold a batch of one somewhere, in the tables of a rotary embedding for example. So where
    `run` fails on the first synthesised sample, free batch dimensions are 1.

    Args:
        signature: what the model takes.
        options: the samples that the user chose.
        count: how many to synthesise.
        run: the model, if its samples are to be tried.

    Raises:
        BackendError: `run` fails on what is synthesised, with batches of one too.
        ShapeError: samples do not fit the model, there are none, a file is unreadable, or both inputs and shapes are
            given.
        ContractError: the user's function cannot be loaded, or raises.
    """
    inputs, shapes = options.get("inputs"), options.get("shapes") or {}
    if inputs is None:
        return _synthesised(signature, options, count, run)
    # Given arrays have sizes of their own, so a --dim would have no effect.
    if shapes:
        what = f"sizes {', '.join(shapes)} with given inputs"
        advice = ("drop ", Option("shapes"), ": given inputs have their sizes")
        raise ShapeError(signature.name, what, expected="one or the other", advice=advice)
    source = str(inputs) if isinstance(inputs, (str, Path)) else "given inputs"
    # Checked sample by sample, so that an error names the one that does not fit.
    named = _named(inputs, {spec.name: spec for spec in signature.specs})
    checked = [(name, check_inputs(arrays, signature.specs, name)) for name, arrays in named]
    if not checked:
        raise ShapeError(source, "no samples", expected="samples for the model", advice="give at least one")
    names, feeds = zip(*checked, strict=True)
    return Samples(feeds, f"from {source}", names)


def _synthesised(signature: Signature, options: SampleOptions, count: int, run: Callable[[Inputs], object]) -> Samples:
    shapes, seed, source = options.get("shapes") or {}, options.get("seed", 0), "synthesised"
    feeds = [make_inputs(signature, shapes, seed + number) for number in range(count)]
    try:
        run(feeds[0])
    except BackendError as error:
        batches = Sizes(signature.specs, shapes, signature.name).batches()
        ones = {**shapes, **dict.fromkeys(batches, 1)}
        feeds = [make_inputs(signature, ones, seed + number) for number in range(count)]
        try:
            run(feeds[0])
        except BackendError:
            raise error from None
        source = f"synthesised; {', '.join(batches)} = 1, since the model does not run with 2"
    names = tuple(f"sample {number}" for number in range(1, count + 1))
    return Samples(tuple(feeds), source, names, synthesised=True)


def _named(inputs: Any, specs: Mapping[str, InputSpec]) -> _Named:
    if isinstance(inputs, Mapping):
        yield "given inputs", inputs
    elif not isinstance(inputs, (str, Path)):
        yield from _yielded("given inputs", lambda: inputs)
    # A file may be called a:b; what exists is taken for a file, so that no code runs by mistake.
    elif is_reference(str(inputs)) and not Path(inputs).exists():
        yield from _yielded(str(inputs), load_function(str(inputs)))
    elif os.path.isdir(inputs):
        yield from ((str(file), load_arrays(file)) for file in sorted(Path(inputs).glob("*.npz")))
    elif Path(inputs).suffix == ".jsonl":
        yield from _in_lines(Path(inputs), specs)
    else:
        yield str(inputs), load_arrays(Path(inputs))


def _yielded(source: str, make: Callable[[], Any]) -> _Named:
    """Yields what a user's function, or a user's iterable, yields."""
    try:
        samples = list(make())
    except Exception as error:  # whatever the user's code raises
        raise failed(source, error) from error
    for number, arrays in enumerate(samples, 1):
        name = f"{source} sample {number}"
        if not isinstance(arrays, Mapping):
            what = f"a {type(arrays).__name__}"
            raise ShapeError(name, what, expected="a mapping of input names to arrays", advice="yield a dict")
        yield name, arrays


def _in_lines(path: Path, specs: Mapping[str, InputSpec]) -> _Named:
    """Yields a sample per line that is not blank."""
    try:
        # Bytes that are not UTF-8 make a line that is no JSON, and an error that names it.
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ShapeError.unreadable(path, error, "a readable .jsonl file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"{path} line {number}"
        try:
            values = json.loads(line)
        except ValueError as error:
            advice = "write one object per line"
            raise ShapeError(name, f"not JSON: {error}", expected='{"input": [...], ...}', advice=advice) from None
        if not isinstance(values, dict):
            what = f"a {type(values).__name__}"
            raise ShapeError(name, what, expected='{"input": [...], ...}', advice="name the lists after the inputs")
        # The usual mistake with a .jsonl file, so the advice is the step that is missing.
        if text := next((key for key, value in values.items() if isinstance(value, str)), None):
            expected = ", ".join(map(str, specs.values()))
            advice = "tokenize first: write what the model's tokenizer gives, transformers.AutoTokenizer of its folder"
            raise ShapeError(name, f"{text!r} is text", expected=expected, advice=advice)
        yield name, {key: _array(values[key], specs.get(key), name) for key in values}


def _array(values: Any, spec: InputSpec | None, where: str) -> Array:
    """Returns a list of a .jsonl file in the dtype of its input; what that dtype cannot hold is an error."""
    try:
        array = np.asarray(values)
    except ValueError:  # NumPy's, of lists of different lengths
        array = np.asarray(None)
    if spec is None:
        return array  # `check_inputs` says that the model has no such input
    if array.size and array.dtype.kind not in "biuf":
        advice = "give lists of equal lengths, of numbers or booleans"
        raise ShapeError(where, f"{spec.name!r} is not an array of numbers", expected=str(spec), advice=advice)
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(spec.dtype)
    # Floats may be rounded, but not to infinity; integers and booleans are what was written.
    exact = (
        result == array if spec.dtype.kind in "biu" else np.isfinite(result.astype(np.float64)) | ~np.isfinite(array)
    )
    if not np.all(exact):
        what = f"{spec.name!r} has a value that {spec.dtype.name} cannot hold"
        raise ShapeError(where, what, expected=str(spec), advice="correct the values")
    return result


def is_reference(text: object) -> bool:
    """Whether `text` names a function as module:function."""
    return isinstance(text, str) and REFERENCE.fullmatch(text) is not None


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function that module:function names; the module may be in the current folder.

    Importing the module runs it.

    Raises:
        ContractError: there is no such module or function, or the module fails.
    """
    module, _, name = reference.partition(":")
    here = str(Path.cwd())
    # As `python -m` does: an installed command has no current folder in its path.
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the user's module raises
        raise failed(reference, error) from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        what = f"{module} has no function called {name!r}"
        raise ContractError(reference, what, expected="module:function", advice="correct the name")
    return function  # type: ignore[no-any-return]  # of whatever type the user's function is


def failed(reference: str, error: Exception) -> ContractError:
    """Returns the error for an exception of a user's function."""
    reason = next(iter(str(error).splitlines()), "")
    what = f"raised {type(error).__name__}{f': {reason}' if reason else ''}"
    return ContractError(reference, what, expected="a function that runs", advice="correct it; --debug shows where")
