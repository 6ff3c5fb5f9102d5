"""The fixture that forces instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from grids import instruction_sets


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on the best instruction set and on the portable one; on all where MXFP8_TEST_ISAS is `all`."""
    from mxfp8_ops import cpu

    with cpu.forced_isa(request.param):
        yield request.param
