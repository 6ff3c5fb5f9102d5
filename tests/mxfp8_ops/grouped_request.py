"""A request that ONNX Runtime alone makes, in C++: the struct of mxfp8_cuda_plan.h, for `planner.plan`."""

from collections import namedtuple

Grouped = namedtuple(
    "Grouped",
    "x_kind b_kind y_dtype activation_dtype x x_scales b b_scales experts y x_rows indices count n k "
    "outer middle inner x_outer x_middle x_inner e_outer e_middle e_inner",
    defaults=(0,) * 24,
)
