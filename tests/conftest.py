"""Fixtures shared by all tests. The model builders are in `builders.py`, which pyproject.toml puts on the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "test_documentation.py",
    "test_real_models.py",
    "test_onnx_fuse_attention_exports.py",
    "test_torch_training.py",
    "test_torch_caches.py",
    "test_random_graphs.py",
    "test_cuda_build.py",
    "test_to_onnx_hostile.py",
)
"""Files that take a minute or more. They come first, so that none is left to one process when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[False, True], ids=["bodies", "kernels"])
def runtime(request: Any, monkeypatch: Any) -> None:
    """Runs a test twice: what `oracle.run` runs, it runs by the nodes' function bodies and then by our kernels."""
    import oracle  # here, because it imports all of mxfp8_graph, which a machine that only tests kernels need not have

    monkeypatch.setattr(oracle, "use_kernels", request.param)
