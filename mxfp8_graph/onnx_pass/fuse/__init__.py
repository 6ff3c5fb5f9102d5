"""What stands beside a replaced matmul becomes part of its node: activations, gates, attention.

run.py           asks every fusion about every node, and puts the fused nodes in place
replacement.py   what a fusion returns, and what it can ask about types
gemm.py          activation and gate behind a gemm; elementwise.py tells which activation nodes compute
attention.py     attention: attention_scores.py reads it, attention_heads.py its operands
"""

from mxfp8_graph.onnx_pass.fuse.run import fuse

__all__ = ["fuse"]
