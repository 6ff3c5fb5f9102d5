"""The nodes inside ONNX Runtime with operands that are empty, absent or of a wrong rank: kernels do as bodies do."""

from __future__ import annotations

import multiprocessing
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
    differences = {changed: text for changed, text in told.items() if text}
    if op.at("bias") is not None:  # it may be absent, so a body can only broadcast it: no op asks for its rank
        for changed in ("bias []", "bias [1]", next(c.changed for c in cases(op) if c.changed.startswith("bias [1, "))):
            assert "; ours: refused, " in differences[changed]
            assert "bias has shape" in differences.pop(changed)
    assert differences == {}
