"""Opens a model with switches: an ONNX model in one session of ONNX Runtime, or an exported program."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import bytes_of, load
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.inputs import Signature
from mxfp8_graph.running.runner import Model, is_program
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.tools.switched_model import SwitchedSession, write_switched
from mxfp8_ops.errors import ContractError

_ROOM: Final = 1.3
"""Bytes that a model with its packed weights takes, in units of the model's; an MXFP8 weight has 8.25 bits of 32."""


@contextmanager
def open_switchable(
    model: Model, recipe: Recipe, *, allow_nonfinite: bool, progress: Progress | None
) -> Iterator[Switchable]:
    """Yields `model` with a switch per site that `recipe` rewrites, none of them fused.

    An ONNX model is read once, written with its switches to a temporary folder, and loaded from there by ONNX Runtime,
    which maps the weights: at most one tensor is in memory besides. A program is in memory, with the packed weights.

    Raises:
        ContractError: the model cannot be read, is rewritten already, or there is no room for it.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    recipe = recipe.without_fusion().for_cpu()
    if is_program(model):
        # Imports torch.
        from mxfp8_graph.tools.switched_program import open_program

        yield open_program(model, recipe, allow_nonfinite=allow_nonfinite, progress=progress)
        return
    loaded = load(model)
    signature = Signature.of(loaded)
    with tempfile.TemporaryDirectory(prefix="mxfp8-graph-") as name:
        folder = Path(name)
        _check_room(folder, round(bytes_of(loaded) * _ROOM), name_of(loaded))
        path = folder / "model.onnx"
        yield SwitchedSession(
            signature, write_switched(loaded, recipe, path, allow_nonfinite=allow_nonfinite, progress=progress)
        )


def _check_room(folder: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        what = f"{folder.parent} has {free / 1e9:.1f} GB free"
        expected = f"{needed / 1e9:.1f} GB for the model with its switches"
        raise ContractError(name, what, expected=expected, advice="set TMPDIR to a folder with more room")
