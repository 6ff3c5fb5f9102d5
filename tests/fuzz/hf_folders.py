"""Hugging Face folders, mutated: a model that can be built and exported, or a documented error; and no request.

An input is config.json, a line feed, and the model.safetensors that belongs to it, with data of any bytes.
"""

from __future__ import annotations

import functools
import json
import random
import socket
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import AutoConfig

from mxfp8_graph.tools.from_hf import from_hf, graph
from mxfp8_ops.errors import Mxfp8Error

from . import safetensors_files

_SIZES: Final = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 40}
_KINDS: Final = (
    ("BertModel", {"num_hidden_layers": 1, "max_position_embeddings": 8}),
    ("LlamaForCausalLM", {"num_hidden_layers": 2, "num_key_value_heads": 1}),
    ("GPT2LMHeadModel", {"n_layer": 1, "n_positions": 16, "n_embd": 32, "n_head": 2}),
    ("Qwen3MoeForCausalLM", {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
)
_NUMBERS: Final = (
    *(0, -1, 1, 2, 3, 5, 8, 16, 31, 32, 63, 64, 100, 1000, 4096, 65_536, 10**5, 2**18, 1e3),
    *(10**6, 2**31, 2**40, 2**63, 10**30, 1e6, 1e300),
)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, "", "x", "eager", "bert", "llama", "gemma3", "deepseek_v3", "detr", "mamba", "t5", "clip", 0.5),
    *([], {}, [1], [2**31], {"rope_type": "yarn", "factor": 2}, {"a": 10**9}, ["full_attention"] * 3, float("inf")),
    *("microsoft/resnet-50", ["BertForMaskedLM"]),
)
_KEYS: Final = (
    *("backbone", "use_pretrained_backbone", "use_timm_backbone", "model_type", "architectures", "num_labels"),
    *("layer_types", "num_key_value_heads", "head_dim", "rope_parameters", "attn_implementation", "is_decoder"),
    *("text_config", "vision_config", "tie_word_embeddings", "torch_dtype", "quantization_config", "sliding_window"),
    *("num_local_experts", "max_position_embeddings", "sinusoidal_pos_embds", "pruned_heads", "auto_map"),
)


class _ReachedError(Exception):
    """The graph would be exported now."""


@functools.cache
def _seeds() -> list[bytes]:
    return [_seed(name, own) for name, own in _KINDS]


def _seed(name: str, own: dict[str, Any]) -> bytes:
    """Returns a folder: parameters of two dimensions are MXFP8, but embeddings and heads."""
    import torch

    cls = getattr(transformers, name)
    config = cls.config_class(**_SIZES, **own)
    with torch.device("meta"):
        shapes = {key: tuple(each.shape) for key, each in cls(config).named_parameters()}
    header: dict[str, Any] = {}
    end = 0

    def add(key: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for key, shape in shapes.items():
        packed = len(shape) == 2 and not any(part in key for part in ("embed", "lm_head", "wte", "wpe", "pooler"))
        count = functools.reduce(int.__mul__, shape)
        add(key, "F8_E4M3" if packed else "F32", shape, count * (1 if packed else 4))
        if packed:
            blocks = (shape[0], -(-shape[1] // 32))
            add(f"{key}_scale", "U8", blocks, blocks[0] * blocks[1])
    settings = {key: value for key, value in config.to_diff_dict().items() if value is not None}
    settings |= {"architectures": [name], "model_type": config.model_type}
    return json.dumps(settings).encode() + b"\n" + safetensors_files.file(header, end)


def seeds() -> list[bytes]:
    """Returns an encoder and three decoders, one of them with experts."""
    return _seeds()


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns `data` with a value of its config exchanged or added, or its checkpoint changed."""
    text, _, checkpoint = data.partition(b"\n")
    if random.random() < 0.3:
        return text + b"\n" + safetensors_files.mutate(checkpoint, random)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = {}
    if not isinstance(config, dict) or random.random() < 0.05:
        return safetensors_files.mutate(text, random).replace(b"\n", b" ") + b"\n" + checkpoint
    known = [key for key, value in config.items() if isinstance(value, int)]
    for _ in range(random.randint(1, 3)):
        if known and random.random() < 0.5:
            config[random.choice(known)] = random.choice(_NUMBERS)
        else:
            key = random.choice((*config, *_KEYS, *_other_keys(config)))
            config[key] = random.choice((*_NUMBERS, *_VALUES))
    if random.random() < 0.1:
        name, kind = random.choice(_kinds())
        config |= {"model_type": kind, "architectures": [name]}
    return json.dumps(config).encode() + b"\n" + checkpoint


@functools.cache
def _kinds() -> list[tuple[str, str]]:
    """Returns the decoders and encoders of transformers, each with its model_type."""
    from transformers.models.auto import modeling_auto

    named = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    pairs = [(name, kind) for mapping in named for kind, name in mapping.items()]
    return [(name if isinstance(name, str) else name[0], kind) for name, kind in pairs]


@functools.cache
def _keys_of(kind: str) -> tuple[str, ...]:
    try:
        return tuple(AutoConfig.for_model(kind).to_dict())
    except Exception:  # whatever a kind lacks
        return ()


def _other_keys(config: dict[str, Any]) -> tuple[str, ...]:
    kind = config.get("model_type")
    return _keys_of(kind) if isinstance(kind, str) else ()


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a request")


def _export(*_: Any, **__: Any) -> Any:
    raise _ReachedError


socket.getaddrinfo = _refuse
graph.export = _export


def check(data: bytes, folder: Path) -> None:
    """Raises unless the model of the folder gets as far as its export, or is refused with a documented error."""
    text, _, checkpoint = data.partition(b"\n")
    (folder / "config.json").write_bytes(text)
    (folder / "model.safetensors").write_bytes(checkpoint)
    try:
        from_hf(folder)
    except _ReachedError:
        return
    except Mxfp8Error as error:
        error.message()
