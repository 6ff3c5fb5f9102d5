"""The stored structures of exports are what the exporters of today make."""

from __future__ import annotations

import onnx
import pytest
import structures
from releases import release


@pytest.mark.slow
@pytest.mark.parametrize("name", structures.NAMES)
def test_a_stored_structure_is_what_the_exporter_makes(name: str) -> None:
    for module in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(module)
    stored = onnx.load(structures.FOLDER / f"{name}.onnx")
    writer = tuple(int(part) for part in stored.producer_version.split("+")[0].split(".")[:2])
    if release("torch") < writer:
        pytest.skip(f"torch {writer} wrote it")
    now = structures.described(structures.strip(structures.exported(name)))
    assert now == structures.described(stored), f"another export; to store it: python tests/structures.py {name}"
