"""Opens, walks, edits and saves exported programs. Does not depend on the pass.

files.py         .pt2 files, which serialized.py reads unless code_in_programs.py refuses them
program.py       a private copy of a program: graphs, signature, weights
higher_order.py  operands of higher-order ops (cond, while_loop, ...) and of their graphs
containers.py    the containers (model outputs, caches) in a program's inputs and outputs
record.py        the record of a rewrite in a program
internals.py     all private torch APIs, checked against the torch version
"""

from mxfp8_ops.errors import BackendError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    what = "not installed"
    expected = "it for exported programs and .pt2 files"
    raise BackendError("torch", what, expected=expected, advice="pip install torch onnxscript") from error

from mxfp8_graph.torch_program.files import load, save

__all__ = ["load", "save"]
