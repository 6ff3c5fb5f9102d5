"""The ONNX front end, on one `onnx_ir.Model`; its files in the order of the way through it.

run.py          the stations, in order
load.py         a file or proto as a graph; protos.py: between the two; single_file.py: weights stay in the file
check.py        what is refused of a model
prepare.py      opset, functions, Attention, Dropout, types; conversion.py, float32.py: what it calls
find.py         finds the matmuls; ops.py: the table of ops; forms.py, einsum.py, operands.py, views.py: its readers
replace.py      replaces them; weights.py: weights that are packed when they are written
fuse/           puts what stands beside a replaced matmul into its node
record.py       the record of the rewrite, and function bodies
save.py         writes model and data
"""
