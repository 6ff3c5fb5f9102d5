"""Recipe files, mutated: a recipe that plans, or a documented error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import load_recipe
from mxfp8_ops.errors import Mxfp8Error

_SITES: Final = [
    MatMulSite(name="layers.0.up", op="MatMul", module="layers.0.mlp.up", n=64, k=64, weight="w"),
    MatMulSite(name="a" * 40 + "!", op="Gemm", n="N", k=None, role="output_projection"),
]

_PIECES: Final = (
    *("&a ", "*a", "<<: *a", "[", "]", "{", "}", ": ", "- ", "\n", "\n  ", "'", '"', "#", "|\n", "!!binary "),
    *("name", "rules", "include", "exclude", "min_dim", "activations", "unchanged", "e5m2"),
    *("true", "false", "null", "~", ".inf", ".nan"),
    *("2020-13-45", "9" * 5000, "0x" + "f" * 5000, "-1", "1e999", "1:1:1", "2020-02-30T25:61:61Z", "0o9", "=", "[["),
    *("(a|aa)+$", "(" * 200, "(?<=a)b", "\\", "x{1,99999}", "(?P<n>a)(?P=n)", "[[:alpha:]", "\x00", "\ud7ff"),
)


def seeds() -> list[bytes]:
    """Returns one of each kind; the first byte says which: 0 is YAML, 1 is TOML."""
    return [
        b"0name: mine\nmin_dim: 16\nexclude: ['layers\\.0\\.']\n",
        b"0rules:\n  - {name: up, activations: unchanged}\n  - {op: Gemm, min_n: 8, quantize: false}\n",
        b"0include: [up, down]\n",
        b"0fp8_format: HYBRID\nscale_rounding: floor\noutput_projections: true\n",
        b'1name = "mine"\nexclude = ["up"]\n[[rules]]\nname = "layers"\nweight_format = "e5m2"\n',
        b"1min_dim = 64\nrouters = true\nfp8_dpa = true\n",
    ]


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns `data` with a few pieces of YAML, TOML or noise put in, taken out, doubled or exchanged."""
    for _ in range(random.randint(1, 4)):
        at, to = sorted(random.randint(1, max(1, len(data))) for _ in range(2))
        kind = random.randrange(5)
        if kind == 0:
            data = data[:at] + random.choice(_PIECES).encode("utf-8", "replace") + data[at:]
        elif kind == 1:
            data = data[:at] + data[min(to, at + 40) :]
        elif kind == 2:
            data = data[:to] + data[at:to] * random.choice((1, 2, 50)) + data[to:]
        elif kind == 3:
            data = data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
        else:
            other = random.choice(seeds())
            data = data[:at] + other[random.randrange(len(other)) :]
    return data[:100_000]


def check(data: bytes, folder: Path) -> None:
    """Raises unless the recipe plans, or is refused with a documented error."""
    path = folder / ("recipe.toml" if data[:1] == b"1" else "recipe.yaml")
    path.write_bytes(data[1:])
    try:
        recipe = load_recipe(path)
        plan(_SITES, recipe)
        recipe.model_dump_json()
    except Mxfp8Error as error:
        error.message().encode()
