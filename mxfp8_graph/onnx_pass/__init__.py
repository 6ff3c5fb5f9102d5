"""The ONNX front end: opened model -> onnx_ir graph -> sites -> plan -> replaced and fused nodes -> file.

run.py       the steps, in order
ops.py       the table of ops: how each multiplies, passes a weight on, picks rows; forms.py, einsum.py: its readers
operands.py  operands that are known before the model runs; views.py: the steps from stored data to them
find.py      finds the matmuls
replace.py   replaces them
fuse/        puts what stands beside a replaced matmul into its node
"""

from mxfp8_graph.onnx_pass.run import rewrite_onnx

__all__ = ["rewrite_onnx"]
