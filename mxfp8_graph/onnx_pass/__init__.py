"""The ONNX front end: opened model -> sites -> plan -> edited model -> file.

run.py              the steps, in order
find.py             finds the matmuls
matmul_forms.py     how each op multiplies: a row per op; form.py is what a row returns
dense_forms.py, einsum.py, packed_attention.py    read the ops of those rows
embeddings.py       how ids pick rows of a table
static_operands.py  which operands are known before the model runs; weight_rows.py reads them
roles.py            what a matmul is for: this front end's op table
replace.py          replaces the matmuls; build.py adds the new nodes, prune.py removes what nothing uses any more
switches.py         both ways of each site in one model, to be chosen while it runs
fuse/               puts what stands beside a replaced matmul into its node
stored_bytes.py     counts the bytes of every stored tensor, for the report; tensor_uses.py says which nodes use them
"""

from mxfp8_graph.onnx_pass.run import rewrite_onnx

__all__ = ["rewrite_onnx"]
