"""Is this model what ONNX says a model is? Asked once, where a model is opened, before anything works on it.

What ONNX Runtime runs passes, also where onnx.checker is stricter: nodes of the main graph out of order, dimensions of
-1, domains without an import. Ops and domains that onnx does not know are left alone. Nothing is repaired.

check.py       the steps, in order
limits.py      how deep graphs and types may be nested
header.py      IR version, opset imports
tensors.py     dtypes, dims, and sizes against the data
functions.py   local functions: recursion, and how many nodes they expand to
graphs.py      names: each defined once, before it is used; no cycles
nodes.py       inputs, outputs and attributes against the schema of the op; branches and bodies
schemas.py     what onnx knows of an op
places.py      how errors say where
"""

from mxfp8_graph.onnx_model.validate.check import validate, validate_structure
from mxfp8_graph.onnx_model.validate.limits import MOST_DIMS
from mxfp8_graph.onnx_model.validate.places import Place
from mxfp8_graph.onnx_model.validate.schemas import schema_of
from mxfp8_graph.onnx_model.validate.tensors import DTYPES

__all__ = ["DTYPES", "MOST_DIMS", "Place", "schema_of", "validate", "validate_structure"]
