"""The committed corpus and 200 damaged models end as promised: exit code 0, 2, 3 or 70, a whole output or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import run

pytestmark = pytest.mark.tools


def test_damaged_models_end_as_promised(tmp_path: Path) -> None:
    assert run.main(["--count", "200", "--seed", "1", "--out", str(tmp_path)]) == 0
