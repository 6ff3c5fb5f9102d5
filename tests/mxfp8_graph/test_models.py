"""What is this model? Each kind at each public entry: it is taken, or refused in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
import pytest
from builders import chain_model, save

import mxfp8_graph
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.running.runner import run_model
from mxfp8_ops.errors import ContractError

UNKNOWN = (None, 3, b"bytes", gs.Node("Neg"), onnx.NodeProto())
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Any]:
    """Returns one model of each kind, all rewritten."""
    folder = tmp_path_factory.mktemp("models")
    proto, _ = mxfp8_graph.rewrite(chain_model())
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    program, _ = mxfp8_graph.rewrite(torch.export.export(module, (torch.zeros(2, 64),)))
    return {
        Kind.ONNX_FILE: save(proto, folder / "m.onnx"),
        Kind.PROGRAM_FILE: mxfp8_graph.save(program, folder / "m.pt2"),
        Kind.ONNX_MODEL: proto,
        Kind.GRAPHSURGEON: mxfp8_graph.rewrite(gs.import_onnx(chain_model()))[0],
        Kind.PROGRAM: program,
    }


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.UNKNOWN])
def test_each_kind_is_told_from_the_others(models: dict[Kind, Any], kind: Kind) -> None:
    assert kind_of(models[kind]) is kind


@pytest.mark.parametrize("thing", UNKNOWN, ids=lambda thing: type(thing).__name__)
def test_what_is_no_model(thing: Any) -> None:
    assert kind_of(thing) is Kind.UNKNOWN


def test_a_path_says_what_it_is_without_being_there() -> None:
    for path in ("no/such.onnx", "no/such.pb", "no/suffix"):
        assert kind_of(path) is kind_of(Path(path)) is Kind.ONNX_FILE
    assert kind_of("no/such.pt2") is kind_of(Path("no/such.pt2")) is Kind.PROGRAM_FILE


def test_asking_imports_nothing() -> None:
    code = (
        "import sys; from mxfp8_graph.models import kind_of\n"
        "for thing in ('m.onnx', 'm.pt2', None, object()): kind_of(thing)\n"
        "print([m for m in ('torch', 'onnx', 'onnx_graphsurgeon', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def to_onnx(model: Any, folder: Path) -> Path:
    return mxfp8_graph.to_onnx(model, folder / "out.onnx")


ENTRIES: dict[str, tuple[Callable[[Any, Path], Any], set[Kind]]] = {
    "rewrite": (lambda model, _: mxfp8_graph.rewrite(model), set()),
    "unpack": (lambda model, _: mxfp8_graph.unpack(model), set()),
    "verify": (lambda model, _: mxfp8_graph.verify(model, model), {Kind.GRAPHSURGEON}),
    "run": (lambda model, _: run_model(model, repeat=1), {Kind.GRAPHSURGEON}),
    "to_onnx": (to_onnx, {Kind.ONNX_FILE, Kind.ONNX_MODEL, Kind.GRAPHSURGEON}),
}
"""Public entry -> the call, and the kinds it refuses besides what is no model."""


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.UNKNOWN])
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_kind_at_each_entry(models: dict[Kind, Any], entry: str, kind: Kind, tmp_path: Path) -> None:
    call, refused = ENTRIES[entry]
    if kind in refused:
        with pytest.raises(ContractError, match=r"expected .*; "):
            call(models[kind], tmp_path)
    else:
        assert call(models[kind], tmp_path)


@pytest.mark.parametrize("thing", UNKNOWN, ids=lambda thing: type(thing).__name__)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_no_model_at_each_entry(entry: str, thing: Any, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=rf"a {type(thing).__name__}; expected .*; "):
        ENTRIES[entry][0](thing, tmp_path)


def test_a_graphsurgeon_graph_is_to_be_exported_before_it_is_verified(models: dict[Kind, Any]) -> None:
    graph = models[Kind.GRAPHSURGEON]
    for pair in ((graph, models[Kind.ONNX_MODEL]), (models[Kind.ONNX_MODEL], graph), (models[Kind.PROGRAM], graph)):
        with pytest.raises(ContractError) as caught:
            mxfp8_graph.verify(*pair)
        assert str(caught.value) == (
            "model: a Graph; expected a path, an onnx.ModelProto or an ExportedProgram; "
            "onnx_graphsurgeon.export_onnx it first"
        )
