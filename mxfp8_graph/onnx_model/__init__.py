"""An ONNX model as a thing to open, walk, convert up and write. Knows nothing of rewriting.

open.py          opens a model without reading its weights
graph.py         the opened model as an onnx_ir.Model, and back
walk.py          its graphs, subgraphs and stored tensors
tensor_data.py   reads tensors, from the model or from external files
upgrade.py       inlines local functions, has old opsets converted
conversion.py    converts an opset, keeping what does not change
old_ops.py       what onnx's converter gets wrong
write.py         writes a model and its tensors
record.py        which recipe made a model
graphsurgeon.py  models as onnx-graphsurgeon graphs
"""
