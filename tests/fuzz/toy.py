"""A target that does what its input says: tests of the runner need one that crashes."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from random import Random

from mxfp8_ops.errors import ContractError

WORDS = (b"good", b"refuse", b"refuse other", b"defect", b"crash", b"leave", b"hang", b"eat", b"litter")


def seeds() -> list[bytes]:
    return [b"good"]


def mutate(data: bytes, random: Random) -> bytes:
    return random.choice(WORDS[:4])


def check(data: bytes, folder: Path) -> None:
    assert not [*folder.iterdir()], "the folder is not empty"
    if data.startswith(b"refuse"):
        raise ContractError("toy", data.decode().removeprefix("refuse").strip() or "no")
    if data == b"swallow":
        try:
            check(b"refuse", folder)
        except ContractError:
            return
    if data.startswith(b"defect"):
        raise KeyError(data)
    if data == b"crash":
        ctypes.string_at(0)
    if data == b"leave":
        raise SystemExit
    if data == b"hang":
        time.sleep(1000)
    if data == b"eat":
        bytearray(b"x") * (600 << 20)
    if data == b"litter":
        (folder / "left").mkdir()
