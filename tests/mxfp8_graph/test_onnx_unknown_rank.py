"""Activations whose rank only a run knows: rewritten, they run by the function bodies and by the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import choose, model, node, steps, subgraph, value, weight
from grids import looped, pairwise
from onnx import helper
from oracle import expect, normal, relu, rewrite, run

pytestmark = pytest.mark.usefixtures("runtime")
W = weight(64, 64)
INPUTS = {"x": (np.float32, ["m", 64]), "to": (np.int64, ["rank"])}


PRODUCT = "MatMul h w>p; Relu p>r"


COUNT, GO = value("i", np.int64, []), value("go", np.bool_, [])
H = helper.make_empty_tensor_value_info("h")
LOOP = subgraph(f"Identity go>on; {PRODUCT}", "on r", [COUNT, GO, H])
WAYS = {
    "by an input": steps(f"Reshape typed to>h; {PRODUCT}; Identity r>y"),
    "in a loop": [*steps("Reshape typed to>start"), node("Loop", "once yes start", "y", body=LOOP)],
    "in a branch": [*steps("Reshape typed to>h"), choose(PRODUCT, "Relu h>q", "y")],
}
"""Nodes from typed to y that give the activation h another rank."""


@pytest.mark.parametrize("recipe", ["mxint8", "mxfp8", "mxint8-weight-only"])
@looped("way, dtype, fuse", pairwise(way=WAYS, dtype=[np.float32, np.float16], fuse=[False, True]))
def test_an_activation_of_unknown_rank_is_quantized(recipe: str, way: str, dtype: Any, fuse: bool) -> None:
    cast = node("Cast", "x", "typed", to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    constants = {"w": W.astype(dtype), "once": np.array(1), "yes": np.array(True)}
    nodes = [cast, *WAYS[way], node("Reshape", "y flat", "z")]
    proto = model(nodes, INPUTS, {"z": (dtype, ["n"])}, {**constants, "flat": np.array([-1])})
    rewritten, report = rewrite(proto, recipe, fuse=fuse)
    assert [site.decision.quantize for site in report.sites] == [True]
    for shape in ((6, 64), (2, 3, 64), (1, 2, 3, 64)):
        x = normal(6, 64).astype(dtype)
        got = run(rewritten, {"x": x.astype(np.float32), "to": np.array(shape)})[0]
        settings = {"weight_only": True} if recipe.endswith("weight-only") else {}
        element = "int8" if "int8" in recipe else "e4m3"
        rounding = "floor" if element == "int8" else "ceil"
        wanted = expect(
            x.reshape(shape), constants["w"].T, formats=(element, element), scale_rounding=rounding,
            dtype=np.dtype(dtype).name, **settings,
        )  # fmt: skip
        wanted.then(relu).then(np.ravel).check(got)
