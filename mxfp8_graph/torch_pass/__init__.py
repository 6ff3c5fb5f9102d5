"""The torch front end: exported program -> sites -> plan -> edited program -> file.

run.py               the steps, in order
find.py              finds the matmuls, and says what each is
matmul_forms.py      how each op multiplies
embeddings.py        how ids pick rows of a table
static_operands.py   which operands are known before the program runs; weight_rows.py reads their values
roles.py             what a matmul is for: this front end's op table
attention.py         scaled_dot_product_attention as two matmuls
replace.py           replaces the matmuls for inference; training.py for training; build.py adds nodes
packed_training.py   lets gradients pass through what is packed, and takes that back
prune.py             removes what that left unused
torchao_weights.py   weights that torchao packed
switches.py          both ways of each site in one program, to be chosen while it runs
stored_bytes.py      counts the bytes of every stored tensor, for the report, and says which nodes use them
"""

from mxfp8_graph import torch_program as _torch_program  # noqa: F401 - says what to install where torch is missing

# isort: split
from mxfp8_graph.torch_pass.run import rewrite_torch

__all__ = ["rewrite_torch"]
