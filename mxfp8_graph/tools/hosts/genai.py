"""Folder for onnxruntime-genai: genai_config.json with the path of the native library, the decoder, its tokenizer.

The library has to lie beside genai_config.json. Fields: https://onnxruntime.ai/docs/genai/reference/config.html.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import onnx_ir as ir

from mxfp8_graph.tools.hosts.layout import MODEL, Description, Layout, Request
from mxfp8_ops.errors import ContractError

CONFIG: Final = "genai_config.json"

_INPUTS: Final = ("input_ids", "attention_mask", "position_ids")
_KINDS: Final = ("key", "value")


def layout(request: Request) -> Layout:
    """Returns the folder of a decoder with a cache of keys and values as inputs and outputs.

    The configuration is the description's genai_config.json, which onnxruntime-genai's model builder writes, with our
    library added; without one it is made of the model's config.json.

    Raises:
        ContractError: there is neither, the model has no such cache, or the configuration is not of one decoder, or
            does not say of which architecture.
    """
    has_config = request.config is not None and (request.config / CONFIG).is_file()
    main = CONFIG if has_config else "config.json"
    described = Description(request.config, request.name, main, "genai_config.json or config.json")
    config = _builder_config(described) if has_config else _decoder_config(request, described)
    decoder = config["model"]["decoder"]
    decoder["filename"] = MODEL
    # Options of the model builder, such as providers, are kept.
    options = decoder.get("session_options") or {}
    if not isinstance(options, dict):
        what = f"session_options is {options!r}"
        raise ContractError(described.path / CONFIG, what, expected="an object", advice="copy the file again")
    decoder["session_options"] = {**options, "custom_ops_library": request.library}
    files = described.files()
    files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return Layout(MODEL, request.library, files)


def _builder_config(described: Description) -> dict[str, Any]:
    config: dict[str, Any] = described.json(CONFIG, dict)
    model = config.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    # A pipeline has a session for each of its models, and only a user knows which of them is this one.
    if not isinstance(decoder, dict) or "pipeline" in decoder:
        what, expected = "has no single decoder", "model.decoder, without a pipeline"
        advice = "add custom_ops_library to the session options of each model by hand"
        raise ContractError(described.path / CONFIG, what, expected=expected, advice=advice)
    _type(config["model"], "type", str(described.path / CONFIG))
    return config


def _decoder_config(request: Request, described: Description) -> dict[str, Any]:
    """Returns a configuration made from transformers' config.json and the names of the model's inputs and outputs."""
    where = str(described.path / "config.json")
    settings = {name: value for name, value in described.json("config.json", dict).items() if value is not None}
    length, end = _number(settings, "max_position_embeddings", where), settings.get("eos_token_id")
    # A model without a padding token pads with its first end token.
    padding = settings.get("pad_token_id", end[0] if isinstance(end, list) and end else end)
    tokens = {"bos_token_id": settings.get("bos_token_id"), "eos_token_id": end, "pad_token_id": padding}
    model = {
        "type": _type(settings, "model_type", where),
        "context_length": length,
        "vocab_size": _number(settings, "vocab_size", where),
        **{name: token for name, token in tokens.items() if token is not None},
        "decoder": _decoder(request, settings, where),
    }
    return {"model": model, "search": {"max_length": length, "past_present_share_buffer": False}}


def _decoder(request: Request, settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the sizes of the decoder and the names of its inputs and outputs."""
    layers, hidden, heads = (
        _number(settings, name, where) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    cached_heads = _number({"num_key_value_heads": heads, **settings}, "num_key_value_heads", where)
    head_size = _number({"head_dim": hidden // heads, **settings}, "head_dim", where)
    graph = request.graph
    inputs, outputs = {str(value.name): value for value in graph.inputs}, [str(value.name) for value in graph.outputs]
    ports: dict[str, dict[str, str]] = {
        "inputs": {name: name for name in _INPUTS if name in inputs},
        "outputs": {"logits": "logits" if "logits" in outputs else outputs[0]},
    }
    for kind in _KINDS:
        ports["inputs"][f"past_{kind}_names"] = past = _pattern(inputs, kind, layers, request)
        ports["outputs"][f"present_{kind}_names"] = _pattern(outputs, kind, layers, request)
        _check_cache(inputs[past.replace("%d", "0")], cached_heads, head_size, where)
    return {
        "head_size": head_size,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": cached_heads,
        **ports,
    }


def _type(config: dict[str, Any], name: str, where: str) -> str:
    """Returns the name of the architecture, which onnxruntime-genai requires to select its code."""
    kind = config.get(name)
    if not isinstance(kind, str) or not kind:
        expected, advice = "the name of an architecture, as llama", "add it"
        raise ContractError(where, f"{name} is {kind!r}", expected=expected, advice=advice)
    return kind


def _number(config: dict[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        advice = "pass the folder that onnxruntime-genai's model builder wrote"
        raise ContractError(where, f"{name} is {value!r}", expected="a positive number", advice=advice)
    return value


def _pattern(names: Iterable[str], kind: str, layers: int, request: Request) -> str:
    """Returns the pattern of the names of all layers' keys, or values, with %d for the layer."""
    numbers_by_pattern: dict[str, set[int]] = {}
    for name in names:
        last = max(_KINDS, key=name.rfind)  # past_key_values.0.value is a value
        if kind == last and kind in name and (match := re.search(r"0|[1-9][0-9]*", name)):
            pattern = f"{name[: match.start()]}%d{name[match.end() :]}"
            numbers_by_pattern.setdefault(pattern, set()).add(int(match[0]))
    for pattern, numbers in numbers_by_pattern.items():
        # Other inputs have numbers too: the pattern is the one that has exactly the numbers of the layers.
        if len(numbers) == layers and max(numbers) == layers - 1:
            return pattern
    what = f"no inputs or outputs that name the {kind}s of layers 0 to {layers - 1}"
    expected = "a decoder with its cache as inputs and outputs, past_key_values.0.key and so on"
    raise ContractError(request.name, what, expected=expected, advice="export the model with its cache")


def _check_cache(value: ir.Value, heads: int, size: int, where: str) -> None:
    """Raises ContractError if a fixed size of a cache input [batch, heads, past, size] is another one."""
    dims = [dim if isinstance(dim, int) else dim.value or "?" for dim in value.shape or ()]
    if len(dims) != 4 or any(isinstance(dim, int) and dim != n for dim, n in ((dims[1], heads), (dims[3], size))):
        what = f"input {value.name!r} of the model has the shape {dims}"
        expected = f"[batch, {heads}, past, {size}], by num_key_value_heads and head_dim"
        raise ContractError(where, what, expected=expected, advice="pass the configuration of this model")
