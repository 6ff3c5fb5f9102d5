"""Generates with onnxruntime-genai from a folder, and checks every token against a loop of our own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai

from mxfp8_ops import ort

PROMPT, TOKENS = "The execution of a with statement proceeds as follows:", 128


def with_genai(model: genai.Model, prompt: list[int]) -> list[int]:
    """Returns the tokens that onnxruntime-genai picks, the likeliest each time."""
    settings = genai.GeneratorParams(model)
    settings.set_search_options(do_sample=False, max_length=len(prompt) + TOKENS, min_length=len(prompt) + TOKENS)
    generator = genai.Generator(model, settings)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


def with_onnxruntime(prompt: list[int], end: int) -> list[int]:
    """Returns the same from a session with our library, fed with its own cache."""
    session = ort.session(folder / decoder["filename"])
    outputs = [value.name for value in session.get_outputs()]
    wanted = [value.name for value in session.get_inputs()]
    nothing = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)
    cache = {name: nothing for name in wanted if name.startswith("past_key_values")}
    tokens, length, found = prompt, 0, list[int]()
    for _ in range(TOKENS):
        length += len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length - len(tokens), length)[None],
        }
        logits, *grown = session.run(outputs, {k: v for k, v in feeds.items() if k in wanted} | cache)
        cache = {name.replace("present", "past_key_values"): v for name, v in zip(outputs[1:], grown, strict=True)}
        scores = logits[0, -1]
        scores[end] = -np.inf  # min_length: the end comes after TOKENS tokens
        tokens = [int(scores.argmax())]
        found += tokens
    return found


folder = Path(sys.argv[1]).resolve()
decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
model = genai.Model(str(folder))
maps, library = Path("/proc/self/maps"), folder / decoder["session_options"]["custom_ops_library"]
if maps.exists() and str(library) not in maps.read_text():
    sys.exit(f"onnxruntime-genai has not loaded {library}: it runs the function bodies, slowly")
tokenizer = genai.Tokenizer(model)
prompt = [int(token) for token in tokenizer.encode(PROMPT)]
ours = with_onnxruntime(prompt, int(tokenizer.eos_token_ids[0]))
theirs = with_genai(model, prompt)
print(PROMPT, repr(tokenizer.decode(np.array(theirs, np.int32)))[:200])
same = sum(a == b for a, b in zip(ours, theirs, strict=True))
print(f"{same} of {TOKENS} tokens of onnxruntime-genai, {len(set(theirs))} different ones, are those of our own loop")
if same < TOKENS:
    sys.exit(f"they differ: {theirs} and {ours}")
