"""torch's ONNX exporter, for `to_onnx` and tools, with the results of torch for masked attention.

Where a mask hides all keys from a row, torch gives 0. torch's exporter and ONNX Runtime give other results there:

    opset 18 to 22, boolean mask     the exporter adds the lowest float, not -Inf: the mean of V
    opset 18 to 22, float mask       a softmax over -Inf alone: NaN
    Attention, boolean mask          NaN in ONNX Runtime 1.23, 0 in 1.31
    Attention, float mask            0 in ONNX Runtime 1.31 for a row of the lowest float, as for -Inf; torch adds it to
                                     the scores and gives the mean of V

So attention with a mask becomes single ops at every opset, and its mask sets hidden rows to 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import onnx_ir as ir
import onnxscript
import torch
from onnxscript import opset18, opset23, optimizer
from onnxscript.function_libs.torch_lib.ops import nn
from onnxscript.rewriter import onnx_fusions
from torch.export import ExportedProgram

from mxfp8_graph.naming import first_line
from mxfp8_graph.torch_pass import internals
from mxfp8_ops.errors import ContractError

_OPS: Final[Any] = opset18
"""The standard ops. `Any`, since their stubs are typed for tensors of one dtype."""
_ATTENTION_OPSET: Final = 23
"""The first opset with Attention."""


def export(
    program: ExportedProgram,
    opset: int,
    names: Mapping[str, Any],
    before_optimizing: Callable[[torch.onnx.ONNXProgram], None] = lambda exported: None,
    translations: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> ir.Model:
    """Returns the ONNX model of a program without mxfp8 ops.

    Args:
        program: the program.
        opset: version of the default operator domain.
        names: arguments for torch.onnx.export that give names.
        before_optimizing: called with the result of torch.onnx.export before constants are folded.
        translations: torch op -> the function that builds its ONNX nodes, besides torch's.

    Raises:
        ContractError: torch cannot export it, or onnxscript cannot optimize the result.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    table: dict[Any, Callable[..., Any]] = {attention: _attention(opset), **translations}
    with quiet(), torch.no_grad():
        with _explained(f"torch {torch.__version__} cannot export the program"):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                verbose=False,
                custom_translation_table=table,
                optimize=False,
                **names,
            )
        assert exported is not None  # None is for exports that write a file themselves
        before_optimizing(exported)
        model: ir.Model = exported.model
        with _explained(f"onnxscript {onnxscript.__version__} cannot optimize the exported program"):
            # onnx's reference evaluator fails to fold more than 64 values of GatherElements, and onnxscript reports it.
            optimizer.optimize_ir(model, should_fold=lambda n: False if n.op_type == "GatherElements" else None)
            onnx_fusions.fuse(model)
    if (version := model.opset_imports.get("", 0)) != opset:
        what = f"onnxscript cannot bring the model from opset {version} to {opset}"
        raise ContractError("to_onnx", what, expected="ops that both have", advice="pass another opset")
    return model


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns any exception into a ContractError: errors of translations and of wrong names have no common base class."""
    try:
        yield
    except Exception as error:
        what, advice = f"{what}: {first_line(error.__cause__ or error)}", "replace that op in the model"
        raise ContractError("to_onnx", what, expected="ops that have an ONNX form", advice=advice) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of torch's exporter about other packages and about itself."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with internals.quiet():
            yield
    finally:
        logger.setLevel(level)


def _attention(opset: int) -> Callable[..., Any]:
    """Returns the function that builds the nodes of scaled_dot_product_attention at an opset."""

    def scaled_dot_product_attention(  # noqa: PLR0913, PLR0917 - the signature of the op
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        if attn_mask is None:
            if opset >= _ATTENTION_OPSET and dropout_p == 0:
                # It counts heads by the shapes, so `enable_gqa` needs no attribute.
                return opset23.Attention(query, key, value, scale=scale, is_causal=int(is_causal))[0]
            return nn.aten_scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal, **settings)
        zero, hidden = (_OPS.Constant(value=ir.tensor(number, dtype=query.dtype)) for number in (0.0, -math.inf))
        mask = _OPS.Where(attn_mask, zero, hidden) if attn_mask.dtype == ir.DataType.BOOL else attn_mask
        y = nn.aten_scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **settings)
        # Not by IsNaN(y): a NaN that comes from Q, K or V must stay.
        largest = _OPS.ReduceMax(mask, _OPS.Constant(value_ints=[-1]), keepdims=1)
        return _OPS.Where(_OPS.Equal(largest, hidden), zero, y)

    return scaled_dot_product_attention
