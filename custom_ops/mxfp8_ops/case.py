"""What the nodes of one op have in common in a model: its function body is written for that, and for nothing else.

A model has one function for each op, so nodes that differ share one: an attribute of several values is read as the
model runs, and a fact that does not hold for every node is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from mxfp8_ops.formats import BLOCK_SIZE
from mxfp8_ops.node import Op


@dataclass(frozen=True)
class Input:
    """What is known of an input of the nodes of one op; the default is nothing but that it is there."""

    dtype: int = 0
    """An onnx.DataType; 0 if it is unknown."""
    shape: tuple[int | None, ...] | None = None
    """A None in it is an unknown size."""
    whole: bool = False
    """Whether the last axis has whole blocks."""
    constant: bool = False
    """Whether it is an initializer, or a Constant."""
    neutral: bool = False
    """Whether it is a constant that changes nothing, as the contract has one for an input that is not there."""
    present: bool | None = True
    """None: in some of the nodes. An input that is not there may have a stand-in, whose dtype and shape are known."""

    @classmethod
    def of(cls, dtype: int, shape: Iterable[int | None] | None, **facts: bool) -> Input:
        """Returns the facts of a tensor of this dtype and shape."""
        sizes = None if shape is None else tuple(shape)
        last = (sizes[-1] if sizes else None) or 0  # an unknown size is not whole
        return cls(dtype, sizes, last > 0 and last % BLOCK_SIZE == 0, **facts)

    @property
    def rank(self) -> int | None:
        """The number of axes."""
        return None if self.shape is None else len(self.shape)

    @property
    def last(self) -> int | None:
        """Size of the last axis."""
        return self.shape[-1] if self.shape else None

    def __or__(self, other: Input) -> Input:
        """Returns what holds for both."""
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
    """The nodes of one op that a body is for."""

    op: Op
    attributes: Mapping[str, tuple[Any, ...]]
    """The values that each attribute has."""
    inputs: Mapping[str, Input]
    """By port; an optional port that is not there is absent."""
    whole: bool = False
    """Whether what it quantizes has whole blocks."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as `from_json` takes it, for a node that stands alone."""
        inputs = {name: astuple(value) for name, value in self.inputs.items()}
        return {"attributes": {k: v for k, (v,) in self.attributes.items()}, "inputs": inputs, "whole": self.whole}

    @classmethod
    def from_json(cls, op: Op, made: Mapping[str, Any]) -> Case:
        """Returns the case that `to_json` wrote.

        Raises:
            ValueError, TypeError, LookupError: it is not one of `op`.
        """
        same = {name: type(value) for name, value in made["attributes"].items()}
        if same != {name: type(default) for name, default in op.attributes.items()}:
            raise ValueError("other attributes")
        values = {p.name: Input(*made["inputs"][p.name]) for p in op.inputs}
        shaped = {name: replace(v, shape=None if v.shape is None else tuple(v.shape)) for name, v in values.items()}
        return cls(op, {k: (v,) for k, v in made["attributes"].items()}, shaped, bool(made["whole"]))

    def __or__(self, other: Case) -> Case:
        """Returns the case of all nodes of both."""
        attributes = {
            name: tuple(dict.fromkeys((*values, *other.attributes[name]))) for name, values in self.attributes.items()
        }
        inputs = {name: value | other.inputs[name] for name, value in self.inputs.items()}
        return Case(self.op, attributes, inputs, self.whole and other.whole)


def merged(cases: Iterable[Case]) -> dict[str, Case]:
    """Returns one case for each op, by its name."""
    result: dict[str, Case] = {}
    for case in cases:
        name = case.op.name
        result[name] = result[name] | case if name in result else case
    return result
