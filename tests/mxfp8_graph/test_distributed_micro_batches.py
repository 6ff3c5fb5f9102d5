"""`weight_cache` with FSDP2, which writes whole weights into the same memory for each micro-batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import micro_batch_checks as checks  # noqa: E402
from process_pool import ProcessPool  # noqa: E402

pytestmark = pytest.mark.processes


def test_sharded_weights_are_quantized_once_per_step_with_the_same_bits() -> None:
    with ProcessPool(2) as two:
        two(checks.fsdp2_trains_the_same)
        two(checks.fsdp2_that_keeps_whole_weights_trains_the_same)
