"""The torch front end: exported program -> sites -> plan -> edited program -> file.

run.py               the steps, in order
find.py              finds the matmuls, and says what each is
matmul_forms.py      how each op multiplies, and how ids pick rows of a table
static_operands.py   which operands are known before the program runs, and their values
roles.py             this front end's op table for `policy.roles`
attention.py         scaled_dot_product_attention as two matmuls
replace.py           replaces the matmuls for inference and removes what is unused after that; training.py
                     replaces them for training; build.py adds nodes
packed_training.py   lets gradients pass through packed weights, and reverts that
torchao_weights.py   weights that torchao packed
account.py           lists the stored tensors, for the report
"""

from mxfp8_ops.errors import BackendError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    what = "not installed"
    expected = "it for exported programs and .pt2 files"
    raise BackendError("torch", what, expected=expected, advice="pip install torch onnxscript") from error

from mxfp8_graph.torch_pass.run import rewrite_torch

__all__ = ["rewrite_torch"]
