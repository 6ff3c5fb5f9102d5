"""An ONNX model as a thing to open, walk, convert up and write. Knows nothing of rewriting.

open.py          opens a model without reading its weights
tensor_data.py   reads tensors from where a model keeps them
upgrade.py       inlines local functions, converts old opsets
write.py         writes a model; sinks.py takes its tensors as they come
graphsurgeon.py  models as onnx-graphsurgeon graphs
"""
