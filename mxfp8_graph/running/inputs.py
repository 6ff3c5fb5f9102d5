"""Inputs of a model: checked, or synthesised so that the model accepts them.

Synthesised inputs are deterministic. Sizes: see `Sizes`. Values: floats are normal(0, 1); integers that index a table
stay inside it (`index_ranges.py`); position ids count up; masks, booleans and other integers are one; images in uint8
are noise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.graph import Dim, name_of
from mxfp8_graph.running.index_ranges import index_ranges
from mxfp8_ops.errors import Option, ShapeError

Array = npt.NDArray[Any]
Inputs = dict[str, Array]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)

PASS_OTHERS: Final = (
    "correct the inputs, or where they are synthesised, pass ",
    Option("inputs", "FILE.npz"),
    " or ",
    Option("shapes", {"NAME": "SIZE"}),
)
"""Advice for inputs that a model refuses."""


@dataclass(frozen=True)
class InputSpec:
    """One graph input: its name, dtype and dimensions (a number, a dim_param, or None where it has no name)."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[Dim, ...]

    def __str__(self) -> str:
        """Returns the input as a user writes it: input_ids int64 [batch, seq]."""
        return f"{self.name} {self.dtype.name} [{', '.join('?' if d is None else str(d) for d in self.dims)}]"


@dataclass(frozen=True)
class Signature:
    """The inputs of a model."""

    name: str
    """Name of the model in messages: its path."""
    specs: list[InputSpec]
    ranges: Mapping[str, range]
    """The values that integer inputs may take, by name, where they index tables."""
    rewritten: bool = False
    """Whether the model was rewritten."""
    recipe: str | None = None
    """The recipe that rewrote it, as JSON, or None if it is not recorded."""

    @classmethod
    def from_model(cls, model: ir.Model) -> Signature:
        """Returns the inputs of a model, without initializers that are listed as inputs (before IR version 4).

        Raises:
            ShapeError: an input is not a tensor of numbers, or has no shape.
        """
        name = name_of(model)
        specs = [_spec(value, name) for value in model.graph.inputs if not value.is_initializer()]
        return cls(name, specs, index_ranges(model), record.is_rewritten(model), record.recipe_of(model))


def _spec(value: ir.Value, where: str) -> InputSpec:
    if not isinstance(value.type, ir.TensorType) or value.dtype in {None, 0, ir.DataType.STRING} or value.shape is None:
        what = f"input {value.name!r} is no tensor of numbers with a shape"
        advice = "export the model with shapes, or run it from Python, with mxfp8_ops.ort.session"
        raise ShapeError(where, what, expected="one", advice=advice)
    dims = (dim if isinstance(dim, int) else dim.value or None for dim in value.shape)
    # Some exporters write -1 for a size they do not know.
    known = tuple(None if isinstance(dim, int) and dim < 0 else dim for dim in dims)
    return InputSpec(str(value.name), value.type.dtype.numpy(), known)


def check_inputs(arrays: Mapping[str, Array], specs: list[InputSpec], where: str) -> Inputs:
    """Returns `arrays` in the order of `specs`.

    Raises:
        ShapeError: a name, dtype or shape differs from `specs`, or one dim_param has two sizes.
    """
    wanted = {spec.name for spec in specs}
    if odd := sorted(wanted ^ set(arrays)):
        what = f"no {'array for input' if odd[0] in wanted else 'input called'} {odd[0]!r}"
        listing = ", ".join(map(str, specs)) or "no inputs"
        raise ShapeError(where, what, expected=listing, advice="name the arrays after the inputs")
    sizes: dict[str, tuple[int, str]] = {}
    checked: Inputs = {}
    for spec in specs:
        array = np.asarray(arrays[spec.name])
        # NumPy has no bfloat16, so .npz files hold its bits as uint16, or as void if ml_dtypes wrote them.
        if spec.dtype == BFLOAT16 and array.dtype.itemsize == 2 and array.dtype.kind in "uV":
            array = array.view(BFLOAT16)
        pairs = list(zip(array.shape, spec.dims, strict=False))
        fits = array.ndim == len(spec.dims) and all(size == dim for size, dim in pairs if isinstance(dim, int))
        if array.dtype != spec.dtype or not fits:
            advice = "convert or reshape it"
            raise ShapeError(where, describe({spec.name: array}), expected=str(spec), advice=advice)
        for size, dim in pairs:
            # ONNX Runtime checks this inside of the run, and names a node instead of the input.
            if isinstance(dim, str) and sizes.setdefault(dim, (size, spec.name))[0] != size:
                first, owner = sizes[dim]
                what = f"{spec.name!r} has {dim} = {size} and {owner!r} has {dim} = {first}"
                raise ShapeError(where, what, expected="one size for both", advice="correct one of them")
        checked[spec.name] = array
    return checked


def describe(inputs: Mapping[str, Array]) -> str:
    """Returns the inputs as a user writes them: input_ids int64 [2, 16], ..."""
    return ", ".join(str(InputSpec(name, array.dtype, array.shape)) for name, array in inputs.items()) or "no inputs"


def make_inputs(
    signature: Signature, shapes: Mapping[str, int] | None = None, seed: int = 0, *, batch: int = 2
) -> Inputs:
    """Returns one synthesised array per input of a model, the same for the same arguments.

    `shapes` are sizes by dim_param ("batch") or by input and axis ("input_ids.1"), over the defaults of `Sizes`.

    Raises:
        ShapeError: an input cannot be synthesised, or `shapes` names a dimension the model does not have.
    """
    sizes = Sizes(signature, shapes or {}, batch)
    rng = np.random.default_rng(seed)
    inputs: Inputs = {}
    for spec in signature.specs:
        shape = tuple(sizes.size_of(spec.name, axis) for axis in range(len(spec.dims)))
        try:
            inputs[spec.name] = _fill(spec, shape, signature.ranges.get(spec.name), sizes.past, rng).astype(spec.dtype)
        except (MemoryError, ValueError):  # NumPy's ValueError is about sizes that no array can have
            what = f"input {spec} would be {shape}"
            expected, advice = "one that fits in memory", ("pass smaller sizes, ", Option("shapes", {"NAME": "SIZE"}))
            raise ShapeError(signature.name, what, expected=expected, advice=advice) from None
    return inputs


def _fill(spec: InputSpec, shape: tuple[int, ...], bounds: range | None, past: int, rng: np.random.Generator) -> Array:
    # Position ids count up from the end of the cache; random ones would repeat and skip positions.
    if "position" in spec.name.lower() and spec.dtype.kind in "iu":
        steps = np.broadcast_to(np.arange(shape[-1] if shape else 1) + past, shape or (1,)).reshape(shape)
        return np.clip(steps, bounds.start, bounds.stop - 1) if bounds else steps
    # Ones are right for a multiplicative mask; as an additive mask they are a constant, which softmax ignores.
    if spec.dtype.kind == "b" or "mask" in spec.name.lower():
        return np.ones(shape)
    # uint8 inputs that index no table are images.
    if bounds is None and spec.dtype == np.uint8:
        bounds = range(256)
    if spec.dtype.kind in "iu":
        return np.asarray(rng.integers(bounds.start, bounds.stop, shape)) if bounds else np.ones(shape)
    return rng.standard_normal(shape, np.float32)


_SEQUENCE: Final = 16
_PAST: Final = 8

_BY_NAME: Final = (
    (re.compile(r"past|cache", re.IGNORECASE), _PAST),
    (re.compile(r"batch|^(b|n|bs)$", re.IGNORECASE), None),
    (re.compile(r"height|width|image", re.IGNORECASE), 224),  # of most image models
    (re.compile(r"channel", re.IGNORECASE), 3),
    (re.compile(r"seq|len|token|time|frame", re.IGNORECASE), _SEQUENCE),
)
"""Size by a word in the dim_param; None stands for the batch size."""


class Sizes:
    """Sizes of all inputs, one size per dim_param throughout; the first rule that applies decides.

    1. A fixed dimension has its size.
    2. `overrides`, by input and axis ("input_ids.1") or by dim_param ("batch").
    3. A dim_param that is a sum or product of others ("past_sequence_length + sequence_length") has their value.
    4. "total" in its name, or the last axis of an attention mask in a model with a KV cache: past + sequence.
    5. By its name, see `_BY_NAME`.
    6. The first axis `batch`, axis 2 of a past key or value 8, any other 16.
    """

    def __init__(self, signature: Signature, overrides: Mapping[str, int], batch: int) -> None:
        """Raises ShapeError if an override names a dimension that no input has, or is negative."""
        self._inputs = {spec.name: spec.dims for spec in signature.specs}
        self._batch = batch
        self._known = dict(overrides)
        """Sizes by input and axis, and by dim_param."""
        dims = {f"{name}.{axis}": dim for name, dims in self._inputs.items() for axis, dim in enumerate(dims)}
        free = {place: dim for place, dim in dims.items() if not isinstance(dim, int)}
        names = {symbol for dim in free.values() if dim for symbol in (dim, *_symbols(dim))}
        for key, size in overrides.items():
            if key not in names | free.keys() or size < 0:
                choices = ", ".join(sorted(names or free))
                expected = f"0 or more, for one of {choices} (or INPUT.AXIS)" if free else "none: all sizes are fixed"
                advice = ("correct or drop ", Option("shapes"))
                raise ShapeError(signature.name, f"size {key} = {size}", expected=expected, advice=advice)

    @property
    def past(self) -> int:
        """Length of the KV cache, 0 for a model without one."""
        caches = (name for name, dims in self._inputs.items() if "past" in name.lower() and len(dims) == 4)
        return next((self.size_of(name, 2) for name in caches), 0)

    def size_of(self, name: str, axis: int) -> int:
        """Returns the size of a dimension of an input."""
        dim, place = self._inputs[name][axis], f"{name}.{axis}"
        if isinstance(dim, int):
            return dim
        if place in self._known:
            return self._known[place]
        return self._default(name, axis, "") if dim is None else self._size(name, axis, dim)

    def _size(self, name: str, axis: int, dim: str) -> int:
        if dim not in self._known:
            self._known[dim] = _SEQUENCE  # ends the recursion of a size that is defined through itself
            sizes = {symbol: self._size(name, axis, symbol) for symbol in _symbols(dim) - {dim}}
            size = ir.SymbolicDim(dim).evaluate(sizes) if sizes else None
            self._known[dim] = max(0, size) if isinstance(size, int) else self._default(name, axis, dim)
        return self._known[dim]

    def _default(self, name: str, axis: int, dim: str) -> int:
        # A decoder's mask covers cache and tokens; exporters give its length a name that has no relation to the two.
        has_past = any("past" in other.lower() for other in self._inputs)
        mask = "attention_mask" in name and axis == len(self._inputs[name]) - 1 and has_past
        # If another input has the same name, it is the sequence's, and both must have one size.
        shared = any(dim and dim in dims for other, dims in self._inputs.items() if other != name)
        if "total" in dim.lower() or (mask and not shared):
            tokens = (each for each in self._inputs if re.search("input_ids|inputs_embeds", each))
            return self.past + next((self.size_of(n, 1) for n in tokens if len(self._inputs[n]) > 1), _SEQUENCE)
        for pattern, size in _BY_NAME:
            if pattern.search(dim):
                return self._batch if size is None else size
        if "past" in name.lower() and axis == 2:
            return _PAST
        return self._batch if axis == 0 else _SEQUENCE


def _symbols(dim: str) -> frozenset[str]:
    """Returns the names in a dim_param such as "past + sequence"; the whole text if it is no expression."""
    try:
        return ir.SymbolicDim(dim).free_symbols()
    except ValueError:
        return frozenset({dim})
