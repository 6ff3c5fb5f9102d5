"""The case of an op in a model: the facts that all its nodes share. Its function body is written for this case alone.

A model has one function per op, so nodes that differ share it. The body reads an attribute that has several values when
the model runs, and relies only on facts that hold for every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.node import Op


@dataclass(frozen=True)
class Input:
    """The known facts about one input of the nodes of an op. By default only one is known: the input is present."""

    dtype: int = 0
    """An onnx.DataType; 0 if unknown."""
    shape: tuple[int | None, ...] | None = None
    """The sizes; None is an unknown size."""
    whole: bool = False
    """Whether the size of the last axis is a multiple of 32, so that each block is full."""
    constant: bool = False
    """Whether the input is an initializer or the output of a Constant node."""
    neutral: bool = False
    """Whether the input is a constant that changes nothing; nodes write one in place of some absent inputs."""
    present: bool | None = True
    """Whether the nodes have the input; None if only some have it. An absent input may have a neutral constant in its
    place: then its dtype and shape are known."""

    @classmethod
    def from_shape(cls, dtype: int, shape: Iterable[int | None] | None, **facts: bool) -> Input:
        """Returns the facts that follow from a tensor's dtype and shape, with other `facts` as they are."""
        sizes = None if shape is None else tuple(shape)
        last = (sizes[-1] if sizes else None) or 0  # an unknown size is not whole
        return cls(dtype, sizes, last > 0 and last % BLOCK_SIZE == 0, **facts)

    @property
    def rank(self) -> int | None:
        """The number of axes; None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def last(self) -> int | None:
        """The size of the last axis; None if unknown."""
        return self.shape[-1] if self.shape else None

    def __or__(self, other: Input) -> Input:
        """Returns the facts that hold for both inputs."""
        # An absent input has no dtype or shape to contradict the other's: the facts stay, for the nodes that have it.
        if ABSENT in (self, other):
            there = other if self == ABSENT else self
            return there if self == other else replace(there, present=None)
        shape = None
        if self.shape is not None and other.shape is not None and len(self.shape) == len(other.shape):
            shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        return Input(
            self.dtype if self.dtype == other.dtype else 0,
            shape,
            self.whole and other.whole,
            self.constant and other.constant,
            self.neutral and other.neutral,
            self.present if self.present == other.present else None,
        )


ABSENT: Final = Input(present=False)


@dataclass(frozen=True)
class Case:
    """The facts about the nodes of one op, which its function body is written for."""

    op: Op
    attributes: Mapping[str, tuple[Any, ...]]
    """All values that each attribute has in these nodes."""
    inputs: Mapping[str, Input]
    """The facts of each input by its port name; `ABSENT` if no node has it."""
    whole: bool = False
    """Whether the blocks that the nodes quantize are all full."""

    def to_json(self) -> dict[str, Any]:
        """Returns the case of a single node as JSON data, which `from_json` reads."""
        inputs = {name: astuple(value) for name, value in self.inputs.items()}
        return {"attributes": {k: v for k, (v,) in self.attributes.items()}, "inputs": inputs, "whole": self.whole}

    @classmethod
    def from_json(cls, op: Op, made: Mapping[str, Any]) -> Case:
        """Returns the case that `to_json` wrote.

        Raises:
            ValueError, TypeError, LookupError: the data is not a case of `op`.
        """
        # The data comes from a model file, which other programs may have edited: so names and types are checked.
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in made["attributes"].items()}
        if {name: type(v) for name, v in settings.items()} != {name: type(v) for name, v in op.attributes.items()}:
            raise ValueError("other attributes")
        values = {p.name: Input(*made["inputs"][p.name]) for p in op.inputs}
        shaped = {name: replace(v, shape=None if v.shape is None else tuple(v.shape)) for name, v in values.items()}
        return cls(op, {k: (v,) for k, v in settings.items()}, shaped, bool(made["whole"]))

    def __or__(self, other: Case) -> Case:
        """Returns the case that covers the nodes of both."""
        attributes = {
            name: tuple(dict.fromkeys((*values, *other.attributes[name]))) for name, values in self.attributes.items()
        }
        inputs = {name: value | other.inputs[name] for name, value in self.inputs.items()}
        return Case(self.op, attributes, inputs, self.whole and other.whole)


def merged(cases: Iterable[Case]) -> dict[str, Case]:
    """Returns one case per op, by op name, that covers all its cases."""
    result: dict[str, Case] = {}
    for case in cases:
        name = case.op.name
        result[name] = result[name] | case if name in result else case
    return result
