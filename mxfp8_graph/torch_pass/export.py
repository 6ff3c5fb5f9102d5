"""Exports a module, for users who have no program yet, and gives the rewritten program back as a module.

The batch stays dynamic: axis 0 of each tensor, where torch.export can. An example of one row counts, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree

from mxfp8_graph.naming import first_line
from mxfp8_graph.torch_pass import internals
from mxfp8_ops.errors import ContractError

FIXED: Final = "the batch is fixed at the size of example_inputs: torch.export cannot keep it dynamic in this module"


if TYPE_CHECKING:

    class RewrittenModule(torch.nn.Module):
        """The module of a rewritten program: it is called as the original module."""

        program: ExportedProgram
        """The exported program, for `save` and `to_onnx`. It shares its parameters with the module."""


def exported(
    module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any], dynamic_shapes: Any
) -> tuple[ExportedProgram, list[str]]:
    """Returns (the program that torch exports from a module, notes).

    Args:
        module: the module, in training or evaluation mode.
        inputs: sample arguments, as a sequence by position or a mapping by name.
        dynamic_shapes: the sizes that may vary, as in torch.export.export. None keeps the batch dynamic.

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
    batched = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
    if dynamic_shapes is None and batched:
        try:
            program = _with_dynamic_batch(module, args, kwargs, batched)
        except Exception:  # the export below has the error of a module that torch cannot export at all
            program = None
        if program is not None and program.range_constraints:  # else the module has fixed every size
            return program, []
    try:
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch raises many classes, and passes on the errors of the module
        what = f"torch.export refuses it: {type(error).__name__}: {first_line(error)}"
        advice = "see what torch says of torch.export.export(module, inputs)"
        raise ContractError(type(module).__name__, what, expected="a module it can export", advice=advice) from error
    return program, [FIXED] if dynamic_shapes is None and batched else []


def _with_dynamic_batch(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, batched: Sequence[torch.Tensor]
) -> ExportedProgram:
    """Returns the program with axis 0 of these tensors dynamic where the module allows it."""
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for x in batched:
        shapes[x] = {0: Dim.AUTO}
    with internals.sizes_of_one_vary(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if the module fixes a size; our note says so, too
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


def as_module(program: ExportedProgram) -> RewrittenModule:
    """Returns a program of `exported` as a module that is called as the original, with the program in `.program`.

    What the program holds in high precision is copied first: `half()` of the result must not convert the original.
    """
    copies: dict[int, torch.Tensor] = {}
    for tensors in (program.state_dict, program.constants):
        for name, x in tensors.items():
            if isinstance(x, torch.Tensor):
                tensors[name] = copies.setdefault(id(x), _copy(x))
    module = program.module()
    module.program = program  # type: ignore[assignment]
    if not any(x.requires_grad for x in module.parameters()):
        # torch's own refuses, and programs of users call it out of habit.
        module.eval = MethodType(lambda self: self, module)  # type: ignore[method-assign]
    return cast("RewrittenModule", module)


def _copy(x: torch.Tensor) -> torch.Tensor:
    copy = x.detach().clone()
    return torch.nn.Parameter(copy, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copy
