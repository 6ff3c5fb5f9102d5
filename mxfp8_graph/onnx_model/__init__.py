"""An ONNX model as a thing to open, walk, convert up and write. Knows nothing of rewriting.

open.py          opens a model without reading its weights
walk.py          its graphs, subgraphs and stored tensors
tensor_data.py   reads tensors, from the model or from external files
upgrade.py       inlines local functions, converts old opsets
write.py         writes a model and its tensors
record.py        which recipe made a model
graphsurgeon.py  models as onnx-graphsurgeon graphs
"""
