"""C and C++ programs that load a rewritten model, built here and run on the ONNX Runtime that Python has.

The published headers are those that ONNXRUNTIME_INCLUDE names, or the ones (1.17) in the package amd-quark, which need
not be able to run. Without them the C program is built on the few declarations that lie beside it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models as b
import numpy as np
import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_ops import cpu, ort

SAMPLE = Path(__file__).parents[2] / "samples/11_c_and_cpp"
MINIMAL = SAMPLE / "minimal"
X = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)

pytestmark = [
    pytest.mark.usefixtures("own_folder"),
    pytest.mark.skipif(sys.platform != "linux", reason="links as Linux does"),
    pytest.mark.skipif(shutil.which("cc") is None or shutil.which("c++") is None, reason="needs cc and c++"),
]


def published() -> Path:
    """Returns the folder with the headers of a release; skips the test if there is none."""
    if "ONNXRUNTIME_INCLUDE" in os.environ:
        return Path(os.environ["ONNXRUNTIME_INCLUDE"])
    try:
        files = importlib.metadata.files("amd-quark") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "onnxruntime_cxx_api.h":
            return Path(str(file.locate())).parent
    return pytest.skip("no headers of ONNX Runtime: set ONNXRUNTIME_INCLUDE, or pip install --no-deps amd-quark")


def build(compiler: str, source: str, include: Path, *flags: str) -> str:
    capi = Path(onnxruntime.__path__[0]) / "capi"
    Path("libonnxruntime.so.1").symlink_to(next(capi.glob("libonnxruntime.so.*")))
    subprocess.run(
        [compiler, *flags, f"-I{include}", SAMPLE / source, "libonnxruntime.so.1", f"-Wl,-rpath,{Path.cwd()}", "-orun"],
        check=True,
    )
    return "./run"


def run(program: str, model: str | Path, library: str | Path) -> subprocess.CompletedProcess[bytes]:
    arguments = [program, model, library, *map(str, X.shape)]
    return subprocess.run(arguments, input=X.tobytes(), capture_output=True, check=False)


@pytest.fixture
def model(own_folder: None) -> str:
    mxfp8_graph.rewrite(b.save(b.matmul_model(), Path("m.onnx")))
    return "m.mxfp8.onnx"


STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror")


@pytest.mark.parametrize(
    ("compiler", "source", "include", "flags"),
    [
        ("cc", "run.c", lambda: MINIMAL, STRICT),
        ("cc", "run.c", published, ()),
        ("c++", "run.cpp", published, ("-std=c++17",)),
        # Triton's backend calls RegisterCustomOpsLibrary with `op_library_filename`, then CreateSession with the path.
        ("cc", "run.c", lambda: MINIMAL, (*STRICT, "-DOLD_CALL")),
    ],
    ids=["C, the declarations beside it", "C, the published header", "C++, the published header", "Triton's call"],
)
def test_a_program_computes_what_a_session_in_python_does(model, compiler, source, include, flags) -> None:
    done = run(build(compiler, source, include(), *flags), model, cpu.library_path())
    assert done.returncode == 0, done.stderr
    expected = ort.session(model).run(None, {"x": X})[0]
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32).reshape(expected.shape), expected)


def test_a_program_says_which_library_is_missing(model: str) -> None:
    done = run(build("cc", "run.c", MINIMAL), model, "none.so")
    assert (done.returncode, b"none.so" in done.stderr) == (1, True), done.stderr


def test_the_declarations_are_those_of_the_published_header() -> None:
    """Every function stands where the release has it; that run.c builds on both shows what they take."""
    ours = re.sub(r"/\*.*?\*/", "", (MINIMAL / "onnxruntime_c_api.h").read_text(), flags=re.DOTALL)
    names = re.findall(r"\(\*(\w+)\)\(", ours.split("typedef struct OrtApi {")[1].split("} OrtApi;")[0])
    places = "\n".join(f"M({name})" for name in names)
    source = f"""
#include <onnxruntime_c_api.h>
#include <stdio.h>
#define M(name) printf(#name " %zu\\n", offsetof(struct OrtApi, name) / sizeof(void*));
int main(void) {{ {places} return 0; }}
"""
    Path("places.c").write_text("#include <stddef.h>\n" + source)
    found = []
    for include in (MINIMAL, published()):
        subprocess.run(["cc", f"-I{include}", "places.c", "-o", "places"], check=True)
        found.append(subprocess.run(["./places"], capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1]
    assert found[0].count("\n") == len(names) >= 23
