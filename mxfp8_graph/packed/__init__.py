"""Access to packed weights, wherever they are: by name, as elements and scales, or dequantized.

weight.py        what a packed weight is, and what else a model stores
parts.py         a part of one, which has whole blocks
from_onnx.py     finds them in ONNX models, ours and TensorRT's
from_torch.py    finds them in exported programs
contents.py      chooses between the two: unpack
conventions.py   what safetensors checkpoints call them
safetensors.py   the file format
checkpoint.py    what a checkpoint holds: a file, an index, a folder
interchange.py   to and from safetensors
"""

from mxfp8_graph.packed.contents import unpack
from mxfp8_graph.packed.interchange import export_safetensors, import_safetensors
from mxfp8_graph.packed.weight import PackedWeight

__all__ = ["PackedWeight", "export_safetensors", "import_safetensors", "unpack"]
