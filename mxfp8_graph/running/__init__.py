"""Runs models and compares them, for `mxfp8-graph verify` and `run`.

verify.py        original against rewritten, output by output; report.py: the result
node_check.py    every node's kernel against its function body
runner.py        one model, timed
sessions.py      ONNX Runtime sessions with and without the native library; programs.py: exported torch programs
inputs.py        inputs from a file, or synthesised in sizes that fit the model; index_ranges.py: the ids that fit it
samples.py       the inputs of several runs, from a file, a folder, a user's function or arrays
compare.py       the differences of two arrays in numbers
"""
