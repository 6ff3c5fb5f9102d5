"""Every attention of what torch's exporters write becomes MXFP8Attention, and gives the same, step after step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import oracle
import pytest
import structures
from attention_models import EXACT, check_near
from oracle import kinds, run

import mxfp8_graph

LAYERS = 2

GUARDS = {
    "sharp_bert_18": 1, "sharp_bert_23": 1, "sharp_bert_eager_20": 0, "sharp_bert_older_17": 1,
    "sharp_bert_eager_older_14": 0, "sharp_vit_18": 1, "sharp_vit_older_17": 0,  # torch 2.10 wrote a guard
    "sharp_gpt2_18": 1, "sharp_llama_18": 1, "sharp_llama_23": 1,
}  # fmt: skip
"""Whether the attention of each export guards against NaN."""


class Rewritten(NamedTuple):
    """An export, and what it becomes without fusion and with it."""

    name: str
    unfused: onnx.ModelProto
    fused: onnx.ModelProto


@pytest.fixture(scope="module", params=structures.and_exported_now(GUARDS))
def rewritten(request: Any) -> Rewritten:
    proto = structures.model(request.param)
    models = (mxfp8_graph.rewrite(proto, recipe)[0] for recipe in (EXACT.without_fusion(), EXACT))
    return Rewritten(request.param.partition(",")[0], *models)


def feeds(name: str, batch: int, tokens: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    if "vit" in name:
        return {"pixel_values": rng.standard_normal((batch, 3, 64, 64)).astype(np.float32)}
    inputs = {"input_ids": rng.integers(0, 99, (batch, tokens))}
    if "bert" in name:
        inputs["attention_mask"] = np.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, 4:] = 0
    if "llama" in name:
        inputs |= {f"past.{i}.{kind}": np.zeros((batch, 2, 0, 16), np.float32)
                  for i in range(LAYERS) for kind in ("key", "value")}  # fmt: skip
    return inputs


def test_every_attention_of_an_export_is_one_node(rewritten: Rewritten) -> None:
    name, result = rewritten.name, rewritten.fused
    nodes = [node for node in result.graph.node if node.op_type == "MXFP8Attention"]
    assert len(nodes) == LAYERS
    assert not kinds(result).keys() & {"Softmax", "Attention", "IsNaN"}
    settings = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert {s["nan_guard"] for s in settings} == {GUARDS[name]}
    assert {s["q_num_heads"] for s in settings} == {4}
    assert {s["kv_num_heads"] for s in settings} == {2 if "llama" in name else 4}
    assert [s["scale"] for s in settings] == pytest.approx([0.25] * LAYERS, rel=1e-6)
    assert all(node.metadata_props for node in nodes) == ("older" not in name)
    onnx.checker.check_model(result, full_check=True)


@pytest.mark.usefixtures("runtime")
def test_an_export_gives_the_same_with_attention_fused(rewritten: Rewritten) -> None:
    batch = 1 if rewritten.name == "sharp_llama_23" else 3  # ONNX Runtime's RotaryEmbedding wants angles of each
    inputs = feeds(rewritten.name, batch)
    check_near(run(rewritten.unfused, inputs), run(rewritten.fused, inputs))


@pytest.mark.parametrize("rewritten", ["sharp_llama_18", "sharp_llama_23"], indirect=True)
def test_a_cache_gives_the_same_over_several_steps(rewritten: Rewritten, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in (False, True):
        monkeypatch.setattr(oracle.runtime, "kernels", kernels)
        inputs = [feeds(rewritten.name, 1, tokens=5)] * 2
        for step in range(4):
            results = [
                run(model, each) for model, each in zip((rewritten.unfused, rewritten.fused), inputs, strict=True)
            ]
            check_near(*results)
            assert results[0][1].shape[2] == 5 + step
            pasts = [dict(zip(list(inputs[0])[1:], result[1:], strict=True)) for result in results]
            inputs = [{"input_ids": np.array([[7 * step]]), **past} for past in pasts]
