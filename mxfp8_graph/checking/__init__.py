"""Runs models and compares them, for `mxfp8-graph verify` and `run`.

verify.py        original against rewritten, output by output; report.py: the result
node_check.py    every node's kernel against its function body
runner.py        one model, timed
sessions.py      ONNX Runtime sessions with and without the native library; programs.py: exported torch programs
inputs.py        inputs from a file or synthesised; input_sizes.py, index_ranges.py: which sizes and ids fit the model
samples.py       several runs' worth of inputs, from whatever a user names; user_code.py: functions among that
compare.py       two arrays in numbers
text.py          reports on a terminal
"""
