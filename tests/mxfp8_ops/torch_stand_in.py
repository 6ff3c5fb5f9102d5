"""The torch ops of CUDA on tensors of the processor, and the emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_emulation import EmulatedDevice, device, queue
from cupy_stand_in import cupy

from mxfp8_ops.torch_ops import cuda as torch_cuda

__all__ = ["cupy"]


@pytest.fixture
def emulated(monkeypatch, cupy) -> Iterator[EmulatedDevice]:
    monkeypatch.setattr(torch_cuda, "_queue", lambda x: queue())
    torch_cuda.forget_kept()
    device().launched.clear()
    yield device()
    torch_cuda.forget_kept()


def on_a(monkeypatch, capability: tuple[int, int]) -> EmulatedDevice:
    """Gives the device a compute capability."""
    monkeypatch.setattr(device(), "capability", capability)
    device().launched.clear()
    return device()
