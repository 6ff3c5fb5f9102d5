"""A cuBLASLt for the tests (cublaslt_emulation.cpp): it checks each call, records it, and multiplies on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compiled
import pytest

from mxfp8_ops import formats
from mxfp8_ops.cuda import loader

_NAMES = {row.cuda_data_type: row.name for row in formats.DTYPES.values()}
STATUS, NO_ALGORITHM = 1, 2
"""How the library refuses a product."""


class Call(NamedTuple):
    """A product that the library computed."""

    sizes: tuple[int, int, int]
    """M, N and K."""
    dtypes: tuple[str, str, str]
    """Those of x, b and y."""
    stream: int


class CublasLt:
    """The library, in a file of its own: the native library remembers the answers of a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path).encode()
        self.library = ctypes.CDLL(str(path))
        self.library.call.restype = ctypes.POINTER(ctypes.c_int64 * 7)
        self.library.start()

    def refuse(self, how: int) -> None:
        ctypes.c_int.in_dll(self.library, "refusal").value = how

    @property
    def questions(self) -> int:
        """Returns how often it was asked for an algorithm."""
        return int(self.library.question_count())

    @property
    def calls(self) -> list[Call]:
        calls = []
        for i in range(self.library.call_count()):
            m, n, k, *types, stream = self.library.call(i)[0]
            x, b, y = (_NAMES[each] for each in types)
            calls.append(Call((m, n, k), (x, b, y), stream))
        return calls


@functools.cache
def _built() -> bytes:
    source = (Path(__file__).parent / "cublaslt_emulation.cpp").read_text()
    return compiled.library("cublaslt", source, ("-Wall", "-Wextra")).read_bytes()


@pytest.fixture
def cublaslt(monkeypatch: Any, tmp_path: Path) -> Iterator[CublasLt]:
    path = tmp_path / "libcublasLt.so.13"
    path.write_bytes(_built())
    lt = CublasLt(path)
    monkeypatch.setattr(loader, "cublaslt", lambda: lt.path)
    yield lt
    assert lt.library.live_objects() == 0
