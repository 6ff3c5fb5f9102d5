"""`MXFP8Tensor`: a tensor whose values are MXFP8 codes, quantized along its rows, along its columns, or both.

An op dequantizes it, and an op that writes to it quantizes the result, but for the ops of `_OWN`. `linear_train` reads
the codes as they are, so its result is the result for the tensor that was quantized: nothing is rounded twice.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only

from mxfp8_ops.errors import ContractError, RecipeError, ShapeError
from mxfp8_ops.torch_ops import training

_ATEN: Final = torch.ops.aten
_MX: Final = torch.ops.mxfp8
_DTYPES: Final = {torch.float32, torch.float16, torch.bfloat16}
ROWS: Final = ("_mxfp8", "_mxfp8_scales")
COLUMNS: Final = ("_columns_mxfp8", "_columns_mxfp8_scales")
"""Attributes with elements and scales. An exported program calls its buffers so, as a rewritten one does."""


class DType(enum.Enum):
    """TransformerEngine's names of element formats -> ours."""

    kFloat8E4M3 = "e4m3"  # noqa: N815
    kFloat8E5M2 = "e5m2"  # noqa: N815

    @classmethod
    def cast(cls, value: Any) -> DType:
        """Returns the format of a member (ours or TransformerEngine's), of our name, or of torch's dtype."""
        text = str(getattr(value, "name", value)).lower()
        for each in cls:
            if text.removeprefix("torch.").removeprefix("k").replace("_", "").removesuffix("fn").endswith(each.value):
                return each
        raise ContractError.unknown("fp8_dtype", value, (each.value for each in cls))


class Through(torch.autograd.Function):
    """Applies a function and passes its gradient on unchanged: rounding counts as the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns function(x)."""
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns the gradient of x."""
        return grads[0], None


class MXFP8Tensor(Tensor):
    """A tensor [..., N] in MXFP8, as [M, N] with a scale for 32 values of a row, of a column, or both.

    `rowwise_elements` [..., N] with `rowwise_scales` [M, ceil(N / 32)], and `columnwise_elements` [..., N] with
    `columnwise_scales` [ceil(M / 32), N], are uint8, or None. TransformerEngine's names are `_rowwise_data`,
    `_rowwise_scale_inv` and so on; scales have no padding, see `padded_scales`. In memory, columnwise codes are those
    of the transpose [N, M], as a product reads them. `dtype` is the dtype of the values. Assign to `t[i]` and not to a
    view of it: other views than `view` are copies of its values.
    """

    fp8_dtype: DType
    scale_rounding: str
    _turned: bool
    """Whether it is the transpose of such a tensor: its values are those of its columns."""
    initial: Tensor | None
    """The values before quantization, see `quantized_model_init`."""
    master: Any
    """A weak reference to its master, see `master_weights`; None without one."""
    _mxfp8: Any
    _mxfp8_scales: Any
    _columns_mxfp8: Any
    _columns_mxfp8_scales: Any

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: Any, codes: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype, **settings: Any
    ) -> Any:
        """Makes a tensor of codes by attribute; `settings` are the attributes fp8_dtype, scale_rounding, _turned."""
        device = next(iter(codes.values())).device
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.__dict__ |= {
            **dict.fromkeys((*ROWS, *COLUMNS, "initial", "master")),
            "_turned": False,
            **settings,
            **codes,
        }
        return self

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names = [name for name in (*ROWS, *COLUMNS) if getattr(self, name) is not None]
        settings = {name: getattr(self, name) for name in ("fp8_dtype", "scale_rounding", "_turned")}
        return names, {"dtype": self.dtype, **settings}

    @staticmethod
    def __tensor_unflatten__(inner: Any, settings: Any, size: Any, stride: Any) -> Any:
        return MXFP8Tensor(inner, size, **settings)

    def _map(self, function: Callable[[Tensor], Tensor], **changed: Any) -> Any:
        names, settings = self.__tensor_flatten__()
        codes = {name: function(getattr(self, name)) for name in names}
        with torch.inference_mode(False):  # torch cannot detach a wrapper that is made in inference mode
            result = MXFP8Tensor(codes, **{"shape": self.shape, **settings, **changed})
        result.initial = self.initial
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _OWN:
            return _OWN[func](*args, **kwargs)
        plain, plain_kwargs = tree_map_only(MXFP8Tensor, MXFP8Tensor._dequantized, (args, kwargs))
        result = func(*plain, **plain_kwargs)
        written = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        names = [each.name for each in func._schema.arguments]
        before, after = (dict(zip(names, a, strict=False)) | k for a, k in ((args, kwargs), (plain, plain_kwargs)))
        for name in (each.name for each in written if each.name in before):
            for old, new in zip(*(tree_leaves(each[name]) for each in (before, after)), strict=True):
                if isinstance(old, MXFP8Tensor):
                    if (new.shape, new.stride()) != (old.shape, old.stride()):
                        advice = "apply it to dequantize()"
                        raise ShapeError("MXFP8Tensor", f"{func} in place", expected="the same shape", advice=advice)
                    old._store(new)
                    result = old if result is new else result
        return result

    def _dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        # Of a tensor with both, the rows; of its transpose, the columns, which are the same codes.
        by_columns = self._mxfp8 is None or (self._turned and self._columns_mxfp8 is not None)
        codes = [getattr(self, name) for name in (COLUMNS if by_columns else ROWS)]
        values: Tensor = _MX.dequantize.default(*codes, -1, self.fp8_dtype.value, dtype or self.dtype)
        return (values.mT.contiguous() if by_columns else values).view(self.shape)

    def _store(self, values: Tensor) -> None:
        """Quantizes new values into the codes that there are."""
        self.initial, matrix = None, _matrix(values)
        for names, source in ((ROWS, matrix), (COLUMNS, matrix.t())):
            if getattr(self, names[0]) is not None:
                new = _MX.quantize.default(source, -1, self.fp8_dtype.value, self.scale_rounding)
                _write([getattr(self, name) for name in names], new)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the values as a plain tensor, from the rowwise codes if there are any; gradients pass through."""
        if self.requires_grad and torch.is_grad_enabled():
            return straight_through(self, lambda each: each._dequantized(dtype))
        return self._dequantized(dtype)

    def quantize_(self, values: Tensor) -> MXFP8Tensor:
        """Quantizes `values`, of the same shape, into this tensor and returns it."""
        with torch.no_grad():
            self.copy_(values)  # through the dispatcher, which counts the change for autograd
        return self

    rowwise_elements = property(lambda self: None if self._mxfp8 is None else self._mxfp8.view(self.shape))
    rowwise_scales = property(lambda self: self._mxfp8_scales)
    columnwise_elements = property(
        lambda self: None if self._columns_mxfp8 is None else self._columns_mxfp8.mT.reshape(self.shape)
    )
    columnwise_scales = property(lambda self: None if self._columns_mxfp8 is None else self._columns_mxfp8_scales.mT)
    _rowwise_data, _rowwise_scale_inv = rowwise_elements, rowwise_scales
    _columnwise_data, _columnwise_scale_inv = columnwise_elements, columnwise_scales
    _fp8_dtype = property(lambda self: self.fp8_dtype)
    nbytes = property(lambda self: sum(code.nbytes for code in self.state_dict().values()))
    """The bytes of its codes: 1 + 1 / 32 for each value and direction."""

    def get_usages(self) -> dict[str, bool]:
        """Returns {"rowwise": ..., "columnwise": ...}: whether it has these codes."""
        return {"rowwise": self._mxfp8 is not None, "columnwise": self._columns_mxfp8 is not None}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drops the codes of a direction that is False; None keeps it.

        Raises:
            ContractError: a direction that is True is missing, or none would be left.
        """
        has, wanted = self.get_usages(), {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        kept = {name: has[name] if wanted[name] is None else wanted[name] for name in has}
        for name, keep in kept.items():
            if (keep and not has[name]) or not any(kept.values()):
                raise _missing(name)
        for name, names in (("rowwise", ROWS), ("columnwise", COLUMNS)):
            if not kept[name]:
                self.__dict__ |= dict.fromkeys(names)

    def padded_scales(self, columnwise: bool = False, swizzled: bool = False) -> Tensor:
        """Returns the scales, zero-padded as TransformerEngine stores them, or in the tiles that cuBLASLt reads.

        [M, N / 32] is padded to multiples of 128 x 4, [M / 32, N] to 4 x 128. A tile has 128 x 4 scales, of the
        transpose if `columnwise`: `mxfp8_graph.packing.unswizzled` describes it.
        """
        stored = self._columns_mxfp8_scales if columnwise else self._mxfp8_scales
        if stored is None:
            raise _missing("columnwise" if columnwise else "rowwise")
        padded = F.pad(stored, (0, -stored.shape[1] % 4, 0, -stored.shape[0] % 128))
        if swizzled:
            return padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
        return padded.mT if columnwise else padded

    def state_dict(self) -> dict[str, Tensor]:
        """Returns its codes as plain tensors, for safetensors; the columnwise ones are those of the transpose.

        Their element format is not among them.
        """
        return {name.removeprefix("_"): getattr(self, name) for name in self.__tensor_flatten__()[0]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies the codes of a `state_dict` into this tensor; ShapeError if a name or a shape differs."""
        self.quantize_(self.with_codes(state))

    def with_codes(self, state: Mapping[str, Tensor]) -> MXFP8Tensor:
        """Returns a tensor like this one with the codes of a `state_dict`; raises as `load_state_dict`."""
        own, theirs = ({name: list(code.shape) for name, code in each.items()} for each in (self.state_dict(), state))
        if own != theirs:
            raise ShapeError("MXFP8Tensor", f"codes {theirs}", expected=f"{own}", advice="make a tensor of that shape")
        inner = {f"_{name}": code for name, code in state.items()}
        return self.__tensor_unflatten__(inner, self.__tensor_flatten__()[1], self.shape, None)  # type: ignore[no-any-return]

    @property
    def data(self) -> Tensor:
        """A tensor with the same codes. Values that are assigned are quantized, codes are taken."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype not in _DTYPES:
            what, expected = f"{values.dtype} {list(values.shape)}", f"float32, float16, bfloat16 {list(self.shape)}"
            raise ShapeError("MXFP8Tensor.data", what, expected=expected, advice="make a new layer for other values")
        self.quantize_(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.detach().dequantize()
        values[index] = value
        self.quantize_(values)

    def get_high_precision_init_val(self) -> Tensor | None:
        """Returns the values before quantization, if `quantized_model_init` kept them."""
        return self.initial

    def clear_high_precision_init_val(self) -> None:
        """Frees these values."""
        self.initial = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone()
        is_parameter = isinstance(self, torch.nn.Parameter)
        return memo.setdefault(id(self), torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "master"}

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"MXFP8Tensor({self.fp8_dtype.name}, {self.detach().dequantize()})"


def straight_through(x: Tensor, function: Callable[[Any], Tensor]) -> Tensor:
    """Returns function(x), which passes its gradient on to x."""
    result: Tensor = Through.apply(x, function)  # type: ignore[no-untyped-call]
    return result


def quantized(x: Tensor, *, fp8_dtype: DType, scale_rounding: str, rowwise: bool, columnwise: bool) -> MXFP8Tensor:
    """Returns `x` [..., N] in MXFP8; both directions are quantized from `x`."""
    matrix = _matrix(x)
    codes: dict[str, Tensor] = {}
    for names, source, wanted in ((ROWS, matrix, rowwise), (COLUMNS, matrix.t(), columnwise)):
        if wanted:
            codes |= zip(names, _MX.quantize.default(source, -1, fp8_dtype.value, scale_rounding), strict=True)
    if not codes:
        raise _missing("rowwise")
    result: MXFP8Tensor = MXFP8Tensor(codes, x.shape, x.dtype, fp8_dtype=fp8_dtype, scale_rounding=scale_rounding)
    return result


def _matrix(x: Tensor) -> Tensor:
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def _missing(direction: str) -> ContractError:
    advice = "quantize the original values so: codes of the other direction are rounded already"
    return ContractError("MXFP8Tensor", f"no {direction} codes", expected=f"{direction}=True", advice=advice)


def _write(codes: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for code, value in zip(codes, values, strict=True):
        code.copy_(value)
        # torch counts no changes below the dispatcher, and kernels keep panels of a weight until its count changes.
        torch.autograd.graph.increment_version(code)


def _quantize(x: MXFP8Tensor, axis: int = -1, element_format: str = "e4m3", scale_rounding: str = "ceil") -> Any:
    """Returns the codes as they are; an error for other codes, which would be rounded twice."""
    if (axis % x.dim(), element_format, scale_rounding) != (x.dim() - 1, x.fp8_dtype.value, x.scale_rounding):
        what = (
            f"{x.fp8_dtype.value} with {x.scale_rounding} scales, asked for {element_format}, {scale_rounding}, {axis}"
        )
        raise RecipeError("MXFP8Tensor", what, expected="one format", advice="quantize the original values so")
    if x._mxfp8 is None:
        raise _missing("columnwise" if x._turned else "rowwise")
    if x.dim() == 2:  # as they are: a view that is made here has a count of changes of its own
        return x._mxfp8, x._mxfp8_scales
    return x._mxfp8.view(x.shape), x._mxfp8_scales.view(*x.shape[:-1], -1)


def _transpose(x: MXFP8Tensor, first: int, second: int) -> Any:
    if x.dim() != 2 or first % 2 == second % 2:
        return x._dequantized().transpose(first, second)
    names, settings = x.__tensor_flatten__()
    other = dict(zip((*ROWS, *COLUMNS), (*COLUMNS, *ROWS), strict=True))
    codes = {other[name]: getattr(x, name) for name in names}
    return MXFP8Tensor(codes, **{**settings, "shape": x.shape[::-1], "_turned": not x._turned})


def _view(x: MXFP8Tensor, shape: Sequence[int]) -> Any:
    sizes = list(torch.empty(x.shape, device="meta").view(shape).shape)
    if sizes[-1:] != [x.shape[-1]] or x._turned:
        what, expected = f"a view {sizes} of {list(x.shape)}", "the same last size, which keeps blocks of 32 whole"
        advice = "view dequantize() instead, and pass init_sync=False to DistributedDataParallel"
        raise ShapeError("MXFP8Tensor", what, expected=expected, advice=advice)
    return x._map(lambda code: code, shape=sizes)


def _to(x: MXFP8Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype not in {None, *_DTYPES}:
        return x._dequantized().to(device=device, dtype=dtype)
    return x._map(lambda code: code.to(device, copy=True), dtype=dtype or x.dtype)  # the op always copies


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, MXFP8Tensor):
        return target.copy_(source._dequantized())
    names, settings = target.__tensor_flatten__()
    alike = isinstance(source, MXFP8Tensor) and source.shape == target.shape
    if alike and source.__tensor_flatten__() == (names, {**settings, "dtype": source.dtype}):
        _write(*([getattr(each, name) for name in names] for each in (target, source)))
        target.initial = None
    else:
        values = source._dequantized() if isinstance(source, MXFP8Tensor) else source
        target._store(values.to(target.device, target.dtype).expand(target.shape))
    return target


_OWN: Final[Mapping[Any, Callable[..., Any]]] = {
    _MX.quantize.default: _quantize,
    _MX.linear_train.default: training.linear_train,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: lambda x: _transpose(x, 0, 1),
    _ATEN.view.default: _view,
    _ATEN._to_copy.default: _to,
    _ATEN.copy_.default: _copy,
    _ATEN.detach.default: lambda x: x._map(lambda code: code),
    _ATEN.clone.default: lambda x, **_: x._map(Tensor.clone),
    _ATEN.empty_like.default: lambda x, device=None, **_: x._map(partial(torch.empty_like, device=device)),
}
"""Ops that read or write the codes themselves."""

torch.serialization.add_safe_globals([MXFP8Tensor, DType])
