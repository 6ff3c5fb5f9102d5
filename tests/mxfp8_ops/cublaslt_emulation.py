"""A cuBLASLt for the tests (cublaslt_emulation.cpp): it checks each call, records it, and multiplies on the CPU."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compiled
import pytest

from mxfp8_ops import formats

NAMES = {row.cuda_data_type: row.name for row in formats.DTYPES.values()}
STATUS, NO_ALGORITHM = 1, 2
"""How the library refuses products."""
BFLOAT16, FP8 = 0, 1

OBSERVE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int)
_LOADED: list[CublasLt] = []
_POINTERS: dict[str, Any] = {}


class Call(NamedTuple):
    """A product that the library computed."""

    sizes: tuple[int, int, int]
    """M, N and K."""
    dtypes: tuple[str, str, str]
    """Those of x, b and y."""
    stream: int


class CublasLt:
    """A file of the library."""

    def __init__(self, path: Path) -> None:
        self.path = str(path).encode()
        self.library = ctypes.CDLL(str(path))
        self.library.call.restype = ctypes.POINTER(ctypes.c_int64 * 7)
        self.library.start()
        _LOADED.append(self)
        self._connect()

    def _connect(self) -> None:
        for name, function in _POINTERS.items():
            ctypes.c_void_p.in_dll(self.library, name).value = ctypes.cast(function, ctypes.c_void_p).value

    def refuse(self, how: int, *kinds: int) -> None:
        """Refuses products of some kinds; of FP8, if none is named."""
        for kind in kinds or (FP8,):
            (ctypes.c_int * 2).in_dll(self.library, "refusal")[kind] = how

    def fail(self, status: int) -> None:
        """Makes products fail."""
        ctypes.c_int.in_dll(self.library, "failure").value = status

    def fail_once(self, *, create: int = 0, ask: int = 0) -> None:
        """Sets the next status of cublasLtCreate or of a question."""
        (ctypes.c_int * 2).in_dll(self.library, "failure_once")[:] = [create, ask]

    @property
    def alignments(self) -> tuple[int, int, int]:
        """Returns the alignments of x, b and y in the last question, in bytes."""
        b, x, y = (ctypes.c_int64 * 3).in_dll(self.library, "alignments")
        return x, b, y

    @property
    def questions(self) -> int:
        """Returns how often it was asked for an algorithm."""
        return int(self.library.question_count())

    @property
    def calls(self) -> list[Call]:
        calls = []
        for i in range(self.library.call_count()):
            m, n, k, *types, stream = self.library.call(i)[0]
            x, b, y = (NAMES[each] for each in types)
            calls.append(Call((m, n, k), (x, b, y), stream))
        return calls


def connect(**pointers: Any) -> None:
    """Sets functions that every library calls.

    They are `contexts`, the driver's function that counts contexts, and `observe`, which gets the cudaDataType of b and
    of y at each product.
    """
    _POINTERS.update(pointers)
    for lt in _LOADED:
        lt._connect()


def file() -> bytes | None:
    """Returns the file of the library on emulated machines."""
    return shared().path


@functools.cache
def shared() -> CublasLt:
    """Returns the library of tests that use no fixture."""
    source = (Path(__file__).parent / "cublaslt_emulation.cpp").read_text()
    return CublasLt(compiled.library("cublaslt", source, ("-Wall", "-Wextra")))


@pytest.fixture
def cublaslt(monkeypatch: Any, tmp_path: Path) -> Iterator[CublasLt]:
    """The library in a file of its own: libmxfp8_ops remembers the answers of a file."""
    path = tmp_path / "libcublasLt.so.13"
    path.write_bytes(Path(shared().path.decode()).read_bytes())
    lt = CublasLt(path)
    monkeypatch.setattr(sys.modules[__name__], "file", lambda: lt.path)
    yield lt
    assert lt.library.live_objects() == 0
