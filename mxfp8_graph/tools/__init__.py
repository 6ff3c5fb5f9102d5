"""Tools around the pass. They import the core; the core never imports them.

compare    what each recipe does to a model, on given data
analyze    which matmul causes the error
tune       the plan that keeps a budget
dialects   MXFP8 of other tools, read and written
from_hf    a Hugging Face folder with MXFP8 weights as an ONNX model
checkpoint a Hugging Face folder with packed weights, for servers

compare, analyze and tune share:
metrics.py           the distance of outputs from the original's, one number per sample
switchable.py        a model whose rewritten sites can be switched on and off; switched.py opens one
switched_model.py    an ONNX model with switches; switched_program.py: an exported program, run node by node
exclusion.py         patterns that match some sites and no other
"""
