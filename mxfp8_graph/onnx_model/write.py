"""Writes the result: everything to temporary files, then renamed, so that no half file is ever seen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, Literal

import onnx
from google.protobuf.message import EncodeError

from mxfp8_graph.onnx_model.open import Source, iter_tensors
from mxfp8_graph.onnx_model.sinks import ExternalSink, InlineSink, Sink
from mxfp8_graph.onnx_model.tensor_data import is_external, location
from mxfp8_graph.policy.plan import Decision, MatMulSite
from mxfp8_ops.errors import ContractError, Option
from mxfp8_ops.formats import BLOCK_SIZE

INLINE_LIMIT: Final = 1_900_000_000
"""protobuf cannot hold 2^31 bytes; the rest is room for the graph."""


class Target:
    """Where one result goes: `sink` takes tensors as they come, `finish` writes the rest and renames the files."""

    def __init__(self, source: Source, path: Path | None, *, external: bool) -> None:
        self.path = path
        self.byte_size = 0
        self._source = source
        self._temporary: dict[Path, Path] = {}
        self._data: IO[bytes] | None = None
        self.sink: Sink = InlineSink()
        if path is not None and external:
            data_path = data_path_of(path)
            self._data = self._open(data_path)
            # Until the files are renamed, what this writes lies in the temporary file, whose name no source can have.
            self.sink = ExternalSink(self._data, self._temporary[data_path].name)

    def finish(self) -> None:
        """Stores the initializers that were not packed, writes the model and renames the files.

        Raises:
            ContractError: a tensor cannot be read, or the model is too large for one file.
        """
        model, folder, name = self._source.proto, self._source.folder, self._source.name
        for tensor in model.graph.initializer:
            if stored := self._source.tensors.get(tensor.name):
                self.sink.transfer(tensor, stored, folder, name)
        self._transfer_others()
        if self.path is None:
            self.byte_size = model.ByteSize()
            return
        try:
            content = model.SerializeToString()
        except (EncodeError, ValueError):
            raise _too_large(self.path) from None
        with self._open(self.path) as file:
            file.write(content)
        if self._data is not None:
            self._data.close()
        self._put_in_place(self.path)

    def _transfer_others(self) -> None:
        """Moves what subgraphs, functions and Constant nodes keep in external files, and names the final data file."""
        own = data_path_of(self.path) if self.path else None
        written = self._temporary[own].name if own in self._temporary else None
        for tensor in filter(is_external, iter_tensors(self._source.proto)):
            if location(tensor) != written:
                stored = onnx.TensorProto()
                stored.CopyFrom(tensor)
                self.sink.transfer(tensor, stored, self._source.folder, self._source.name)
            for entry in tensor.external_data:
                if own and entry.key == "location":
                    entry.value = own.name

    def probe(self) -> None:
        """Opens what `finish` would write to, for a dry run: what cannot be written is to be known then."""
        if self.path is not None:
            self._open(self.path).close()

    def discard(self) -> None:
        """Removes the temporary files that are left."""
        if self._data is not None:
            self._data.close()
        for temporary in self._temporary.values():
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _open(self, path: Path) -> IO[bytes]:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._temporary[path] = temporary
        return temporary.open("wb")

    def _put_in_place(self, path: Path) -> None:
        self.byte_size = sum(temporary.stat().st_size for temporary in self._temporary.values())
        overwrites = path.exists()
        if self._data is not None:
            path.unlink(missing_ok=True)  # an old model must never be seen beside new data
            self._temporary.pop(data_path_of(path)).replace(data_path_of(path))
        self._temporary.pop(path).replace(path)
        if self._data is None and overwrites:
            data_path_of(path).unlink(missing_ok=True)  # of the old result, and of no use to the new one


@contextlib.contextmanager
def open_target(source: Source, path: Path | None, *, external: bool, overwrite: bool) -> Iterator[Target]:
    """Yields the target of a rewrite; whatever goes wrong inside, no temporary file stays.

    Raises:
        ContractError: the output exists and `overwrite` is false, is the input or its data, or cannot be written.
    """
    if path is not None:
        _check_path(source, path, external=external, overwrite=overwrite)
    target: Target | None = None
    try:
        target = Target(source, path, external=external)
        yield target
    except OSError as error:  # reading reports ContractError, so this is about writing
        advice = ("free some space or pass another ", Option("output"))
        raise ContractError.unwritable(path, error, advice) from None
    finally:
        if target is not None:
            target.discard()


def wants_external(
    source: Source, decisions: Sequence[Decision], path: Path | None, choice: Literal["auto", "always", "never"]
) -> bool:
    """Returns whether the result's tensors go to an external file: as the source has them, or near protobuf's 2 GB.

    Raises:
        ContractError: external data is asked for, and there is no path to put it next to; or it is not, and there is
            too much for one protobuf file.
    """
    weights = {d.site.weight: d.site for d in decisions if d.quantize and d.site.weight}
    size = source.byte_size - sum(site.weight_bytes - _packed_bytes(site) for site in weights.values())
    if path is None:
        if choice == "always":
            raise ContractError(
                source.name,
                "external_data 'always' without an output",
                expected="a path to put it next to",
                advice="pass output",
            )
        return False
    if choice == "never" and size > INLINE_LIMIT:
        raise _too_large(path)
    return choice == "always" or (choice == "auto" and (source.uses_external_data or size > INLINE_LIMIT))


def _packed_bytes(site: MatMulSite) -> int:
    """Returns how many bytes the site's weight takes as elements and scales, but for partial last blocks."""
    values = site.weight_bytes // (4 if site.dtype == "float32" else 2)
    return values + values // BLOCK_SIZE


def _too_large(path: Path) -> ContractError:
    return ContractError(
        path,
        "the model does not fit into one protobuf file (2 GB)",
        expected="external data",
        advice=("pass ", Option("external_data", "always")),
    )


def data_path_of(path: Path) -> Path:
    """Returns where the external data of a model written to `path` lies."""
    return path.with_name(path.name + ".data")


def _check_path(source: Source, path: Path, *, external: bool, overwrite: bool) -> None:
    if path.is_dir():
        inside = ("pass ", Option("output", "DIRECTORY/MODEL.onnx"))
        raise ContractError(path, "a directory", expected="a file name", advice=inside)
    inputs = {Path(source.name).resolve()} if source.folder else set()
    if source.folder is not None:
        for tensor in [*source.tensors.values(), *iter_tensors(source.proto)]:
            if is_external(tensor):
                inputs.add((source.folder / location(tensor)).resolve())
    if {path.resolve(), data_path_of(path).resolve()} & inputs:
        another = ("pass another ", Option("output"))
        raise ContractError(path, "is the input or its external data", expected="another file", advice=another)
    for file in (path, data_path_of(path))[: 1 + external]:
        if file.exists() and not overwrite:
            replace = ("pass ", Option("overwrite", True), " or another ", Option("output"))
            raise ContractError(file, "exists already", expected="a new file", advice=replace)
