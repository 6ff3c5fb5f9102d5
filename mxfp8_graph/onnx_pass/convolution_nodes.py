"""The nodes beside a convolution: a weight that is dequantized by standard ops, and the phases of ConvTranspose.

    elements -> Cast                                   -> Mul -> Transpose -> weight [O, C / group, k...]
    scales -> Cast -> Gather(table) -> Gather(blocks) ----^

ONNX Runtime folds the nodes of a weight when it opens the file, so the convolution is as fast as before. It does not
fold DequantizeLinear, which it keeps for its own int8 kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mxfp8_graph.onnx_pass.convolutions import Convolution
from mxfp8_graph.onnx_pass.forms import EpilogueNode
from mxfp8_graph.onnx_pass.replacement import NewNodes
from mxfp8_ops import contract, formats, numerics

Array = npt.NDArray[Any]


def dequantized_weight(
    build: NewNodes,
    packed: Sequence[ir.Value],
    *,
    shape: Sequence[int],
    element_format: str,
    dtype: int,
    constant: Callable[[str, Array], ir.Value],
) -> ir.Value:
    """Returns a weight as [O, C / group, k...] values of an onnx.TensorProto.DataType.

    Args:
        build: gets the new nodes.
        packed: elements [O, k..., C / group] and scales [O, k..., blocks].
        shape: of the elements.
        element_format: of the elements.
        dtype: of the result.
        constant: returns the initializer with a name and values, which all weights share.
    """
    elements, scales = packed
    name, rank, fmt = str(elements.name), len(shape), formats.element_format(element_format)
    # A table, because ONNX has no op that makes a power of two of a code. INT8 elements are whole numbers to Cast.
    powers = np.ldexp(numerics.decode_scale(np.arange(256, dtype=np.uint8)), -fmt.mantissa_bits * fmt.twos_complement)
    table = constant(f"{element_format}_scale_values", powers.astype(np.float32))
    blocks = constant(f"blocks_of_{shape[-1]}_channels", np.arange(shape[-1]) // formats.BLOCK_SIZE)
    codes = build.result("Cast", scales, wanted=f"{name}_scale_codes", to=ir.DataType.INT32)
    factors = build.result("Gather", table, codes, wanted=f"{name}_block_factors", axis=0)
    factors = build.result("Gather", factors, blocks, wanted=f"{name}_factors", axis=-1)
    values = build.result("Cast", elements, wanted=f"{name}_codes", to=contract.FLOAT)
    values = build.result("Mul", values, factors, wanted=f"{name}_values")
    if dtype != contract.FLOAT:
        values = build.result("Cast", values, wanted=f"{name}_cast", to=dtype)
    perm = (0, rank - 1, *range(1, rank - 1))
    return build.result("Transpose", values, wanted=f"{name}_weight", perm=perm)


def interleaved(form: Convolution, outputs: int) -> tuple[EpilogueNode, ...]:
    """Returns the nodes that make pixels of the phases: [N, O x phases, ...] -> [N, O, ...]."""
    axes, stride = len(form.phases), form.phases[0] if form.phases else 1
    steps = []
    if stride > 1 and axes == 2:
        steps.append(EpilogueNode(op="DepthToSpace", attributes={"blocksize": stride, "mode": "CRD"}))
    elif stride > 1:
        o = outputs // stride
        steps += [
            EpilogueNode(op="Reshape", inputs=(_ints(0, o, stride, -1),)),
            EpilogueNode(op="Transpose", attributes={"perm": (0, 1, 3, 2)}),
            EpilogueNode(op="Reshape", inputs=(_ints(0, o, -1),)),
        ]
    if any(form.cut):
        # The end counts from the back, except that -0 is the front.
        ends = [-last or np.iinfo(np.int64).max for last in form.cut[axes:]]
        where = _ints(*form.cut[:axes]), _ints(*ends), _ints(*range(2, 2 + axes))
        steps.append(EpilogueNode(op="Slice", inputs=where))
    return tuple(steps)


def _ints(*numbers: int) -> ir.TensorProtocol:
    return ir.tensor(numbers, ir.DataType.INT64)
