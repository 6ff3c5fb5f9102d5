"""Packed programs as ONNX: it uses both front ends, which do not import each other.

to_onnx.py   exports the program in high precision, and quantizes the same nodes by the ONNX pass
exporter.py  torch's ONNX exporter, for `to_onnx` and tools
"""
