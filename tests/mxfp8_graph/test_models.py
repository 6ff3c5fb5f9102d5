"""The kinds of models at each public function: each is accepted, or an error that names the kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
import pytest
from models import chain_model, save

import mxfp8_graph
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.running.runner import run_model
from mxfp8_ops.errors import ContractError

torch = pytest.importorskip("torch")
NO_MODELS = (None, 3, b"bytes", gs.Node("Neg"), onnx.NodeProto())
KINDS = [kind for kind in Kind if kind is not Kind.UNKNOWN]


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_model(models: dict[Kind, Any], kind: Kind) -> None:
    assert kind_of(models[kind]) is kind


@pytest.mark.parametrize("path", ["no/such.onnx", "no/such.pb", "no/suffix", "no/such.pt2"])
def test_the_kind_of_a_path_needs_no_file(path: str) -> None:
    expected = Kind.PROGRAM_FILE if path.endswith(".pt2") else Kind.ONNX_FILE
    assert kind_of(path) is kind_of(Path(path)) is expected


FUNCTIONS: dict[str, tuple[Callable[[Any, Path], Any], set[Kind]]] = {
    "rewrite": (lambda model, _: mxfp8_graph.rewrite(model), set()),
    "unpack": (lambda model, _: mxfp8_graph.unpack(model), set()),
    "verify": (lambda model, _: mxfp8_graph.verify(model, model), {Kind.GRAPHSURGEON}),
    "run": (lambda model, _: run_model(model, repeat=1), {Kind.GRAPHSURGEON}),
    "to_onnx": (
        lambda model, folder: mxfp8_graph.to_onnx(model, folder / "out.onnx"),
        {Kind.ONNX_FILE, Kind.ONNX_MODEL, Kind.GRAPHSURGEON},
    ),
}
"""Public function -> the call, and the kinds that it does not accept."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_accepts_a_kind_or_gives_an_error(
    models: dict[Kind, Any], name: str, kind: Kind, tmp_path: Path
) -> None:
    call, refused = FUNCTIONS[name]
    if kind in refused:
        with pytest.raises(ContractError, match=r"expected .*; "):
            call(models[kind], tmp_path)
    else:
        assert call(models[kind], tmp_path)


@pytest.mark.parametrize("thing", NO_MODELS, ids=lambda thing: type(thing).__name__)
def test_another_object_is_an_error_of_each_function(thing: Any, tmp_path: Path) -> None:
    assert kind_of(thing) is Kind.UNKNOWN
    for call, _ in FUNCTIONS.values():
        with pytest.raises(ContractError, match=rf"a {type(thing).__name__}; expected .*; "):
            call(thing, tmp_path)


def test_a_graphsurgeon_graph_is_to_be_exported_before_it_is_verified(models: dict[Kind, Any]) -> None:
    graph, proto = models[Kind.GRAPHSURGEON], models[Kind.ONNX_MODEL]
    for pair in ((graph, proto), (proto, graph), (models[Kind.PROGRAM], graph)):
        with pytest.raises(ContractError, match=r"^model: a Graph; .*; onnx_graphsurgeon\.export_onnx it first$"):
            mxfp8_graph.verify(*pair)
