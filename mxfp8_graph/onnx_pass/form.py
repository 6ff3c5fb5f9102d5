"""A product as its node states it: what every reader of an op returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_graphsurgeon as gs


@dataclass(frozen=True, kw_only=True)
class View:
    """What happens to an operand before it is multiplied: its axes are permuted, then it is reshaped."""

    perm: tuple[int, ...] | None = None
    """Permutation of all axes; None if they stay."""
    shape: tuple[int, ...] | None = None
    """As Reshape takes it: 0 leaves a dimension as it is. None if it stays."""

    def of(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns what a tensor of that shape has after this."""
        if self.perm is not None:
            shape = tuple(shape[axis] for axis in self.perm)
        if self.shape is not None:
            shape = tuple(size or shape[axis] for axis, size in enumerate(self.shape))
        return shape


AS_IS = View()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A node behind a product. It takes every result of the step before, and then `inputs`."""

    op: str
    inputs: tuple[str | onnx.TensorProto | tuple[str, float], ...] = ()
    """Names, constants, or (name, factor): a tensor times a number."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1


@dataclass(frozen=True, kw_only=True)
class Form:
    """One matmul as its node states it: alpha * a @ b + beta * c, and then the steps `after`."""

    a: gs.Tensor
    b: gs.Tensor
    a_view: View = AS_IS
    b_view: View = AS_IS
    a_transposed: bool = False
    """`a`, so viewed, is [..., K, M] instead of [..., M, K]."""
    b_transposed: bool = True
    """`b`, so viewed, is [..., K, N] instead of [..., N, K]."""
    c: gs.Tensor | None = None
    """What the op itself adds."""
    alpha: float = 1.0
    beta: float = 1.0
    rank: int | None = None
    """Rank of both operands, where the op allows only one."""
    absorbs_add: bool = True
    """A bias in an Add after the op may become part of it."""
    after: tuple[Step, ...] = ()
    """What the op does with the sum."""
    blocker: str | None = None
    """Why the op is no matmul that can be rewritten, or None."""
