"""Rewrites whose reports are checked: they have every byte of model and result, and those of a dry run too."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from mxfp8_graph.onnx_model.tensor_data import byte_length
from mxfp8_graph.onnx_model.walk import iter_tensors
from mxfp8_graph.report.data import RewriteReport
from mxfp8_ops import contract

_LISTS = {"value_float": 4, "value_floats": 4, "value_int": 8, "value_ints": 8}


def checked(rewrite: Callable[..., Any], count: Callable[[Any], int]) -> Callable[..., Any]:
    """Returns `rewrite` with a check of its report."""

    def rewriting(model: Any, recipe: Any, options: Any) -> Any:
        before = count_or_none(count, model)
        result, report = rewrite(model, recipe, options)
        if not report.already_rewritten and before is not None:
            check(report, before, None if result is None else count(result))
            if options.output is None and not options.dry_run:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _, planned = rewrite(model, recipe, replace(options, dry_run=True))
                assert planned.account.to_dict() == report.account.to_dict()
        return result, report

    return rewriting


def check(report: RewriteReport, before: int, after: int | None) -> None:
    account = report.account
    assert account.bytes_before == before
    assert after is None or account.bytes_after == after
    rows = [tensor.to_dict() for tensor in account.tensors]
    assert len({row["name"] for row in rows}) == len(rows)
    assert sum(group.bytes_after for group in account.groups) == account.bytes_after


def count_or_none(count: Callable[[Any], int], model: Any) -> int | None:
    """Returns the bytes of a model, or None if it cannot be read: then the rewrite says what is wrong."""
    if isinstance(model, (str, Path)) and not os.path.isfile(model):
        return None
    try:
        return count(model)
    except Exception:
        return None


def onnx_bytes(model: Any) -> int:
    """Returns the bytes of all tensors in a model, but for those in the function bodies of our own nodes."""
    proto = onnx.ModelProto()
    proto.CopyFrom(onnx.load(model, load_external_data=False) if isinstance(model, (str, Path)) else model)
    for index in reversed(range(len(proto.functions))):
        if proto.functions[index].domain == contract.DOMAIN:
            del proto.functions[index]
    strings = onnx.TensorProto.STRING
    total = sum(sum(map(len, t.string_data)) if t.data_type == strings else byte_length(t) for t in iter_tensors(proto))
    return total + sum(list_bytes(nodes) for nodes in all_nodes(proto))


def all_nodes(proto: onnx.ModelProto) -> list[list[onnx.NodeProto]]:
    found = [proto.graph.node, *(function.node for function in proto.functions)]
    for nodes in found:
        for attribute in (a for node in nodes for a in node.attribute):
            found += [g.node for g in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs)]
    return found


def list_bytes(nodes: Any) -> int:
    """Returns the bytes of the constants that are numbers or lists of numbers in attributes."""
    attributes = [a for n in nodes if n.op_type == "Constant" for a in n.attribute if a.name in _LISTS]
    return sum(_LISTS[a.name] * (len(a.floats) + len(a.ints) if a.name.endswith("s") else 1) for a in attributes)


def program_bytes(program: Any) -> int:
    """Returns the bytes of the storages of a program."""
    import torch

    from mxfp8_graph.torch_pass import torchao_weights
    from mxfp8_graph.torch_program.files import load

    if isinstance(program, Path):
        program = load(program)
    sizes = {}
    for tensor in (*program.state_dict.values(), *program.constants.values()):
        if torchao_weights.is_mx(tensor):
            sizes[id(tensor)] = tensor.qdata.nbytes + tensor.scale.nbytes
        elif isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
