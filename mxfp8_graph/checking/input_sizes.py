"""Sizes of the dimensions of synthesised inputs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Final

from mxfp8_ops.errors import Option, ShapeError

Dim = int | str | None

BATCH: Final = 2
SEQUENCE: Final = 16
PAST: Final = 8
# The input size of most image models.
IMAGE: Final = 224
CHANNELS: Final = 3

_BY_NAME: Final = (
    (re.compile(r"past|cache", re.IGNORECASE), PAST),
    (re.compile(r"batch|^(b|n|bs)$", re.IGNORECASE), BATCH),
    (re.compile(r"height|width|image", re.IGNORECASE), IMAGE),
    (re.compile(r"channel", re.IGNORECASE), CHANNELS),
    (re.compile(r"seq|len|token|time|frame", re.IGNORECASE), SEQUENCE),
)


class Sizes:
    """Sizes of all inputs, one size per dim_param throughout.

    The first rule that applies decides:
    1. A fixed dimension has its size.
    2. `overrides`, by input and axis ("input_ids.1") or by dim_param ("batch").
    3. A dim_param that is a sum or product of others ("past_sequence_length + sequence_length") has their value.
    4. The total length ("total" in its name, or an attention mask's last dimension in a model with a KV cache) is
       past + sequence.
    5. By its name: past or cache 8, batch 2, height, width or image 224, channels 3, sequence, length, tokens, time or
       frames 16.
    6. The first axis 2, axis 2 of a past key or value 8, any other 16.

    Raises:
        ShapeError: an override names a dimension that no input has, or is negative.
    """

    def __init__(self, inputs: Mapping[str, tuple[Dim, ...]], overrides: Mapping[str, int], where: str) -> None:
        self._inputs = inputs
        self._overrides = overrides
        self._memo: dict[str, int] = {}
        self._refuse_unknown(where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of input `name`."""
        return tuple(self._size(name, axis, dim) for axis, dim in enumerate(self._inputs[name]))

    @property
    def past(self) -> int:
        """Length of the KV cache, 0 for a model without one."""
        for name, dims in self._inputs.items():
            if "past" in name.lower() and len(dims) == 4:
                return self._size(name, 2, dims[2])
        return 0

    @property
    def sequence(self) -> int:
        """Length of the sequence fed in one call."""
        for name, dims in self._inputs.items():
            if ("input_ids" in name or "inputs_embeds" in name) and len(dims) > 1:
                return self._size(name, 1, dims[1])
        return SEQUENCE

    def batches(self) -> list[str]:
        """Returns the dimensions to which rule 5 or 6 gives the size of a batch, by dim_param or as INPUT.AXIS."""
        dimensions = set()
        for name, dims in self._inputs.items():
            for axis, dim in enumerate(dims):
                plain = not isinstance(dim, int) and _expression(dim or "") is None
                if plain and self._default(name, axis, str(dim or "")) == BATCH:
                    dimensions.add(str(dim or f"{name}.{axis}"))
        return sorted(dimensions - self._overrides.keys())

    def option(self, name: str) -> Option:
        """Returns how a user sets the free dimensions of input `name`: shapes={"batch": 2, "input_ids.1": 16}."""
        free = [(axis, dim) for axis, dim in enumerate(self._inputs[name]) if not isinstance(dim, int)]
        symbols = self._symbols()
        sizes = {dim if dim in symbols else f"{name}.{axis}": self._size(name, axis, dim) for axis, dim in free}
        return Option("shapes", sizes)

    def _size(self, name: str, axis: int, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        for key in (f"{name}.{axis}", dim):
            if key is not None and key in self._overrides:
                return self._overrides[key]
        if dim is None:
            return self._default(name, axis, "")
        if dim not in self._memo:
            self._memo[dim] = SEQUENCE  # ends the recursion of a size that is defined through itself
            self._memo[dim] = self._evaluate(name, axis, dim)
        return self._memo[dim]

    def _evaluate(self, name: str, axis: int, dim: str) -> int:
        terms = _expression(dim)
        if terms is None:
            return self._default(name, axis, dim)
        return max(0, _value(terms, lambda symbol: self._size(name, axis, symbol)))

    def _default(self, name: str, axis: int, dim: str) -> int:
        # Decoders take a mask over cache and tokens; exporters give its length a name of its own, which says nothing.
        mask = "attention_mask" in name and axis == len(self._inputs[name]) - 1 and self._has_past()
        # A name that another input has too is the sequence's, and both must have one size.
        shared = any(dim and dim in dims for other, dims in self._inputs.items() if other != name)
        if "total" in dim.lower() or (mask and not shared):
            return self.past + self.sequence
        for pattern, size in _BY_NAME:
            if pattern.search(dim):
                return size
        if "past" in name.lower() and axis == 2:
            return PAST
        return BATCH if axis == 0 else SEQUENCE

    def _has_past(self) -> bool:
        return any("past" in name.lower() for name in self._inputs)

    def _symbols(self) -> set[str]:
        symbols: set[str] = set()
        for dims in self._inputs.values():
            for dim in dims:
                if isinstance(dim, str):
                    terms = _expression(dim)
                    names = [n.id for n in ast.walk(terms) if isinstance(n, ast.Name)] if terms else []
                    symbols.update([dim, *names])
        return symbols

    def _refuse_unknown(self, where: str) -> None:
        free = {f"{n}.{a}" for n, dims in self._inputs.items() for a, d in enumerate(dims) if not isinstance(d, int)}
        for key, size in self._overrides.items():
            if key not in self._symbols() and key not in free:
                choices = ", ".join(sorted(self._symbols()) or sorted(free))
                what = f"no dimension {key!r}" if choices else f"no dimension {key!r}: every dimension is fixed"
                expected = f"one of {choices} (or INPUT.AXIS)" if choices else "no sizes"
                advice: tuple[str | Option, ...] = ("correct the name",) if choices else ("drop ", Option("shapes"))
                raise ShapeError(where, what, expected=expected, advice=advice)
            if size < 0:
                raise ShapeError(where, f"dimension {key} = {size}", expected="0 or more", advice="correct it")


def _expression(dim: str) -> ast.expr | None:
    """Returns the syntax tree of a dim_param such as "past + sequence"; None if it is a plain name."""
    try:
        tree = ast.parse(dim, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    # A dim_param is text of a file that anyone may have made: it is parsed and never evaluated by Python.
    allowed = (ast.BinOp, ast.Name, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Load)
    legal = all(
        isinstance(node, allowed) and (not isinstance(node, ast.Constant) or isinstance(node.value, int))
        for node in ast.walk(tree)
    )
    return tree if legal and isinstance(tree, ast.BinOp) else None


def _value(tree: ast.expr, size: Callable[[str], int]) -> int:
    if isinstance(tree, ast.Name):
        return size(tree.id)
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, size), _value(tree.right, size)
        if isinstance(tree.op, ast.Add):
            return left + right
        if isinstance(tree.op, ast.Sub):
            return left - right
        # A division by 0 becomes one by 1: a size has to come out, and the model itself says whether it fits.
        return left * right if isinstance(tree.op, ast.Mult) else left // max(right, 1)
    return int(tree.value) if isinstance(tree, ast.Constant) and isinstance(tree.value, int) else 0
