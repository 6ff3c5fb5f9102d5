"""The runner finds failures and continues after them: tried on a toy that crashes on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.run import Result, fuzz, main
from fuzz.supervisor import Limits
from fuzz.trial import Job

pytestmark = pytest.mark.tools


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., Result]:
    """Returns a function that tries inputs on the toy, each as it is."""

    def run(*inputs: bytes, **limits: float) -> Result:
        files = []
        for index, data in enumerate(inputs):
            files.append(tmp_path / str(index))
            files[-1].write_bytes(data)
        return fuzz(Job("toy", "0", pool=[], files=[*map(str, files)]), limits=Limits(**limits))

    return run


def summary(result: Result) -> dict[str, int]:
    return {outcome: kinds.total() for outcome, kinds in result.counts.items()}


def test_an_input_is_accepted_or_refused(tried) -> None:
    result = tried(b"good", b"refuse", b"swallow")
    assert summary(result) == {"accepted": 1, "refused": 2, "finding": 0}
    assert all(kind.startswith("ContractError at tests/fuzz/toy.py:") for kind in result.counts["refused"])


@pytest.mark.parametrize(
    ("data", "kind", "limits"),
    [
        (b"defect", "KeyError at tests/fuzz/toy.py:", {}),
        (b"crash", "SIGSEGV at ", {}),
        (b"leave", "SystemExit at tests/fuzz/toy.py:", {}),
        (b"hang", "over 1 s at tests/fuzz/toy.py:", {"seconds": 1}),
        (b"eat", "over 400 MB ", {"megabytes": 400}),
    ],
)
def test_a_finding_does_not_end_the_run(data: bytes, kind: str, limits: dict[str, float], tried) -> None:
    result = tried(b"good", data, b"good", **limits)
    assert summary(result) == {"accepted": 2, "refused": 0, "finding": 1}
    (found,) = result.findings.values()
    assert found.kind.startswith(kind)
    assert bytes.fromhex(found.data or "") == data
    assert "toy.py" in found.text or "MB held" in found.text


def test_each_input_finds_an_empty_folder(tried) -> None:
    assert summary(tried(b"litter", b"litter"))["accepted"] == 2


def test_a_finding_is_counted_and_its_smallest_input_kept(tried) -> None:
    result = tried(b"defect, long", b"defect", b"defect, longer")
    assert [*result.counts["finding"].values()] == [3]
    assert [verdict.data for verdict in result.findings.values()] == [b"defect".hex()]


def test_the_same_seed_tries_the_same_inputs() -> None:
    first, again, other = (fuzz(Job("toy", seed, pool=[], count=200)).counts for seed in "112")
    assert first == again
    assert first != other


def test_every_job_does_its_share() -> None:
    result = fuzz(Job("toy", "0", pool=[], count=101), jobs=2)
    assert result.tried == 101 + 2  # each tries the one seed


def test_the_command_saves_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--target", "toy", "--out", str(tmp_path)]
    assert main([*common, "--count", "100", "--jobs", "1"]) == 1
    (found,) = (tmp_path / "toy" / "findings").glob("*.bin")
    assert found.read_bytes() == b"defect"
    assert "Traceback" in found.with_suffix(".txt").read_text()
    kept = {path.read_bytes() for path in (tmp_path / "toy" / "corpus").iterdir()}
    assert kept == {b"refuse", b"refuse other"}
    capsys.readouterr()
    assert main([*common, "--input", str(found)]) == 1
    assert "KeyError at tests/fuzz/toy.py" in capsys.readouterr().out


def test_a_missing_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "nothing", "--count", "1"]) == 1
    assert "no such target: tests/fuzz/nothing.py" in capsys.readouterr().err


def test_who_stops_a_run_is_told_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleep, polls = time.sleep, iter(range(40))

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if next(polls, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    code = main(["--target", "toy", "--out", str(tmp_path), "--seconds", "600", "--jobs", "1"])
    assert code in {1, 130}  # 1 if there was a finding by then
    assert "toy: " in capsys.readouterr().out
