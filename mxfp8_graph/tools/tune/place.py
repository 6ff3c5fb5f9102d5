"""Where a result goes: a folder, which is there whole or not at all. Until then, all is in FOLDER.part beside it.

FOLDER/NAME.mxfp8.onnx   or .pt2: the rewritten model
FOLDER/recipe.yaml       from which `rewrite` makes it again
FOLDER/report.html, report.json
FOLDER.part/measurements.jsonl   the measurements of a search that has not ended
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mxfp8_graph.file_reading import is_folder
from mxfp8_graph.files import open_locked
from mxfp8_graph.models import kind_of
from mxfp8_graph.tools.tune import measurements
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
        self._state = self.part / measurements.NAME
        if not is_folder(self.folder.parent):
            what = f"no folder {self.folder.parent}"
            raise ContractError(self.folder, what, expected="a folder for it", advice="correct the output")
        if self.folder.exists() and not is_folder(self.folder):
            raise ContractError(self.folder, "is a file", expected="a folder", advice=another)
        self.check_free()
        # Drafts of a killed process, whose names begin with a dot, are not in the way.
        inside = [path for path in self.part.glob("*") if not path.name.startswith(".")]
        if (self.part.exists() and not is_folder(self.part)) or (inside and self._state not in inside):
            away = ("move it away, or ", *another)
            raise ContractError(self.part, "exists", expected="nothing there, or an unfinished search", advice=away)

    @contextlib.contextmanager
    def search(self) -> Iterator[BinaryIO]:
        """Yields the file of the measurements, open for reading and appending; its lock keeps other searches out.

        Raises:
            ContractError: another process uses it for a search, or the folder cannot be written.
        """
        try:
            self.part.mkdir(exist_ok=True)
            file = open_locked(self._state)
        except BlockingIOError:
            what, advice = "another process uses it for a search", ("wait for it, or pass another ", Option("output"))
            raise ContractError(self.part, what, expected="one search at a time", advice=advice) from None
        except OSError as error:
            raise ContractError.unwritable(self.part, error, ("pass another ", Option("output"))) from None
        with file:
            try:
                yield file
            finally:
                with contextlib.suppress(OSError):
                    if self._state.stat().st_size == 0:  # the search did not begin
                        self._state.unlink()
                        self.part.rmdir()

    def check_free(self) -> None:
        """Raises ContractError if something is there that may not be replaced."""
        if os.path.lexists(self.folder) and not self._overwrite:
            replace = ("pass ", Option("overwrite", True), ", or another ", Option("output"))
            raise ContractError(self.folder, "exists", expected="nothing there", advice=replace)

    def put(self) -> None:
        """Makes what is in `part` the result, where there was none before; without the measurements."""
        self.part.rename(self.folder)
        (self.folder / measurements.NAME).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes what the search wrote."""
        shutil.rmtree(self.part, ignore_errors=True)
