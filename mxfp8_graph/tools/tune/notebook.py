"""What was measured, in a file that is written anew after each measurement: a search that is killed goes on from it.

The search decides by nothing but what is written here, so that it decides the same again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter

from mxfp8_graph.file_reading import open_regular
from mxfp8_graph.file_writing import write_text
from mxfp8_ops.errors import ContractError

NAME: Final = "state.json"
"""What the file is called in the folder of a search that goes on."""
_SCHEMA: Final = 1
_MAKES = Callable[[], Any]
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
"""What is measured, by the first word of its name: that of `Trials.trial`, `Trials.seconds` and `Damages`."""


class Notebook:
    """Measurements by what was measured."""

    def __init__(self, folder: Path | None, subject: Mapping[str, str], scores: Mapping[str, int]) -> None:
        """Reads what an earlier search left.

        Args:
            folder: where the file is; None keeps everything in memory.
            subject: what is measured: of the model, the samples and so on, something that tells them from others.
            scores: how many numbers a trial has of each metric.

        Raises:
            ContractError: the file is of another subject, or not one of these.
        """
        self._path = None if folder is None else folder / NAME
        self._subject = dict(subject)
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = _read(self._path, self._subject, scores)
        self.resumed = len(self._found)
        """How many measurements an earlier search made."""

    def recall(self, what: str, make: _MAKES) -> Any:
        """Returns what was measured before under that name, or measures and writes it down; of JSON types only."""
        if what not in self._found:
            # As JSON gives it back: a search that goes on sees the same as one that was never killed.
            self._found[what] = json.loads(json.dumps(make()))
            self._write()
        return self._found[what]

    def found(self, what: str) -> Any:
        """Returns what was measured under that name."""
        return self._found[what]

    def knows(self, what: str) -> bool:
        """Whether something was measured under that name."""
        return what in self._found

    def damaged(self) -> ContractError:
        """Returns the error for measurements that do not fit what is measured."""
        return _damaged(self._path or Path(NAME))

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(exist_ok=True)
        state = {"schema": _SCHEMA, "subject": self._subject, "measured": self._found, "digest": _digest(self._found)}
        write_text(self._path, json.dumps(state))


def _advice(path: Path) -> str:
    return f"remove the folder {path.parent} to begin anew, or choose another output"


def _damaged(path: Path) -> ContractError:
    return ContractError(path, "not the state of a search", expected="one that tune wrote", advice=_advice(path))


def _read(path: Path, subject: Mapping[str, str], scores: Mapping[str, int]) -> dict[str, Any]:
    advice = _advice(path)
    try:
        with open_regular(path) as file:
            state = json.loads(file.read())
        schema, before, found = state["schema"], dict(state["subject"]), dict(state["measured"])
        if schema == _SCHEMA and state["digest"] != _digest(found):
            raise ValueError("changed since it was written")
    except OSError as error:
        raise ContractError.unreadable(path, error, "the state of a search") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path) from None
    if schema != _SCHEMA or before.keys() != subject.keys():
        raise ContractError(path, "of another version", expected=f"schema {_SCHEMA}", advice=advice)
    if others := [name for name in subject if before[name] != subject[name]]:
        what = f"the state of a search with another {', another '.join(others)}"
        raise ContractError(path, what, expected="that of this search", advice=advice)
    try:
        return {key: _checked(key, value, scores) for key, value in found.items()}
    except (ValueError, KeyError):
        raise _damaged(path) from None


def _checked(key: str, value: Any, scores: Mapping[str, int]) -> Any:
    """Returns a measurement with the types that `_KINDS` says; ValueError or KeyError if it cannot be one."""
    kind = key.split(" ", maxsplit=1)[0]
    found = _KINDS[kind].validate_json(json.dumps(value), strict=True)
    if not isinstance(found, _Trial):
        return found
    if {name: len(values) for name, values in found.scores.items()} != scores:
        raise ValueError("scores of other metrics, or of other samples")
    return found.model_dump()


def _digest(measured: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()
