"""What is recorded of conversions: digests of models in every dialect and of the way back, and what was lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attention_models
import dialect_models as d
import models as b
import numpy as np
import onnx

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_graph.tools.dialects.rows import WRITTEN
from mxfp8_ops.errors import ContractError

from .cases import CASES
from .digests import VERSION_KEY, digest, model_text, without_bodies

FILE = Path(__file__).with_name("conversions.json")
ALLOW = ("activations", "rounding")
RECIPES = ("mxfp8", "mxfp8-bf16", "ocp", "mxint8", "mxint8-weight-only")
PACKED = (
    "llama, all",
    "experts by Gather",
    "tied table",
    "shared weight, both ways",
    "If, inner weights of one name",
    "texts, metadata, dead code",
)
"""Cases of rewrites that are converted too."""

OURS: dict[str, Callable[[], onnx.ModelProto]] = {
    "attention": b.attention_model,
    "decoder": attention_models.decoder,
    "float16, bias": partial(b.matmul_model, dtype=np.float16, bias=True),
    "partial blocks": partial(b.chain_model, (70, 96, 64)),
}
THEIRS: dict[str, Callable[[], onnx.ModelProto]] = {
    "modelopt": d.modelopt,
    "modelopt in float16": partial(d.modelopt, dtype=np.float16),
    "modelopt, norm": partial(d.modelopt, norm=True),
    "TransformerEngine": d.transformer_engine,
    "static activation": d.static_activation,
    **{f"qdq, {scales}": partial(d.qdq, scales) for scales in ("e8m0", "cast", "float32", "float16")},
    "qdq, rows first": partial(d.qdq, rows_last=False),
    "quark": d.quark,
}


def models() -> Iterator[tuple[str, Callable[[], onnx.ModelProto]]]:
    """Yields models to convert, by name."""
    yield from THEIRS.items()
    ways: list[tuple[str, Callable[[], onnx.ModelProto], Any]]
    ways = [(f"{name}, {recipe}", build, recipe) for name, build in OURS.items() for recipe in RECIPES]
    ways += [(name, case.build, case.recipe) for name, case in CASES.items() if name in PACKED]
    for name, build, recipe in ways:
        kept = recipe if isinstance(recipe, str) else Recipe.model_validate(recipe)
        yield name, lambda build=build, kept=kept: mxfp8_graph.rewrite(build(), kept)[0]


def record(build: Callable[[], onnx.ModelProto]) -> dict[str, list[str]]:
    """Returns for each dialect digests there and back and the losses, or the error."""
    model, rows = build(), {}
    for to in WRITTEN:
        try:
            there, report = mxfp8_graph.convert(model, to, allow=ALLOW)
            rows[to] = [text_of(there), text_of(mxfp8_graph.convert(there, "mxfp8")[0]), *report.losses]
        except ContractError as error:
            rows[to] = [str(error)]
    return rows


def text_of(proto: onnx.ModelProto) -> str:
    """Returns a digest of all but value_info, which depends on onnx's version, and the version's name."""
    for entry in proto.metadata_props:
        entry.value = "" if entry.key == VERSION_KEY else entry.value
    text = model_text(without_bodies(proto))
    return digest(text["tensors"] + text["nodes"])[:16]


def write() -> None:
    """Writes conversions.json anew and says what changed."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    now = {name: record(build) for name, build in models()}
    print("conversions that changed:", [name for name in before.keys() | now if before.get(name) != now.get(name)])
    FILE.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n")
