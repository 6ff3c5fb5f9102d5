"""The ONNX front end: opened model -> sites -> plan -> edited model -> file.

run.py         the steps, in order
ops.py         the table of ops: what the pass knows of each, a row per op
forms.py       how each op multiplies; einsum.py reads Einsum
views.py       what the views in front of a matmul make of a stored weight
operands.py    which operands are stored, picked by indices, or computed
find.py        finds the matmuls, and what each is for
replace.py     replaces them
fuse/          puts what stands beside a replaced matmul into its node
account.py     counts the bytes of every stored tensor, for the report, and says which nodes use it
switches.py    both ways of each site in one model, to be chosen while it runs
prune.py       removes from a protobuf what nothing uses any more
"""

from mxfp8_graph.onnx_pass.run import rewrite_onnx

__all__ = ["rewrite_onnx"]
