"""The ONNX front end: source model -> sites -> plan -> edited model -> file.

source.py     opens the model without reading its weights
upgrade.py    inlines local functions, converts old opsets
constants.py  which operands are known before the model runs
roles.py      what a matmul is for
sites.py      finds the matmuls; site.py says what one is
edit.py       replaces them; prune.py removes what that left unused
output.py     writes the result; sinks.py takes its tensors as they come
"""

from mxfp8_graph.onnx_pass.run import Options, rewrite_onnx

__all__ = ["Options", "rewrite_onnx"]
