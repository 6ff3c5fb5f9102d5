"""Writes a transformer encoder as torch.export saves it: two blocks, a free batch size, random weights."""

from __future__ import annotations

import sys

import torch

torch.manual_seed(0)
block = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, norm_first=True, activation="gelu")
model = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))  # so that the blocks differ and no bias is zero
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.randn(4, 16, 256),), dynamic_shapes=({0: batch},))
torch.export.save(program, sys.argv[1])
