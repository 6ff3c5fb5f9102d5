"""The outcome of one input: accepted, refused with a documented error, or a finding."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from mxfp8_ops.errors import Mxfp8Error

from . import ROOT

ACCEPTED, REFUSED, FINDING = "accepted", "refused", "finding"

_OURS = re.compile(r".*/((?:mxfp8_graph|mxfp8_ops)/.*)")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in ')
_VALUES = re.compile(r"'.*?'|\".*?\"|\[.*?\]|-?\d[\d.]*")

_made: list[Mxfp8Error] = []
"""The errors made since the last input: a target may swallow them."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one input."""

    outcome: str
    kind: str
    """The key that distinguishes refusals and findings: exception and place."""
    text: str = ""
    """For a refusal its message without values; for a finding the traceback."""
    data: str | None = None
    """The input in hexadecimal, if it should be kept."""

    def to_line(self) -> str:
        """Returns the verdict as a line, see `from_line`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str | bytes) -> Verdict:
        """Returns the verdict that `to_line` wrote."""
        return Verdict(**json.loads(line))


def watch_errors() -> None:
    """From now on, `judge` knows of the errors that a target swallows."""
    make = Mxfp8Error.__init__

    def noted(self: Mxfp8Error, *args: object, **fields: object) -> None:
        make(self, *args, **fields)  # type: ignore[arg-type]
        _made.append(self)

    Mxfp8Error.__init__ = noted  # type: ignore[method-assign, assignment]


def judge(check: Callable[[bytes, Path], None], data: bytes, folder: Path) -> Verdict:
    """Returns the verdict on one input of the target that `check` belongs to."""
    try:
        check(data, folder)
    except Mxfp8Error as error:
        return _refused(error)
    except BaseException as error:  # an input that raises SystemExit is a finding too
        text = "".join(traceback.format_exception(error))
        return Verdict(FINDING, f"{type(error).__name__} at {_place(error.__traceback__)}", text)
    else:
        raised = [error for error in _made if error.__traceback__]
        return _refused(raised[-1]) if raised else Verdict(ACCEPTED, ACCEPTED)
    finally:
        _made.clear()


def _refused(error: Mxfp8Error) -> Verdict:
    place = _place(error.__traceback__)
    return Verdict(REFUSED, f"{type(error).__name__} at {place}", _VALUES.sub("_", error.what or error.where)[:60])


def _place(trace: TracebackType | None) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    return _innermost(frames[::-1])


def place_in_dump(dump: str) -> str:
    """Returns the place that a traceback of faulthandler, innermost frame first, ends in."""
    return _innermost([(match["file"], match["line"]) for match in _FRAME.finditer(dump)])


def _innermost(frames: list[tuple[str, object]]) -> str:
    """Returns the first place of the frames, given innermost first, that is in our own code; else the first."""
    for file, line in frames:
        if (match := _OURS.match(file)) is not None:
            return f"{match[1]}:{line}"
    return f"{frames[0][0].removeprefix(f'{ROOT}/')}:{frames[0][1]}" if frames else "an unknown place"
