"""Claim: search with packed weights finds what search in float32 finds, in less time than other 8-bit weights take.

The task is one that needs no data set: find the docstring of a function by the function's name ("re split": "Split the
source string by the occurrences of the pattern"). The real all-MiniLM-L6-v2 embeds names and docstrings of the standard
library, NumPy, SciPy, scikit-learn and PyTorch, sorted by length, 32 a batch. "top 10 kept" is the share of the ten
nearest docstrings in float32 that stay among the ten nearest; nDCG@10 and top-1 judge against the right docstring.

Contenders take turns batch by batch. Seconds are those of the sessions, without the tokenizer.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from contenders import Field, Runner
from exports import export_minilm
from harness import publish
from minilm import model_folder
from peers import Feeds
from settings import BEST, BITS8, INT8
from tokenizers import Tokenizer

MODULES = """
    torch torch.nn torch.nn.functional torch.linalg torch.fft torch.special torch.optim torch.utils.data numpy
    numpy.linalg numpy.fft numpy.random scipy.stats scipy.optimize scipy.signal scipy.linalg scipy.sparse scipy.spatial
    scipy.interpolate scipy.special sklearn.metrics sklearn.linear_model sklearn.cluster sklearn.preprocessing
    sklearn.decomposition sklearn.ensemble sklearn.model_selection sklearn.feature_extraction.text sklearn.svm
    sklearn.tree sklearn.neighbors os os.path shutil json re math statistics itertools functools collections datetime
    random string textwrap subprocess threading asyncio socket ssl email urllib.parse http.client zipfile tarfile gzip
    csv sqlite3 logging argparse pathlib tempfile glob inspect ast typing unittest decimal fractions heapq bisect pickle
    struct codecs locale calendar time signal ctypes multiprocessing concurrent.futures contextlib copy difflib hashlib
    hmac secrets html ipaddress mimetypes platform pprint queue selectors shlex stat traceback uuid weakref
    xml.etree.ElementTree
"""
RECIPES = ("mxint8", "mxint8-bf16", "mxfp8", "mxfp8-bf16")
BATCH, TOKENS, NEAREST = 32, 96, 10
LONGEST_DOCSTRING = 400
"""Characters: about `TOKENS` tokens."""


def functions() -> Iterator[tuple[str, str]]:
    """Yields each public function's and class's name in words, and its docstring without the name."""
    known = set()
    for module in map(importlib.import_module, MODULES.split()):
        for name in sorted(dir(module)):
            with warnings.catch_warnings():  # names that a library will remove
                warnings.simplefilter("ignore")
                value = getattr(module, name, None)
            text = " ".join((inspect.getdoc(value) or "").split()) if callable(value) else ""
            words = re.sub("_", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).lower()
            # Shorter docstrings say too little, and one-letter names nothing.
            if name.startswith("_") or name in known or len(text) < 80 or len(words) < 5:
                continue
            known.add(name)
            text = re.sub(re.escape(name), "it", text, flags=re.IGNORECASE)
            yield f"{module.__name__.split('.')[-1]} {words}", text[:LONGEST_DOCSTRING]


def tokenizer() -> Tokenizer:
    """Returns the model's tokenizer, which cuts at `TOKENS` and pads to the longest text."""
    loaded = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    loaded.enable_truncation(TOKENS)
    loaded.enable_padding()
    return loaded


def feeds_of(encoder: Tokenizer, texts: list[str]) -> Feeds:
    """Returns the inputs of the model for a batch of texts."""
    encoded = encoder.encode_batch(texts)
    names = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: np.array([getattr(e, of) for e in encoded]) for name, of in names.items()}


def batches(texts: list[str]) -> Iterator[tuple[list[int], Feeds]]:
    """Yields the places of texts of like lengths, and the inputs of the model."""
    encoder, order = tokenizer(), sorted(range(len(texts)), key=lambda place: len(texts[place]))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        yield places, feeds_of(encoder, [texts[place] for place in places])


def embed(runners: dict[str, Runner], texts: list[str], seconds: dict[str, float]) -> dict[str, np.ndarray]:
    """Returns one normalized embedding per text and contender, and adds up the seconds of each."""
    embeddings = {name: np.empty((len(texts), 384), np.float32) for name in runners}
    for turn, (places, feeds) in enumerate(batches(texts)):
        for name, runner in runners.items():
            runner.feed(feeds)
            if turn == 0:
                runner.output()  # warm-up
            start = time.perf_counter()
            hidden = runner.output()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
            mean = (hidden * feeds["attention_mask"][..., None]).sum(1)
            embeddings[name][places] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return embeddings


def main() -> None:
    """Embeds names and docstrings with each contender, and writes results/retrieval."""
    names, docstrings = map(list, zip(*functions(), strict=True))
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "minilm.onnx"
        export_minilm(model, None)
        field = Field(model, {name: name for name in RECIPES})
        runners: dict[str, Runner] = {name: field.openers[name]() for name in (BEST, *RECIPES, INT8, BITS8)}
        queries, documents = (embed(runners, texts, seconds) for texts in (names, docstrings))
    rows = []
    nearest: dict[str, np.ndarray] = {}
    for name in runners:
        similarities = queries[name] @ documents[name].T
        rank = (similarities > np.diag(similarities)[:, None]).sum(1)
        nearest[name] = similarities.argsort(1)[:, ::-1][:, :NEAREST]
        pairs = zip(nearest[name], nearest[BEST], strict=True)
        kept = 100 * float(np.mean([len(set(a) & set(b)) / NEAREST for a, b in pairs]))
        gain = np.where(rank < NEAREST, 1 / np.log2(2 + rank), 0).mean()
        speed = seconds[BEST] / seconds[name]
        rows.append([name, f"{seconds[name]:.1f}", f"{speed:.2f}", f"{kept:.1f}"])
        rows[-1] += [f"{gain:.4f}", f"{100 * float((rank == 0).mean()):.1f}"]
    columns = ("contender", "seconds", f"x {BEST}", "top 10 kept, %", "nDCG@10", "top-1, %")
    notes = [f"{len(names)} names and as many docstrings, in batches of {BATCH}, of at most {TOKENS} tokens."]
    title = "Retrieval of docstrings by function names, all-MiniLM-L6-v2"
    publish("retrieval", title, columns, rows, notes=notes)


if __name__ == "__main__":
    main()
