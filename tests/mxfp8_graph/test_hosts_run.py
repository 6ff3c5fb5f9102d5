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

import builders as b
import numpy as np
import onnx
import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_ops import cpu

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
    done = subprocess.run(
        [node, "-e", NODE, str(Path("m.onnx").resolve()), json.dumps(x.ravel().tolist()), package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout), np.float32).reshape(2, 64)
    expected = onnxruntime.InferenceSession("m.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_triton_server_takes_the_configuration() -> None:
    """The server in the package nvidia-pytriton has no ONNX Runtime backend: that is all it may have to say."""
    found = importlib.util.find_spec("pytriton")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs a server: pip install --no-deps nvidia-pytriton")
    server = Path(found.submodule_search_locations[0], "tritonserver")
    mxfp8_graph.rewrite(b.chain_model(), output="m.onnx")
    mxfp8_graph.package("m.onnx", "triton", "repository/chain")
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
    reasons = set(re.findall(r"failed to load 'chain' version 1: (.*?)[,\"]", said))
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


def test_genai_loads_the_library_that_was_packaged() -> None:
    """A library that cannot be loaded is what it says it cannot load: it does not run the function bodies instead."""
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the extra hosts")
    from test_hosts import LLAMA, decoder

    model = decoder()
    model.graph.input[0].name = model.graph.node[0].input[0] = "input_ids"
    onnx.save(model, "source.onnx")
    mxfp8_graph.rewrite("source.onnx", output="m.onnx")
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    folder = mxfp8_graph.package("m.onnx", "genai", "packaged", config="llama")
    genai.Model(str(folder))
    maps = Path("/proc/self/maps")
    library = folder / cpu.library_path().name
    assert not maps.exists() or str(library) in maps.read_text()
    broken = shutil.copytree(folder, Path("broken"))
    (broken / library.name).write_bytes(b"no library")
    with pytest.raises(Exception, match=library.name):
        genai.Model(str(broken))
