"""Temporary folders: what a killed run leaves is removed by the next one, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import builders as b
import pytest

import mxfp8_graph
from mxfp8_graph.files import scratch

HOLD = """
import sys
from mxfp8_graph.files import scratch
with scratch("tune") as folder:
    (folder / "model.onnx.data").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of these tests alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds such a folder, whose path it printed, until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], **pipes) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def test_it_is_gone_at_the_end(around: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), scratch("tune") as folder:
        (folder / "below").mkdir()
        assert folder.parent == around
        raise KeyboardInterrupt
    assert list(around.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_another_uses_stays(around: Path, holder) -> None:
    files = Path(holder.stdout.readline().strip())
    with scratch("analyze"):
        assert (files / "model.onnx.data").exists()
    holder.kill()
    holder.wait()
    assert list(around.iterdir()) == [files]
    with scratch("analyze") as folder:
        assert list(around.iterdir()) == [folder]


def test_what_is_not_ours_stays(around: Path) -> None:
    names = ["mxfp8-graph-tune-x", "mxfp8-tune-abc", "mxfp8-graph.tune.a-b", "other"]
    for name in names:
        (around / name).mkdir()
    (around / "mxfp8-graph.tune.file").touch()
    (around / "kept").mkdir()
    (around / "mxfp8-graph.tune.link").symlink_to("kept")
    with scratch("tune"):
        pass
    assert {path.name for path in around.iterdir()} == {
        *names, "kept", "mxfp8-graph.tune.file", "mxfp8-graph.tune.link"
    }  # fmt: skip


def test_where_there_are_no_locks_nothing_is_removed(around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    left = around / "mxfp8-graph.tune.left"
    left.mkdir()
    monkeypatch.setattr("fcntl.flock", refuse)
    with scratch("tune"):
        assert left.exists()


@pytest.mark.parametrize("command", ["analyze", "compare", "tune"])
def test_every_command_that_needs_one_cleans_up(around: Path, command: str) -> None:
    left = around / "mxfp8-graph.analyze.left"
    left.mkdir()
    (left / "model.onnx.data").write_bytes(bytes(1000))
    model = b.chain_model((64, 96, 64))
    if command == "tune":
        mxfp8_graph.tune(model, "cosine>=0.9")
    elif command == "analyze":
        mxfp8_graph.analyze(model)
    else:
        mxfp8_graph.compare(model, recipes=["mxfp8"])
    assert list(around.iterdir()) == []
