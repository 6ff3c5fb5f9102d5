"""Checks that the tensors of a program have the shapes and dtypes that its graph states."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from mxfp8_ops.errors import ContractError

CHANGED = "undo what changed it, such as module.half(), or export the model in that dtype"
"""Advice for a program that is in memory."""

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def check_stored(program: ExportedProgram, where: object, advice: str = "save it again") -> None:
    """Checks that a program has all its parameters, buffers and constants, in the shapes and dtypes of its graph.

    Raises:
        ContractError: one is; called `where`.
    """
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind not in _STORED:
            continue
        tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
        placeholder = placeholders.get(getattr(spec.arg, "name", ""))
        said = placeholder.meta.get("val") if placeholder is not None else None
        if not isinstance(tensor, torch.Tensor) or not isinstance(said, torch.Tensor):
            raise ContractError(
                where, f"no tensor {spec.target!r}", expected="all tensors that its graph uses", advice=advice
            )
        # torch itself does not compare them.
        if tensor.shape != said.shape or tensor.dtype != said.dtype:
            what = f"tensor {spec.target!r} is {tensor.dtype} {list(tensor.shape)}"
            expected = f"{said.dtype} {list(said.shape)}, as its graph says"
            raise ContractError(where, what, expected=expected, advice=advice)
