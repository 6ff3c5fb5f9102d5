"""States of searches that tune goes on from, mutated: a search that ends, or a documented error."""

from __future__ import annotations

import functools
import json
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from builders import chain_model, save

import mxfp8_graph
from mxfp8_ops.errors import Mxfp8Error

_OBJECTIVES: Final[tuple[Literal["size", "latency"], ...]] = ("size", "latency")

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 0.5, 1e308, 10**400, "x", "", "0.5", [], [1], {}, {"a": 1}, [[]], [None], ["a", "b", 1, 2]),
    *(float("nan"), float("inf"), [[["x"]]], [1.0, 2.0], [0.0, -1.0]),
)


@functools.cache
def seeds() -> list[bytes]:
    """Returns the last state of a search of each objective, with everything measured."""
    return [_state(objective) for objective in _OBJECTIVES]


def _state(objective: Literal["size", "latency"]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), [b""]

        def look(*_: object) -> None:
            path = folder / "out.part/measurements.jsonl"
            found[0] = path.read_bytes() if path.exists() else found[0]

        _tune(folder, objective, look)
        return found[0]


def _tune(folder: Path, objective: Literal["size", "latency"], progress: Any = None) -> None:
    model = folder / "m.onnx"
    save(chain_model((32, 64, 32, 64)), model)
    x = {"x": np.random.default_rng(0).standard_normal((4, 32), np.float32)}
    recipe = mxfp8_graph.Recipe(name="all", min_dim=1, output_projections=True)
    settings: Any = {"objective": objective, "recipe": recipe, "inputs": [x], "progress": progress}
    budget = "relative_l2<=0.05" if objective == "size" else "relative_l2<=0.2"  # not by packing all; by any plan
    mxfp8_graph.tune(model, budget, output=folder / "out", **settings)


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns a state with values exchanged, and most often the checksums that fit them; or with bytes changed."""
    if random.random() < 0.9:
        try:
            lines = [json.loads(line) for line in data.splitlines()]
            for _ in range(random.choice((1, 1, 2, 3))):
                at = random.randrange(len(lines))
                lines[at] = _changed(lines[at], random)
            if random.random() < 0.9:
                for line in lines[1:]:
                    line["crc32"] = zlib.crc32(json.dumps([line["name"], line["value"]]).encode())
            return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        except (ValueError, TypeError, KeyError, RecursionError):  # too broken to be changed as what it is
            pass
    at = random.randrange(len(data) + 1)
    pieces = (b"", bytes([random.randrange(256)]), b"[" * 3000, b"9" * 5000, b'"\\ud800":1,', b"}", b"\n")
    return data[:at] + random.choice(pieces) + data[at + random.randrange(4) :]


def _changed(value: Any, random: random.Random) -> Any:
    """Returns JSON with one value in it exchanged, removed or doubled."""
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice([*value, *["value"] * 9 * ("value" in value)])
        if random.random() < 0.07:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], _changed(value[at], random), *value[at + random.randrange(2) :]]
    return random.choice(_VALUES)


def check(data: bytes, folder: Path) -> None:
    """Goes on with a search; raises only where that fails with no error of ours."""
    (folder / "out.part").mkdir(exist_ok=True)
    (folder / "out.part/measurements.jsonl").write_bytes(data)
    try:
        _tune(folder, _OBJECTIVES[b'"objective": "latency"' in data])
    except Mxfp8Error as error:
        str(error).encode()
