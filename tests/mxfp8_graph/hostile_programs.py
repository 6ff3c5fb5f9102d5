"""Builds .pt2 files with parts exchanged."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


def records(source: Path) -> dict[str, bytes]:
    """Returns the records of a .pt2 file by their names below its root."""
    with zipfile.ZipFile(source) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(target: Path, content: dict[str, bytes], *, compress: bool = False) -> Path:
    """Returns `target`, a .pt2 file of these records."""
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(f"model/{name}", data)
    return target


def edited(source: Path, target: Path, edit: Callable[[Any], None], name: str = PROGRAM) -> Path:
    """Returns `target`, a copy of `source` after `edit` changed one of its JSON records in place."""
    content = records(source)
    parsed = json.loads(content[name])
    edit(parsed)
    return write(target, {**content, name: json.dumps(parsed).encode()})


class Touch:
    """Pickles to what makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def touching(path: Path) -> bytes:
    """Returns a pickle, as torch.save writes them, that makes a file."""
    import torch

    buffer = io.BytesIO()
    torch.save((Touch(path),), buffer)
    return buffer.getvalue()


def plainly_touching(path: Path) -> bytes:
    return pickle.dumps(Touch(path))
