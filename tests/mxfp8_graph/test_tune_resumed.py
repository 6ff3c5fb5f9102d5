"""tune that is killed or interrupted: it goes on where it was, and comes to the same result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import pytest
from commands import poison, refused, run, save
from full_disk import files_of_at_most
from grids import looped

import mxfp8_graph
from mxfp8_graph.tools.tune.tuner import Interrupted

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's"),
]

BUDGET = "relative_l2<=0.04"
KILLS = int(os.environ.get("TUNE_KILLS", "4"))
"""More of them by hand: TUNE_KILLS=20 pytest tests/mxfp8_graph/test_tune_resumed.py"""
SIZES = (64, 96, 64, 160, 64, 96, 64)


@pytest.fixture(autouse=True)
def temporary_files_lie_with_the_test(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed search leaves some. The next search would remove them, but there is none after the last test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))


def model(folder: Path = Path()) -> str:
    np.savez(folder / "x.npz", x=np.random.default_rng(0).standard_normal((64, 64), np.float32))
    return save(b.chain_model(SIZES), str(folder / "m.onnx"))


def stop(name: str, *_: int) -> None:
    """Interrupts a search once there is a best plan: this is what is tried after the path."""
    if "and layers" in name:
        raise KeyboardInterrupt


@pytest.fixture
def source() -> str:
    return model()


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model and the state of a search that was interrupted."""
    folder = tmp_path_factory.mktemp("searched")
    source = model(folder)
    with np.load(folder / "x.npz") as arrays, pytest.raises(Interrupted) as caught:
        mxfp8_graph.tune(source, BUDGET, inputs=dict(arrays), progress=stop)
    assert caught.value.best is not None
    assert caught.value.best.chosen.met
    return folder


@pytest.fixture
def unfinished(searched: Path) -> str:
    """Puts the interrupted search into the test's folder; returns the model."""
    shutil.copytree(searched, Path.cwd(), dirs_exist_ok=True)
    return "m.onnx"


def command(source: str) -> list[str]:
    return ["tune", source, "--budget", BUDGET, "--inputs", "x.npz"]


def contents(folder: str) -> dict[str, bytes]:
    """Returns what is in the files but for the footer of the page, which has the date."""
    return {path.name: path.read_bytes().partition(b"<footer>")[0] for path in Path(folder).iterdir()}


STATE = Path("m.tuned.part/measurements.jsonl")


def measured() -> int:
    """Returns how many measurements are written; the first line says of what."""
    return max(0, STATE.read_bytes().count(b"\n") - 1) if STATE.exists() else 0


def killed(source: str, more: int) -> bool:
    """Runs the command until it has measured something `more` times, and kills it; whether it had not ended by then."""
    before = measured()
    with subprocess.Popen([sys.executable, "-m", "mxfp8_graph", *command(source)], stdout=subprocess.DEVNULL) as child:
        while child.poll() is None and measured() < before + more:
            time.sleep(0.001)
        child.kill()
    return child.returncode == -9


@pytest.mark.parametrize("kills", [1, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills_change_nothing_about_the_result(source: str, kills: int) -> None:
    assert run(*command(source)).exit_code == 0
    uninterrupted = contents("m.tuned")
    Path("m.tuned").rename("before")
    every = max(1, 40 // (kills + 1))  # it makes 40 measurements or so
    for number in range(kills):
        assert killed(source, every), f"ended before kill {number + 1}"
        assert not Path("m.tuned").exists()
    so_far = measured()
    assert so_far >= kills * every
    result = run(*command(source))
    assert result.exit_code == 0, result.output
    assert f"{so_far} measurements are of a search that did not finish" in result.stdout
    assert contents("m.tuned") == uninterrupted
    assert not Path("m.tuned.part").exists()


def interrupt(source: str, when: str, signal: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, which gets a signal once its progress says `when`."""
    script = (
        "import contextlib, os, signal, sys\n"
        "from mxfp8_graph import __main__ as command, cli\n"
        "@contextlib.contextmanager\n"
        "def progress(**settings):\n"
        f"    yield lambda name, *runs: os.kill(os.getpid(), signal.{signal}) if {when!r} in name else None\n"
        "cli.evidence.progress_bar = progress\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"sys.argv[1:] = {command(source)!r}\n"
        "command.main()\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_a_signal_leaves_the_best_so_far(source: str) -> None:
    result = interrupt(source, "and layers", "SIGTERM")  # what is tried after the path, so that there is a best one
    told = "the best so far is in m.tuned.part; the same command goes on from there"
    assert (result.returncode, result.stderr.splitlines()) == (143, [told, "terminated"])
    assert f"budget {BUDGET} kept, interrupted: the best so far" in result.stdout
    again, _ = mxfp8_graph.rewrite(source, "m.tuned.part/recipe.yaml", output="again.onnx")
    assert Path(again).read_bytes() == Path("m.tuned.part/m.mxfp8.onnx").read_bytes()
    assert not Path("m.tuned").exists()


def test_an_interrupt_before_anything_keeps_the_budget_says_so(source: str) -> None:
    result = interrupt(source, "bfloat16", "SIGINT")
    told = "no plan keeps the budget so far; the measurements are in m.tuned.part; the same command goes on from there"
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.splitlines() == [told, "interrupted"]
    assert [path.name for path in Path("m.tuned.part").iterdir()] == [STATE.name]


def test_an_interrupted_search_goes_on_with_another_bound(unfinished: str) -> None:
    result = run("tune", unfinished, "--budget", "relative_l2<=0.05", "--inputs", "x.npz")
    assert "measurements are of a search that did not finish" in result.stdout
    assert json.loads(Path("m.tuned/report.json").read_text())["finished"]
    assert not Path("m.tuned.part").exists()


def test_the_state_of_something_else_is_an_error(unfinished: str) -> None:
    source = unfinished
    where = f"error: {STATE}: measurements of a search with another "
    advice = "; expected those of this search; remove the folder m.tuned.part to begin anew, or choose another output"
    assert refused(*command(source), "--recipe", "ocp") == f"{where}recipe{advice}"
    assert refused(*command(source), "--budget", "cosine>=0.9") == f"{where}metric{advice}"
    np.savez("x.npz", x=np.zeros((64, 64), np.float32))
    assert refused(*command(source)) == f"{where}samples{advice}"
    save(poison(b.chain_model(SIZES), 3.0))
    assert refused(*command(source)) == f"{where}model, another samples{advice}"


@looped("text", ["[]", '{"schema": 1}', "{" * 100_000, '{"schema": 1, "subject": [], "measured": 3}\n', "\n\n"])
def test_a_damaged_file_is_an_error(source: str, text: str) -> None:
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(text)
    message = refused(*command(source))
    assert message.startswith(f"error: {STATE}: not the measurements of a search; expected a file that tune wrote")
    assert STATE.read_text() == text


def test_a_full_disk_is_an_error_that_names_the_file(source: str) -> None:
    with files_of_at_most(400):
        result = run(*command(source))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {STATE}: cannot be written: File too large; "), result.stderr


@looped("what", ["of another version", "of other facts"])
def test_the_file_of_another_version_is_an_error(unfinished: str, searched: Path, what: str) -> None:
    first, *rest = (searched / STATE).read_text().splitlines(keepends=True)
    header = json.loads(first)
    if what == "of another version":
        header["schema"] = 2
    else:
        header["subject"]["kernel"] = "of another kind"
    STATE.write_text(json.dumps(header) + "\n" + "".join(rest))
    assert refused(*command(unfinished)).startswith(f"error: {STATE}: of another version; expected schema 1; ")


@looped("kept", [0, 1, 20])
def test_what_a_kill_left_of_a_line_is_ignored(unfinished: str, searched: Path, kept: int) -> None:
    """Of the first line, or of one behind the first `kept` measurements."""
    lines = (searched / STATE).read_bytes().splitlines(keepends=True)
    whole = lines[: kept + 1] if kept else []
    shutil.rmtree("m.tuned", ignore_errors=True)
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_bytes(b"".join(whole) + lines[len(whole)][:-9])
    result = run(*command(unfinished))
    assert result.exit_code == 0, result.output
    assert (f"{kept} measurement" in result.stdout) == (kept > 0)
    found = json.loads(Path("m.tuned/report.json").read_text())
    assert found["budgets_kept"]
    assert not STATE.exists()


Measured = dict[str, Any]


def trial(state: Measured) -> Any:
    return next(value for name, value in state.items() if name.startswith("trial "))


FORGED: dict[str, Callable[[Measured], object]] = {
    "no name of a measurement": lambda state: state.update(mine=1),
    "a trial without packed weights": lambda state: trial(state).pop("packed"),
    "a trial with no packed weight": lambda state: trial(state).update(packed=[]),
    "a weight with three fields": lambda state: trial(state)["packed"][0].pop(),
    "scores of another metric": lambda state: trial(state).update(scores={"cosine": [1.0]}),
    "scores of more samples": lambda state: trial(state)["scores"]["relative_l2"].append(0.0),
    "a score that is text": lambda state: trial(state)["scores"].update(relative_l2=["0.01"]),
    "bytes that are text": lambda state: trial(state).update(bytes="1"),
    "bytes beyond 64 bits": lambda state: trial(state).update(bytes=10**400),
    "a damage that is text": lambda state: state.update({"alone e4m3: layers.0.linear": ["0.1"]}),
    "a latency of nothing": lambda state: state.update({"latency 0": [0.0, 1.0]}),
}


@looped("what, signed", [("a measurement that was changed", False), *((what, True) for what in FORGED)])
def test_forged_measurements_are_an_error(unfinished: str, searched: Path, what: str, signed: bool) -> None:
    """The checksum has no secret: whoever changes a measurement can make it right."""
    first, *lines = (searched / STATE).read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    state = {entry["name"]: entry["value"] for entry in entries}
    if signed:
        FORGED[what](state)
        sums = {name: zlib.crc32(json.dumps([name, value]).encode()) for name, value in state.items()}
    else:
        trial(state)["bytes"] -= 1
        sums = {entry["name"]: entry["crc32"] for entry in entries}
    forged = [json.dumps({"name": name, "value": value, "crc32": sums[name]}) for name, value in state.items()]
    STATE.write_text("\n".join([first, *forged, ""]))
    message = refused(*command(unfinished))
    assert message.startswith(f"error: {STATE}: not the measurements of a search; "), message
    assert message.endswith("; remove the folder m.tuned.part to begin anew, or choose another output"), message


def test_what_is_in_the_way_is_an_error(source: str) -> None:
    Path("m.tuned.part").mkdir()
    Path("m.tuned.part/mine.txt").touch()
    assert "m.tuned.part: exists; expected nothing there, or an unfinished search" in refused(*command(source))
