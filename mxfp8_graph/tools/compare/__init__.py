"""compare(): each recipe on the same samples.

run.py            compare(); comparison.py: its result
emulation.py      a model in a format that has no kernels here
fake_quantize.py  the rounding of that format in standard ONNX ops; number_formats.py: the formats as data
"""
