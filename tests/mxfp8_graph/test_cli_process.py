"""The command line as a process: defects, crashes, signals, pipes and terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import models as b
import onnx_ir as ir
import pytest
from commands import process, refused, save

import mxfp8_graph
from mxfp8_graph import __version__, rewriting
from mxfp8_graph.cli import guard
from mxfp8_graph.onnx_pass import run as onnx_pass_run
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_ops.errors import Option

pytestmark = pytest.mark.usefixtures("own_folder")

CHILD, PARENT = "kill(os.getpid()", "kill(os.getppid()"


def test_a_defect_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "rewrite", lambda *args, **kwargs: {}["[oops]"])
    assert "Traceback (most recent call last)" in refused("--debug", "rewrite", "m.onnx", code=70)
    assert refused("rewrite", "m.onnx", code=70) == (
        f"internal error: KeyError: '[oops]'; a defect of mxfp8-graph {__version__}, not of your model; please report "
        "it, with the output of `mxfp8-graph --debug ...` and `mxfp8-graph doctor`"
    )


def test_a_result_that_no_one_could_load_is_a_defect_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_node(model: ir.Model, recipe: Recipe) -> tuple[tuple[()], tuple[()]]:
        model.graph.remove(model.graph[0])
        return (), ()

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


posix = pytest.mark.skipif(os.name == "nt", reason="signals and pty are POSIX's")


def script(*lines: str, source: str = "m.onnx") -> subprocess.CompletedProcess[str]:
    """Runs lines of Python and then `mxfp8-graph rewrite`, in a session of its own: killpg ends no test."""
    words = ["rewrite", source, "--external-data", "always"]
    code = [
        "import contextlib, os, signal, sys, time",
        "from mxfp8_graph import __main__, cli, rewriting",
        *lines,
        f"sys.argv[1:] = {words}",
        "__main__.main()",
    ]
    command = [sys.executable, "-c", "\n".join(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)


@posix
@pytest.mark.parametrize(
    ("name", "code", "call"),
    [
        ("SIGINT", 130, CHILD),
        ("SIGINT", 130, "killpg(0"),  # as a terminal does
        ("SIGTERM", 143, PARENT),
        pytest.param("SIGKILL", -9, PARENT, marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl")),
    ],
)
def test_a_signal_leaves_no_half_file(name: str, code: int, call: str) -> None:
    result = script(
        "@contextlib.contextmanager",
        "def progress():",
        f"    yield lambda name, done, total: (os.{call}, signal.{name}), time.sleep(60))",
        "cli.models.progress_bar = progress",
        source=save(b.chain_model()),
    )
    message = "interrupted\n" if name == "SIGINT" else "terminated\n"
    assert (result.returncode, result.stdout, result.stderr) == (code, "", message)
    assert [p.name for p in Path.cwd().iterdir()] == ["m.onnx"]


@posix
@pytest.mark.parametrize(
    ("name", "code", "message"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "terminated\n")]
)
def test_a_signal_during_the_shutdown_of_python_ends_the_command(name: str, code: int, message: str) -> None:
    late = f"atexit.register(lambda: (os.kill(os.getpid(), signal.{name}), time.sleep(9)))"
    result = script(f"import atexit; rewriting.rewrite = lambda *args, **options: ({late}, sys.exit())")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", message)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_child_ends_if_its_parent_ended_before_the_kernel_watches_it() -> None:
    orphan = "ctypes.CDLL = lambda name: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(.3)) and library(name)"
    result = script(f"import ctypes; library = ctypes.CDLL; {orphan}", source=save(b.chain_model()))
    assert (result.returncode, result.stdout, result.stderr) == (-9, "", "terminated\n")
    assert [p.name for p in Path.cwd().iterdir()] == ["m.onnx"]


LIMIT = "error: mxfp8-graph: reached its limit on processor time (ulimit -t); expected a model that takes less; raise"
KILLED = "error: mxfp8-graph: killed (SIGKILL), as systems do when memory runs out; expected enough memory for the mod"


@posix
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (
            "SIGSEGV",
            2,
            "error: mxfp8-graph: onnx or another native library crashed (Segmentation fault); expected a so",
        ),
        ("SIGKILL", 2, KILLED),
        ("SIGXCPU", 2, LIMIT),
        ("SIGUSR1", 138, "stopped by a signal: User defined signal 1"),
        pytest.param(
            "SIGRTMIN + 3",
            165,
            "stopped by a signal: ",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="real-time signals"),
        ),
    ],
)
def test_a_signal_is_one_line(name: str, code: int, message: str) -> None:
    result = script(f"rewriting.rewrite = lambda *args, **options: os.kill(os.getpid(), signal.{name})")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (code, "", 1)
    assert result.stderr.startswith(message)


@posix
@pytest.mark.parametrize("call", ["bytearray(1 << 62)", "mmap.mmap(-1, 1 << 62)", "torch.empty(1 << 60)"])
def test_memory_that_runs_out_is_no_defect(call: str) -> None:
    result = script(f"import mmap, torch; rewriting.rewrite = lambda *args, **options: {call}")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: mxfp8-graph: out of memory; expected enough for the model; free memory, use a machine with more, or "
        "raise the limit (ulimit -v)\n"
    )


@posix
def test_the_limit_on_processor_time_is_named() -> None:
    result = script(
        "import itertools, resource",
        "rewriting.rewrite = lambda *args, **options: sum(itertools.repeat(0))",
        "resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 2,) * 2)",
    )
    assert (result.returncode, result.stderr[: len(LIMIT)]) == (2, LIMIT)


def test_a_pipe_gets_no_colour_and_100_columns() -> None:
    model = b.chain_model()
    model.graph.node[0].name = "a_name_that_is_longer_than_a_terminal_is_wide/" * 4
    result = process("rewrite", save(model), "-v", env={**os.environ, "COLUMNS": "40", "TERM": "xterm-256color"})
    assert (result.returncode, result.stderr) == (0, "")
    *tables, last = result.stdout.splitlines()
    assert "`mxfp8-graph verify m.onnx m.mxfp8.onnx`" in last
    assert "\x1b" not in result.stdout
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


@posix
def test_a_terminal_shows_progress_in_colour() -> None:
    save(b.chain_model())
    output = on_a_terminal("rewrite", "m.onnx", "-v", columns=120)
    assert "100%" in output
    assert "layers.1.linear" in output
    assert "\x1b[32m" in output


@posix
def test_a_narrow_terminal_shows_whole_names_without_colour_if_no_color_is_set() -> None:
    model = b.chain_model()
    model.graph.node[2].name = "a_long_name_of_the_layer_with_the_worst_error/MatMul"
    save(model)
    output = on_a_terminal("rewrite", "m.onnx", "-v", columns=30, NO_COLOR="1")
    closing = output[output.index("weight error") :]
    assert model.graph.node[2].name in "".join(closing.split())
    assert "\x1b[32m" not in output
