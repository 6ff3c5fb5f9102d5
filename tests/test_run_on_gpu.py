"""The runner of the GPU tests, on tests that fail in all the ways a GPU has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).with_name("run_on_gpu.py")

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
