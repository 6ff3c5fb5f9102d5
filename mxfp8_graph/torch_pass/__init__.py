"""The torch front end: exported program -> sites -> plan -> edited program.

run.py               the steps, in order
find.py              finds the matmuls; site.py says what one is
matmul_forms.py      how each aten op multiplies
static_operands.py   which operands are known before the program runs
roles.py             what a matmul is for
attention.py         scaled_dot_product_attention as two matmuls
replace.py           replaces the matmuls for inference; training.py for fine-tuning; build.py inserts nodes
prune.py             removes what that left unused
torchao_weights.py   weights that torchao packed
"""

from mxfp8_graph.torch_pass.run import Options, rewrite_torch, rewrite_torch_file

__all__ = ["Options", "rewrite_torch", "rewrite_torch_file"]
