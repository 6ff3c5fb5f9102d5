"""TransformerEngine's names over our ops: `from mxfp8_graph import te` and `from mxfp8_graph.te import recipe`.

docs/from_transformer_engine.md lists each name, and what differs.

recipe.py      MXFP8BlockScaling, and recipes that are emulated
tensor.py      MXFP8Tensor: codes along rows and columns
quantizers.py  what makes such tensors, or rounds values as another recipe does
state.py       autocast and quantized_model_init
modules.py     Linear and layers with a normalization
masters.py     float32 masters of weights that are stored in MXFP8
nexus.py       Nexus's names
"""

from mxfp8_graph.te import recipe as recipe
from mxfp8_graph.te.masters import master_weights as master_weights
from mxfp8_graph.te.modules import LayerNormLinear as LayerNormLinear
from mxfp8_graph.te.modules import LayerNormMLP as LayerNormMLP
from mxfp8_graph.te.modules import Linear as Linear
from mxfp8_graph.te.quantizers import Float8BlockQuantizer as Float8BlockQuantizer
from mxfp8_graph.te.quantizers import Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer
from mxfp8_graph.te.quantizers import Float8Quantizer as Float8Quantizer
from mxfp8_graph.te.quantizers import MXFP8BlockScalingRecipeState as MXFP8BlockScalingRecipeState
from mxfp8_graph.te.quantizers import MXFP8Quantizer as MXFP8Quantizer
from mxfp8_graph.te.quantizers import RecipeState as RecipeState
from mxfp8_graph.te.state import autocast as autocast
from mxfp8_graph.te.state import checkpoint as checkpoint
from mxfp8_graph.te.state import current_recipe as current_recipe
from mxfp8_graph.te.state import is_mxfp8_available as is_mxfp8_available
from mxfp8_graph.te.state import is_nvfp4_available as is_nvfp4_available
from mxfp8_graph.te.state import quantized_model_init as quantized_model_init
from mxfp8_graph.te.tensor import DType as DType
from mxfp8_graph.te.tensor import MXFP8Tensor as MXFP8Tensor
