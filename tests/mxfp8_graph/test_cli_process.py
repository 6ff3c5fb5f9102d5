"""The command line as a process: usage, defects, signals, pipes and terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import builders as b
import onnx_ir as ir
import pytest
from commands import process, refused, run, save

import mxfp8_graph
from mxfp8_graph import __version__, rewriting
from mxfp8_graph.cli import guard
from mxfp8_graph.onnx_pass import run as onnx_pass_run
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import Option

pytestmark = pytest.mark.usefixtures("own_folder")

CHILD, PARENT = "kill(os.getpid()", "kill(os.getppid()"


# --- Usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewrite"], "Missing argument 'MODEL'"),
        (["rewrit", "m.onnx"], "No such command 'rewrit'"),
        (["rewrite", "m.onnx", "--dry"], "No such option"),
        (["rewrite", "m.onnx", "--external-data", "maybe"], "'maybe' is not one of 'auto', 'always', 'never'"),
        (["verify", "m.onnx"], "Missing argument 'REWRITTEN'"),
        (["verify", "a", "b", "--max-rel-l2", "-1"], "Invalid value for '--max-rel-l2'"),
        (["verify", "a", "b", "--dim", "batch"], "'batch'; expected NAME=SIZE, as in batch=4"),
        (["run", "m.onnx", "--repeat", "0"], "Invalid value for '--repeat'"),
        (["run", "m.onnx", "--seed", "-1"], "Invalid value for '--seed'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_no_arguments_print_the_help() -> None:
    assert "Rewrites exported models to MXFP8" in run().output


# --- What goes wrong inside ------------------------------------------------------------------------------------------


def test_a_defect_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "rewrite", lambda *args, **kwargs: {}["[oops]"])
    assert "Traceback (most recent call last)" in refused("--debug", "rewrite", "m.onnx", code=70)
    assert refused("rewrite", "m.onnx", code=70) == (
        f"internal error: KeyError: '[oops]'; a defect of mxfp8-graph {__version__}, not of your model; please report "
        "it, with the output of `mxfp8-graph --debug ...` and `mxfp8-graph doctor`"
    )


def test_a_result_that_no_one_could_load_is_a_defect_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_node(model: ir.Model, recipe: Recipe) -> tuple[()]:
        model.graph.remove(model.graph[0])
        return ()

    monkeypatch.setattr(onnx_pass_run, "fuse", lose_a_node)
    proto = b.matmul_model()
    said = "node 'linear' (MXFP8Gemm): input 'x_mxfp8' is not defined, in the result, which is not written"
    assert refused("rewrite", save(proto), "-o", "out.onnx", code=70).startswith(
        f"internal error: RuntimeError: m.onnx: {said}; a defect of mxfp8-graph"
    )
    with pytest.raises(RuntimeError) as caught:
        mxfp8_graph.rewrite(proto)
    assert str(caught.value) == f"model: {said}"


def test_an_error_of_the_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", "out.onnx")

    monkeypatch.setattr(rewriting, "rewrite", full)
    assert refused("rewrite", "m.onnx") == "error: out.onnx: No space left on device"


def test_an_advice_with_the_number_1_keeps_it() -> None:
    assert [guard._flag(Option("seed", value)) for value in (1, True, None)] == ["--seed 1", "--seed", "--seed"]


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("name", "code", "call"),
    [
        *((*signal, call) for signal in (("SIGINT", 130), ("SIGTERM", 143)) for call in (CHILD, PARENT, "killpg(0")),
        pytest.param("SIGKILL", -9, PARENT, marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl")),
    ],
)
def test_a_signal_leaves_no_half_file(name: str, code: int, call: str) -> None:
    source = save(b.chain_model())
    script = (
        "import contextlib, os, signal, sys, time\n"
        "from mxfp8_graph import __main__, cli\n"
        "@contextlib.contextmanager\n"
        "def progress():\n"
        f"    yield lambda name, done, total: (os.{call}, signal.{name}), time.sleep(60))\n"
        "cli.models.progress_bar = progress\n"
        f"sys.argv[1:] = ['rewrite', {source!r}, '--external-data', 'always']\n"
        "__main__.main()\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    assert (result.returncode, result.stdout, result.stderr) == (
        code,
        "",
        "interrupted\n" if name == "SIGINT" else "terminated\n",
    )
    assert [p.name for p in Path.cwd().iterdir()] == ["m.onnx"]


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SIGSEGV", "onnx or another native library crashed (Segmentation fault); expected a sound model; check the"),
        ("SIGKILL", "killed (SIGKILL), as systems do when memory runs out; expected enough memory for the model; free"),
    ],
)
def test_a_crash_is_one_line(name: str, message: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from mxfp8_graph import __main__, rewriting\n"
        f"rewriting.rewrite = lambda *args, **options: os.kill(os.getpid(), signal.{name})\n"
        "sys.argv[1:] = ['rewrite', 'm.onnx']\n"
        "__main__.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: mxfp8-graph: {message}")


# --- As a process ----------------------------------------------------------------------------------------------------


def test_as_a_module() -> None:
    result = process("rewrite", save(b.chain_model()))
    assert (result.returncode, result.stderr) == (0, "")
    assert "`mxfp8-graph verify m.onnx m.mxfp8.onnx`" in result.stdout


def test_pipes_get_no_colour_and_100_columns() -> None:
    model = b.chain_model()
    model.graph.node[0].name = "a_name_that_is_longer_than_a_terminal_is_wide/" * 4
    save(model)
    result = process("rewrite", "m.onnx", "--dry-run", env={**os.environ, "COLUMNS": "40", "TERM": "xterm-256color"})
    assert "\x1b" not in result.stdout
    *tables, _ = result.stdout.splitlines()
    assert 60 < max(map(len, tables)) <= 100
    assert result.stdout.count("wide/") + result.stdout.count("is_wide") >= 4, "folded, and whole"


def test_a_reader_that_goes_away_is_no_error() -> None:
    save(b.chain_model())
    command = [sys.executable, "-m", "mxfp8_graph", "rewrite", "m.onnx", "--dry-run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


def on_a_terminal(*arguments: str, columns: int, **environment: str) -> str:
    """Returns what the command prints on a terminal, stdout and stderr together."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "COLUMNS", "CI"}}
    command = [sys.executable, "-m", "mxfp8_graph", *arguments]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm-256color", **environment}):
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 4096):
                output += chunk
        except OSError:  # Linux says EIO where others say end of file
            pass
    os.close(ours)
    return output.decode()


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_a_terminal_shows_progress() -> None:
    save(b.chain_model())
    output = on_a_terminal("rewrite", "m.onnx", columns=120)
    assert "100%" in output
    assert "layers.1.linear" in output


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_no_color() -> None:
    save(b.chain_model())
    assert "\x1b[32m" in on_a_terminal("rewrite", "m.onnx", "--dry-run", columns=120)
    assert "\x1b[32m" not in on_a_terminal("rewrite", "m.onnx", "--dry-run", columns=120, NO_COLOR="1")


@pytest.mark.skipif(os.name == "nt", reason="pty is POSIX's")
def test_a_narrow_terminal_cuts_no_names() -> None:
    model = b.chain_model()
    model.graph.node[2].name = "a_long_name_of_the_layer_with_the_worst_error/MatMul"
    save(model)
    output = on_a_terminal("rewrite", "m.onnx", columns=30)
    closing = output[output.index("weight error") :]
    assert model.graph.node[2].name in "".join(closing.split())
