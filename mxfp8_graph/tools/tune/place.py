"""Where a result goes: a folder, which is there whole or not at all. Until then, all is in FOLDER.part beside it.

FOLDER/NAME.mxfp8.onnx   or .pt2: the rewritten model
FOLDER/recipe.yaml       from which `rewrite` makes it again
FOLDER/report.html, report.json
FOLDER.part/state.json   what was measured so far, while a search goes on
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxfp8_graph.file_reading import is_folder
from mxfp8_graph.file_scratch import lock_folder
from mxfp8_graph.models import kind_of
from mxfp8_graph.tools.tune import notebook
from mxfp8_ops.errors import ContractError, Option


class Place:
    """The folder of a result, and the one beside it in which a search goes on."""

    def __init__(self, model: Any, output: str | Path | None, *, overwrite: bool) -> None:
        """Checks that the result can go there.

        Raises:
            ContractError: something is there and `overwrite` is false, or there is no folder for it.
        """
        kind, another = kind_of(model), ("pass another ", Option("output"))
        self._overwrite = overwrite
        stem = Path(model).stem if kind.is_file else "program" if kind.is_program else "model"
        self.folder = Path(output) if output else Path(model).parent / f"{stem}.tuned"
        if self.folder.name in {"", ".."}:
            what, expected = "not the name of a folder", "a folder for the result alone"
            raise ContractError(self.folder, what, expected=expected, advice=another)
        self.part = self.folder.with_name(f"{self.folder.name}.part")
        self.model_name = f"{stem}.mxfp8.{'pt2' if kind.is_program else 'onnx'}"
        if not is_folder(self.folder.parent):
            what = f"no folder {self.folder.parent}"
            raise ContractError(self.folder, what, expected="a folder for it", advice="correct the output")
        if self.folder.exists() and not is_folder(self.folder):
            raise ContractError(self.folder, "is a file", expected="a folder", advice=another)
        self.check_free()
        if self.part.exists() and not (self.part / notebook.NAME).exists() and any(self._others()):
            away = ("move it away, or ", *another)
            raise ContractError(self.part, "exists", expected="nothing there, or an unfinished search", advice=away)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other searches out until its end.

        Raises:
            ContractError: another process uses it for a search, or the folder cannot be written.
        """
        try:
            self.part.mkdir(exist_ok=True)
            lock = lock_folder(self.part)
        except BlockingIOError:
            what, advice = "another process uses it for a search", ("wait for it, or pass another ", Option("output"))
            raise ContractError(self.part, what, expected="one search at a time", advice=advice) from None
        except OSError as error:
            raise ContractError.unwritable(self.part, error, ("pass another ", Option("output"))) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.part.rmdir()  # if nothing was written
            if lock is not None:
                os.close(lock)

    def check_free(self) -> None:
        """Raises ContractError if something is there that may not be replaced."""
        if os.path.lexists(self.folder) and not self._overwrite:
            replace = ("pass ", Option("overwrite", True), ", or another ", Option("output"))
            raise ContractError(self.folder, "exists", expected="nothing there", advice=replace)

    def put(self) -> None:
        """Makes what is in `part` the result, where there was none before; without the state of the search."""
        self.part.rename(self.folder)
        (self.folder / notebook.NAME).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes what the search wrote."""
        shutil.rmtree(self.part, ignore_errors=True)

    def _others(self) -> list[Path]:
        """Returns what is in `part` that no killed writer of ours left."""
        inside = self.part.iterdir() if is_folder(self.part) else [self.part]
        return [path for path in inside if not path.name.startswith(".")]
