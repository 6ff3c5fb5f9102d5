"""Converts a local Hugging Face folder with MXFP8 weights to ONNX, without a float weight in memory.

architecture.py  config.json -> a module whose weights have shapes and no values, and how to call it
graph.py         that module -> an ONNX graph whose parameters are inputs, so that no pass can fold them
repeat.py        a graph of three layers -> the graph of all layers, if they are alike
stored.py        parameters -> tensors that lie where the checkpoint has them
whole.py         the graph of all layers
run.py           calls these, then the ONNX pass with the bytes of the checkpoint
"""

from mxfp8_graph.tools.from_hf.run import from_hf

__all__ = ["from_hf"]
