"""Decides who is to blame for an unexpected exception: the model, if onnx.checker refuses it, else mxfp8-graph.

A complaint of onnx.checker alone refuses nothing: ONNX Runtime runs models that the checker refuses.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import onnx

from mxfp8_graph.onnx_pass.protos import iter_graphs
from mxfp8_graph.onnx_pass.single_file import skeleton
from mxfp8_ops.errors import ContractError, Mxfp8Error

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_EMPTY: Final = onnx.TensorProto(name="tensor", data_type=onnx.TensorProto.FLOAT, dims=[0], raw_data=b"")


def blame_models_if_checker_complains(
    *parameters: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a function that reads models: an unexpected exception becomes onnx.checker's complaint about one.

    Without a complaint the exception is a defect of ours, and stays. `parameters` are the names of the function's
    parameters that may be ONNX models.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except (Mxfp8Error, OSError, MemoryError, Warning):
                raise
            except Exception as error:
                values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
                for model in (values.get(name) for name in parameters):
                    if said := complaint(model):
                        where = str(model) if isinstance(model, (str, Path)) else "model"
                        expected, advice = "a model that passes onnx.checker", "export the model again"
                        raise ContractError(where, said, expected=expected, advice=advice) from error
                raise

        return call

    return decorate


def complaint(model: Any) -> str:
    """Returns the complaint of onnx.checker about an ONNX model; "" if it has none, or if `model` is none.

    It raises nothing but MemoryError.
    """
    try:
        proto = onnx.ModelProto()
        if isinstance(model, onnx.ModelProto):
            proto.CopyFrom(model)
        elif isinstance(model, (str, Path)) and Path(model).suffix != ".pt2":
            proto.ParseFromString(skeleton(Path(model)))
        else:
            return ""
        content = _without_data(proto).SerializeToString()
    except MemoryError:
        raise
    except Exception:  # it cannot be read, which `load` says
        return ""
    try:
        onnx.checker.check_model(content)
    except MemoryError:
        raise
    except Exception as error:  # exceptions from onnx's C++ have no common base
        said, _, context = " ".join(str(error).split()).partition(" ==> Context: ")
        # The checker names the node at the end, in a long context; here a message begins with it.
        node = re.match(r"Bad node spec for node\. Name: (.*?) OpType: (\S+)", context)
        return f"node {node[1]!r} ({node[2]}): {said.rstrip('.')}" if node else said.rstrip(".") or type(error).__name__
    return ""


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Empties initializers and external tensors: the checker refuses a proto in memory whose data is in files."""
    parts: list[Any] = [proto.graph, *proto.functions]  # a function has nodes like a graph
    for graph in (each for part in parts for each in iter_graphs(part)):
        values = (attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t"))
        external = (tensor for tensor in values if tensor.data_location == onnx.TensorProto.EXTERNAL)
        for tensor in (*getattr(graph, "initializer", ()), *external):
            name = tensor.name
            tensor.CopyFrom(_EMPTY)
            tensor.name = name
    return proto
