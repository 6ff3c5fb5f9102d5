"""What a host wants to be in its folder, and what it may be made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnx

from mxfp8_graph.file_reading import open_regular
from mxfp8_graph.model_folder import ModelFolder
from mxfp8_ops.errors import ContractError, Option

MODEL: Final = "model.onnx"
"""What hosts call a model unless they are told otherwise."""

_DESCRIPTIONS: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Of tokenizers and configurations; what else lies beside a model is most often weights."""

_WEIGHTS: Final = (".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True)
class Request:
    """What a folder is made of."""

    model: onnx.ModelProto
    """The rewritten model, its weights left out."""
    name: str
    """What to call the model in messages: its path."""
    folder_name: str
    """The last part of where the folder goes."""
    library: str
    """File name of the native library."""
    config: Path | None
    """The folder that describes the model: configuration and tokenizer."""
    root: PurePosixPath
    """Where the host sees the folder; absolute."""


@dataclass(frozen=True)
class Layout:
    """What goes into a folder, by path below it."""

    model: str
    library: str | None
    """None if the host is not told of a library by files: its caller registers it."""
    files: dict[str, bytes | Path]
    """Other files: what is in them, or which to copy."""


class Description:
    """The folder that describes a model, whose files stay inside it.

    Raises:
        ContractError: none is given, or it has no file `main`.
    """

    def __init__(self, request: Request, main: str, made_by: str) -> None:
        if request.config is None:
            what, expected = "nothing says what model it is", f"a folder with {made_by}"
            raise ContractError(request.name, what, expected=expected, advice=("pass ", Option("config", "FOLDER")))
        self.path = request.config
        if not (self.path / main).is_file():
            advice = ("pass another ", Option("config", "FOLDER"))
            raise ContractError(self.path, f"has no {main}", expected=f"a folder with {made_by}", advice=advice)
        self._folder = ModelFolder(self.path / main)

    def locate(self, name: str) -> Path:
        """Returns the path of a file in the folder.

        Raises:
            ContractError: there is none, or it lies elsewhere.
        """
        try:
            return self._folder.locate(name, str(self.path))
        except OSError as error:
            raise ContractError.unreadable(self.path / name, error, "a readable file") from None

    def json(self, name: str, kind: type) -> Any:
        """Returns what a JSON file holds, which is a `kind`: dict or list.

        Raises:
            ContractError: it is missing, is no JSON, or holds something else.
        """
        path = self.path / name
        try:
            with open_regular(self.locate(name)) as file:
                found = json.load(file)
        except OSError as error:
            raise ContractError.unreadable(path, error, "a readable file") from None
        except (ValueError, RecursionError) as error:
            raise ContractError(path, f"no JSON: {error}", expected="JSON", advice="copy the file again") from None
        if not isinstance(found, kind):
            what = f"holds a {type(found).__name__}"
            raise ContractError(path, what, expected=kind.__name__, advice="copy the file again")
        return found

    def files(self, below: str = "", *, every: bool = False, optional: bool = False) -> dict[str, bytes | Path]:
        """Returns the files of the folder, or of one below it, that describe a model and its tokenizer; or `every` one.

        Raises:
            ContractError: there is no such folder and it is not `optional`, or it or one of the files lies elsewhere.
        """
        try:
            folder = self._folder.locate(below, str(self.path)) if below else self.path
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
        except OSError as error:
            if optional and isinstance(error, FileNotFoundError):
                return {}
            raise ContractError.unreadable(self.path / below, error, "a readable folder") from None
        chosen = [str(PurePosixPath(below, name)) for name in names if every or _describes(name)]
        return {name: self.locate(name) for name in chosen}


def _describes(name: str) -> bool:
    return Path(name).suffix in _DESCRIPTIONS and not name.endswith(_WEIGHTS)
