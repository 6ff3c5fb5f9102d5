"""Folders for the ONNX backends of optimum and sentence-transformers, which take session options from their caller."""

from __future__ import annotations

from typing import Any

from mxfp8_graph.hosts.layout import MODEL, Description, Layout, Request
from mxfp8_ops.errors import ContractError


def optimum(request: Request) -> Layout:
    """Returns what `ORTModelForX.from_pretrained(folder, session_options=options)` loads.

    Raises:
        ContractError: there is no config.json.
    """
    described = Description(request, "config.json", "the model's config.json and tokenizer")
    return Layout(MODEL, None, described.files())


def sentence_transformers(request: Request) -> Layout:
    """Returns what `SentenceTransformer(folder, backend="onnx", model_kwargs={"session_options": options})` loads.

    Raises:
        ContractError: there is no modules.json, or it names a folder that is not there.
    """
    described = Description(request, "modules.json", "a sentence-transformers model")
    files = described.files()
    for module in described.json("modules.json", list):
        if path := _path(module, described):
            files |= described.files(path, every=True)
    return Layout(f"onnx/{MODEL}", None, files)


def _path(module: Any, described: Description) -> str:
    path = module.get("path") if isinstance(module, dict) else None
    if not isinstance(path, str):
        what, expected = "a module without a path", "a list of modules, each with its path"
        raise ContractError(described.path / "modules.json", what, expected=expected, advice="copy the file again")
    return path
