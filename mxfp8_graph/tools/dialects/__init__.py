"""MXFP8 in the dialects of others: every one is read to our nodes, and written from them.

convert.py       the public call: read, then write
edit.py          a model whose nodes are replaced one by one
trt.py qdq.py ort_cuda.py nbits.py quark.py   a dialect each: `read` a node as ours, `write` ours as its own
standard.py      no dialect: standard ops alone, activation quantization too
decompose.py     our gemms and fused nodes as MXFP8Quantize, MXFP8Dequantize and standard ops
gemms.py         the way back: products of dequantized operands as gemms
recompose.py     the way back: what our own conversion took apart, where it is unchanged
trt_rules.py     what TensorRT's parser asks of a model
report.py        what was found, written and lost
"""

from mxfp8_graph.tools.dialects.convert import convert

__all__ = ["convert"]
