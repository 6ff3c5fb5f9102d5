"""Builds a module from config.json, whose weights have shapes and no values, and exports it.

Parameters are CPU tensors whose memory is never read or written, so the system never allocates it. Unlike meta tensors
they can be exported together with real inputs, and unlike fake tensors they need no mode. Buffers that the module
computes in its constructor (frequencies of rotary embeddings, position ids) have values.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_pass.graph import NAME_SCOPES
from mxfp8_ops.errors import ContractError

_DYNAMIC: Final = torch.export.Dim.DYNAMIC
"""A dynamic axis, with a range that torch infers: an encoder's table of positions limits it."""

_OURS: Final = "model."
"""Prefix of the model's names in the wrapper of `Call`."""

_BATCH, _TOKENS, _PAST = 2, 3, 5
"""Sizes of the sample inputs; all different, and none 0 or 1, which torch.export treats as constants."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a model with plain tensors as inputs and outputs."""

    module: nn.Module
    """Module that calls the model, its submodule `model`."""
    inputs: tuple[Any, ...]
    dims: tuple[Any, ...]
    """Dynamic axes of `inputs`, as torch.export takes them."""
    input_names: list[str]
    axes: Sequence[Mapping[int, str]]
    """Names of the dynamic axes of each of `input_names`."""
    output_names: list[str]
    """Names of the outputs; complete after a call of the module."""


@contextlib.contextmanager
def _explained(where: object, what: str, expected: str, advice: str = "export it yourself") -> Iterator[None]:
    """Turns an exception of transformers or torch inside of the block, of any class, into a ContractError."""
    try:
        yield
    except Exception as error:
        raise ContractError(where, f"{what}: {first_line(error)}", expected=expected, advice=advice) from error


def build(folder: Path, dtype: str, device: Literal["cpu", "meta"]) -> Any:
    """Returns the model that config.json in a folder describes, in eval mode, without values for its parameters.

    On "meta" it takes no memory; on "cpu" its buffers have values. No code of the folder is run.

    Raises:
        ContractError: transformers does not know this kind of model, the config names none of its classes, or the
            constructor of the class fails.
    """
    import transformers

    where = folder / "config.json"
    what, expected = f"transformers {transformers.__version__} cannot read it", "a model that it knows"
    with _offline(), _explained(where, what, f"{expected} without code of the folder, which is never run"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # so that the module is the one before quantization
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    cls = getattr(transformers, str(name), None)
    if not (inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)):
        what, expected = f"architectures: {config.architectures}", "a model class of transformers"
        raise ContractError(where, what, expected=expected, advice="correct the config")
    config._attn_implementation = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    config.dtype, default = getattr(torch, dtype), torch.get_default_dtype()
    problem = _explained(where, f"{name} cannot be made of it", "a valid config", "correct it")
    try:
        # Modules allocate in the default dtype. It is global, so it is restored below.
        torch.set_default_dtype(config.dtype)
        with _offline(), problem, torch.device(device), _Unfilled(), torch.no_grad():
            model: Any = cls(config)
    finally:
        torch.set_default_dtype(default)
    if device == "cpu":
        _untouched(model)
    return model.requires_grad_(False).eval()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
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


def check_callable(model: Any, folder: Path) -> None:
    """Raises ContractError if a model is neither a decoder nor an encoder."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters or getattr(model.config, "is_encoder_decoder", False):
        what = f"{type(model).__name__} is called with {', '.join(list(parameters)[:4])}, ..."
        expected = "a decoder or an encoder of tokens"
        raise ContractError(folder / "config.json", what, expected=expected, advice="export it yourself")


def call_of(model: Any) -> Call:
    """Returns the call of a model: of a decoder, with its cache as inputs and outputs, or of an encoder."""
    parameters = inspect.signature(model.forward).parameters
    decoder = "past_key_values" in parameters and type(model).__name__.endswith("ForCausalLM")
    return _decoder(model, parameters) if decoder else _encoder(model, parameters)


def _encoder(model: Any, parameters: Mapping[str, Any]) -> Call:
    names = ["input_ids", "attention_mask"]
    # A table with one type has no information, so the input is left to its default.
    if "token_type_ids" in parameters and getattr(model.config, "type_vocab_size", 0) > 1:
        names.append("token_type_ids")
    results: list[str] = []
    module = _Encoder(model, names, results)
    axes = {0: _DYNAMIC, 1: _DYNAMIC}
    return Call(
        module=module,
        # A tensor for each, since torch.export makes one input of one tensor.
        inputs=tuple(torch.ones(_BATCH, _TOKENS, dtype=torch.int64) for _ in names),
        dims=((axes,) * len(names),),
        input_names=names,
        axes=[{0: "batch", 1: "sequence"}] * len(names),
        output_names=results,
    )


def _decoder(model: Any, parameters: Mapping[str, Any]) -> Call:
    text = model.config.get_text_config()
    layers = text.num_hidden_layers
    # Without these two fields each head has its own keys, with an equal share of the hidden size.
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = next(model.parameters()).dtype
    cache = [torch.zeros(_BATCH, heads, _PAST, size, dtype=dtype) for _ in range(2 * layers)]
    past = [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    present = [name.replace("past_key_values", "present") for name in past]
    names = ["input_ids", "attention_mask", *past]
    batch, tokens, cached = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    mask = torch.ones(_BATCH, _PAST + _TOKENS, dtype=torch.int64)
    return Call(
        module=_Decoder(model, positions="position_ids" in parameters),
        inputs=(torch.ones(_BATCH, _TOKENS, dtype=torch.int64), mask, cache),
        # By name, so that the caches of all layers have one length; the mask has the length of cache and tokens.
        dims=({0: batch, 1: tokens}, {0: batch, 1: _DYNAMIC}, [{0: batch, 2: cached}] * len(past)),
        input_names=names,
        axes=[{0: "batch", 1: "sequence"}, {0: "batch", 1: "total"}, *[{0: "batch", 2: "past"}] * len(past)],
        output_names=["logits", *present],
    )


def export(call: Call, opset: int, where: str) -> ir.Model:
    """Returns the graph of a model, with its parameters among the inputs by the names that the model gives them.

    As initializers they would need values: constants are folded, and equal initializers are merged.

    Raises:
        ContractError: torch cannot export the model.
    """
    from mxfp8_graph.onnx_export import exporter  # export_checkpoint does without onnxscript

    what, expected = f"torch {torch.__version__} cannot export it", "a model without control flow on values"
    with _explained(where, what, expected), exporter.quiet(), torch.no_grad():
        program = torch.export.export(call.module, call.inputs, dynamic_shapes=call.dims, strict=False)
    # With duplicates: a tied tensor may be exported under either of its names.
    parameters = set(call.module.state_dict())

    def lift(exported: torch.onnx.ONNXProgram) -> None:
        model = exported.model
        for name in [name for name in model.graph.initializers if name in parameters]:  # in the same order each time
            value = model.graph.initializers.pop(name)
            # Without a value the initializer becomes an input, which no pass folds.
            value.const_value = None
            value.name = name.removeprefix(_OURS)
            model.graph.inputs.append(value)

    # For an exported program, torch.onnx takes only the names of axes from `dynamic_shapes`.
    names = {"input_names": call.input_names, "output_names": call.output_names, "dynamic_shapes": tuple(call.axes)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "# The axis name: ", UserWarning)  # about axes that share a size and a name
        model = exporter.export(program, opset, names, lift)
    for node in model.graph:
        # Module paths as in the model itself, without the wrapper.
        if NAME_SCOPES in node.metadata_props:
            node.metadata_props[NAME_SCOPES] = node.metadata_props[NAME_SCOPES].replace(f"'{_OURS}", "'")
    return model


class _Encoder(nn.Module):
    """Calls an encoder with tensors, and returns the tensors of its result."""

    def __init__(self, model: nn.Module, inputs: list[str], results: list[str]) -> None:
        """`results` receives the names of the outputs, since torch.export reverts changes of attributes."""
        super().__init__()
        self.model = model
        self._inputs, self._record = inputs, partial(results.__setitem__, slice(None))

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
        present = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (result.logits, *present)


class _Unfilled(TorchFunctionMode):
    """Allocates parameters (torch.empty) as meta tensors, which no initialization fills."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`."""
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def _untouched(model: nn.Module) -> None:
    """Replaces the meta parameters of a model by uninitialized CPU tensors; tied ones stay tied."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                empty = nn.Parameter(torch.empty_like(tensor, device="cpu"), requires_grad=False)
                module._parameters[name] = parameters.setdefault(id(tensor), empty)
