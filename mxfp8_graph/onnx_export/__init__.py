"""Writes a rewritten ExportedProgram as the ONNX file that a rewrite of its ONNX export would give.

export.py       to_onnx, step by step; plain_to_onnx, for a program as it is
translation.py  which node each op becomes
attention.py    scaled_dot_product_attention, where a mask may hide all keys
experts.py      packed experts that are picked at run time
float8.py       gives elements, which torch keeps as uint8, their float8 types
"""

from mxfp8_graph.onnx_export.export import plain_to_onnx, to_onnx

__all__ = ["plain_to_onnx", "to_onnx"]
