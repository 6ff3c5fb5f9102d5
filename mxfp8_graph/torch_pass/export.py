"""Exports a module, for users who have no program yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from mxfp8_graph.naming import first_line
from mxfp8_ops.errors import ContractError


def exported(
    module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Returns the program that torch exports from a module.

    Args:
        module: the module, in training or evaluation mode.
        inputs: sample arguments, as a sequence by position or a mapping by name.
        dynamic_shapes: the sizes that may vary, as in torch.export.export.

    Raises:
        ContractError: `inputs` is neither a sequence nor a mapping, or torch cannot export the module with it.
    """
    args: tuple[Any, ...] = ()
    if isinstance(inputs, (list, tuple)):
        args = tuple(inputs)
    elif not isinstance(inputs, Mapping):
        what, expected = f"example_inputs is a {type(inputs).__name__}", "a tuple of arguments, or a mapping by name"
        raise ContractError("rewrite", what, expected=expected, advice="pass (x,)")
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else None
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch raises many classes, and passes on the errors of the module
        what = f"torch.export refuses it: {type(error).__name__}: {first_line(error)}"
        advice = "see what torch says of torch.export.export(module, inputs)"
        raise ContractError(type(module).__name__, what, expected="a module it can export", advice=advice) from error
