"""Files of samples, mutated: .npz, .npy and .jsonl; arrays for the model, or a documented error."""

from __future__ import annotations

import contextlib
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from mxfp8_graph.running.inputs import BFLOAT16, InputSpec, Signature
from mxfp8_graph.running.samples import make_samples
from mxfp8_ops.errors import Mxfp8Error

_NAMES: Final = {b"z": "samples.npz", b"y": "samples/one.npy", b"j": "samples.jsonl"}
"""The meaning of the first byte of an input: the kind of file of the rest."""

_SHAPES: Final[tuple[Any, ...]] = (
    *((), (0,), (2, 8), (2**40, 64), (2**62, 4), (2**63, 0), (2**61, 0), (-1, 8), (0, 2**62), (1,) * 70),
    *((True,), (1.5,), ("2",), 8, None, (2, 8, 0), (10**30,)),
)
_DTYPES: Final[tuple[Any, ...]] = (
    *("<f4", "<f8", "<i8", "|b1", "<U8", "|O", "<M8[s]", "|V2", "|V4294967296", "<c16", "", "f4,f4", "<f999", ">f4"),
    *([("a", "<f4")], [("a", "|O")], {"names": ["a"]}, ("<f4", (3,)), 4),
)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 1.5, 2**63, 10**400, 1e308, "x", "", [], {}, [[]], [1, [2]], [[1.0] * 8], [[None]], [["a"]]),
    *([[float("nan")] * 8], [[float("inf")] * 8], [[[1]]], {"a": 1}),
)


def seeds() -> list[bytes]:
    """Returns a good file of each kind, and a compressed one."""
    x, ids = np.ones((2, 8), np.float32), np.zeros((2, 3), np.int64)
    plain, packed, single = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(plain, x=x, ids=ids, half=np.zeros(2, np.uint16))
    np.savez_compressed(packed, x=x, ids=ids, half=np.zeros(2, np.uint16))
    np.save(single, x)
    line = json.dumps({"x": x.tolist(), "ids": ids.tolist(), "half": [0.5, 1.0]})
    return [b"z" + plain.getvalue(), b"z" + packed.getvalue(), b"y" + single.getvalue(), f"j{line}\n\n{line}".encode()]


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns a file whose headers or values are others, or whose bytes are changed."""
    kind, rest = data[:1], data[1:]
    change = {b"z": _archive, b"y": _array, b"j": _lines}.get(kind)
    if change is not None and random.random() < 0.7:
        with contextlib.suppress(Exception):  # zipfile raises much; what it cannot read is changed as bytes
            return kind + change(rest, random)
    at = random.randrange(len(rest) + 1)
    noise = bytes([random.randrange(256)])
    piece = random.choice((b"", noise, noise, b"\xff\xff\xff\xff", b"[" * 3000, b"9" * 5000, b"PK\x05\x06", b"\n"))
    kind = random.choice((kind, kind, kind, kind, b"z", b"y", b"j"))
    return kind + rest[:at] + piece + rest[at + random.randrange(5) :]


def _archive(data: bytes, random: random.Random) -> bytes:
    """Returns an .npz file with a member changed, doubled, renamed or taken out, or with a wrong directory."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = random.randrange(len(members))
    name, content = members[at]
    kind = random.randrange(7)
    if kind == 0:
        members[at] = (random.choice(("y.npy", "x", "../x.npy", "x.npy/", "ids.npy", "file.npy", "ä.npy")), content)
    elif kind == 1:
        del members[at]
    elif kind == 2:
        members.append((f"{name[:-4]}{len(members)}.npy", content))
    elif kind == 3 and len(content) < 10**6:
        members[at] = (name, content + bytes(random.choice((10**6, 2 * 10**7))))  # which compresses to little
    else:
        members[at] = (name, _array(content, random))
    packing = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, content in members:
            archive.writestr(name, content)
    whole = bytearray(file.getvalue())
    if random.random() < 0.3:  # flags, method, sizes and offsets in the directory of the archive
        start = whole.rfind(b"PK\x01\x02")
        whole[start + random.randrange(8, 46)] = random.choice((0, 1, 0x0E, 0x7F, 0xFF))
    return bytes(whole)


def _array(data: bytes, random: random.Random) -> bytes:
    """Returns an .npy file with another header, or with more or fewer bytes behind it."""
    size = int.from_bytes(data[8:10], "little")
    header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": (2, 8)}
    for _ in range(random.choice((1, 1, 2))):
        key = random.choice(("descr", "shape", "shape", "fortran_order", "other"))
        header[key] = random.choice({"descr": _DTYPES, "shape": _SHAPES}.get(key, (True, None, 1)))
    good = repr(header)
    text = random.choice((good, good, good, good, good[:-3], "[" * 3000, "__import__('os')", "{" + "1" * 9999))
    body = data[10 + size :]
    body = random.choice((body, body, body[:-1], b"", body * 3))
    version = random.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    length = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + length + text.encode() + body


def _lines(data: bytes, random: random.Random) -> bytes:
    """Returns a .jsonl file with a value of a line exchanged."""
    lines = data.decode().splitlines() or [""]
    at = random.randrange(len(lines))
    line = json.loads(lines[at] or "{}")
    if not isinstance(line, dict) or random.random() < 0.1:
        line = random.choice(_VALUES)
    else:
        line[random.choice([*line, "y"])] = random.choice(_VALUES)
    lines[at] = json.dumps(line)
    return "\n".join(lines).encode()


_SPECS: Final = [
    InputSpec("x", np.dtype(np.float32), ("batch", 8)),
    InputSpec("ids", np.dtype(np.int64), ("batch", "seq")),
    InputSpec("half", BFLOAT16, ("batch",)),
]


def check(data: bytes, folder: Path) -> None:
    """Raises unless the file holds samples for a model, or is refused with a documented error."""
    path = folder / _NAMES.get(data[:1], "samples.npz")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data[1:])
    single = path.suffix == ".npy"  # for models of one input, in a folder
    signature = Signature("model", _SPECS[:1] if single else _SPECS, {})
    try:
        str(make_samples(signature, {"inputs": path.parent if single else path})).encode()
    except Mxfp8Error as error:
        str(error).encode()
