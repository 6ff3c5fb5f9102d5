"""The first half hour on a GPU, on a machine without one: its dry run, and steps that fail as they do on a GPU."""

from __future__ import annotations

import subprocess
import sys

import gpu_first
import pytest
from gpu_first import Step
from test_run_on_gpu import alive, until

from mxfp8_ops.cuda import build
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.tools

MOST_FILES = 8
"""What comes back of a call on a machine elsewhere."""


@pytest.mark.parametrize("call", gpu_first.CALLS)
def test_a_dry_run_finds_every_test_section_and_script(tmp_path, call):
    """A name that no test, section or script has any more fails here, and not in a call on a GPU."""
    pytest.importorskip("torch")
    if call == "A":
        try:
            build.nvrtc_version()
        except BackendError as error:
            pytest.skip(str(error))
    command = [sys.executable, gpu_first.__file__, call, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = (tmp_path / f"first-{call}.txt").read_text()
    assert done.returncode == 0, log[-4000:]
    assert {path.name for path in tmp_path.iterdir()} == {f"first-{call}.md", f"first-{call}.txt"}
    for step in gpu_first.CALLS[call][1]:
        assert f"| {step.name} | ok |" in done.stdout
        assert f"== {step.name}: " in log


@pytest.mark.parametrize("call", gpu_first.CALLS)
def test_calls_end_in_time_and_leave_few_files(call):
    steps = gpu_first.CALLS[call][1]
    assert sum(step.seconds for step in steps) <= gpu_first.CALL_SECONDS < 570
    written = {"bench": 3}  # gpu.md, gpu.json, and gpu.jsonl of one that is killed
    logs = [word for step in steps for word in step.command if word.startswith("{out}/")]
    assert 2 + len(logs) + sum(written.get(step.name, 0) for step in steps) <= MOST_FILES
    for step in steps:  # what a step can say of its own end, it says before it is killed
        given = [float(step.command[i + 1]) for i, word in enumerate(step.command) if word == "--seconds"]
        assert all(seconds < step.seconds for seconds in given)


def step(name: str, script: str, seconds: float = 60, **fields) -> Step:
    return Step(name, seconds, (sys.executable, "-c", script), (), **fields)


@pytest.fixture
def first(monkeypatch, tmp_path):
    """Runs call A with other steps; returns the exit code and the summary."""

    def call(*steps: Step, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
        monkeypatch.setattr(gpu_first, "CALLS", {"A": ("title", steps), "B": ("other", ())})
        monkeypatch.setattr(sys, "argv", ["gpu_first.py", "A", "--out", str(tmp_path), *arguments])
        code = gpu_first.main()
        return code, (tmp_path / "first-A.md").read_text()

    return call


def test_what_is_well_names_the_next_call(first, tmp_path):
    code, text = first(step("one", "print('3 TB/s'); print('noise')", numbers="TB/s"), step("two", "pass"))
    assert code == 0
    assert "## Numbers: one\n\n```\n3 TB/s\n```" in text
    assert text.endswith("Next: make gpu-first CALL=B\n")
    assert "noise" in (tmp_path / "first-A.txt").read_text()


def test_a_failure_costs_no_other_step_and_is_told(first):
    code, text = first(step("bad", "raise SystemExit('no such GPU')"), step("good", "pass"))
    assert code == 1
    assert "| bad | exit code 1 |" in text
    assert "| good | ok |" in text
    assert "## Failed: bad" in text
    assert "no such GPU" in text
    assert text.endswith("Next: mend bad, then: make gpu-first CALL=A STEP=bad\n")


def test_a_program_that_is_not_there_is_told(first):
    code, text = first(Step("profile", 9, ("no-such-profiler",), ()), step("good", "pass"))
    assert code == 1
    assert "| profile | cannot be run: [Errno 2] No such file or directory: 'no-such-profiler' |" in text
    assert "| good | ok |" in text


def test_without_what_is_needed_nothing_more_runs(first):
    code, text = first(step("library", "raise SystemExit(2)", needed=True), step("good", "pass"))
    assert code == 1
    assert "good" not in text
    assert text.endswith("Next: mend library, then: make gpu-first CALL=A\n")


def test_one_step_runs_after_those_that_it_needs(first, capsys):
    steps = step("library", "pass", needed=True), step("one", "pass"), step("two", "pass")
    assert first(*steps, arguments=("--step", "two"))[0] == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["library", "two"]
    with pytest.raises(SystemExit):
        first(*steps, arguments=("--step", "three"))
    assert "call A has the steps library, one, two" in capsys.readouterr().err


def test_a_step_that_hangs_is_ended_with_all_that_it_started(first, tmp_path):
    script = "import os; os.fork(); open(f'{pids}/{{os.getpid()}}', 'w').close(); import time; time.sleep(600)"
    (tmp_path / "pids").mkdir()
    code, text = first(step("hang", script.format(pids=tmp_path / "pids"), 3), step("good", "pass"))
    assert code == 1
    assert "| hang | took more than 3 s |" in text
    assert "| good | ok |" in text
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    assert until(lambda: not any(map(alive, pids)))


def test_the_driver_s_folder_stays_and_a_toolkit_s_goes(tmp_path):
    for folder, name in (("driver", "libcuda.so.1"), ("toolkit", "libnvrtc.so.13")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    paths = f"{tmp_path / 'toolkit'}:{tmp_path / 'driver'}:"
    assert gpu_first.without_nvrtc(paths) == str(tmp_path / "driver")
