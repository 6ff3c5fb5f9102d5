"""Converts a local Hugging Face folder with MXFP8 weights to ONNX, without a float weight in memory.

architecture.py  config.json -> a module whose weights have shapes and no values; that -> an ONNX graph whose parameters
                 are inputs, so that no pass can fold them
stored.py        parameters -> external data in the files of the checkpoint
run.py           calls these, then the ONNX pass with the bytes of the checkpoint
"""

from mxfp8_graph.tools.from_hf.run import from_hf

__all__ = ["from_hf"]
