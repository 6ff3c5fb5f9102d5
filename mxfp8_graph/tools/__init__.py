"""Tools around the pass. They import the core; the core never imports them.

compare    what each recipe does to a model, on given data
analyze    which matmul causes the error
tune       the plan that keeps a budget
dialects   MXFP8 of other tools, read and written
from_hf    a Hugging Face folder with MXFP8 weights as an ONNX model
checkpoint a Hugging Face folder with packed weights, for servers

compare, analyze and tune share:
metrics.py           the distance of outputs from the original's, one number per sample
trials.py            the loop that runs models on the same samples; recipes that are rewritten for real
switchable.py        a model whose rewritten sites can be switched on and off
switches.py          opens one, and has that of an ONNX model; switched_program.py: a program, run node by node
"""
