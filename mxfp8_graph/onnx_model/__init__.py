"""An ONNX model as a thing to open, walk, convert up and write. Knows nothing of rewriting.

open.py          opens a model without reading its weights
graph.py         the opened model as an onnx_ir.Model, and back
walk.py          its graphs, subgraphs and stored tensors
tensor_data.py   reads tensors, from the model or from external files
upgrade.py       inlines local functions and Attention, has old opsets converted, switches Dropout off
conversion.py    converts an opset, keeping what does not change, and sets right what onnx's converter gets wrong
cpu_provider.py  asks ONNX Runtime for kernels of 16-bit floats; float32.py: gives a model float32 values
write.py         writes a model and its tensors
record.py        which recipe made a model
graphsurgeon.py  models as onnx-graphsurgeon graphs
"""
