"""What stands beside a replaced matmul becomes part of its node: activations, normalizations, attention.

run.py          asks every fusion about every node, and puts the fused nodes in place
graph_view.py   what a fusion can see of a graph: who makes and who reads a value, constants, dtypes and shapes
replacement.py  what a fusion returns
attention.py    attention: attention_scores.py reads it, attention_heads.py its operands, attention_node.py writes it

Each fusion is one function in a file of its own, named in `run.FUSIONS`.
"""

from mxfp8_graph.onnx_pass.fuse.run import fuse

__all__ = ["fuse"]
