"""The ONNX front end: steps that edit one `onnx_ir.Model`, in this order.

run.py          calls the steps
load.py         file or proto -> graph; protos.py: between proto and graph; single_file.py: leaves weights in the file
check.py        refuses models that later steps cannot handle; blame.py: asks onnx.checker after an unexpected exception
prepare.py      opset, functions, Attention, Dropout, dtypes; conversion.py and float32.py do parts of it
find.py         finds the matmuls; ops.py: the table of ops; forms.py, einsum.py, operands.py, views.py: its readers
replace.py      makes the new nodes of each matmul; lazy_weights.py: weights that are packed when they are written
replacement.py  puts new nodes in place of old ones, for replace, fuse/ and the tools
fuse/           merges the nodes beside a replaced matmul into its node
record.py       the record of the rewrite, and function bodies
save.py         writes model and data
graph.py        helpers of all steps; graphsurgeon.py: graphs of onnx_graphsurgeon
dialects.py     ops of other MXFP8 dialects; dialect_ops.py recognizes their nodes
"""
