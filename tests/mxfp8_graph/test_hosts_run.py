"""Hosts that are installed, running rewritten models; samples 08 to 10 run more of them. Others are skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import models as b
import numpy as np
import onnxruntime
import pytest

import mxfp8_graph

pytestmark = pytest.mark.usefixtures("own_folder")

NODE = """
const ort = require(process.argv[3]);
const x = new ort.Tensor("float32", Float32Array.from(JSON.parse(process.argv[2])), [2, 64]);
ort.InferenceSession.create(process.argv[1])
  .then(session => session.run({x}))
  .then(results => { console.log(JSON.stringify([...results.y.data])); process.exit(0); });
"""


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_without_a_call_for_custom_ops_the_function_bodies_run(package: str) -> None:
    node = shutil.which("node")
    here = node and subprocess.run([node, "-e", f"require('{package}')"], capture_output=True, check=False)
    if not here or here.returncode:
        pytest.skip(f"needs node and `npm install {package}`, with NODE_PATH set to its node_modules")
    mxfp8_graph.rewrite(b.chain_model(), output="m.onnx")
    x = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    command = [node, "-e", NODE, str(Path("m.onnx").resolve()), json.dumps(x.ravel().tolist()), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout), np.float32).reshape(2, 64)
    expected = onnxruntime.InferenceSession("m.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_triton_server_takes_the_configuration_of_the_page() -> None:
    """The server in the package nvidia-pytriton has no ONNX Runtime backend: that is all it may have to say."""
    found = importlib.util.find_spec("pytriton")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs a server: pip install --no-deps nvidia-pytriton")
    server = Path(found.submodule_search_locations[0], "tritonserver")
    page = (Path(__file__).parents[2] / "docs/production.md").read_text(encoding="utf-8")
    Path("repository/minilm/1").mkdir(parents=True)
    Path("repository/minilm/config.pbtxt").write_text(page.split("```pbtxt\n")[1].split("```")[0], encoding="utf-8")
    mxfp8_graph.rewrite(b.chain_model(), output="repository/minilm/1/model.onnx")
    quiet = [f"--allow-{what}=false" for what in ("http", "grpc", "metrics")]
    done = subprocess.run(
        [
            server / "bin/tritonserver",
            "--model-repository=repository",
            f"--backend-directory={server}/backends",
            *quiet,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = done.stdout + done.stderr
    assert "failed to read text proto" not in said
    reasons = set(re.findall(r"failed to load 'minilm' version 1: (.*?)[,\"]", said))
    assert reasons == {"Invalid argument: unable to find backend library for backend 'onnxruntime'"}, said


def test_ray_goes_on_with_a_folder_of_models_after_a_kill() -> None:
    pytest.importorskip("ray", reason="needs the extra hosts")
    script = Path(__file__).parents[2] / "samples/10_ray/rewrite_folder.py"
    command = [sys.executable, script, "models", "results"]
    Path("models/deep").mkdir(parents=True)
    for number in range(12):
        b.save(b.chain_model(), Path(f"models/deep/{number}.onnx"))
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("{"):
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = len(list(Path("results").rglob("*.onnx")))
    assert before > 0

    second = subprocess.run(command, capture_output=True, text=True, check=True)
    said, *lines = second.stdout.splitlines()
    done = int(re.fullmatch(r"12 models, (\d+) rewritten before", said)[1])
    assert done >= before
    assert len([line for line in lines if '"rewritten": 2' in line]) == 12 - done
    assert len(list(Path("results/deep").glob("*.onnx"))) == 12
    third = subprocess.run(command, capture_output=True, text=True, check=True)
    assert third.stdout == "12 models, 12 rewritten before\n"
