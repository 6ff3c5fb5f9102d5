"""tune that is killed or interrupted: it goes on where it was, and comes to the same result."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import builders as b
import numpy as np
import pytest
from commands import poison, refused, run, save

import mxfp8_graph
from mxfp8_graph.evidence.tuning.tuner import Interrupted

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's"),
]

BUDGET = "relative_l2<=0.04"
KILLS = int(os.environ.get("TUNE_KILLS", "4"))
"""More of them by hand: TUNE_KILLS=20 pytest tests/mxfp8_graph/test_tune_resumed.py"""


@pytest.fixture(autouse=True)
def temporary_files_lie_with_the_test(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed search leaves some, which the next search would remove, but nobody after the last test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))


def model() -> str:
    np.savez("x.npz", x=np.random.default_rng(0).standard_normal((64, 64), np.float32))
    return save(b.chain_model((64, 96, 64, 160, 64, 96, 64)))


def command(source: str) -> list[str]:
    return ["tune", source, "--budget", BUDGET, "--inputs", "x.npz"]


def contents(folder: str) -> dict[str, bytes]:
    """Returns what is in the files but for the footer of the page, which has the date."""
    return {path.name: path.read_bytes().partition(b"<footer>")[0] for path in Path(folder).iterdir()}


def measured() -> int:
    state = Path("m.tuned.part/state.json")
    return len(json.loads(state.read_bytes())["measured"]) if state.exists() else 0


def killed(source: str, more: int) -> bool:
    """Runs the command until it has measured something `more` times, and kills it; whether it had not ended by then."""
    before = measured()
    with subprocess.Popen([sys.executable, "-m", "mxfp8_graph", *command(source)], stdout=subprocess.DEVNULL) as child:
        while child.poll() is None and measured() < before + more:
            time.sleep(0.001)
        child.kill()
    return child.returncode == -9


def test_kills_change_nothing_about_the_result() -> None:
    source = model()
    assert run(*command(source)).exit_code == 0
    uninterrupted = contents("m.tuned")
    Path("m.tuned").rename("before")
    every = max(1, 40 // (KILLS + 1))  # it makes 40 measurements or so
    for number in range(KILLS):
        assert killed(source, every), f"ended before kill {number + 1}"
        assert not Path("m.tuned").exists()
    so_far = measured()
    assert so_far >= KILLS * every
    result = run(*command(source))
    assert result.exit_code == 0, result.output
    assert f"{so_far} measurements are of a search that did not finish" in result.stdout
    assert contents("m.tuned") == uninterrupted
    assert not Path("m.tuned.part").exists()


def interrupt(source: str, when: str, signal: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, which gets a signal once its progress says `when`."""
    script = (
        "import contextlib, os, signal, sys\n"
        "from mxfp8_graph import cli\n"
        "@contextlib.contextmanager\n"
        "def progress(**settings):\n"
        f"    yield lambda name, *runs: os.kill(os.getpid(), signal.{signal}) if {when!r} in name else None\n"
        "cli.evidence.progress_bar = progress\n"
        f"sys.argv[1:] = {command(source)!r}\n"
        "cli.main()\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("signal", "code", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_an_interrupt_leaves_the_best_so_far_and_goes_on(signal: str, code: int, said: str) -> None:
    source = model()
    result = interrupt(source, "and layers", signal)  # what is tried after the path, so that there is a best one
    told = "the best so far is in m.tuned.part; the same command goes on from there"
    assert (result.returncode, result.stderr.splitlines()) == (code, [told, said])
    assert f"budget {BUDGET} kept, interrupted: the best so far" in result.stdout
    again, _ = mxfp8_graph.rewrite(source, "m.tuned.part/recipe.yaml", output="again.onnx")
    assert Path(again).read_bytes() == Path("m.tuned.part/m.mxfp8.onnx").read_bytes()
    assert not Path("m.tuned").exists()
    assert run(*command(source)).exit_code == 0
    assert json.loads(Path("m.tuned/report.json").read_text())["finished"]
    assert not Path("m.tuned.part").exists()


def test_an_interrupt_before_anything_keeps_the_budget_says_so() -> None:
    result = interrupt(model(), "bfloat16", "SIGINT")
    told = "no plan keeps the budget so far; the measurements are in m.tuned.part; the same command goes on from there"
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.splitlines() == [told, "interrupted"]
    assert [path.name for path in Path("m.tuned.part").iterdir()] == ["state.json"]


def test_in_python_an_interrupt_brings_the_best_so_far() -> None:
    def stop(name: str, *_: int) -> None:
        if "and layers" in name:
            raise KeyboardInterrupt

    inputs = {"x": np.random.default_rng(0).standard_normal((64, 64), np.float32)}
    with pytest.raises(Interrupted) as caught:
        mxfp8_graph.tune(b.chain_model((64, 96, 64, 160, 64, 96, 64)), BUDGET, inputs=inputs, progress=stop)
    assert caught.value.best is not None
    assert caught.value.best.chosen.met


def test_one_search_at_a_time_in_one_folder() -> None:
    source = model()
    Path("slow.py").write_text(
        "import pathlib, time\n"
        "def metric(before, after):\n"
        "    pathlib.Path('began').touch()\n"
        "    while not pathlib.Path('go').exists():\n"
        "        time.sleep(0.01)\n"
        "    return 0.0\n"
    )
    words = ["tune", source, "--inputs", "x.npz", "--budget", "slow:metric<=0.5"]
    with subprocess.Popen([sys.executable, "-m", "mxfp8_graph", *words], stdout=subprocess.DEVNULL) as first:
        while first.poll() is None and not Path("began").exists():
            time.sleep(0.01)
        assert first.poll() is None
        assert refused(*command(source)) == (
            "error: m.tuned.part: another process uses it for a search; expected one search at a time; "
            "wait for it, or pass another --output"
        )
        Path("go").touch()
    assert first.returncode == 0
    assert Path("m.tuned/m.mxfp8.onnx").exists()


def test_the_state_of_something_else_is_an_error() -> None:
    source = model()
    interrupt(source, "bfloat16", "SIGINT")
    where = "error: m.tuned.part/state.json: the state of a search with another "
    advice = "; expected that of this search; remove the folder m.tuned.part to begin anew, or choose another output"
    assert refused(*command(source), "--recipe", "ocp") == f"{where}recipe{advice}"
    assert refused(*command(source), "--budget", "cosine>=0.9") == f"{where}metric{advice}"
    np.savez("x.npz", x=np.zeros((64, 64), np.float32))
    assert refused(*command(source)) == f"{where}samples{advice}"
    save(poison(b.chain_model((64, 96, 64, 160, 64, 96, 64)), 3.0))
    assert refused(*command(source)) == f"{where}model, another samples{advice}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 1}', "{" * 100_000, '{"schema": 1, "subject": [], "measured": 3}']
)
def test_a_damaged_state_is_an_error(text: str) -> None:
    source = model()
    Path("m.tuned.part").mkdir()
    Path("m.tuned.part/state.json").write_text(text)
    message = refused(*command(source))
    assert message.startswith("error: m.tuned.part/state.json: not the state of a search; expected one that tune wrote")


def test_a_measurement_that_somebody_changed_is_an_error() -> None:
    source = model()
    interrupt(source, "and layers", "SIGINT")
    path = Path("m.tuned.part/state.json")
    state = json.loads(path.read_text())
    state["measured"][next(iter(state["measured"]))] = None
    path.write_text(json.dumps(state))
    assert "m.tuned.part/state.json: not the state of a search" in refused(*command(source))


def trial(state: dict[str, Any]) -> Any:
    return next(value for key, value in state["measured"].items() if key.startswith("trial "))


FORGED = {
    "no name of a measurement": lambda state: state["measured"].update(mine=1),
    "a trial without packed weights": lambda state: trial(state).pop("packed"),
    "a trial with no packed weight": lambda state: trial(state).update(packed=[]),
    "a weight with three fields": lambda state: trial(state)["packed"][0].pop(),
    "scores of another metric": lambda state: trial(state).update(scores={"cosine": [1.0]}),
    "scores of more samples": lambda state: trial(state)["scores"]["relative_l2"].append(0.0),
    "a score that is text": lambda state: trial(state)["scores"].update(relative_l2=["0.01"]),
    "bytes that are text": lambda state: trial(state).update(bytes="1"),
    "bytes beyond 64 bits": lambda state: trial(state).update(bytes=10**400),
    "a damage that is text": lambda state: state["measured"].update({"alone e4m3: layers.0.linear": ["0.1"]}),
    "a latency of nothing": lambda state: state["measured"].update({"latency 0": [0.0, 1.0]}),
}


def test_measurements_of_other_types_are_an_error() -> None:
    """Their digest is right: it has no secret."""
    source = model()
    interrupt(source, "and layers", "SIGINT")
    path = Path("m.tuned.part/state.json")
    text = path.read_text()
    for what, forge in FORGED.items():
        state = json.loads(text)
        forge(state)
        measured = json.dumps(state["measured"], sort_keys=True).encode()
        path.write_text(json.dumps({**state, "digest": hashlib.sha256(measured).hexdigest()}))
        message = refused(*command(source))
        assert message.startswith("error: m.tuned.part/state.json: not the state of a search; "), (what, message)
        assert message.endswith("; remove the folder m.tuned.part to begin anew, or choose another output"), message
    path.write_text(text)
    assert run(*command(source)).exit_code == 0


def test_another_bound_goes_on_from_the_same_measurements() -> None:
    source = model()
    interrupt(source, "and layers", "SIGINT")
    result = run("tune", source, "--budget", "relative_l2<=0.05", "--inputs", "x.npz")
    assert "measurements are of a search that did not finish" in result.stdout


def test_what_is_in_the_way_is_an_error() -> None:
    source = model()
    Path("m.tuned.part").mkdir()
    Path("m.tuned.part/mine.txt").touch()
    assert "m.tuned.part: exists; expected nothing there, or an unfinished search" in refused(*command(source))
