"""Turns the parameters of a graph into external data in the files of the checkpoint, without reading it.

A tensor in a safetensors file has an offset and a length, as external data in ONNX. So tensors in high precision are
copied from file to file, unchanged, and the pass fills MXFP8 weights with their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir
from torch.nn import Module

from mxfp8_graph.onnx_pass.graph import attribute, is_op
from mxfp8_graph.packed.checkpoint import Checkpoint, listed
from mxfp8_graph.packed.safetensors import DTYPES, Stored
from mxfp8_ops.errors import ContractError

_FLOATS: Final = ("F32", "F16", "BF16", "F64")
"""Dtypes of parameters, by their names in safetensors."""


def bind_parameters(model: ir.Model, checkpoint: Checkpoint, inputs: Sequence[str], names: Mapping[str, str]) -> None:
    """Turns the parameters among a model's inputs into initializers from the checkpoint, in place.

    `inputs` are the names of the other inputs; `names` is the result of `names_of`.
    """
    graph = model.graph
    # Parameters were inputs for the export only; from here on they are initializers.
    parameters = [value for value in graph.inputs if value.name not in inputs]
    graph.inputs[:] = [value for value in graph.inputs if value.name in inputs]
    for value in parameters:
        value.name = name = names[str(value.name)]
        stored = checkpoint.others.get(name)
        if stored is None:
            value.const_value = _without_data(name, value, checkpoint)
        else:
            value.const_value = tensor = _external(name, stored)
            # The bytes of the file stay as they are, so nodes that compute in another dtype need a cast.
            if tensor.dtype != value.dtype:
                _cast(graph, value, tensor.dtype)
        graph.register_initializer(value)
        value.type = value.shape = None  # else the saved model declares each initializer's type twice
        value.metadata_props.clear()  # the exporter's notes describe an input
    model.meta["name"] = str(checkpoint.path)


def names_of(blank: Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the name in the checkpoint of each tensor of a module, which may be the name of a tied tensor.

    Raises:
        ContractError: the checkpoint lacks tensors, or has them in another shape, or not as floats; it lists them all.
    """
    # Checkpoints of a model with and without a head differ in a prefix of their names.
    prefix = f"{blank.base_model_prefix}." if getattr(blank, "base_model_prefix", "") else ""
    state = blank.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    names, problems = dict[str, str](), []
    for parameter, tensor in state.items():
        aliases = (parameter, *tied[id(tensor)])
        spellings = (name for alias in aliases for name in (alias, f"{prefix}{alias}", alias.removeprefix(prefix)))
        name = next((each for each in spellings if each in checkpoint.weights or each in checkpoint.others), "")
        stored = checkpoint.others.get(name) or checkpoint.weights.get(name)
        if stored is None:
            problems.append(f"no {parameter!r} {list(tensor.shape)}")
        elif stored.shape != tuple(tensor.shape):
            problems.append(f"{name!r} is {list(stored.shape)}, not {list(tensor.shape)}")
        elif isinstance(stored, Stored) and stored.dtype not in _FLOATS:
            problems.append(f"{name!r} is {stored.dtype}, not one of {', '.join(_FLOATS)}")
        names[parameter] = name
    if problems:
        expected = "a value for each parameter that its config.json asks for"
        raise ContractError(checkpoint.path, listed(problems), expected=expected, advice="check that it is complete")
    return names


def _external(name: str, stored: Stored) -> ir.ExternalTensor:
    """Returns a tensor whose data is in a file of the checkpoint."""
    dtype = ir.DataType.from_numpy(DTYPES[stored.dtype])
    path = stored.path.resolve()  # in the Hugging Face hub's cache it is a link to a file outside of the folder
    place = path.name, stored.offset, stored.byte_size
    return ir.ExternalTensor(*place, dtype, shape=ir.Shape(stored.shape), name=name, base_dir=str(path.parent))


def _without_data(name: str, value: ir.Value, checkpoint: Checkpoint) -> ir.ExternalTensor:
    """Returns a tensor without data for an MXFP8 weight; the pass takes the packed bytes and never reads it."""
    assert value.shape is not None  # the exporter gives it
    assert value.dtype is not None
    folder = str(checkpoint.path)
    return ir.ExternalTensor(name, None, None, value.dtype, shape=value.shape, name=name, base_dir=folder)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> None:
    """Sets the dtype of a parameter to `dtype`, and casts it to the dtype that the graph computes in.

    Rows of a table are cast after the Gather: a cast of the table would convert all of it in every run.
    """
    computed, value.dtype = value.dtype, dtype
    assert computed is not None  # the exporter gives it
    others = []
    for use in value.uses():
        if use.idx or not is_op(use.node, "Gather") or attribute(use.node, "axis", 0) != 0:
            others.append(use)
            continue
        # The cast takes over the name of the rows, which users and graph outputs refer to.
        rows, owner = use.node.outputs[0], use.node.graph
        assert owner is not None  # it is a node of the model
        result = ir.Value(name=rows.name, type=rows.type, shape=rows.shape)
        rows.replace_all_uses_with(result, replace_graph_outputs=True)
        rows.name, rows.type = f"{result.name}_stored", ir.TensorType(dtype)
        cast = ir.node("Cast", [rows], {"to": computed}, outputs=[result], name=f"{result.name}_cast")
        owner.insert_after(use.node, cast)
    if others:
        result = ir.Value(name=f"{value.name}_{computed.numpy().name}")
        graph.insert_before(
            graph[0], ir.node("Cast", [value], {"to": computed}, outputs=[result], name=f"{result.name}_cast")
        )
        for use in others:
            use.node.replace_input_with(use.idx, result)
