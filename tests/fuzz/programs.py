"""Exported programs (.pt2), mutated: a program that is rewritten and runs, or a documented error."""

from __future__ import annotations

import functools
import io
import json
import random
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import mxfp8_graph
from mxfp8_graph.running.runner import run_model
from mxfp8_ops.errors import Mxfp8Error

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, -1, 0, 1, 2, 7, 64, 2**31, 2**63, 10**30, 0.5, "", "x"),
    *("linear", "__import__('os')", "../x", "a.b"),
    *([], {}, [1], ["x"], {"as_int": 1}, {"as_none": True}, {"as_tensor": {"name": "x"}}, {"as_ints": [0, 1]}),
    *({"as_string": "x"}, {"as_sym_int": {"as_name": "x"}}, {"as_expr": {"expr_str": "Symbol('s0')"}}),
    {"as_float": "NaN"},
    *("torch.ops.aten.matmul.default", "torch.ops.aten.permute.default", "torch.ops.aten.add.Tensor"),
    *("torch.ops.aten.sym_size.int", "torch.ops.mxfp8.weight_gemm.default", "torch.ops.higher_order.cond"),
    *("torch.os.system", "_operator.getitem"),
    *("Pow(Symbol('s0'), 9**9)", "Symbol('s77', positive=True, integer=True)", "u99999999"),
)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x + self.down(torch.relu(self.up(x)))
        return {"y": self.head(y), "s": torch.softmax(y @ y.transpose(0, 1), -1)}


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.cond(x.sum() > 0, lambda v: v @ self.w, lambda v: v + 1, (x,))
        return y, torch.einsum("ab,cb->ac", x, self.w)


class _Experts(nn.Module):
    """A table that ids look up, and experts in groups of rows and picked row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64, dtype=torch.bfloat16)
        self.stack = nn.Parameter(torch.randn(3, 48, 64, dtype=torch.bfloat16))

    def forward(self, ids: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        grouped = torch._grouped_mm(rows, self.stack.transpose(-2, -1), ends)
        picked = torch.bmm(rows.unsqueeze(1), self.stack[ids % 3].mT).squeeze(1)
        return torch.relu(grouped), torch.relu(picked)


_X: Final = (torch.ones(5, 64),)
_IDS: Final = torch.arange(5), torch.tensor([1, 3, 5], dtype=torch.int32)


@functools.cache
def seeds() -> list[bytes]:
    """Returns programs with what programs have, each as it is and rewritten."""
    found = []
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [
            torch.export.export(_Model().eval(), _X, dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}),
            torch.export.export(_Branches().eval(), _X),
            torch.export.export(_Experts().eval(), _IDS),
            *_decoder(),
        ]
        for program in programs:
            found.append(_saved(program))
            found.append(_saved(mxfp8_graph.rewrite(program, "all")[0]))
    return found


def _decoder() -> Iterator[torch.export.ExportedProgram]:
    """Yields a Llama that continues a cache of transformers, if that is installed."""
    try:
        import transformers
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:
        return
    register_dynamic_cache_export_support()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=16)
    model = transformers.LlamaForCausalLM(config).eval()
    past = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(4)[None], past_key_values=past, use_cache=True)
    inputs = {"input_ids": torch.arange(4, 7)[None], "past_key_values": past, "use_cache": True}
    yield torch.export.export(model, (), inputs, strict=False)


def _saved(program: torch.export.ExportedProgram) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return mxfp8_graph.save(program, Path(folder) / "seed.pt2").read_bytes()


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns `data` with values of its JSON exchanged, a record changed, or bytes of the archive changed."""
    kind = random.random()
    if kind < 0.1:
        at = random.randrange(len(data))
        return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at + random.randrange(9) :]
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError):
        return random.choice(seeds())
    texts = [name for name in records if name.endswith(".json")]
    weights = [name for name in texts if not name.endswith("model.json")]
    name = random.choice(texts if random.random() < 0.2 else weights if random.random() < 0.2 else texts)
    if kind < 0.2 or not texts:
        name = random.choice(list(records))
        records[name] = random.choice((b"", records[name][:-3], records[name] + b"x", random.randbytes(20)))
    else:
        records[name] = _edited(records[name], random)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for record, content in records.items():
            archive.writestr(record, content)
    return buffer.getvalue()


def _edited(content: bytes, random: random.Random) -> bytes:
    try:
        parsed = json.loads(content)
    except ValueError:
        return b"{}"
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        parsed = _changed(parsed, random)
    return json.dumps(parsed).encode()


def _changed(value: Any, random: random.Random) -> Any:
    """Returns JSON with one value in it exchanged, removed or doubled; the deeper ones are the more likely."""
    if isinstance(value, dict) and value and random.random() < 0.97:
        key = random.choice([name for name in value if name != "metadata"] or list(value))
        if random.random() < 0.03:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.95:
        at = random.randrange(len(value))
        kind = random.random()
        if kind < 0.04:
            return [*value[:at], *value[at + 1 :]]
        if kind < 0.08:
            return [*value[:at], random.choice(value), *value[at:]]
        return [*value[:at], _changed(value[at], random), *value[at + 1 :]]
    if isinstance(value, str) and random.random() < 0.3:
        at = random.randrange(len(value) + 1)
        return value[:at] + random.choice(("0", ".", "'", "\n", "x", "(")) + value[at + random.randrange(2) :]
    return random.choice(_VALUES)


def check(data: bytes, folder: Path) -> None:
    """Raises unless the program is planned, unpacked, rewritten, run or exported, or refused with a documented error.

    The data choose which of these: loading is most of the time.
    """
    path = folder / "model.pt2"
    path.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _STEPS[zlib.crc32(data) % len(_STEPS)](path)
    except Mxfp8Error as error:
        error.message()


def _dry(path: Path) -> None:
    mxfp8_graph.rewrite(path, "all", dry_run=True)


def _unpacked(path: Path) -> None:
    for weight in mxfp8_graph.unpack(path).values():
        weight.dequantize()


def _written(path: Path) -> None:
    mxfp8_graph.rewrite(path, "all", output=path.with_name("out.pt2"), overwrite=True)


def _ran(path: Path) -> None:
    run_model(path, repeat=1)


def _exported(path: Path) -> None:
    mxfp8_graph.to_onnx(path, path.with_name("out.onnx"), overwrite=True)


_STEPS: Final = (*(_dry, _unpacked, _written, _ran) * 2, _exported)
