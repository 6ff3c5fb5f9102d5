"""Inputs of a model: read from an .npz file, or synthesised so that the model accepts them.

Synthesised inputs are deterministic. Sizes: see `Sizes`. Values: floats are normal(0, 1); integers that index a table
stay inside it (`index_ranges.py`); position ids count up; masks, booleans and other integers are one; images in uint8
are noise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
        """Returns it as a user writes it: input_ids int64 [batch, seq]."""
        return f"{self.name} {self.dtype.name} [{', '.join('?' if d is None else str(d) for d in self.dims)}]"


def input_specs(graph: ir.Graph, where: str) -> list[InputSpec]:
    """Returns the inputs a caller must feed (initializers that are listed as inputs are not among them).

    Raises:
        ShapeError: an input is not a tensor of numbers, or has no shape.
    """
    specs = []
    for value in graph.inputs:
        # Before IR version 4 every initializer is also an input, with a default value.
        if value.is_initializer():
            continue
        if not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING:
            advice = "run this model from Python, with mxfp8_ops.ort.session"
            what = f"input {value.name!r} is no tensor of numbers"
            raise ShapeError(where, what, expected="one", advice=advice)
        if value.shape is None or not value.dtype:
            what = f"input {value.name!r} has no {'shape' if value.shape is None else 'dtype'}"
            raise ShapeError(where, what, expected="one", advice="export the model with shapes")
        dims = tuple(dim if isinstance(dim, int) else dim.value or None for dim in value.shape)
        # Some exporters write -1 for a size they do not know.
        known = tuple(None if isinstance(dim, int) and dim < 0 else dim for dim in dims)
        specs.append(InputSpec(str(value.name), value.type.dtype.numpy(), known))
    return specs


@dataclass(frozen=True)
class Signature:
    """The inputs of a model."""

    name: str
    """Name of the model in messages."""
    specs: list[InputSpec]
    ranges: Mapping[str, range]
    """The values that integer inputs may take, by name, where they index tables."""
    rewritten: bool = False
    """Whether the model was rewritten."""

    @classmethod
    def of(cls, model: ir.Model) -> Signature:
        """Returns the inputs of a model."""
        name = name_of(model)
        return cls(name, input_specs(model.graph, name), index_ranges(model), record.is_rewritten(model))


def make_inputs(signature: Signature, shapes: Mapping[str, int] | None = None, seed: int = 0) -> Inputs:
    """Returns one synthesised array per input of a model, the same for the same arguments.

    `shapes` are sizes by dim_param ("batch") or by input and axis ("input_ids.1"), over the defaults of `Sizes`.

    Raises:
        ShapeError: an input cannot be synthesised, or `shapes` names a dimension the model does not have.
    """
    sizes = Sizes(signature.specs, shapes or {}, signature.name)
    rng = np.random.default_rng(seed)
    inputs: Inputs = {}
    for spec in signature.specs:
        shape = sizes.shape(spec)
        try:
            inputs[spec.name] = _fill(spec, shape, signature.ranges.get(spec.name), sizes.past, rng)
        except (MemoryError, ValueError):  # NumPy's ValueError is about sizes that no array can have
            what = f"input {spec} would be {shape}"
            expected, advice = "one that fits in memory", ("pass smaller sizes, ", Option("shapes", {"NAME": "SIZE"}))
            raise ShapeError(signature.name, what, expected=expected, advice=advice) from None
    return inputs


def _fill(spec: InputSpec, shape: tuple[int, ...], bounds: range | None, past: int, rng: np.random.Generator) -> Array:
    name, dtype = spec.name.lower(), spec.dtype
    # Position ids count up from the end of the cache; random ones would repeat and skip positions.
    if "position" in name and dtype.kind in "iu":
        steps = np.broadcast_to(np.arange(shape[-1] if shape else 1) + past, shape or (1,)).reshape(shape)
        return (np.clip(steps, bounds.start, bounds.stop - 1) if bounds else steps).astype(dtype)
    if bounds is not None:
        return np.asarray(rng.integers(bounds.start, bounds.stop, shape)).astype(dtype)
    if dtype.kind == "b" or "mask" in name:
        # Right for a multiplicative mask, and harmless for an additive one: softmax does not see a constant.
        return np.ones(shape, dtype)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    if dtype.kind in "iu":
        return np.ones(shape, dtype)
    return rng.standard_normal(shape, np.float32).astype(dtype)


def load_arrays(path: Path) -> Inputs:
    """Returns the arrays of an .npz file.

    Raises:
        ShapeError: the file cannot be read, is damaged, or has something else than plain arrays.
    """
    try:
        with path.open("rb") as source:
            loaded = np.load(source, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                return dict(loaded)
            what = "a single array"
    except OSError as error:
        raise ShapeError.unreadable(path, error, "a readable .npz file") from None
    except Exception as error:  # zipfile and NumPy raise anything for damaged files: zlib.error, struct.error, KeyError
        what = str(error) or type(error).__name__
    expected = "an .npz file of plain arrays, one per input"
    raise ShapeError(path, what, expected=expected, advice="save it with numpy.savez")


def check_inputs(arrays: Mapping[str, Array], specs: list[InputSpec], where: str) -> Inputs:
    """Returns `arrays` in the order of `specs`.

    Raises:
        ShapeError: names, dtypes or shapes other than those of `specs`, or two sizes for one dim_param.
    """
    wanted = {spec.name for spec in specs}
    listing = ", ".join(map(str, specs)) or "no inputs"
    for label, names in (("no array for input", wanted - set(arrays)), ("no input called", set(arrays) - wanted)):
        if names:
            what = f"{label} {', '.join(map(repr, sorted(names)))}"
            raise ShapeError(where, what, expected=listing, advice="name the arrays after the inputs")
    seen: dict[str, tuple[int, str]] = {}
    checked: Inputs = {}
    for spec in specs:
        array = np.asarray(arrays[spec.name])
        # NumPy has no bfloat16, so .npz files hold its bits as uint16, or as void if ml_dtypes wrote them.
        if spec.dtype == BFLOAT16 and array.dtype.itemsize == 2 and array.dtype.kind in "uV":
            array = array.view(BFLOAT16)
        if array.dtype != spec.dtype:
            what = f"{spec.name!r} has dtype {array.dtype.name}"
            raise ShapeError(where, what, expected=spec.dtype.name, advice="convert it first")
        _check_shape(array.shape, spec, seen, where)
        checked[spec.name] = array
    return checked


def _check_shape(shape: tuple[int, ...], spec: InputSpec, seen: dict[str, tuple[int, str]], where: str) -> None:
    sizes = list(zip(shape, spec.dims, strict=False))
    if len(shape) != len(spec.dims) or any(isinstance(dim, int) and size != dim for size, dim in sizes):
        raise ShapeError(where, f"{spec.name!r} has shape {list(shape)}", expected=str(spec), advice="reshape it")
    for size, dim in sizes:
        if isinstance(dim, str):
            # ONNX Runtime checks that too late, and by the name of a node.
            first, owner = seen.setdefault(dim, (size, spec.name))
            if first != size:
                what = f"{spec.name!r} has {dim} = {size} and {owner!r} has {dim} = {first}"
                raise ShapeError(where, what, expected="one size for both", advice="correct one of them")


def describe(inputs: Mapping[str, Array]) -> str:
    """Returns the inputs as a user writes them: input_ids int64 [2, 16], ..."""
    return ", ".join(str(InputSpec(name, array.dtype, array.shape)) for name, array in inputs.items()) or "no inputs"


BATCH: Final = 2
SEQUENCE: Final = 16
PAST: Final = 8

_BY_NAME: Final = (
    (re.compile(r"past|cache", re.IGNORECASE), PAST),
    (re.compile(r"batch|^(b|n|bs)$", re.IGNORECASE), BATCH),
    (re.compile(r"height|width|image", re.IGNORECASE), 224),  # of most image models
    (re.compile(r"channel", re.IGNORECASE), 3),
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

    def __init__(self, specs: Sequence[InputSpec], overrides: Mapping[str, int], where: str) -> None:
        self._inputs = {spec.name: spec.dims for spec in specs}
        self._overrides = overrides
        self._memo: dict[str, int] = {}
        self._refuse_unknown(where)

    def shape(self, spec: InputSpec) -> tuple[int, ...]:
        """Returns the shape of an input."""
        return tuple(self._size(spec.name, axis, dim) for axis, dim in enumerate(spec.dims))

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
        dimensions = {
            dim or f"{name}.{axis}"
            for name, axis, dim in self._free()
            if (dim is None or _symbols(dim) == {dim}) and self._default(name, axis, dim or "") == BATCH
        }
        return sorted(dimensions - self._overrides.keys())

    def _free(self) -> Iterator[tuple[str, int, str | None]]:
        """Yields input, axis and dim_param of each dimension without a fixed size."""
        for name, dims in self._inputs.items():
            yield from ((name, axis, dim) for axis, dim in enumerate(dims) if not isinstance(dim, int))

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
            sizes = {symbol: self._size(name, axis, symbol) for symbol in _symbols(dim) - {dim}}
            size = ir.SymbolicDim(dim).evaluate(sizes) if sizes else None
            self._memo[dim] = max(0, size) if isinstance(size, int) else self._default(name, axis, dim)
        return self._memo[dim]

    def _default(self, name: str, axis: int, dim: str) -> int:
        # Decoders take a mask over cache and tokens; exporters give its length a name of its own, which says nothing.
        has_past = any("past" in other.lower() for other in self._inputs)
        mask = "attention_mask" in name and axis == len(self._inputs[name]) - 1 and has_past
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

    def _refuse_unknown(self, where: str) -> None:
        free = list(self._free())
        dims = {symbol for _, _, dim in free if dim for symbol in (dim, *_symbols(dim))}
        axes = {f"{name}.{axis}" for name, axis, _ in free}
        for key, size in self._overrides.items():
            if key not in dims | axes:
                choices = ", ".join(sorted(dims or axes))
                what = f"no dimension {key!r}" if choices else f"no dimension {key!r}: every dimension is fixed"
                expected = f"one of {choices} (or INPUT.AXIS)" if choices else "no sizes"
                advice: tuple[str | Option, ...] = ("correct the name",) if choices else ("drop ", Option("shapes"))
                raise ShapeError(where, what, expected=expected, advice=advice)
            if size < 0:
                raise ShapeError(where, f"dimension {key} = {size}", expected="0 or more", advice="correct it")


def _symbols(dim: str) -> frozenset[str]:
    """Returns the names in a dim_param such as "past + sequence"; the whole text if it is no expression."""
    try:
        return ir.SymbolicDim(dim).free_symbols()
    except ValueError:
        return frozenset({dim})
