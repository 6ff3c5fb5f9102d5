"""Modules with packed weights, and those that train. `pack` and `train` change a module in place, so that references to
it stay valid.

A packed weight is two uint8 buffers, plain tensors: the elements `weight_mxfp8` [N, K], or [O, k..., C / group] of a
convolution, and `weight_mxfp8_scales`, one per 32 elements of the last axis. A program that `rewrite` packed has the
same names and bytes.
`weight` dequantizes at each access, for code that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.utils import _pytree as pytree

from mxfp8_graph import provenance, te
from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.torch_pass import record
from mxfp8_graph.torch_pass.convolutions import pads_of
from mxfp8_ops.errors import ContractError

_OPS: Final = torch.ops.mxfp8
_QUANTIZE: Final = _OPS.quantize.default
_GEMM: Final = _OPS.gemm.default
_WEIGHT_GEMM: Final = _OPS.weight_gemm.default
_LINEAR_PACKED: Final = _OPS.linear_packed.default

CODES: Final = ("weight_mxfp8", "weight_mxfp8_scales")
"""The buffers of a packed weight: elements and scales."""


class LazyWeight(Tensor):
    """The weight of a packed module in its original layout. The first use of its values dequantizes them.

    T5 reads the dtype of a weight three times at each call.
    """

    _module: Packed
    _is_hf_initialized = True
    """transformers writes no initial values to a tensor with this attribute."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, module: Packed, shape: Sequence[int]) -> Any:
        """Makes the weight of a module."""
        device = module.weight_mxfp8.device
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=module.weight_dtype, device=device)
        self._module = module
        return self

    def values(self) -> Tensor:
        """Returns a plain tensor with the values."""
        return self._module.dequantized()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = (x for x, each in zip(args, func._schema.arguments, strict=False) if each.is_write)
        if any(isinstance(x, LazyWeight) for x in written):
            raise _read_only()
        plain = pytree.tree_map_only(LazyWeight, LazyWeight.values, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    @property
    def data(self) -> Tensor:
        """Itself, so that changes in place raise ContractError."""
        return self

    @data.setter
    def data(self, _: Tensor) -> None:
        raise _read_only()

    def numpy(self, **options: Any) -> Any:
        """Returns the values as an array."""
        return self.values().numpy(**options)

    def tolist(self) -> Any:
        """Returns the values as lists."""
        return self.values().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _read_only() -> ContractError:
    what, advice = "is packed, so a change would be lost", "change the weight before quantize_"
    return ContractError("weight", what, expected="no change", advice=advice)


class Packed(nn.Module):
    """The base class of modules with a packed weight."""

    recipe: Recipe
    """The recipe that packed the weight; an export records it."""
    record: dict[str, str]
    """The recipe as metadata of a node."""
    weight_format: str
    activations: str
    """One of `recipe.Activations`, for this module."""
    scale_rounding: str
    weight_dtype: torch.dtype
    """The dtype of `weight`. It follows half() and to(dtype)."""
    weight_mxfp8: Tensor
    weight_mxfp8_scales: Tensor
    bias_f32: Tensor | None
    """The bias of a convolution with a folded normalization; None for others."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the result of the original module, with its weight and perhaps its activations rounded."""
        if not torch.compiler.is_exporting():
            return self._compute(x)
        if torch.compiler.is_dynamo_compiling():  # strict=True, which traces this line
            with annotate(self.record):
                return self._compute(x)
        with record.traced(self.recipe):
            return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, in the layout of the original module."""
        if torch.compiler.is_compiling():
            return self.dequantized()
        shape: torch.Size = self._as_original(self.weight_mxfp8).shape
        weight: Tensor = LazyWeight(self, shape)
        return weight

    def dequantized(self) -> Tensor:
        """Returns the weight as a plain tensor."""
        codes, dtype = (self.weight_mxfp8, self.weight_mxfp8_scales), self.weight_dtype
        values: Tensor = torch.ops.mxfp8.dequantize(*codes, -1, self.weight_format, not_default(dtype))
        return self._as_original(values)

    def _as_original(self, values: Tensor) -> Tensor:
        """Returns values in the layout of the original module."""
        return values

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Returns the text of the original module, and the formats."""
        return f"{super().extra_repr()}, weight={self.weight_format}, activations={self.activations}"


def not_default(dtype: torch.dtype) -> torch.dtype | None:
    """Returns a dtype as an argument of our ops, whose default is float32: `rewrite` leaves defaults out, too."""
    return None if dtype is torch.float32 else dtype


VALUES: Final = {"unchanged": None, "bfloat16": torch.bfloat16}
"""Activations that are not quantized -> the dtype that they are rounded to."""


class PackedLinear(Packed, nn.Linear):  # type: ignore[override]
    """y = x W^T + b of a packed W."""

    def _compute(self, x: Tensor) -> Tensor:
        # In as few steps as Python allows: a call of a small linear takes tens of microseconds.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        own, form, activations = self._buffers, self.weight_format, self.activations
        elements, scales, bias = own["weight_mxfp8"], own["weight_mxfp8_scales"], self._parameters["bias"]
        if bias is not None and bias.dtype is not torch.float32:
            bias = bias.float()  # type: ignore[assignment]
        y: Tensor
        if activations in VALUES:
            y = _WEIGHT_GEMM(x, elements, scales, bias, form, None, VALUES[activations])
        elif torch.compiler.is_compiling() and not (x.requires_grad and torch.is_grad_enabled()):
            # Two ops, which a compiler shares among linears, and from which an export makes an ONNX file.
            rows, row_scales = _QUANTIZE(x, -1, activations, self.scale_rounding)
            y = _GEMM(rows, row_scales, elements, scales, bias, activations, form, not_default(x.dtype))
        else:
            # The same bits in one op. Gradients pass through the packed weight, so that adapters train.
            y = _LINEAR_PACKED(x, elements, scales, bias, activations, form, "E4M3", self.scale_rounding)
        return y


class PackedTransposed(PackedLinear):
    """The Conv1D of transformers, whose weight is [K, N]."""

    def _as_original(self, values: Tensor) -> Tensor:
        return values.mT

    def extra_repr(self) -> str:
        """Returns the sizes."""
        return f"{self.weight_mxfp8.shape[1]}, {self.weight_mxfp8.shape[0]}"


class PackedEmbedding(Packed, nn.Embedding):  # type: ignore[override]
    """Rows of a packed table."""

    def _compute(self, x: Tensor) -> Tensor:
        codes, dtype = (self.weight_mxfp8, self.weight_mxfp8_scales), not_default(self.weight_dtype)
        y: Tensor = torch.ops.mxfp8.embedding(x, *codes, self.weight_format, dtype)
        return y


class _PackedConv(Packed):
    """A convolution with a packed weight."""

    def _as_original(self, values: Tensor) -> Tensor:
        return values.permute(0, -1, *range(1, values.dim() - 1))

    def _compute(self, x: Tensor) -> Tensor:
        conv: Any = self
        bias: Tensor | None = conv.bias if self.bias_f32 is None else self.bias_f32
        y: Tensor
        if x.dim() == self.weight_mxfp8.dim() - 1:  # without a batch
            y = self._compute(x[None])[0]
            return y
        if self.activations in VALUES:  # the weight alone is packed, and the op is the framework's
            y = conv._conv_forward(x, self.dequantized(), None if bias is None else bias.to(x.dtype))
            return y
        pads = pads_of(conv.padding, conv.kernel_size, conv.dilation)
        # A single number stands for all, and may be the default.
        window = [[*each][:1] if len({*each}) == 1 else [*each] for each in (conv.stride, pads, conv.dilation)]
        codes, dtype = (self.weight_mxfp8, self.weight_mxfp8_scales), not_default(x.dtype)
        bias = bias if bias is None or bias.dtype is torch.float32 else bias.float()
        formats = self.activations, self.scale_rounding
        y = torch.ops.mxfp8.conv(x, *codes, bias, None, self.weight_format, dtype, *window, conv.groups, *formats)
        return y


class PackedConv1d(_PackedConv, nn.Conv1d):  # type: ignore[override]
    """A convolution over one axis with a packed weight."""


class PackedConv2d(_PackedConv, nn.Conv2d):  # type: ignore[override]
    """A convolution over two axes with a packed weight."""


class TrainingLinear(te.Linear):
    """A `te.Linear` that trains by a recipe of its own where no `te.autocast` sets one."""

    recipe: Recipe
    own_recipe: Recipe
    """The recipe for this layer alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out_features] for [..., in_features]; the three products are in MXFP8."""
        with nullcontext() if te.current_recipe() else te.autocast(recipe=self.own_recipe):
            return super().forward(x)


KINDS: Final[dict[type[nn.Module], type[Packed]]] = {
    nn.Linear: PackedLinear,
    te.Linear: PackedLinear,
    TrainingLinear: PackedLinear,
    nn.Embedding: PackedEmbedding,
    nn.Conv1d: PackedConv1d,
    nn.Conv2d: PackedConv2d,
}
"""The modules that can be packed. A subclass may compute another way, so it is none of them."""


def kind_of(module: nn.Module) -> type[Packed] | None:
    """Returns the class of the packed form of a module, or None."""
    kind = type(module)
    # By name: transformers need not be installed.
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return PackedTransposed
    return KINDS.get(kind)


def pack(
    module: nn.Module, codes: Sequence[Tensor], decision: Decision, recipe: Recipe, bias: Tensor | None = None
) -> None:
    """Turns a module that has a kind into its packed form in place.

    Args:
        module: the module.
        codes: its buffers `CODES`.
        decision: the formats.
        recipe: the recipe to record.
        bias: float32 [O], in place of the bias of the module; None keeps it.
    """
    packed: Any = module
    dtype = packed.weight.dtype
    del packed.weight
    for name in ("quantizers", "fp8_meta"):  # te.Linear has them
        packed.__dict__.pop(name, None)
    packed.__class__ = kind_of(module)
    for name, code in zip(CODES, codes, strict=True):
        packed.register_buffer(name, code)
    packed.register_buffer("bias_f32", bias)
    if bias is not None:
        packed.bias = None
    packed.recipe, packed.weight_dtype = recipe, dtype
    packed.record = provenance.entries(recipe.to_record())
    for name in ("weight_format", "activations", "scale_rounding"):
        setattr(packed, name, getattr(decision, name))


def train(linear: nn.Module, decision: Decision, recipe: Recipe) -> None:
    """Turns an nn.Linear into a `TrainingLinear` in place."""
    layer: Any = linear
    layer.__class__ = TrainingLinear
    # The recipe chose this layer already; its patterns match paths of the model.
    changes = {"rules": (), "include": (), "exclude": (), "scale_rounding": decision.scale_rounding}
    layer.recipe, layer.own_recipe = recipe, recipe.model_copy(update=changes)
    layer.quantizers, layer.fp8_meta = {"scaling_fwd": [], "scaling_bwd": []}, {}
