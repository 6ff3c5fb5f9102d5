"""Folders for the ONNX backends of optimum and sentence-transformers, which take session options from their caller."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from mxfp8_graph.tools.hosts.layout import MODEL, Description, Layout, Request
from mxfp8_ops.errors import ContractError


def optimum(request: Request) -> Layout:
    """Returns what `ORTModelForX.from_pretrained(folder, session_options=options)` loads.

    Raises:
        ContractError: there is no config.json.
    """
    described = Description(request.config, request.name, "config.json", "the model's config.json and tokenizer")
    return Layout(MODEL, None, described.files())


def sentence_transformers(request: Request) -> Layout:
    """Returns what `SentenceTransformer(folder, backend="onnx", model_kwargs={"session_options": options})` loads.

    The first module is the transformer, whose model is looked for below its path: "", or "0_Transformer" in folders of
    early versions. What else lies there describes it; other modules are small, and go along whole. The folder of a
    Normalize module may be missing: most often it has no files, and git, pip and the Hugging Face hub carry no empty
    folder. sentence-transformers loads the module without it.

    Raises:
        ContractError: there is no modules.json, or it names a folder that is not there.
    """
    described = Description(request.config, request.name, "modules.json", "a sentence-transformers model")
    modules = described.json("modules.json", list) or [None]
    paths = [_path(module, described) for module in modules]
    files = described.files()
    for number, (module, path) in enumerate(zip(modules, paths, strict=True)):
        if path:
            # The class has moved between packages of sentence-transformers; its name is the same in all of them.
            optional = number > 0 and str(module.get("type")).endswith(".Normalize")
            files |= described.files(path, every=number > 0, optional=optional)
    return Layout(str(PurePosixPath(paths[0], "onnx", MODEL)), None, files)


def _path(module: Any, described: Description) -> str:
    path = module.get("path") if isinstance(module, dict) else None
    if not isinstance(path, str):
        what, expected = "a module without a path", "a list of modules, each with its path"
        raise ContractError(described.path / "modules.json", what, expected=expected, advice="copy the file again")
    return path
