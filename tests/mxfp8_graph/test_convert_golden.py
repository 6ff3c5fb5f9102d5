"""Conversions give what tests/golden/conversions.json records, there and back; golden/write.py writes it anew."""

from __future__ import annotations

import json

from golden import conversions
from grids import looped

RECORDED = json.loads(conversions.FILE.read_text())
MODELS = dict(conversions.models())


def test_each_model_is_recorded() -> None:
    assert list(RECORDED) == list(MODELS)


@looped("name", MODELS)
def test_a_conversion_gives_what_is_recorded(name: str) -> None:
    assert conversions.record(MODELS[name]) == RECORDED[name]
