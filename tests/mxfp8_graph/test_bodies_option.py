"""The option `bodies`: how a file computes its nodes where our library is not registered."""

from __future__ import annotations

import builders as b
import numpy as np
import onnx
import onnxruntime
import pytest

import mxfp8_graph
from mxfp8_ops import contract, ort
from mxfp8_ops.errors import ContractError


def bodies_of(model: onnx.ModelProto) -> list[str]:
    return [function.name for function in model.functions if function.domain == contract.DOMAIN]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxint8-weight-only"])
def test_small_bodies_compute_the_same_and_keep_weights_in_8_bits(recipe: str, tmp_path) -> None:
    x = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
    results, sizes = [], []
    for bodies in ("folded", "small"):
        model, _ = mxfp8_graph.rewrite(b.chain_model(), recipe, bodies=bodies)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / f"{bodies}.onnx")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        results.append(session.run(None, x)[0])
        weight = max(onnx.load(options.optimized_model_filepath).graph.initializer, key=lambda t: len(t.raw_data))
        sizes.append(len(weight.raw_data) // int(np.prod(weight.dims)))
    np.testing.assert_array_equal(*results)
    assert sizes == [4, 1], "bytes of a value of the weights in a session"


def test_a_file_without_bodies_runs_with_our_library_only(tmp_path) -> None:
    path, _ = mxfp8_graph.rewrite(b.save(b.chain_model(), tmp_path / "m.onnx"), bodies="none")
    assert bodies_of(onnx.load(path)) == []
    ort.session(path)
    with pytest.raises(Exception, match="mxfp8:MXFP8"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    whole, _ = mxfp8_graph.convert(onnx.load(path), "mxfp8")
    assert bodies_of(whole)


def test_another_name_is_an_error() -> None:
    with pytest.raises(ContractError, match="bodies: 'tiny'; expected one of folded, small, none; correct the name"):
        mxfp8_graph.rewrite(b.chain_model(), bodies="tiny")
