"""An exported program as a thing to open, walk and save. Knows nothing of rewriting.

files.py         .pt2 files
program.py       a private copy of a program: graphs, signature, weights
higher_order.py  how higher-order ops (cond, while_loop, ...) hand operands to the graphs they hold
values.py        tensors as NumPy sees them
containers.py    what is known of the containers (model outputs, caches) that programs take and give
record.py        which recipe made a program
internals.py     every private torch API the project stands on, checked against the torch version
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
