"""Every target, for a moment: a fixed number of inputs from a fixed seed, after those of the committed corpus.

`make fuzz` looks for longer.
"""

from __future__ import annotations

import pytest

from fuzz import CORPUS, TARGETS
from fuzz.run import fuzz
from fuzz.trial import Job

pytestmark = pytest.mark.tools


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_breaks_a_promise(target: str) -> None:
    result = fuzz(Job(target, "1", pool=[str(CORPUS / target)], count=TARGETS[target]))
    assert not result.findings, "\n\n".join(f"{v.kind}: {v.data}\n{v.text}" for v in result.findings.values())
    assert result.counts["accepted"], f"every input was refused:\n{result}"
    assert result.counts["refused"], f"no input was refused:\n{result}"
