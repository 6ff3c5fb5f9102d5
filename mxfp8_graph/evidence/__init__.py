"""Evidence for the choice of a recipe, on the user's own model and data.

metrics.py           how far outputs are from the original's, in one number per sample

compare.py           compare(): each recipe on the same samples
comparison.py        what it found, as data, JSON and a page; comparison_text.py: on a terminal
emulation.py         a model in a format that has no kernels here
fake_quantize.py     its rounding in standard ONNX ops; number_formats.py: the formats as data

analyze.py           analyze(): which site hurts, the damage of each alone and of everything but it
switchable.py        a model whose rewritten sites can be switched on and off; switched.py opens one
switched_program.py  runs an exported program node by node, of each site the way that is chosen
input_statistics.py  what goes into a site, in numbers
exclusion.py         patterns that match some sites and no other; layers.py: sites whose names begin alike
damage.py            what was measured of a site; analysis.py: of a model; analysis_text.py: to read

tuning               tune(): the plan that keeps a budget
"""
