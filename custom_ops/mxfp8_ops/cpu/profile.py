"""Which kernels ran, and how long: written down by the native library, in C ABI calls and ONNX Runtime sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from mxfp8_ops import native
from mxfp8_ops.errors import BackendError


@dataclass(frozen=True)
class Call:
    """One call of the native library, or of a node of an ONNX Runtime session."""

    op: str
    """The node's type; empty for a call that is no node's."""
    name: str
    """The node's name."""
    isa: str
    """The instruction set the kernels ran on; empty if they ran on a GPU."""
    gemms: tuple[str, ...]
    """The gemm kernels that ran, as src/cpu/kernels has them; more than one where rows differ in what they need."""
    seconds: float


class Profile:
    """What the native library has written down since the `with` began."""

    def calls(self) -> list[Call]:
        """Returns the calls that have ended, in that order."""
        text: bytes | None = native.load().mxfp8_profile_text()
        if text is None:
            raise BackendError("profile", "out of memory", expected="room for a line per call", advice="profile less")
        return [_call(line) for line in text.decode(errors="replace").split("\n") if line]

    def clear(self) -> None:
        """Forgets the calls so far."""
        native.load().mxfp8_profile(1)


@contextmanager
def profiled() -> Iterator[Profile]:
    """Writes down every call of the native library, in the whole process, inside a `with`."""
    library = native.load()
    library.mxfp8_profile(1)
    try:
        yield Profile()
    finally:
        library.mxfp8_profile(0)


_ESCAPED: Final = {"\\n": "\n", "\\\\": "\\"}


def _call(line: str) -> Call:
    nanoseconds, isa, gemms, where = line.split("\t", 3)
    op, _, quoted = where.partition(" ")
    name = "".join(_ESCAPED.get(part, part) for part in _parts(quoted[1:-1]))
    return Call(op, name, isa, tuple(gemms.split(",")) if gemms else (), int(nanoseconds) / 1e9)


def _parts(text: str) -> Iterator[str]:
    """Yields characters, and escapes as two."""
    at = 0
    while at < len(text):
        size = 2 if text[at] == "\\" else 1
        yield text[at : at + size]
        at += size
