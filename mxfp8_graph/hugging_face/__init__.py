"""A local Hugging Face folder with MXFP8 weights -> ONNX, in one step, without a float weight in memory.

architecture.py  config.json -> a module whose weights have shapes and no values, and how to call it
graph.py         that module -> an ONNX graph whose parameters are inputs, so that nothing can be computed from them
repeat.py        a graph of three layers -> that of all, where every layer is like the one before
stored.py        parameters -> tensors that lie where the checkpoint has them
whole.py         the graph of all layers
run.py           these, and then the ONNX pass with the bytes of the checkpoint
"""

from mxfp8_graph.hugging_face.run import from_hf

__all__ = ["from_hf"]
