"""What each MXFP8 node computes: formats, reference numerics, kernels and their bindings.

Importing this package loads no native code, no ONNX, no ONNX Runtime and no torch; import the module you need:
`numerics` (the reference), `cpu` (native kernels), `ort` (ONNX Runtime), `onnx_functions` (portable bodies).
"""
