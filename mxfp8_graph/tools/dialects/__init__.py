"""MXFP8 in the dialects of other tools: each is read into our nodes, and most are written from them.

rows.py       what each dialect has; loads no onnx, so that the command line can name the dialects
convert.py    the public call and its report: read, then write
edit.py       a model whose nodes are replaced one by one, and the checks before it is read
gemms.py      gemms and lookups as products of dequantized operands, and back
bodies.py     fused nodes as the standard ops of their bodies, and back; the dialect of standard ops alone
qdq.py trt.py ort.py   dialects: `read` a node as ours, and steps that `WRITE` ours as theirs
"""
