"""What tells a model and its samples from others: digests of all that they hold."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import onnx

from mxfp8_graph.checking.runner import is_program
from mxfp8_graph.checking.samples import Samples
from mxfp8_graph.file_reading import open_regular
from mxfp8_graph.onnx_model.open import open_model
from mxfp8_graph.onnx_model.tensor_data import is_external, location
from mxfp8_graph.onnx_model.walk import iter_tensors
from mxfp8_graph.tools.metrics import Metric


def of_model(model: Any) -> str:
    """Returns the digest of a model: of its files, or of what it holds in memory."""
    digest = hashlib.sha256()
    if isinstance(model, (str, Path)):
        _add_file(digest, Path(model))
        for path in [] if is_program(model) else _external(Path(model)):
            _add_file(digest, path)
    elif is_program(model):
        from mxfp8_graph.torch_program.values import to_numpy

        digest.update(model.graph_module.code.encode())
        for name, tensor in sorted({**model.state_dict, **model.constants}.items()):
            digest.update(name.encode())
            if hasattr(tensor, "detach"):
                digest.update(to_numpy(tensor.detach().contiguous()).tobytes())
    else:
        digest.update(model.SerializeToString(deterministic=True))
    return digest.hexdigest()


def of_samples(samples: Samples) -> str:
    """Returns the digest of what is in the samples, in their order."""
    digest = hashlib.sha256()
    for feeds in samples.feeds:
        for name, array in sorted(feeds.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def of_metric(metric: Metric) -> str:
    """Returns the name of a metric; of a user's own with the digest of the file that defines it."""
    file = getattr(sys.modules.get(metric.name.partition(":")[0]), "__file__", None)
    if ":" not in metric.name or file is None:
        return metric.name
    digest = hashlib.sha256()
    _add_file(digest, Path(file))
    return f"{metric.name} {digest.hexdigest()[:16]}"


def _external(model: Path) -> list[Path]:
    """Returns the files with the external data of a model."""
    opened = open_model(model)
    tensors: list[onnx.TensorProto] = [*opened.tensors.values(), *iter_tensors(opened.proto)]
    names = sorted({location(tensor) for tensor in tensors if is_external(tensor)})
    assert opened.folder is not None, "it has a path"
    return [opened.folder.locate(name, opened.name) for name in names]


def _add_file(digest: Any, path: Path) -> None:
    with open_regular(path) as file:
        while piece := file.read(2**20):
            digest.update(piece)
