"""What a shell offers while a command is typed."""

import os
import subprocess
import sys

import pytest

from mxfp8_graph.policy.presets import PRESETS

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
