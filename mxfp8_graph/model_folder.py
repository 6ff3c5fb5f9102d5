"""The folder of a model: which files there the model may name, and how they were when first opened.

The external data of an ONNX model and the shards of a checkpoint's index. The rules are those of onnx (`checker.cc`,
resolve_external_data_location): a file below the folder, no symbolic link, no second hard link. A model that someone
sent can name any file, and through a link it could read one that is not its own.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import BinaryIO

from mxfp8_graph.file_reading import Pins
from mxfp8_ops.errors import ContractError


class ModelFolder:
    """The folder that a model, or the index of a checkpoint, lies in."""

    def __init__(self, model: Path) -> None:
        self.path = model.parent
        self._model = model
        self.files = Pins()
        """The model and the external files that were read."""
        # In the cache of the Hugging Face hub, model and data are links into one other folder: that counts as inside.
        self._linked = Path(os.path.realpath(model)).parent if model.is_symlink() else None
        self._allowed: dict[str, Path] = {}

    def open(self, name: str, where: str) -> BinaryIO:
        """Returns the file that a model calls `name`, open; `where` says in errors which part of the model names it.

        Raises:
            OSError: there is no such file, or it cannot be read, or is no regular file.
            ContractError: the model must not name this file, or it changed since it was first opened.
        """
        return self.files.open(self.locate(name, where))

    def open_model(self) -> BinaryIO:
        """Returns the model's own file, open; errors as `open`."""
        return self.files.open(self._model)

    def check(self, file: BinaryIO) -> None:
        """Raises ContractError if a file that `open` returned, or the model that says what is where in it, changed."""
        self.files.check_open(file)
        self.files.check(self._model)

    def locate(self, name: str, where: str) -> Path:
        """Returns the path, without links, of the file that a model calls `name`; errors as `open`."""
        if name not in self._allowed:
            self._allowed[name] = self._allow(name, where)
        path = self._allowed[name]
        if (links := path.stat().st_nlink) > 1 and path.is_file():
            what = f"external file {name!r} has {links} hard links"
            raise ContractError(where, what, expected="a file of one name, as onnx does", advice="put a copy there")
        return path

    def _allow(self, name: str, where: str) -> Path:
        plain = PurePath(name)
        nameless = not name or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)  # JSON has half surrogates
        outside = nameless or plain.is_absolute() or ".." in plain.parts
        expected = Path(os.path.realpath(self.path)) / plain
        found = expected if outside else Path(os.path.realpath(expected))
        cached = self._linked is not None and found.is_relative_to(self._linked)
        if outside or not (cached or found.is_relative_to(os.path.realpath(self.path))):
            advice = "move the data next to the model"
            raise ContractError(where, f"external file {name!r}", expected=f"a file inside {self.path}", advice=advice)
        if found != expected and not cached:
            what = f"external file {name!r} is a symbolic link"
            raise ContractError(where, what, expected="a file, as onnx does", advice="put the file itself there")
        return found
