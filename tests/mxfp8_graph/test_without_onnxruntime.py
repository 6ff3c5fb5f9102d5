"""Without ONNX Runtime models are rewritten, and what runs them says which extra to install."""

from __future__ import annotations

import json
import re
from pathlib import Path

import models as b
from test_without_torch import COMMANDS, WITHOUT_TORCH, python

WITHOUT = """
import sys; sys.modules['onnxruntime'] = None
from importlib import metadata
version = metadata.version
def others(name):
    if name.startswith('onnxruntime'):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = others
from mxfp8_graph import *
"""


def test_a_model_is_rewritten_and_what_runs_it_names_the_extra(tmp_path: Path) -> None:
    source, output = b.save(b.chain_model(), tmp_path / "m.onnx"), tmp_path / "m.mxfp8.onnx"
    lines = [f"rewrite {source}", "doctor", f"run {output}", f"verify {source} {output}", f"analyze {source}"]
    script = COMMANDS.replace(WITHOUT_TORCH, WITHOUT)
    results = [json.loads(line) for line in python(script, json.dumps([line.split() for line in lines]))]
    (rewritten, _, _), (diagnosed, checks, _), *others = results
    assert (rewritten, diagnosed) == (0, 0)
    assert "not installed; needed to run and verify models" in checks
    message = r"error: onnxruntime: cannot be imported .*; pip install 'mxfp8-graph\[cpu\]' \(for a GPU .*\n"
    assert all(code == 2 and re.fullmatch(message, errors) for code, _, errors in others)
