"""Evidence for the choice of a recipe, on the user's own model and data.

metrics.py           how far outputs are from the original's, in one number per sample

compare.py           compare(): each recipe on the same samples
comparison.py        what it found, as data, JSON and a page; comparison_text.py: on a terminal
emulation.py         a model in a format that has no kernels here
fake_quantize.py     its rounding in standard ONNX ops; number_formats.py: the formats as data
"""
