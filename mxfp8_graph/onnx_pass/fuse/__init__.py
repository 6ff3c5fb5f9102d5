"""Merges the nodes beside a replaced matmul into its node: activations, gates, attention.

run.py           calls every fusion for every node
nodes.py         makes nodes in place of others, and reads the types of values
gemm.py          activation and gate behind a gemm; conv.py: activation and residual behind a convolution
elementwise.py   recognizes activations
attention.py     attention; attention_scores.py reads it, attention_heads.py its operands
"""

from mxfp8_graph.onnx_pass.fuse.run import fuse

__all__ = ["fuse"]
