"""The scripts for a lent GPU, on a machine without one: a dry run of each call, and steps and tests that fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_first
import gpu_start
import pytest
import run_on_gpu
from gpu_first import Step

from mxfp8_ops.cuda import build
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.tools

MOST_FILES = 8
"""The most files that a machine elsewhere gives back after a call."""


@pytest.mark.parametrize("call", gpu_first.CALLS)
def test_a_dry_run_finds_every_test_section_and_script(tmp_path: Path, call: str) -> None:
    """A name that no test, section or script has any more fails here, and not in a call on a GPU."""
    pytest.importorskip("torch")
    try:
        build.nvrtc_version()
    except BackendError as error:
        pytest.skip(str(error))
    command = [sys.executable, gpu_first.__file__, call, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = (tmp_path / f"first-{call}.txt").read_text()
    assert done.returncode == 0, log[-4000:]
    for step in gpu_first.CALLS[call]:
        assert f"| {step.name} | ok |" in done.stdout


def test_the_first_checks_name_what_is_missing_and_compare_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_start.session("cpu")
    with pytest.raises(BackendError, match="has no CUDAExecutionProvider"):
        gpu_start.install()
    printed = capsys.readouterr().out
    assert "session on cpu: largest difference from the processor 0.0e+00" in printed
    assert "providers: " in printed


@pytest.mark.parametrize("call", gpu_first.CALLS)
def test_calls_end_in_time_and_leave_few_files(call: str) -> None:
    steps = gpu_first.CALLS[call]
    assert sum(step.seconds for step in steps) <= gpu_first.CALL_SECONDS < 570
    written = {"bench": 3}  # gpu.md, gpu.json, and gpu.jsonl of one that is killed
    logs = [word for step in steps for word in step.command if word.startswith("{out}/")]
    assert 2 + len(logs) + sum(written.get(step.name, 0) for step in steps) <= MOST_FILES


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs call A with other steps; returns the exit code and the summary."""

    def call(*steps: Step) -> tuple[int, str]:
        monkeypatch.setattr(gpu_first, "CALLS", {"A": steps, "B": ()})
        monkeypatch.setattr(sys, "argv", ["gpu_first.py", "A", "--out", str(tmp_path)])
        return gpu_first.main(), (tmp_path / "first-A.md").read_text()

    return call


def step(name: str, script: str, seconds: float = 60, *, needed: bool = False) -> Step:
    return Step(name, seconds, (sys.executable, "-c", script), (), needed)


def alive(pid: int) -> bool:
    """Returns whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_end(folder: Path) -> None:
    """Fails if one of the processes runs on whose ids are the names of files in a folder."""
    pids, deadline = [int(path.name) for path in folder.iterdir()], time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (len(pids), [pid for pid in pids if alive(pid)]) == (2, [])


FORKS = "import os, time; os.fork(); open(f'{pids}/{{os.getpid()}}', 'w').close(); time.sleep(600)"
"""A program of two processes, as under a sanitizer, that writes their ids and hangs."""


def test_a_step_that_fails_or_hangs_costs_no_other_step(first: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    code, text = first(
        step("bad", "raise SystemExit('no such GPU')"),
        Step("profile", 9, ("no-such-profiler",), ()),
        step("hang", FORKS.format(pids=tmp_path / "pids"), 3),
        step("good", "print('3 TB/s')"),
    )
    assert code == 1
    assert "| bad | exit code 1 |" in text
    assert "| profile | cannot be run: [Errno 2] No such file or directory: 'no-such-profiler' |" in text
    assert "| hang | took more than 3 s |" in text
    assert "no such GPU" in text
    assert "## good\n\n```\n3 TB/s\n```" in text
    assert text.endswith("Next: mend bad, profile, hang, then: make gpu-first CALL=A STEP=bad\n")
    assert_all_end(tmp_path / "pids")


def test_a_call_ends_after_a_step_that_the_others_need(first: Callable[..., tuple[int, str]]) -> None:
    code, text = first(step("library", "raise SystemExit(2)", needed=True), step("good", "pass"))
    assert code == 1
    assert "good" not in text
    assert text.endswith("Next: mend library, then: make gpu-first CALL=A STEP=library\n")
    assert first(step("library", "pass", needed=True))[1].endswith("Next: make gpu-first CALL=B\n")


TESTS = """
import os, time
import pytest
import run_on_gpu

pytestmark = pytest.mark.gpu

def test_a_pass():
    pass

def test_b_failure():
    assert 1 == 2

def test_c_device_is_lost(monkeypatch):
    run_on_gpu.lost = lambda: True
    assert False

def test_d_crash():
    os.kill(os.getpid(), 11)

def test_e_hang():
    FORKS

def test_f_skip():
    pytest.skip("no such device")

def test_g_pass():
    pass
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str, str]:
    """Runs tests by run_on_gpu.py; returns the exit code, the log and the output."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(tests)
    log = folder / "log.txt"
    command = [sys.executable, run_on_gpu.__file__, "--log", str(log), *options, str(folder / "test_it.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=600)
    return done.returncode, log.read_text(), done.stdout


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see which processes run")
def test_every_gpu_test_gets_its_turn_after_one_that_loses_the_device_crashes_or_hangs(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    program = FORKS.format(pids=tmp_path / "pids")
    hang = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    code, log, output = run(tmp_path, TESTS.replace("FORKS", hang), "--most", "10")
    lines = [line.split(" ", 2) for line in log.splitlines() if not line.startswith((" ", "start"))]
    assert [(outcome, name.partition("::")[2]) for outcome, _, name in lines] == [
        ("passed", "test_a_pass"),
        ("failed", "test_b_failure"),
        ("failed", "test_c_device_is_lost"),
        ("failed", "test_d_crash"),
        ("failed", "test_e_hang"),
        ("skipped", "test_f_skip"),
        ("passed", "test_g_pass"),
    ]
    for text in ("assert 1 == 2", "The device is lost", "with exit code -11.", "It took too long.", "no such device"):
        assert text in log
    assert code == 1
    assert "4 failed, 2 passed, 1 skipped" in output
    assert_all_end(tmp_path / "pids")


def test_passed_gpu_tests_are_a_success_and_no_tests_are_none(tmp_path: Path) -> None:
    code, log, _ = run(tmp_path, TESTS, "-k", "a_pass or g_pass")
    assert (code, log.count("passed")) == (0, 3)
    assert run(tmp_path, "def test_it(): pass\n")[0] == 1
    assert run(tmp_path, TESTS, "--seconds", "0")[0] == 1
