"""Builds a module from config.json whose weights have shapes and no values, and describes how to call it.

Parameters are CPU tensors whose memory is never read or written, so the system never allocates it. Unlike meta tensors
they can be exported together with real inputs, and unlike fake ones they need no mode. Buffers that the module computes
in its constructor (frequencies of rotary embeddings, position ids) are real.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mxfp8_graph.naming import first_line
from mxfp8_graph.tools.from_hf.limits import Limits
from mxfp8_ops.errors import ContractError

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_DYNAMIC: Final = torch.export.Dim.DYNAMIC
"""A dynamic axis, with a range that torch infers: an encoder's table of positions limits it."""

_BATCH, _TOKENS, _PAST = 2, 3, 5
"""Sizes of the sample inputs; all different, none 0 or 1, which torch.export would take for constants."""
_LARGEST_CACHE: Final = 1 << 23
"""Four times that of the largest models; the sample takes 0.7 GB then."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a model with plain tensors as inputs and outputs."""

    module: nn.Module
    """Calls the model, which is its submodule `model`."""
    inputs: tuple[Any, ...]
    dims: tuple[Any, ...]
    """Dynamic axes of `inputs`, as torch.export takes them."""
    input_names: list[str]
    axis_names: Mapping[str, tuple[str, ...]]
    """Names of the dynamic axes of each input, "" for fixed axes."""
    output_names: Callable[[], list[str]]
    """Returns the names of the outputs; valid after a call of the module."""


def load_config(folder: Path) -> Any:
    """Returns the config of the model in a folder; no code of the folder is run.

    Raises:
        ContractError: transformers does not know this kind of model.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for a config that it does not expect
        what = f"transformers {transformers.__version__} cannot read it: {first_line(error)}"
        expected = "a model that transformers knows without code of the folder, which is never run"
        raise ContractError(folder / "config.json", what, expected=expected, advice="export it yourself") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the module is that of the model before it was quantized
    return config


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Makes huggingface_hub refuse requests inside of the block: transformers fetches a "backbone" that a config names.

    The environment variable would come too late: it is read when the hub is imported.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def build(config: Any, folder: Path, dtype: str, limits: Limits, device: Literal["cpu", "meta"]) -> nn.Module:
    """Returns the model that a config describes, in eval mode, without values for its parameters.

    Nothing that it holds takes memory on "meta", so build it there first; on "cpu" its buffers have values.

    Raises:
        ContractError: the config names no class of transformers, or the class cannot be made of it; or it asks for more
            than there can be.
    """
    import transformers

    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, str(name), None)
    if not (inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)):
        what, expected = f"architectures: {config.architectures}", "a model class of transformers"
        raise ContractError(folder / "config.json", what, expected=expected, advice="correct the config")
    config._attn_implementation = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    config.dtype = DTYPES[dtype]
    default = torch.get_default_dtype()
    try:
        # Modules allocate in the default dtype. It is global, so it is restored below.
        torch.set_default_dtype(DTYPES[dtype])
        with torch.device(device), _Unfilled(limits), torch.no_grad():
            model: nn.Module = cls(config)
        if device == "cpu":
            _untouched(model)
    except ContractError:
        raise
    except Exception as error:
        what = f"{name} cannot be made of it: {first_line(error)}"
        raise ContractError(folder / "config.json", what, expected="a valid config", advice="correct it") from error
    finally:
        torch.set_default_dtype(default)
    limits.check_buffers(model)
    model.requires_grad_(False)
    model.train(False)
    return model


def check_callable(model: nn.Module, config: Any, folder: Path) -> None:
    """Raises ContractError if a model is neither a decoder nor an encoder."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters or getattr(config, "is_encoder_decoder", False):
        what = f"{type(model).__name__} is called with {', '.join(list(parameters)[:4])}, ..."
        expected = "a decoder or an encoder of tokens"
        raise ContractError(folder / "config.json", what, expected=expected, advice="export it yourself")


def call_of(model: nn.Module, config: Any) -> Call:
    """Returns how to call a model: a decoder with its cache as inputs and outputs, or an encoder."""
    parameters = inspect.signature(model.forward).parameters
    decoder = "past_key_values" in parameters and type(model).__name__.endswith("ForCausalLM")
    return _decoder(model, config, parameters) if decoder else _encoder(model, config, parameters)


def _encoder(model: nn.Module, config: Any, parameters: Mapping[str, Any]) -> Call:
    names = ["input_ids", "attention_mask"]
    # A table with one type has no information, so the input is left to its default.
    if "token_type_ids" in parameters and getattr(config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    results: list[str] = []
    module = _Encoder(model, names, results)
    axes = {0: _DYNAMIC, 1: _DYNAMIC}
    return Call(
        module=module,
        inputs=tuple(torch.ones(_BATCH, _TOKENS, dtype=torch.int64) for _ in names),  # one tensor would be one input
        dims=((axes,) * len(names),),
        input_names=names,
        axis_names=dict.fromkeys(names, ("batch", "sequence")),
        output_names=lambda: results,
    )


def _decoder(model: nn.Module, config: Any, parameters: Mapping[str, Any]) -> Call:
    text = config.get_text_config()
    layers = text.num_hidden_layers
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # The sample cache is real memory, and its size is in numbers of the config.
    if layers * heads * size > _LARGEST_CACHE:
        what = f"a cache of {layers} x {heads} x {size} values for each token"
        raise ContractError(
            type(model).__name__, what, expected=f"{_LARGEST_CACHE} at most", advice="correct the config"
        )
    cache = [torch.zeros(_BATCH, heads, _PAST, size, dtype=torch.get_default_dtype()) for _ in range(2 * layers)]
    cache = [each.to(next(model.parameters()).dtype) for each in cache]
    past = [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    present = [name.replace("past_key_values", "present") for name in past]
    names = ["input_ids", "attention_mask", *past]
    batch, tokens, cached = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    mask = torch.ones(_BATCH, _PAST + _TOKENS, dtype=torch.int64)
    return Call(
        module=_Decoder(model, positions="position_ids" in parameters),
        inputs=(torch.ones(_BATCH, _TOKENS, dtype=torch.int64), mask, cache),
        # By name, so that the caches of all layers have one length; the mask must have that of cache and tokens.
        dims=({0: batch, 1: tokens}, {0: batch, 1: _DYNAMIC}, [{0: batch, 2: cached}] * len(past)),
        input_names=names,
        axis_names={"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "total")}
        | dict.fromkeys(past, ("batch", "", "past", "")),
        output_names=lambda: ["logits", *present],
    )


class _Encoder(nn.Module):
    """Calls an encoder with tensors; gives those of its results."""

    def __init__(self, model: nn.Module, inputs: list[str], results: list[str]) -> None:
        """`results` gets the names of the results; torch.export undoes changes of attributes."""
        super().__init__()
        self.model = model
        self._inputs = inputs

        def record(names: list[str]) -> None:
            results[:] = names

        self._record = record

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.model(**dict(zip(self._inputs, tensors, strict=True)), return_dict=True)
        outputs = {name: value for name, value in result.items() if isinstance(value, Tensor)}
        self._record(list(outputs))
        return tuple(outputs.values())


class _Decoder(nn.Module):
    """Calls a decoder with its cache as tensors [batch, heads, past, size], key and value of each layer in turn.

    Positions are counted in the attention mask, so that sequences of a batch may be padded on the left.
    """

    def __init__(self, model: nn.Module, *, positions: bool) -> None:
        super().__init__()
        self.model = model
        self._positions = positions

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        extra = {}
        if self._positions:
            # Padding on the left gets position 0; it is masked, so the value does not matter.
            counted = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            newest = torch.arange(input_ids.shape[1]) + past[0].shape[2]
            extra["position_ids"] = counted.index_select(1, newest)
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **extra
        )
        grown = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (result.logits, *grown)


class _Unfilled(TorchFunctionMode):
    """Allocates parameters (torch.empty) as meta tensors, and checks their number and size."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits
        self._count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`."""
        kwargs = kwargs or {}
        if func is not torch.empty:
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "device": "meta"})
        self._limits.check_parameter(result, self._count)
        self._count += 1
        return result


def _untouched(model: nn.Module) -> None:
    """Replaces the meta parameters of a model by uninitialized CPU tensors; tied ones stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                key = id(tensor)
                parameters.setdefault(
                    key, nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), requires_grad=False)
                )
                module._parameters[name] = parameters[key]
