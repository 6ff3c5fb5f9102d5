"""The files of a host's folder, and the inputs that they are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnx_ir as ir

from mxfp8_graph.file_reading import locate
from mxfp8_ops.errors import ContractError, Option

MODEL: Final = "model.onnx"
"""Default name of a model in the hosts."""

_DESCRIPTIONS: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Suffixes of tokenizers and configurations; other files beside a model are most often weights."""

_WEIGHTS: Final = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True)
class Request:
    """The inputs of a folder."""

    graph: ir.Graph
    """The graph of the rewritten model."""
    name: str
    """Name of the model in messages: its path."""
    folder_name: str
    """Name of the new folder."""
    library: str
    """File name of the native library."""
    config: Path | None
    """The folder that describes the model: configuration and tokenizer."""
    root: PurePosixPath
    """Absolute path of the folder on the host."""


@dataclass(frozen=True)
class Layout:
    """The files of a folder, by path below it."""

    model: str
    library: str | None
    """None if no file of the folder names the library: the host's caller registers it."""
    files: dict[str, bytes | Path]
    """Other files: their content, or the path of a file to copy."""


class Description:
    """The folder that describes a model, whose files stay inside it.

    Raises:
        ContractError: none is given, or it has no file `main`.
    """

    def __init__(self, config: Path | None, name: str, main: str, made_by: str) -> None:
        """`config`: the folder; `name`: that of the model in messages; `made_by`: what the folder holds."""
        if config is None:
            what, expected = "there is no description of the model", f"a folder with {made_by}"
            raise ContractError(name, what, expected=expected, advice=("pass ", Option("config", "FOLDER")))
        self.path = config
        if not (self.path / main).is_file():
            advice = ("pass another ", Option("config", "FOLDER"))
            raise ContractError(self.path, f"has no {main}", expected=f"a folder with {made_by}", advice=advice)
        self._main = self.path / main

    def locate(self, name: str) -> Path:
        """Returns the path of a file in the folder.

        Raises:
            ContractError: there is none, or it lies elsewhere.
        """
        try:
            return locate(self._main, name, str(self.path))
        except OSError as error:
            raise ContractError.unreadable(self.path / name, error, "a readable file") from None

    def json(self, name: str, kind: type) -> Any:
        """Returns what a JSON file holds, which is a `kind`: dict or list.

        Raises:
            ContractError: it is missing, is not JSON, or is not a `kind`.
        """
        path = self.path / name
        try:
            with self.locate(name).open("rb") as file:
                data = json.load(file)
        except OSError as error:
            raise ContractError.unreadable(path, error, "a readable file") from None
        except (ValueError, RecursionError) as error:
            raise ContractError(path, f"not JSON: {error}", expected="JSON", advice="copy the file again") from None
        if not isinstance(data, kind):
            what = f"holds a {type(data).__name__}"
            raise ContractError(path, what, expected=kind.__name__, advice="copy the file again")
        return data

    def files(self, below: str = "", *, every: bool = False, optional: bool = False) -> dict[str, bytes | Path]:
        """Returns the files of the folder, or of one below it, that describe a model and its tokenizer; or `every` one.

        Raises:
            ContractError: the folder is missing and not `optional`, or it or one of its files is outside of it.
        """
        try:
            # Located before it is listed: a link to a folder elsewhere is refused unread.
            folder = locate(self._main, below, str(self.path)) if below else self.path
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
        except OSError as error:
            if optional and isinstance(error, FileNotFoundError):
                return {}
            raise ContractError.unreadable(self.path / below, error, "a readable folder") from None
        chosen = [str(PurePosixPath(below, name)) for name in names if every or _describes(name)]
        return {name: self.locate(name) for name in chosen}


def _describes(name: str) -> bool:
    return Path(name).suffix in _DESCRIPTIONS and not name.endswith(_WEIGHTS)
