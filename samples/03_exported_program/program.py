"""Rewrites an exported program in Python, runs it, saves it, and looks at its packed weights."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import mxfp8_graph

source = Path(sys.argv[1])
program = torch.export.load(source)
rewritten, report = mxfp8_graph.rewrite(program, recipe="mxfp8")
print(f"{len(report.rewritten)} matmuls rewritten, {len(report.kept)} kept")
for reason, sites in report.kept_by_reason.items():
    print(f"  kept {len(sites)}: {reason}")

x = torch.randn(8, 16, 256)
with torch.no_grad():
    expected, actual = program.module()(x), rewritten.module()(x)
print(f"relative L2 error of the output: {((actual - expected).norm() / expected.norm()).item():.4f}")

path = mxfp8_graph.save(rewritten, source.with_name("program.mxfp8.pt2"), overwrite=True)
with torch.no_grad():
    again = mxfp8_graph.load(path).module()(x)
print(f"{path}: {path.stat().st_size / source.stat().st_size:.2f} of the size, bit-equal: {torch.equal(again, actual)}")

weights = mxfp8_graph.unpack(rewritten)
for name, weight in weights.items():
    original = program.state_dict[name].detach().numpy()
    error = ((weight.dequantize() - original) ** 2).sum() ** 0.5 / (original**2).sum() ** 0.5
    print(f"  {name:34} {weight.element_format} {weight.shape!s:12} relative L2 error {error:.4f}")

checkpoint = mxfp8_graph.export_safetensors(rewritten, source.with_suffix(".safetensors"), overwrite=True)
copies = mxfp8_graph.import_safetensors(checkpoint)
same = all((copies[name].elements == weight.elements).all() for name, weight in weights.items())
print(f"{checkpoint}: read back, the elements are {'the same bytes' if same else 'DIFFERENT'}")
