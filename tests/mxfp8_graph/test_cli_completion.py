"""What a shell offers while a command is typed, and the man page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mxfp8_graph.cli import app
from mxfp8_graph.policy.presets import PRESETS

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from mxfp8_graph.cli import main; main()"]


def completions(typed: str, shell: str) -> str:
    """Returns what the command answers when a shell asks how `typed` may go on."""
    words = typed.split(" ")
    environment = {
        "_MXFP8_GRAPH_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(COMMAND, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_offered_commands_options_and_presets(shell):
    for typed, expected in (
        ("mxfp8-graph rew", ["rewrite"]),
        ("mxfp8-graph rewrite --dry", ["--dry-run"]),
        ("mxfp8-graph rewrite m.onnx --recipe mxfp8-", ["mxfp8-bf16", "mxfp8-weight-only"]),
        ("mxfp8-graph rewrite m.onnx --external-data a", ["auto", "always"]),
        ("mxfp8-graph convert m.onnx --to o", ["ort-cuda"]),
    ):
        offered = completions(typed, shell)
        assert all(word in offered for word in expected), f"{shell}, {typed!r}: {offered!r}"


def test_every_preset_is_offered_wherever_a_recipe_is_asked_for():
    for command in ("rewrite", "analyze", "tune", "from-hf"):
        assert completions(f"mxfp8-graph {command} m.onnx --recipe ", "bash").split() == list(PRESETS), command


@pytest.mark.parametrize("typed", ["mxfp8-graph rewrite mod", "mxfp8-graph rewrite m.onnx --recipe ./my"])
def test_files_are_left_to_the_shell(typed):
    assert completions(typed, "bash").split() == []  # `complete -o default` then offers files
    assert completions(typed, "zsh").strip() == "_files"


@pytest.fixture(scope="module")
def man_page(tmp_path_factory):
    """The page as a build writes it: from the sources, with typer and rich and no other dependency."""
    path = tmp_path_factory.mktemp("man") / "mxfp8-graph.1"
    heavy = ("numpy", "onnx", "onnx_ir", "onnxruntime", "torch", "pydantic", "yaml", "mxfp8_ops.native")
    code = f"import sys, runpy; sys.modules.update(dict.fromkeys({heavy})); sys.argv[1:] = [{str(path)!r}]; "
    code += f"runpy.run_path({str(ROOT / 'custom_ops/man_page.py')!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code], check=True)
    return path


def test_every_command_and_option_is_in_the_man_page(man_page):
    text = man_page.read_text(encoding="utf-8")
    assert text.count("\n.TP") > 100
    text = text.replace(r"\-", "-").replace(r"\e", "\\")
    root = typer.main.get_command(app)
    for name, command in {"": root, **root.commands}.items():
        section = text.partition(f".SS {name} ")[2].partition("\n.S")[0] if name else text
        for parameter in command.params:
            told = [*parameter.opts, *(getattr(parameter, "help", None) or "").split()]
            missing = [word for word in told if word not in section and word not in parameter.name]
            assert not missing, f"{name}: {missing}"
    assert text.count("\n.SS ") == len(root.commands)


def test_the_man_page_is_read_without_a_warning(man_page):
    try:
        command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(man_page)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs groff")
    assert (done.returncode, done.stderr) == (0, "")
