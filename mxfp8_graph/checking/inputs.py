"""Inputs of a model: read from an .npz file, or synthesised so that the model accepts them.

Synthesised inputs are deterministic. Sizes: see `Sizes`. Values: floats are normal(0, 1); integers that index a table
stay inside it (`index_ranges.py`); position ids count up; masks, booleans and other integers are one; images in uint8
are noise.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from mxfp8_graph.checking.index_ranges import index_ranges
from mxfp8_graph.checking.input_sizes import Sizes
from mxfp8_graph.file_reading import open_regular
from mxfp8_graph.onnx_model import record
from mxfp8_graph.onnx_model.open import OpenedModel
from mxfp8_ops.errors import Option, ShapeError

Array = npt.NDArray[Any]
Inputs = dict[str, Array]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)

MOST_BYTES: Final = 2**30
"""Largest size of all synthesised inputs of one model. Inputs from files may be larger."""

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
    dims: tuple[int | str | None, ...]

    def __str__(self) -> str:
        """Returns it as a user writes it: input_ids int64 [batch, seq]."""
        return f"{self.name} {self.dtype.name} [{', '.join('?' if d is None else str(d) for d in self.dims)}]"


def input_specs(model: onnx.ModelProto, where: str = "model") -> list[InputSpec]:
    """Returns the inputs a caller must feed (initializers that are listed as inputs are not among them).

    Raises:
        ShapeError: an input is not a tensor of numbers, or has no shape.
    """
    initializers = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        # Before IR version 4 every initializer is also an input, with a default value.
        if value.name in initializers:
            continue
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or tensor.elem_type == onnx.TensorProto.STRING:
            kind = value.type.WhichOneof("value") or "untyped"
            what = "strings" if kind == "tensor_type" else kind.removesuffix("_type").replace("_", " ")
            advice = "run this model from Python, with mxfp8_ops.ort.session"
            raise ShapeError(where, f"input {value.name!r} is {what}", expected="a tensor of numbers", advice=advice)
        for what, missing in (("shape", not tensor.HasField("shape")), ("dtype", not tensor.elem_type)):
            if missing:
                advice = "export the model with shapes"
                raise ShapeError(where, f"input {value.name!r} has no {what}", expected="one", advice=advice)
        dims = tuple(_dim(d) for d in tensor.shape.dim)
        specs.append(InputSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type), dims))
    return specs


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None  # some exporters write -1 for a size they do not know
    return dim.dim_param or None


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
    def of(cls, opened: OpenedModel) -> Signature:
        """Returns the inputs of an opened model."""
        proto, name = opened.proto, opened.name
        return cls(name, input_specs(proto, name), index_ranges(proto, name), record.is_rewritten(proto))


def make_inputs(signature: Signature, shapes: Mapping[str, int] | None = None, seed: int = 0) -> Inputs:
    """Returns synthesised inputs of a model; arguments and errors as `synthesise`."""
    return synthesise(signature.specs, signature.ranges, shapes=shapes, seed=seed, where=signature.name)


def synthesise(
    specs: list[InputSpec],
    ranges: Mapping[str, range],
    *,
    shapes: Mapping[str, int] | None = None,
    seed: int = 0,
    where: str = "model",
) -> Inputs:
    """Returns one array per spec, the same for the same arguments.

    `shapes` are sizes by dim_param ("batch") or by input and axis ("input_ids.1"), over the defaults of `Sizes`.

    Raises:
        ShapeError: an input cannot be synthesised, or `shapes` names a dimension the model does not have.
    """
    sizes = Sizes({spec.name: spec.dims for spec in specs}, shapes or {}, where)
    rng = np.random.default_rng(seed)
    inputs: Inputs = {}
    left = MOST_BYTES
    shapes_of = {spec.name: sizes.shape(spec.name) for spec in specs}
    for spec in specs:
        shape = shapes_of[spec.name]
        # Checked before anything is allocated, and over all inputs: each alone may be small enough.
        left -= math.prod(shape) * spec.dtype.itemsize
        if left < 0:
            what = f"input {spec} would be {shape}"
            expected = f"synthesised inputs of at most {MOST_BYTES // 2**20} MiB in all"
            smaller = ("pass smaller sizes, ", sizes.option(spec.name), ", or ") if _is_free(spec) else ()
            advice = (*smaller, "pass your own, ", Option("inputs", "FILE.npz"))
            raise ShapeError(where, what, expected=expected, advice=advice)
    for spec in specs:
        shape = shapes_of[spec.name]
        try:
            inputs[spec.name] = _fill(spec, shape, ranges.get(spec.name), sizes.past, rng)
        except (MemoryError, ValueError):  # NumPy's ValueError is about sizes that no array can have
            what = f"input {spec} would be {shape}"
            advice = ("pass smaller sizes, ", sizes.option(spec.name))
            raise ShapeError(where, what, expected="one that fits in memory", advice=advice) from None
    return inputs


def _is_free(spec: InputSpec) -> bool:
    return not all(isinstance(dim, int) for dim in spec.dims)


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


def load_arrays(path: Path) -> Any:
    """Returns the array of an .npy file, or the arrays of an .npz file as a dict.

    NumPy allocates what the header of an array claims before it reads a value. So no header may claim more than is
    there, and no archive unpack to more than 1 GiB, or 100 times its size.

    Raises:
        ShapeError: the file cannot be read, is damaged, or has something else than plain arrays.
    """
    kind, save = (".npz", "numpy.savez") if path.suffix == ".npz" else (".npy", "numpy.save")
    try:
        with open_regular(path) as source:
            # By content: NumPy reads either kind under any suffix.
            is_archive, size = source.read(2) == b"PK", source.seek(0, 2)
            if not is_archive:
                _check_header(source, size)
                source.seek(0)
                return np.load(source, allow_pickle=False)
            with zipfile.ZipFile(source) as archive:
                total, most = sum(info.file_size for info in archive.infolist()), max(MOST_BYTES, 100 * size)
                if total > most:
                    raise ValueError(f"{size} bytes that unpack to {total}; the limit is {most}")
                for info in archive.infolist():
                    with archive.open(info) as member:
                        _check_header(member, info.file_size)
            source.seek(0)
            return dict(np.load(source, allow_pickle=False))
    except OSError as error:
        raise ShapeError.unreadable(path, error, f"a readable {kind} file") from None
    except Exception as error:  # zipfile and NumPy raise anything for damaged files: zlib.error, struct.error, KeyError
        what, expected = str(error) or type(error).__name__, f"an {kind} file of plain arrays"
        raise ShapeError(path, what, expected=expected, advice=f"save it with {save}") from None


def _check_header(file: IO[bytes], size: int) -> None:
    """Raises ValueError if an array claims more bytes than its file of `size` bytes has."""
    file.seek(0)
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        return  # no array, as NumPy will say
    file.seek(0)
    # Versions 2 and 3 of the format differ in the encoding of names alone.
    first = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed > left and not dtype.hasobject:  # objects are refused as such
        raise ValueError(f"the header of {list(shape)} {dtype.name} claims {claimed} bytes, and there are {left}")


def load_inputs(path: str | Path, specs: list[InputSpec]) -> Inputs:
    """Returns the arrays of an .npz file, one per spec.

    A bfloat16 input may be stored as uint16 bits.

    Raises:
        ShapeError: unreadable file, or names, dtypes or shapes other than the model's.
    """
    path = Path(path)
    arrays = load_arrays(path)
    if not isinstance(arrays, dict):
        expected = "an .npz file with one array per input"
        raise ShapeError(path, "a single array", expected=expected, advice="use numpy.savez")
    return check_inputs(arrays, specs, str(path))


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
    fits = len(shape) == len(spec.dims) and all(
        size == dim for size, dim in zip(shape, spec.dims, strict=True) if isinstance(dim, int)
    )
    if not fits:
        raise ShapeError(where, f"{spec.name!r} has shape {list(shape)}", expected=str(spec), advice="reshape it")
    for size, dim in zip(shape, spec.dims, strict=True):
        if isinstance(dim, str):
            # One size for each dim_param, over all inputs: ONNX Runtime checks that too late, and by the name of a
            # node.
            first, owner = seen.setdefault(dim, (size, spec.name))
            if first != size:
                what = f"{spec.name!r} has {dim} = {size} and {owner!r} has {dim} = {first}"
                raise ShapeError(where, what, expected="one size for both", advice="correct one of them")


def describe(inputs: Mapping[str, Array]) -> str:
    """Returns the inputs as a user writes them: input_ids int64 [2, 16], ..."""
    return ", ".join(str(InputSpec(name, array.dtype, array.shape)) for name, array in inputs.items()) or "no inputs"
