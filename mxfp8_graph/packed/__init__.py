"""Access to the packed weights of models and checkpoints: by name, as elements and scales, or dequantized.

contents.py             a packed weight, and a model's other tensors
from_onnx.py            finds them in ONNX models, ours and TensorRT's
from_torch.py           finds them in exported programs
safetensors.py          the file format
checkpoint.py           opens a checkpoint: a file, an index or a folder
compressed_tensors.py   tensors of compressed-tensors and of weight_scale_inv; torchao.py and comfyui.py: of these
interchange.py          unpack, for both kinds of models; export to safetensors, and import from it
"""

from mxfp8_graph.packed.contents import PackedWeight
from mxfp8_graph.packed.interchange import export_safetensors, import_safetensors, unpack

__all__ = ["PackedWeight", "export_safetensors", "import_safetensors", "unpack"]
