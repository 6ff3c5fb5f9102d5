"""The folder of a result, which is there whole or not at all, and the measurements from which a search continues.

    FOLDER/NAME.mxfp8.onnx           or .pt2: the rewritten model
    FOLDER/recipe.yaml               from which `rewrite` makes it again
    FOLDER/report.html, report.json
    FOLDER.part/measurements.jsonl   until the search ends; the files above are written beside it

The first line of the measurements says of what they are, every other line is one. The search decides by these values
alone, so that after a kill it decides the same again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, Field, TypeAdapter

from mxfp8_graph.models import kind_of
from mxfp8_graph.onnx_pass.load import external_files, load
from mxfp8_graph.running.runner import is_program
from mxfp8_graph.running.samples import Samples
from mxfp8_graph.tools.metrics import Metric
from mxfp8_ops.errors import ContractError, Option

NAME: Final = "measurements.jsonl"
"""Name of the file in the folder of a search."""

_SCHEMA: Final = 1
_Bytes = Annotated[int, Field(ge=0, le=2**63)]
_Seconds = Annotated[float, Field(gt=0, le=1e9)]


class _Trial(BaseModel, strict=True, extra="forbid"):
    scores: dict[str, list[float]]
    bytes: _Bytes
    packed: list[tuple[str, str, _Bytes, _Bytes]]


_KINDS: Final = {
    "trial": TypeAdapter[Any](_Trial),
    "latency": TypeAdapter[Any](tuple[_Seconds, _Seconds]),
    "alone": TypeAdapter[Any](list[float] | None),
}
"""Type of a measurement, by the first word of its name: of `Trials.trial`, `Trials.seconds` and `Damages`."""


class Place:
    """The folder of a result, and the one beside it in which a search goes on."""

    def __init__(self, model: Any, output: str | Path | None, *, overwrite: bool) -> None:
        """Checks that the result can go there.

        Raises:
            ContractError: something is there and `overwrite` is false, or there is no folder for it.
        """
        kind, another = kind_of(model), ("pass another ", Option("output"))
        self._overwrite = overwrite
        stem = Path(model).stem if kind.is_file else "program" if kind.is_program else "model"
        self.folder = Path(output) if output else Path(model).parent / f"{stem}.tuned"
        if self.folder.name in {"", ".."}:
            what, expected = "not the name of a folder", "a folder for the result alone"
            raise ContractError(self.folder, what, expected=expected, advice=another)
        self.part = self.folder.with_name(f"{self.folder.name}.part")
        self.model_name = f"{stem}.mxfp8.{'pt2' if kind.is_program else 'onnx'}"
        self._state = self.part / NAME
        if not os.path.isdir(self.folder.parent):
            what = f"no folder {self.folder.parent}"
            raise ContractError(self.folder, what, expected="a folder for it", advice="correct the output")
        if self.folder.exists() and not os.path.isdir(self.folder):
            raise ContractError(self.folder, "is a file", expected="a folder", advice=another)
        self.check_free()
        # Temporary folders of a killed process, whose names begin with a dot, are not in the way.
        inside = [path for path in self.part.glob("*") if not path.name.startswith(".")]
        if (self.part.exists() and not os.path.isdir(self.part)) or (inside and self._state not in inside):
            away = ("move it away, or ", *another)
            raise ContractError(self.part, "exists", expected="nothing there, or an unfinished search", advice=away)

    @contextlib.contextmanager
    def search(self) -> Iterator[BinaryIO]:
        """Yields the file of the measurements, open for reading and appending.

        Raises:
            ContractError: the folder cannot be written.
        """
        try:
            self.part.mkdir(exist_ok=True)
            file = self._state.open("a+b")
        except OSError as error:
            raise ContractError.unwritable(self.part, error, ("pass another ", Option("output"))) from None
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                if self._state.stat().st_size == 0:  # the search did not begin
                    self._state.unlink()
                    self.part.rmdir()
            with contextlib.suppress(OSError):  # what is buffered for a full disk fails once more
                file.close()

    def check_free(self) -> None:
        """Raises ContractError if something is there that may not be replaced."""
        if os.path.lexists(self.folder) and not self._overwrite:
            replace = ("pass ", Option("overwrite", True), ", or another ", Option("output"))
            raise ContractError(self.folder, "exists", expected="nothing there", advice=replace)

    def put(self) -> None:
        """Makes what is in `part` the result, where there was none before; without the measurements."""
        self.part.rename(self.folder)
        (self.folder / NAME).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes what the search wrote."""
        shutil.rmtree(self.part, ignore_errors=True)


class Measurements:
    """Measurements by name."""

    def __init__(self, file: BinaryIO | None, subject: Mapping[str, str], scores: Mapping[str, int]) -> None:
        """Reads what an earlier search left.

        Args:
            file: open for reading and appending; None keeps everything in memory.
            subject: what is measured: of the model, the samples and so on, what tells them from others.
            scores: how many numbers a trial has of each metric.

        Raises:
            ContractError: the file is of another subject, or not one of these.
        """
        self._file = file
        self._values: dict[str, Any] = {}
        if file is not None:
            self._read(file, dict(subject), scores)
        self.resumed = len(self._values)
        """How many measurements an earlier search made."""

    def __contains__(self, name: str) -> bool:
        """Returns whether something was measured under that name."""
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """Returns what was measured under that name."""
        return self._values[name]

    def recall(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns what was measured before under that name, or measures it and writes it down; of JSON types only."""
        if name not in self._values:
            # As JSON gives it back: a search that continues has the same values as one that was never killed.
            value = json.loads(json.dumps(measure()))
            self._append({"name": name, "value": value, "crc32": _checksum(name, value)})
            self._values[name] = value
        return self._values[name]

    def damaged(self) -> ContractError:
        """Returns the error for measurements that do not fit what is measured."""
        return self._error("not the measurements of a search", "a file that tune wrote")

    def _error(self, what: str, expected: str) -> ContractError:
        path = Path(NAME if self._file is None else self._file.name)
        advice = f"remove the folder {path.parent} to begin anew, or choose another output"
        return ContractError(path, what, expected=expected, advice=advice)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line).encode() + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise ContractError.unwritable(self._file.name, error, ("pass another ", Option("output"))) from None

    def _read(self, file: BinaryIO, subject: dict[str, str], scores: Mapping[str, int]) -> None:
        header = {"schema": _SCHEMA, "subject": subject}
        file.seek(0)
        first, *lines = file.read().split(b"\n")
        if not lines and json.dumps(header).encode().startswith(first):  # new, or killed in its first line
            file.truncate(0)
            self._append(header)
            return
        try:
            found = json.loads(first)
            schema, before = found["schema"], {**found["subject"]}
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self.damaged() from None
        if schema != _SCHEMA or before.keys() != subject.keys():
            raise self._error("of another version", f"schema {_SCHEMA}")
        if others := [name for name in subject if before[name] != subject[name]]:
            raise self._error(
                f"measurements of a search with another {', another '.join(others)}", "those of this search"
            )
        if not lines:
            raise self.damaged()
        left = lines.pop()  # what a kill left of a line
        try:
            self._values = dict(_measurement(line, scores) for line in lines)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self.damaged() from None
        file.truncate(file.tell() - len(left))


def _measurement(line: bytes, scores: Mapping[str, int]) -> tuple[str, Any]:
    """Returns (name, value) of a line, the value with the types of `_KINDS`; an error if it cannot be one."""
    found = json.loads(line)
    name, value = found["name"], found["value"]
    if found["crc32"] != _checksum(name, value):
        raise ValueError("changed since it was written")
    checked = _KINDS[name.split(" ", maxsplit=1)[0]].validate_json(json.dumps(value), strict=True)
    if not isinstance(checked, _Trial):
        return name, checked
    if {metric: len(values) for metric, values in checked.scores.items()} != scores:
        raise ValueError("scores of other metrics, or of other samples")
    return name, checked.model_dump()


def _checksum(name: str, value: Any) -> int:
    return zlib.crc32(json.dumps([name, value]).encode())


def model_digest(model: Any) -> str:
    """Returns the SHA-256 of a model: of its files, or of what it holds in memory."""
    if isinstance(model, (str, Path)):
        beside = [] if is_program(model) else sorted(external_files(load(model)))
        files = [Path(model), *beside]
        return _digest(piece for file in files for piece in _pieces(file))
    if not is_program(model):
        return _digest([model.SerializeToString(deterministic=True)])
    from mxfp8_graph.torch_pass.internals import to_numpy

    tensors = sorted({**model.state_dict, **model.constants}.items())
    values = (to_numpy(t.detach().contiguous()).tobytes() if hasattr(t, "detach") else b"" for _, t in tensors)
    names = " ".join(name for name, _ in tensors)
    return _digest([model.graph_module.code.encode(), names.encode(), *values])


def samples_digest(samples: Samples) -> str:
    """Returns the SHA-256 of what is in the samples, in their order."""
    arrays = (pair for feeds in samples.feeds for pair in sorted(feeds.items()))
    return _digest(piece for name, a in arrays for piece in (f"{name} {a.dtype} {a.shape}".encode(), a.tobytes()))


def metric_digest(metric: Metric) -> str:
    """Returns the name of a metric; of a user's own with the SHA-256 of the file that defines it."""
    file = getattr(sys.modules.get(metric.name.partition(":")[0]), "__file__", None)
    if ":" not in metric.name or file is None:
        return metric.name
    return f"{metric.name} {_digest(_pieces(Path(file)))[:16]}"


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(2**20):
            yield piece


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
