"""llama.cpp with Q8_0 weights as a peer; see peers.py.

Needs `pip install llama-cpp-python gguf`, best in a venv of its own; it is compiled there, for that processor, which
takes six minutes of processor time. Its AMX products crash where GCC 12 compiled them, whose `_tile_loadconfig` reads
8 of the 64 bytes for all the optimizer knows (version 0.3.36): CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-fno-dse -fno-tree-dse'".

Settings: "model", a GGUF file, which is made of "weights" (an .npz of a transformers Llama's state) and "config" if it
does not exist; "threads".
"""

from __future__ import annotations

import os

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when the library loads: idle threads must not spin in another's turn

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as api
import numpy as np
from peers import Feeds, serve

CONTEXT = 1024
"""Tokens that there is room for."""
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""The names of a layer's modules in transformers and in GGUF."""
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Returns what GGUF calls a weight of transformers' Llama.

    >>> gguf_name("model.layers.3.mlp.up_proj.weight")
    'blk.3.ffn_up.weight'
    """
    module = name.removesuffix(".weight")
    if module in OTHERS:
        return f"{OTHERS[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns a query's or key's weight with the halves of each head's rows interleaved, as llama.cpp rotates them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, weights: Path, config: dict[str, Any]) -> None:
    """Writes the model, its matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    q8 = gguf.GGMLQuantizationType.Q8_0
    with np.load(weights) as tensors:
        for name in tensors.files:
            value = tensors[name]
            projection = name.split(".")[-2]
            if projection in heads:
                value = interleaved(value, heads[projection])
            if value.ndim == 1:
                writer.add_tensor(gguf_name(name), value)
            else:
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A model, the tokens whose keys and values are cached, and those that a run adds."""

    version = api.__version__

    def __init__(self, settings: dict[str, Any]) -> None:
        path = Path(settings["model"])
        if not path.exists():
            write_gguf(path, Path(settings["weights"]), settings["config"])
        api.llama_backend_init()
        model = api.llama_load_model_from_file(str(path).encode(), api.llama_model_default_params())
        wanted = api.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = CONTEXT, CONTEXT, CONTEXT
        wanted.n_threads = wanted.n_threads_batch = settings["threads"]
        self._context = api.llama_new_context_with_model(model, wanted)
        self._vocabulary: int = settings["config"]["vocab_size"]
        self._cached = 0
        self._ids = np.zeros(0, np.int32)

    def feed(self, feeds: Feeds) -> None:
        """Takes "input_ids", after reading "past_ids" into the cache."""
        past = feeds["past_ids"].astype(np.int32).ravel()
        self._ids, self._cached = feeds["input_ids"].astype(np.int32).ravel(), 0
        if past.size:
            self._decode(past)
        self._cached = past.size

    def run(self) -> None:
        """Returns the cache to what it was, and reads the ids."""
        self._decode(self._ids)

    def output(self) -> np.ndarray:
        """Returns the last token's logits."""
        logits = api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self._vocabulary,)).copy()

    def _decode(self, ids: np.ndarray) -> None:
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), 0, self._cached, -1)
        tokens = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        if api.llama_decode(self._context, api.llama_batch_get_one(tokens, ids.size)):
            raise RuntimeError("llama.cpp could not decode")


if __name__ == "__main__":
    serve(LlamaCpp)
