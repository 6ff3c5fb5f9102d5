"""What compute-sanitizer watches on a GPU, rehearsed on emulated threads: it runs, and launches every kernel source."""

from __future__ import annotations

import importlib
import sys

import pytest
from cuda_emulation import device, source_of
from test_cuda_frontends import array, cupy, stand_in

from mxfp8_ops.cuda import build

pytestmark = pytest.mark.tools

__all__ = ["cupy"]


def test_small_launches_run_every_source(cupy, monkeypatch, capsys):
    module = stand_in()
    module.asarray, module.ndarray = array, type(array([0]))
    module.cuda.runtime.deviceSynchronize = lambda: None
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.delitem(sys.modules, "cuda_small_launches", raising=False)
    device().launched.clear()
    importlib.import_module("cuda_small_launches").main()
    assert "launched every kernel" in capsys.readouterr().out
    launched = {*map(source_of, device().launched)}
    assert launched >= {path.stem for path in build.SOURCES.glob("*.cu")}
