"""The errors a user can meet. Every message reads "<where>: <what is>; expected <what>; <what to do>"."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxfp8_ops import system

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class Option:
    """An option that an advice names. It prints its Python name; the command line prints its own spelling instead."""

    name: str
    value: object = None
    """The value to pass; None if the advice names the option alone."""

    def __str__(self) -> str:
        """Returns the option as a Python caller writes it: `output`, `overwrite=True`, `shapes={"batch": 2}`."""
        if self.value is None:
            return self.name
        if isinstance(self.value, Mapping):
            entries = ", ".join(f'"{key}": {value}' for key, value in self.value.items())
            return f"{self.name}={{{entries}}}"
        return f'{self.name}="{self.value}"' if isinstance(self.value, str) else f"{self.name}={self.value}"


def correction(name: object, choices: Iterable[str]) -> str:
    """Returns the advice for a name that is not one of `choices`: the one that is spelled like it, if there is one."""
    close = difflib.get_close_matches(str(name), list(choices), n=1)
    return f"did you mean {close[0]}?" if close else "correct the name"


class Mxfp8Error(ValueError):
    """Base of every error this project raises for bad input; catch this one to catch them all."""

    def __init__(
        self, where: object, what: str = "", *, expected: str = "", advice: str | Sequence[str | Option] = ""
    ) -> None:
        """Makes the message of its four parts.

        Args:
            where: file, node, tensor, option or function; or the whole message, if there are no other parts.
            what: what is wrong there.
            expected: what would be right.
            advice: what the user should do; a sequence of texts and options if it names options.
        """
        # Parts, not one text: the command line spells options its own way, and `inside` prepends a place.
        self.where, self.what, self.expected = str(where), what, expected
        self._advice = (advice,) if isinstance(advice, str) else tuple(advice)
        super().__init__(self.message())

    @property
    def problem(self) -> str:
        """The first part of the message: where, and what is wrong."""
        return f"{self.where}: {self.what}" if self.what else self.where

    @property
    def advice(self) -> str:
        """The advice, with options by their Python names."""
        return self._advise(str)

    def message(self, write: Callable[[Option], str] = str) -> str:
        """Returns the whole message; `write` spells each option that the advice names."""
        expected = f"expected {self.expected}" if self.expected else ""
        return "; ".join(filter(None, (self.problem, expected, self._advise(write))))

    def _advise(self, write: Callable[[Option], str]) -> str:
        return "".join(piece if isinstance(piece, str) else write(piece) for piece in self._advice)

    def inside(self, place: str) -> Self:
        """Returns the same error with `place` in front of its own place."""
        return type(self)(f"{place}: {self.where}", self.what, expected=self.expected, advice=self._advice)

    @classmethod
    def unknown(cls, where: object, name: object, choices: Iterable[str]) -> Self:
        """Returns the error for a name that is not one of `choices`."""
        choices = list(choices)
        return cls(where, repr(name), expected=f"one of {', '.join(choices)}", advice=correction(name, choices))

    @classmethod
    def unreadable(cls, path: object, error: OSError, expected: str) -> Self:
        """Returns the error for a file that the system does not let us read."""
        return cls(path, error.strerror or str(error), expected=expected, advice="check the path")

    @classmethod
    def unwritable(cls, path: object, error: OSError, advice: str | Sequence[str | Option] = "choose another") -> Self:
        """Returns the error for a file that the system does not let us write."""
        folder = Path(str(path)).parent
        # The text of a FileNotFoundError names the file, but the folder is missing.
        if isinstance(error, FileNotFoundError) and "\0" not in str(folder) and not folder.is_dir():
            what = f"folder {folder} does not exist"
            return cls(path, what, expected="a file in an existing folder", advice="create the folder")
        what = f"cannot be written: {error.strerror or error}"
        if system.in_use(error):
            what += f" ({error.filename})"
            return cls(path, what, expected="files that no program has open or mapped", advice="close them first")
        return cls(path, what, expected="a writable folder with enough space", advice=advice)


class ShapeError(Mxfp8Error):
    """Shapes or dtypes of tensors do not fit together."""


class RecipeError(Mxfp8Error, RuntimeError):
    """A recipe is malformed, contradicts itself, or does not fit the model it is applied to.

    A RuntimeError too: TransformerEngine raises that for a recipe that does not fit.
    """


class ContractError(Mxfp8Error):
    """A model or a node breaks a rule of its format: unreadable file, unknown opset, illegal attribute."""


class BackendError(Mxfp8Error):
    """A backend (native library, ONNX Runtime, CUDA) is missing, or too old for the request."""
