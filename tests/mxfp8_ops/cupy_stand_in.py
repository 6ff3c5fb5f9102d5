"""A CuPy on host memory, whose device is the emulated one."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
from cuda_emulation import EmulatedDevice, device

from mxfp8_ops.cuda import device as cuda_device
from mxfp8_ops.cuda import loader


class Array(np.ndarray):
    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)


def array(x: Any) -> Array:
    return np.asarray(x).view(Array)


def stand_in() -> types.SimpleNamespace:
    """Returns a CuPy on host memory."""
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda index: {"major": 9, "minor": 0, "multiProcessorCount": 3, "name": b"stand-in"},
        runtimeGetVersion=lambda: 13020,
        deviceSynchronize=lambda: None,
        CUDARuntimeError=OSError,
    )
    return types.SimpleNamespace(
        ndarray=Array,
        asarray=array,
        may_share_memory=np.may_share_memory,
        empty=lambda shape, dtype: array(np.empty(shape, dtype)),
        zeros=lambda shape, dtype: array(np.zeros(shape, dtype)),
        ascontiguousarray=lambda x, dtype=None: array(np.ascontiguousarray(x, dtype)),
        broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
        cuda=types.SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: types.SimpleNamespace(ptr=0),
            set_allocator=lambda allocator: None,
        ),
    )


@pytest.fixture
def cupy(monkeypatch) -> None:
    monkeypatch.setattr(cuda_device, "cupy_module", stand_in)
    monkeypatch.setattr(cuda_device, "device", lambda index: device())
    monkeypatch.setattr(loader, "connect", device().connect)


def sources(on: EmulatedDevice) -> list[str]:
    """Returns the kernels that ran, without their template arguments."""
    return [name.partition("<")[0] for name in on.launched]
