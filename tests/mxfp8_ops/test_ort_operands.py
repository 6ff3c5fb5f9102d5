"""The nodes inside ONNX Runtime with operands that are empty, absent or of a wrong rank: kernels do as bodies do."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from operand_cases import Case, cases, difference

from mxfp8_ops import contract


class Child:
    """A process of its own: a kernel that crashes must fail a test, not end it."""

    def __init__(self) -> None:
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def difference(self, case: Case) -> str:
        """Returns how the kernels differ from the bodies, or that they crash."""
        try:
            return self._pool.submit(difference, case).result()
        except BrokenProcessPool:
            self._pool = self._start()
            return "the process crashes"

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.mark.parametrize("op", contract.OPS.values(), ids=lambda op: op.name)
def test_kernels_do_as_bodies_do(child, op):
    told = {case.changed: child.difference(case) for case in cases(op)}
    differences = {changed: text for changed, text in told.items() if text and not is_broadcast_bias(changed, text)}
    assert differences == {}


def is_broadcast_bias(changed: str, text: str) -> bool:
    """Whether a body broadcasts a bias that the kernel refuses: no op tells the rank of what may be absent."""
    broadcasts = re.fullmatch(r"bias \[(1|1, \d+)?\]", changed) is not None
    return broadcasts and re.search("^stock: gives .*; ours: refused, .*: bias has shape", text) is not None
