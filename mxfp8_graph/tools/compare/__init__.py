"""compare(): each recipe on the same samples.

run.py            compare(); comparison.py: its result
emulation.py      a model in a format without kernels here
fake_quantize.py  the rounding of such a format in standard ONNX ops; number_formats.py: the formats as data
"""
