"""A short run of `make faults`: kills, full disks and writers that meet lose nothing."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import faults
import pytest

pytestmark = pytest.mark.tools


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # root writes to a read-only folder, so root does not try
        yield Path(name)


@pytest.fixture
def trials(folder: Path) -> faults.Trials:
    return faults.Trials(folder)


@pytest.fixture
def cases(folder: Path) -> dict[str, faults.Case]:
    return {case.name: case for case in faults.cases(folder, torch=False)}


def test_kills_at_random_moments(trials, cases):
    faults.random_kills(trials, [*cases.values()], 10, seed=1)
    assert trials.wrong == []


@pytest.mark.parametrize("name", ["model and data", "a pair over a pair"])
def test_kills_at_every_step_of_writing_a_model_and_its_data(trials, cases, name):
    steps = faults.kills_at_every_step(trials, cases[name], signal.SIGKILL)
    assert trials.wrong == []
    assert steps > 20
    assert all(trials.counts[f"SIGKILL: {left}"] for left in ("old", "new, not all in place", "new"))


def test_full_disks_and_writers_that_meet(trials, cases):
    found = [cases["a pair over a pair"], cases["model and data"], cases["safetensors"]]
    faults.full_disks(trials, found, 6, seed=1)
    faults.read_only_folders(trials, found)
    faults.writers_that_meet(trials, found, 3)
    assert trials.wrong == []
