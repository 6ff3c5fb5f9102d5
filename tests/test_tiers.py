"""Which tiers of tests .ci/run chooses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tiers", ROOT / ".ci" / "tiers.py")
tiers: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tiers)

pytestmark = pytest.mark.tools


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("README.md", []),
        ("mxfp8_graph/policy/plan.py", []),
        ("custom_ops/mxfp8_ops/src/cpu/kernels/common/codec.h", ["test-isas"]),
        ("custom_ops/mxfp8_ops/src/cuda_host/gemm.cpp", ["test-emulation"]),
        ("tests/mxfp8_ops/test_cuda_gemms.py", ["test-isas", "test-emulation"]),
        ("mxfp8_graph/distributed/fsdp.py", ["test-processes"]),
        ("samples/02_recipe/README.md", ["samples"]),
        ("tests/fuzz/test_run.py", ["test-tools"]),
        ("constraints.txt", ["test-exports"]),
    ],
)
def test_a_changed_file_chooses_the_tiers_that_test_it(
    path: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "changed_paths", lambda: [path])
    tiers.main()
    assert capsys.readouterr().out.split() == expected


def test_every_tier_is_a_target_and_its_sources_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target, starts in tiers.TIERS.items():
        assert f"\n{target}:" in makefile
        assert [start for start in starts if not list(ROOT.glob(f"{start}*"))] == []
