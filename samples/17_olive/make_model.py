"""Writes model.onnx: the real all-MiniLM-L6-v2, which tells from which page a sentence is.

A page's score is the cosine of the sentence with the mean of every second sentence of the page.
"""

from __future__ import annotations

import torch
from data import MODEL, PAGES, sentences, tokens
from torch import nn
from transformers import BertModel


class Pages(nn.Module):
    """Sentences to scores of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel.from_pretrained(MODEL)
        with torch.no_grad():
            means = [self.embed(**tokens(sentences(page)[::2])).mean(0) for page in PAGES]
        self.pages = nn.Linear(len(means[0]), len(PAGES), bias=False)
        self.pages.weight = nn.Parameter(nn.functional.normalize(torch.stack(means)))

    def embed(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Returns an embedding per text, as sentence-transformers does."""
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        return nn.functional.normalize((hidden * attention_mask[..., None]).sum(1))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Returns a score per text and page."""
        return self.pages(self.embed(input_ids, attention_mask))


inputs = tokens(["one", "two"])
batch = {0: torch.export.Dim("batch")}
torch.onnx.export(
    Pages().eval(),
    kwargs=inputs,
    dynamo=True,
    dynamic_shapes=dict.fromkeys(inputs, batch),
    input_names=list(inputs),
    output_names=["scores"],
    verbose=False,
).save("model.onnx")
