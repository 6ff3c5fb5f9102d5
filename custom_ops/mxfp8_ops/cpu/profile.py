"""The kernels that ran, with their times. The native library records calls of the C ABI and of ONNX Runtime nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mxfp8_ops import native
from mxfp8_ops.errors import BackendError


@dataclass(frozen=True)
class Call:
    """One call of the native library, or of a node of an ONNX Runtime session."""

    op: str
    """The type of the node; empty for a call of the C ABI."""
    name: str
    """The node's name."""
    isa: str
    """The instruction set the kernels ran on, or "cuda"."""
    gemms: tuple[str, ...]
    """The gemm kernels that ran, by their names in src/cpu/kernels; several if the rows of a needed different ones.

    On a GPU, the row of the dispatch table (`mxfp8_ops.cuda.planner.routes`).
    """
    seconds: float
    """Wall time."""


class Profile:
    """The calls that the native library has recorded since the `with` began."""

    def calls(self) -> list[Call]:
        """Returns the calls in the order in which they ended."""
        text: bytes | None = native.load().mxfp8_profile_text()
        if text is None:
            raise BackendError(
                "profile", "out of memory", expected="memory for the record", advice="profile fewer calls"
            )
        return [_call(line) for line in text.decode(errors="replace").split("\n") if line]

    def clear(self) -> None:
        """Deletes the calls so far."""
        # To turn recording on again also empties the record (mxfp8_ops.h).
        native.load().mxfp8_profile(1)


@contextmanager
def profiled() -> Iterator[Profile]:
    """Records all calls of the native library in the process inside a `with`; yields the record."""
    library = native.load()
    library.mxfp8_profile(1)
    try:
        yield Profile()
    finally:
        library.mxfp8_profile(0)


def _call(line: str) -> Call:
    # A node's name may contain tabs and line ends: hence at most 3 splits, and escapes in the name.
    nanoseconds, isa, gemms, where = line.split("\t", 3)
    op, _, quoted = where.partition(" ")
    name = re.sub(r"\\(.)", lambda escaped: "\n" if escaped[1] == "n" else escaped[1], quoted[1:-1])
    return Call(op, name, isa, tuple(gemms.split(",")) if gemms else (), int(nanoseconds) / 1e9)
