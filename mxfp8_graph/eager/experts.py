"""Stacks of experts: parameters with three axes in modules of transformers.

The parameter becomes a module `Stack` of the same name. The code of the model passes it to torch like a tensor, and
`__torch_function__` calls our ops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mxfp8_graph.eager.modules import CODES, VALUES, not_default
from mxfp8_graph.policy.eligibility import k_last
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.torch_pass import record

_NAMES: Final = ("gate_up_proj", "up_proj", "down_proj")
_PRODUCTS: Final = ("linear", "bmm", "matmul")
_GROUPED: Final = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "transformers.grouped_mm_fallback")


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields (path, module, name of the parameter) of the stacks [E, ...] that are not packed yet."""
    for path, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):
            for name in _NAMES:
                if (weight := module._parameters.get(name)) is not None and weight.dim() == 3:
                    yield path, module, name


class Operand:
    """Packed weights [..., N, K] in place of a tensor [..., N, K], or [..., K, N] if `transposed`."""

    stack: Stack
    codes: Sequence[Tensor]
    transposed: bool
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.codes[0].device

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        shape = self.codes[0].shape
        return torch.Size(k_last(shape)) if self.transposed else shape

    def size(self, axis: int) -> int:
        """Returns the size of an axis."""
        return self.shape[axis]

    def transpose(self, one: int, two: int) -> Any:
        """Returns the tensor with two axes swapped; it stays packed if they are N and K."""
        rank = self.codes[0].dim()
        if {one % rank, two % rank} != {rank - 2, rank - 1}:
            return self.values().transpose(one, two)
        return _View(self.stack, self.codes, not self.transposed)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return self.values()[index]
        return _View(self.stack, [code[index] for code in self.codes], self.transposed)

    def values(self) -> Tensor:
        """Returns the tensor, dequantized."""
        dtype = not_default(self.dtype)
        values: Tensor = torch.ops.mxfp8.dequantize(*self.codes, -1, self.stack.decision.weight_format, dtype)
        return values.mT if self.transposed else values

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Calls our op for a product along K, and `func` with the dequantized values for all else."""
        name, options = getattr(func, "__name__", ""), kwargs or {}
        operands: list[Any] = [*args, None, None]
        first, second, *rest = operands
        if isinstance(second, Operand):
            product, is_linear = partial(second.stack.product, first, second.codes), name == "linear"
            if name in _PRODUCTS and second.transposed is not is_linear:
                return product()
            if name in _GROUPED and second.transposed:
                return product(options.get("offs", rest[0]))
        elif isinstance(first, Operand) and name in _PRODUCTS and not first.transposed:
            return first.stack.product(second.mT, first.codes).mT
        args, options = pytree.tree_map(lambda x: x.values() if isinstance(x, Operand) else x, (tuple(args), options))
        return func(*args, **options)


class _View(Operand):
    """Some of the weights of a stack, or their transposes."""

    def __init__(self, stack: Stack, codes: Sequence[Tensor], transposed: bool) -> None:
        self.stack, self.codes, self.transposed, self.dtype = stack, codes, transposed, stack.dtype


class Stack(Operand, nn.Module):
    """Packed weights [E, N, K] of experts."""

    weight_mxfp8: Tensor
    weight_mxfp8_scales: Tensor

    def __init__(
        self, codes: Sequence[Tensor], decision: Decision, recipe: Recipe, like: tuple[torch.dtype, bool]
    ) -> None:
        super().__init__()
        for name, code in zip(CODES, codes, strict=True):
            self.register_buffer(name, code)
        self.decision, self.recipe = decision, recipe
        self.dtype, self.transposed = like

    @property
    def stack(self) -> Stack:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def codes(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Elements and scales."""
        return self.weight_mxfp8, self.weight_mxfp8_scales

    def product(self, x: Tensor, codes: Sequence[Tensor], offs: Tensor | None = None) -> Tensor:
        """Returns x [..., K] times these weights, transposed: of all experts, of some, or of groups of rows."""
        ops, decision = torch.ops.mxfp8, self.decision
        formats = decision.activations, decision.weight_format
        y: Tensor
        with record.traced(self.recipe) if torch.compiler.is_exporting() else nullcontext():
            if decision.activations in VALUES:
                rounded = VALUES[decision.activations]
                if offs is None:
                    return ops.weight_gemm(x, *codes, None, formats[1], None, rounded)  # type: ignore[no-any-return]
                y = ops.grouped_gemm(x.to(rounded or x.dtype), None, *codes, offs, "e4m3", formats[1], x.dtype)
                return y
            rows, dtype = ops.quantize(x, -1, formats[0], decision.scale_rounding), not_default(x.dtype)
            if offs is None:
                return ops.gemm(*rows, *codes, None, *formats, dtype)  # type: ignore[no-any-return]
            return ops.grouped_gemm(*rows, *codes, offs, *formats, dtype)  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
