"""Which devices multiply MXFP8 themselves: drivers and GPUs are stand-ins, no answer was compared with a real GPU's."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from grids import looped

import mxfp8_ops
from mxfp8_ops import cpu, is_mxfp8_available, is_mxfp8_native, native, native_reason
from mxfp8_ops.cuda import system
from mxfp8_ops.errors import BackendError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[system.Gpu]:
    """The GPUs of this machine: a list to fill."""
    gpus: list[system.Gpu] = []
    monkeypatch.setattr(system, "gpus", lambda: gpus)
    return gpus


def gpu(name: str, capability: tuple[int, int]) -> system.Gpu:
    return system.Gpu(name, capability, 100, 10**11)


BEFORE = "and tensor cores multiply MXFP8 from 10.0 (Blackwell) on"
YES = "whose tensor cores multiply MXFP8"
ONE_LAYOUT = "which multiplies MXFP8 in one layout only: the one that these products have"


@pytest.mark.parametrize(
    ("name", "capability", "native", "why"),
    [
        ("NVIDIA T4", (7, 5), False, BEFORE),
        ("NVIDIA L4", (8, 9), False, BEFORE),
        ("NVIDIA H200", (9, 0), False, BEFORE),
        ("NVIDIA B200", (10, 0), True, YES),
        ("NVIDIA B300", (10, 3), True, YES),
        ("NVIDIA Thor", (11, 0), True, YES),
        ("NVIDIA GeForce RTX 5090", (12, 0), False, ONE_LAYOUT),
        ("NVIDIA GB10", (12, 1), False, ONE_LAYOUT),
    ],
)
def test_a_gpu_answers_by_its_capability_as_transformer_engine_does(
    gpus: list[system.Gpu], name: str, capability: tuple[int, int], native: bool, why: str
) -> None:
    gpus.append(gpu(name, capability))
    assert is_mxfp8_native() is native
    assert native_reason() == f"{name} has compute capability {capability[0]}.{capability[1]}, {why}"


def test_every_gpu_answers_for_itself(gpus: list[system.Gpu]) -> None:
    gpus += [gpu("NVIDIA H200", (9, 0)), gpu("NVIDIA B200", (10, 0))]
    assert [is_mxfp8_native(device) for device in ("cuda", "cuda:0", "cuda:1", "cuda:2")] == [False, False, True, False]
    assert native_reason("cuda:2") == "the CUDA driver shows 2 GPUs, none with number 2"
    torch = pytest.importorskip("torch")
    assert not is_mxfp8_native(torch.device("cpu"))
    assert is_mxfp8_native(torch.device("cuda", 1))


@pytest.mark.parametrize(("capability", "native", "why"), [((10, 0), True, YES), ((9, 0), False, BEFORE)])
def test_transformer_engines_function_answers_for_the_first_gpu_with_a_reason_or_without(
    gpus: list[system.Gpu], capability: tuple[int, int], native: bool, why: str
) -> None:
    gpus += [gpu("NVIDIA X", capability), gpu("NVIDIA Y", (19 - capability[0], 0))]
    reason = f"NVIDIA X has compute capability {capability[0]}.0, {why}"
    assert (is_mxfp8_available(), is_mxfp8_available(return_reason=True)) == (native, (native, reason))


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "DRIVER", "libnothing.so.1")
    assert not is_mxfp8_native("cuda")
    assert native_reason("cuda").startswith("no CUDA driver (libnothing.so.1: cannot open")


def test_the_processor_emulates_it_on_its_instruction_set() -> None:
    assert not is_mxfp8_native("cpu")
    for isa in cpu.available_isas():
        with cpu.forced_isa(isa):
            assert native_reason("cpu") == (
                f"{platform.machine()} processors have no MXFP8 instructions; the kernels emulate it on {isa}"
            )


def test_whether_the_processor_is_native_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise BackendError("mxfp8_ops", "no library", expected="one", advice="install the project with pip")

    monkeypatch.setattr(native, "load", missing)
    assert not is_mxfp8_native("cpu")
    with pytest.raises(BackendError, match="no library"):
        native_reason("cpu")


@pytest.mark.parametrize("ask", [is_mxfp8_native, native_reason])
@looped("device", ["tpu", "cuda:", "cuda:-1", "cuda:x", "", 0, None, SimpleNamespace(name="cuda")])
def test_another_device_is_refused(ask: Any, device: object) -> None:
    with pytest.raises(BackendError) as caught:
        ask(device)
    assert str(caught.value) == f"device: {str(device)!r}; expected cpu, cuda or cuda:N; name one of these devices"


def test_asking_loads_neither_torch_nor_cupy_nor_a_library_of_ours() -> None:
    code = (
        "import sys, mxfp8_ops; before = 'mxfp8_ops.cuda.hardware' in sys.modules; mxfp8_ops.is_mxfp8_native('cpu'); "
        "mxfp8_ops.is_mxfp8_native('cuda'); from mxfp8_ops import native; "
        "heavy = [m for m in ('torch', 'cupy', 'onnx', 'onnxruntime') if m in sys.modules]; "
        "print(before, heavy, native.load.cache_info().currsize)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False [] 0"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'is_mxfp8'; it has is_mxfp8_native, native_reason"):
        mxfp8_ops.is_mxfp8  # noqa: B018
