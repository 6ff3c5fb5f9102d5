"""Merges the nodes beside a replaced matmul into its node: activations, gates, attention.

run.py           calls every fusion for every node, and inserts the fused nodes
replacement.py   the result of a fusion, and helpers for types and new nodes
gemm.py          activation and gate behind a gemm; elementwise.py recognizes activations
attention.py     attention; attention_scores.py reads it, attention_heads.py its operands
"""

from mxfp8_graph.onnx_pass.fuse.run import fuse

__all__ = ["fuse"]
