"""A table that an embedding and an output projection share: one packed copy, or the reason why there are two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from builders import model, node, save, weight
from oracle import expect, initializers, kinds, quantized, reasons, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule
from mxfp8_graph.policy.plan import NothingEligibleError

F32 = np.float32
TABLE = weight(96, 64)
IDS = np.array([3, 95, 0])
BOTH = Recipe(name="both", embeddings=True, output_projections=True)

HEADS: dict[str, Any] = {
    "MatMul": [node("Transpose", "table", "head", perm=[1, 0]), node("MatMul", "e head", "logits", "lm_head")],
    "Gemm transB": [node("Gemm", "e table", "logits", "lm_head", transB=1)],
    "MatMul of float32": [
        node("Cast", "table", "wide", to=onnx.TensorProto.FLOAT),
        node("Transpose", "wide", "head", perm=[1, 0]),
        node("MatMul", "e head", "logits", "lm_head"),
    ],
    "two transposes": [
        node("Transpose", "table", "there", perm=[1, 0]),
        node("Transpose", "there", "back", perm=[1, 0]),
        node("Gemm", "e back", "logits", "lm_head", transB=1),
    ],
}


def tied(head: str = "MatMul") -> onnx.ModelProto:
    """ids -> Gather -> lm_head -> logits, with one table for both."""
    nodes = [node("Gather", "table ids", "e", "wte"), *HEADS[head]]
    return model(nodes, {"ids": (np.int64, ["m"])}, {"logits": (F32, ["m", 96])}, {"table": TABLE})


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("head", HEADS)
def test_both_nodes_share_one_packed_copy(head: str) -> None:
    rewritten, report = rewrite(tied(head), BOTH)
    assert initializers(rewritten) == ["table_mxfp8", "table_mxfp8_scales"]
    assert kinds(rewritten) == {"MXFP8Embedding": 1, "MXFP8Quantize": 1, "MXFP8Gemm": 1}
    assert [site.decision.site.shared_with for site in report.sites] == [1, 1]
    rows = quantized(TABLE)[IDS].astype(F32)
    expect(rows, TABLE).check(run(rewritten, {"ids": IDS})[0])


def test_a_float16_table_and_its_float32_copy_are_one_weight() -> None:
    table = TABLE.astype(np.float16)
    nodes = [
        node("Gather", "table ids", "half", "wte"),
        node("Cast", "half", "e", to=onnx.TensorProto.FLOAT),
        *HEADS["MatMul of float32"],
    ]
    proto = model(nodes, {"ids": (np.int64, ["m"])}, {"logits": (F32, ["m", 96])}, {"table": table})
    assert initializers(rewrite(proto, BOTH)[0]) == ["table_mxfp8", "table_mxfp8_scales"]


@pytest.mark.parametrize("settings", [{"weight_format": "e5m2"}, {"scale_rounding": "floor"}], ids=str)
def test_settings_that_differ_need_two_packed_copies(settings: dict[str, str]) -> None:
    recipe = Recipe(name="two", embeddings=True, output_projections=True, rules=(Rule(name="wte", **settings),))
    assert len(initializers(rewrite(tied(), recipe)[0])) == 4


COPIES = "both copies are stored, and the file is larger than with neither quantized"


@pytest.mark.parametrize(
    ("fields", "name", "reason"),
    [
        (
            {"rules": (Rule(name="wte"),)},
            "wte",
            "rules.0: name='wte' -> quantize; its table is also the weight of 'lm_head', which is kept: "
            f"{COPIES}; set output_projections: true to share one",
        ),
        (
            {"output_projections": True},
            "lm_head",
            "output projection, by recipe 'one'; its weight is also the table of 'wte', which is kept: "
            f"{COPIES}; set embeddings: true to share one",
        ),
    ],
    ids=["embedding by a rule", "projection only"],
)
def test_the_reason_says_what_quantizing_one_of_them_costs(fields: dict[str, Any], name: str, reason: str) -> None:
    rewritten, report = rewrite(tied(), Recipe(name="one", **fields))
    assert reasons(report)[name] == reason
    assert initializers(rewritten) == ["table", "table_mxfp8", "table_mxfp8_scales"]
    assert report.bytes_after is not None
    assert report.bytes_after > report.bytes_before


ALONE = (
    "embedding: its table is also the weight of 'lm_head', which is kept: packed alone it would make the file larger"
)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"embeddings": True}, "set output_projections: true to share one"),
        ({"embeddings": True, "output_projections": True, "exclude": ("lm_head",)}, "see why"),
    ],
    ids=["policy", "excluded"],
)
def test_an_embedding_is_kept_whose_table_stays_for_the_projection(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(NothingEligibleError) as raised:
        rewrite(tied(), Recipe(name="one", **fields))
    assert raised.value.decisions[0].reason == f"{ALONE}; {advice}"


def test_unpack_gives_the_table_once() -> None:
    weights = mxfp8_graph.unpack(rewrite(tied(), BOTH)[0])
    assert list(weights) == ["table"]
    np.testing.assert_array_equal(weights["table"].dequantize(), quantized(TABLE).astype(F32))


def test_a_checkpoint_has_the_table_once(tmp_path: Any) -> None:
    path = mxfp8_graph.export_safetensors(rewrite(tied(), BOTH)[0], tmp_path / "m.safetensors")
    assert list(mxfp8_graph.import_safetensors(path)) == ["table"]
    assert path.stat().st_size < 96 * 66 + 2000


def test_verify_gives_ids_of_the_table(tmp_path: Any) -> None:
    (tmp_path / "m.onnx").write_bytes(tied().SerializeToString())
    mxfp8_graph.rewrite(tmp_path / "m.onnx", BOTH, output=tmp_path / "out.onnx")
    report = mxfp8_graph.verify(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert report.passed


HELD = """
import sys
from pathlib import Path
import numpy as np
from mxfp8_ops import ort

def resident():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

ids = {"ids": np.arange(4)}
warm = ort.session(sys.argv[1])  # what a runtime takes is no model's
warm.run(None, ids)
before = resident()
session = ort.session(sys.argv[2])
session.run(None, ids)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_a_session_holds_the_table_once(tmp_path: Path) -> None:
    paths = []
    for rows in (96, 1 << 15):
        table = np.resize(weight(96, 1024), (rows, 1024)).astype(np.float16)
        nodes = [node("Gather", "table ids", "e"), *HEADS["Gemm transB"]]
        proto = model(nodes, {"ids": (np.int64, ["m"])}, {"logits": (np.float16, ["m", rows])}, {"table": table})
        paths.append(save(mxfp8_graph.rewrite(proto, BOTH)[0], tmp_path / f"{rows}.onnx", external=True))
    done = subprocess.run(
        [sys.executable, "-c", HELD, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    held = int(done.stdout) / ((1 << 15) * (1024 + 32))
    assert held <= 1.1, f"the session holds {held:.2f}x the packed table"
