"""The runner of the GPU tests, on tests that fail in all the ways a GPU has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run_on_gpu.py")

pytestmark = pytest.mark.tools

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
    time.sleep(600)

def test_f_skip():
    pytest.skip("no such device")

def test_g_pass():
    pass
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str, str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_it.py").write_text(tests)
    log = folder / "log.txt"
    command = [sys.executable, str(RUNNER), "--log", str(log), *options, str(folder / "test_it.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, timeout=600)
    return done.returncode, log.read_text(), done.stdout


def test_every_test_gets_its_turn(tmp_path):
    code, log, output = run(tmp_path, TESTS, "--most", "5")
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
    assert "assert 1 == 2" in log
    assert "The device is lost" in log
    assert "It ended the process with exit code -11." in log
    assert "It took too long." in log
    assert "no such device" in log
    assert code == 1
    assert "4 failed, 2 passed, 1 skipped" in output


def test_what_passes_is_a_success(tmp_path):
    code, _, output = run(tmp_path, "import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n")
    assert code == 0
    assert "1 passed" in output


def test_nothing_is_no_success(tmp_path):
    assert run(tmp_path, "def test_it(): pass\n")[0] == 1
    assert run(tmp_path, "syntax error\n")[0] == 1


def test_time_that_runs_out_is_no_success(tmp_path):
    code, log, _ = run(tmp_path, TESTS, "--seconds", "0")
    assert code == 1
    assert "stopped after 0 s" in log


def test_a_slow_start_is_no_test_that_hangs(tmp_path):
    tests = "import time\nimport pytest\ntime.sleep(4)\n@pytest.mark.gpu\ndef test_it(): pass\n"
    code, log, _ = run(tmp_path, tests, "--most", "2")
    assert code == 0, log


# --- what tests have started -----------------------------------------------------------------------------------------

SANITIZED = """
import subprocess, sys
from pathlib import Path
import pytest

@pytest.mark.gpu
def test_sanitizer():
    subprocess.run([sys.executable, str(Path(__file__).with_name("sanitizer.py"))], capture_output=True)
"""

SANITIZER = """
import os, subprocess, sys, time
from pathlib import Path

program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(__file__).with_name("started.part").write_text(f"{os.getpid()} {program.pid}")
Path(__file__).with_name("started.part").rename(Path(__file__).with_name("started"))
program.wait()
"""
"""As compute-sanitizer does, it runs the program in a process of its own, and waits for it."""


def alive(pid: int) -> bool:
    """Returns whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def sanitized(tmp_path):
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc to see which processes run")
    (tmp_path / "sanitizer.py").write_text(SANITIZER)
    yield tmp_path
    if (tmp_path / "started").exists():
        for pid in map(int, (tmp_path / "started").read_text().split()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_sanitizer_that_takes_too_long_leaves_nothing_behind(sanitized):
    code, log, _ = run(sanitized, SANITIZED, "--most", "10")
    assert code == 1
    assert "It took too long." in log
    pids = [*map(int, (sanitized / "started").read_text().split())]
    assert until(lambda: not any(map(alive, pids))), f"{pids} still run"


def test_a_runner_that_is_ended_leaves_nothing_behind(sanitized):
    (sanitized / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (sanitized / "test_it.py").write_text(SANITIZED)
    command = [sys.executable, str(RUNNER), "--log", str(sanitized / "log.txt"), str(sanitized / "test_it.py")]
    with subprocess.Popen(command, cwd=sanitized, stdout=subprocess.DEVNULL) as runner:
        assert until((sanitized / "started").exists, 60)
        runner.terminate()
    pids = [*map(int, (sanitized / "started").read_text().split())]
    assert until(lambda: not any(map(alive, pids))), f"{pids} still run"


def test_an_expression_selects_tests(tmp_path):
    code, log, _ = run(tmp_path, TESTS, "-k", "a_pass or g_pass")
    assert code == 0
    assert [line.rpartition("::")[2] for line in log.splitlines() if line.startswith("passed")] == [
        "test_a_pass",
        "test_g_pass",
    ]
