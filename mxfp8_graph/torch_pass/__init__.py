"""The torch front end: exported program -> sites -> plan -> edited program -> file.

run.py               the steps, in order
load.py, save.py     .pt2 files
program.py           a private copy of a program: its graphs, signature and weights
checked_program.py   a program that checks whether it still has the tensors of its modules
ops.py               the ops: how each multiplies, how ids pick rows of a table, and what role it plays
operands.py          which operands are known before the program runs, and their values
find.py              finds the matmuls, and describes each as a site
attention.py         scaled_dot_product_attention as two matmuls
replace.py           replaces the matmuls for inference and removes unused nodes; train.py replaces them for training;
                     build.py adds nodes
packed_training.py   lets gradients pass through packed weights, and reverts that
training_mode.py     switches dropout and batch normalization
torchao_weights.py   weights that torchao packed
record.py            the record of a rewrite in a program
export.py            a program from a module
internals.py         all private torch APIs, checked against the torch version
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
