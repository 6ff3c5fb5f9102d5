"""The torch front end: exported program -> sites -> plan -> edited program -> .pt2 file.

adapter.py     every private torch API the pass stands on, checked against the torch version
program.py     a private copy of the program: graphs, signature, weights
hops.py        how higher-order ops (cond, while_loop, ...) hand operands to the graphs they hold
constants.py   which operands are known before the program runs
tensors.py     tensors as rows for packing, without copies
roles.py       what a matmul is for
forms.py       how each aten op multiplies
site.py        what is known of one matmul; sites.py finds them
attention.py   scaled_dot_product_attention as two matmuls
build.py       inserts nodes
edit.py        replaces the matmuls for inference; training.py for fine-tuning
prune.py       removes what that left unused
record.py      which recipe made a program
run.py         the way through
files.py       .pt2 files
torchao.py     weights that torchao packed
"""

from mxfp8_ops.errors import BackendError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise BackendError(
        "torch: not installed; expected it for exported programs and .pt2 files; pip install 'mxfp8-graph[torch]'"
    ) from error

from mxfp8_graph.torch_pass.files import load, rewrite_torch_file, save
from mxfp8_graph.torch_pass.run import Options, rewrite_torch

__all__ = ["Options", "load", "rewrite_torch", "rewrite_torch_file", "save"]
