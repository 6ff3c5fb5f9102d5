"""Tools around the pass. They import the core; the core never imports them.

compare    the error, size and speed of each recipe, on the user's data
analyze    the matmuls that cause the error
tune       the plan that meets a budget
dialects   MXFP8 of other tools, read and written
from_hf    a Hugging Face folder with MXFP8 weights as an ONNX model
checkpoint a Hugging Face folder with packed weights, for servers

compare, analyze and tune share:
metrics.py           the error of outputs against the original's, one number per sample
trials.py            the loop that runs models on the same samples, and rewrites recipes for it
switchable.py        a model whose rewritten sites can be switched on and off
switches.py          opens one, and implements it for ONNX models; switched_program.py: for programs, node by node
"""
