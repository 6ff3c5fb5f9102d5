"""Draws the pictures of the README and of docs/ as SVG files beside this script: `python docs/pictures/draw.py`.

mxfp8_ops computes the numbers of the block; the chart of speeds has those of benchmarks/results. test_documentation.py
fails if a file is stale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics, numpy_nodes

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

# A background of its own keeps a picture legible where the page is dark.
PAPER, INK, FAINT, LINE = "#ffffff", "#1f2933", "#5f6c7b", "#cbd2d9"
BLUE, GREEN, TEAL, GREY, RED = "#cfe3fb", "#c8ecd0", "#c6ecec", "#e8ebee", "#b42318"
SHOWN = 7
"""Values of the block that are written out."""


STYLES = {
    "title": f'font-size="14" font-weight="bold" fill="{INK}"',
    "plain": f'font-size="14" fill="{INK}"',
    "cell": f'font-size="13" fill="{INK}"',
    "note": f'font-size="13" fill="{FAINT}"',
    "warning": f'font-size="13" fill="{RED}"',
}


def text(x: float, y: float, words: str, style: str = "plain", anchor: str = "start") -> str:
    """Returns one line of text; y is its baseline."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {STYLES[style]}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Returns a rectangle; x and y are its top left corner."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{LINE}"/>'


def picture(width: int, height: int, title: str, shapes: list[str]) -> str:
    """Returns the text of an SVG file; a screen reader says its title."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="Helvetica, Arial, sans-serif"><title>{title}</title>'
    )
    paper = f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>'
    return "\n".join([head, paper, *shapes, "</svg>\n"])


def block() -> str:
    """Returns a block of 32 values in E4M3: its values, its shared scale, its elements and its bytes."""
    x = np.random.default_rng(2).standard_normal(formats.BLOCK_SIZE).astype(np.float32)
    elements, scales = numpy_nodes.quantize(x)
    shapes = [*_values(x), *_scale(float(np.abs(x).max()), int(scales[0])), *_elements(x, elements, int(scales[0]))]
    shapes.append(text(20, 494, "4. In memory: 33 bytes, where float32 takes 128", "title"))
    shapes += [box(20, 506, 100, 34, GREEN), text(70, 528, "1 scale", anchor="middle")]
    shapes += [box(124, 506, 616, 34, BLUE), text(432, 528, "32 elements of one byte", anchor="middle")]
    return picture(760, 560, "A block of 32 values, its shared scale and its elements", shapes)


def _values(x: npt.NDArray[np.float32]) -> list[str]:
    top = int(np.abs(x).argmax())
    shapes = [text(20, 30, "1. A block: 32 consecutive values along K", "title")]
    for i, value in enumerate((x / np.abs(x).max()).tolist()):
        shapes.append(box(22 + 22.5 * i, 105 - 60 * max(value, 0), 17, 60 * abs(value), RED if i == top else BLUE))
    shapes.append(f'<line x1="20" y1="105" x2="740" y2="105" stroke="{FAINT}"/>')
    y = 185 if x[top] < 0 else 122
    shapes.append(text(30 + 22.5 * top, y, f"amax {abs(x[top]):.4f}", "warning", "middle"))
    return shapes


def _scale(amax: float, code: int) -> list[str]:
    exponent = code - formats.SCALE_BIAS
    told = f"2^{exponent}, code {code}: {amax:.4f} / 2^{exponent} = {amax / 2.0**exponent:.1f}"
    return [
        text(20, 216, "2. Its shared scale: the smallest power of two with amax &lt;= 448 * scale", "title"),
        box(20, 228, 720, 34, GREEN),
        text(34, 250, f"{told}. Half of this scale would give {amax / 2.0 ** (exponent - 1):.1f}, above 448."),
    ]


def _elements(x: npt.NDArray[np.float32], elements: npt.NDArray[np.uint8], code: int) -> list[str]:
    scale, decoded = 2.0 ** (code - formats.SCALE_BIAS), numerics.decode(elements, formats.E4M3)
    rows = {
        "value": [f"{v:.4f}" for v in x],
        "value / scale": [f"{v / scale:.2f}" for v in x],
        "element": [f"{e:g}" for e in decoded],
        "its byte": [f"{byte:02x}" for byte in elements],
        "element * scale": [f"{e * scale:.4f}" for e in decoded],
    }
    shapes = [text(20, 296, f"3. Its elements: value / scale, rounded to E4M3 (the first {SHOWN} of 32)", "title")]
    for line, (name, cells) in enumerate(rows.items()):
        y = 308 + 30 * line
        shapes.append(text(20, y + 20, name, "note"))
        for column, cell in enumerate(cells[:SHOWN]):
            left = 140 + 86 * column
            shapes.append(box(left, y, 82, 28, BLUE if name in ("element", "its byte") else PAPER))
            shapes.append(text(left + 74, y + 19, cell, "cell", "end"))
    return shapes


BF16, BITS8, BITS16, FLOAT32 = (
    ("bfloat16", GREEN),
    ("8-bit integers", BLUE),
    ("16-bit integers", TEAL),
    ("float32", GREY),
)
KERNELS = (
    ("Intel with AMX, on Linux", "amx_bf16", BF16, BF16, BF16),
    ("AMD with AVX-512 BF16 (Zen 4, Zen 5)", "avx512_bf16", BF16, BITS8, BF16),
    ("AVX-512 with VNNI", "avx512_vnni", BITS16, BITS8, FLOAT32),
    ("AVX-512 without VNNI", "avx512", FLOAT32, FLOAT32, FLOAT32),
    ("AVX2 with AVX-VNNI", "avx2_vnni", BITS16, BITS8, FLOAT32),
    ("AVX2", "avx2", FLOAT32, BITS16, FLOAT32),
    ("Arm with I8MM, BF16 and FHM", "neon_mm", BF16, BITS8, BF16),
    ("Arm with dot products", "neon_dot", FLOAT32, BITS8, FLOAT32),
    ("any other x86-64 or Arm", "portable", FLOAT32, FLOAT32, FLOAT32),
)
"""Processor, instruction set of its kernels, and what it multiplies many rows as: tables.cpp, isa.cpp."""


def kernels() -> str:
    """Returns what each processor multiplies the products of each preset as."""
    heads = ("your processor", "instruction set", "mxfp8", "mxint8", "mxfp8-bf16, mxint8-bf16")
    lefts = (20, 300, 436, 572, 708)
    shapes = [text(left + 2, 34, head, "title") for left, head in zip(lefts, heads, strict=True)]
    for line, (processor, isa, *products) in enumerate(KERNELS):
        y = 48 + 36 * line
        shapes += [text(22, y + 20, processor), text(302, y + 20, isa, "cell")]
        for left, (words, color) in zip(lefts[2:], products, strict=True):
            width = 132 if left < lefts[-1] else 214
            shapes += [box(left, y, width, 30, color), text(left + width / 2, y + 20, words, "cell", "middle")]
    y = 48 + 36 * len(KERNELS) + 20
    shapes.append(
        text(22, y, "The first row that fits applies. Integers and bfloat16 are faster than float32.", "note")
    )
    shapes.append(
        text(22, y + 20, "16-bit integers multiply E4M3 from 9 rows on (AVX2: 12); fewer rows use float32.", "note")
    )
    return picture(942, y + 38, "What each processor multiplies the products of each preset as", shapes)


OURS = ("mxint8", "mxint8-bf16", "mxint8-weight-only", "mxfp8", "mxfp8-bf16")
STRONG = "#0b6e4f"
BEST = "ORT fp32, best settings"
LABEL_SIDES = {"mxint8-weight-only": (-12, 8, "end"), "int8 static, per channel": (12, 18, "start")}
"""Where the name of a point is, if not to the right of it: contenders that are close to each other."""


def _results(name: str) -> tuple[list[dict[str, str]], str]:
    """Returns (the rows of a file of benchmarks/results, its processor)."""
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    machine = results["machine"]
    where = f"{machine['processor']} with {machine['isa']}, {machine['cores']} cores"
    return [dict(zip(results["columns"], row, strict=True)) for row in results["rows"]], where


def _speeds(
    points: Mapping[str, tuple[float, float]], words: tuple[str, str, str, str], where: str, *, most: float, least: int
) -> str:
    """Returns speed against quality in percent, by contender.

    `words` are the title, the head and the axes y and x; the axes reach to `most` times float32 and from `least`
    percent.
    """
    left, right, top, bottom = 70, 730, 66, 300

    def at(speed: float, quality: float) -> tuple[float, float]:
        return left + (right - left) * speed / most, bottom - (bottom - top) * (quality - least) / (100 - least)

    title, head, vertical, horizontal = words
    shapes = [
        text(20, 28, head, "title"),
        text(20, 48, vertical, "note"),
        text(right, 346, horizontal, "note", "end"),
        text(20, 346, where, "note"),
    ]
    for quality in range(least, 101, 10):
        y = at(0, quality)[1]
        shapes.append(f'<line x1="{left}" y1="{y:g}" x2="{right}" y2="{y:g}" stroke="{LINE}"/>')
        shapes.append(text(left - 8, y + 5, f"{quality} %", "note", "end"))
    for speed in np.arange(0, most + 0.25, 0.5):
        shapes.append(text(at(speed, least)[0], bottom + 22, f"{speed:g}", "note", "middle"))
    for label, point in points.items():
        x, y = at(*point)
        fill, style = (STRONG, "title") if label in OURS else (FAINT, "plain")
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="{fill}"/>')
        dx, dy, anchor = LABEL_SIDES.get(label, (12, 5, "start"))
        shapes.append(text(round(x + dx, 1), round(y + dy, 1), label, style, anchor))
    return picture(760, 362, title, shapes)


def retrieval() -> str:
    """Returns speed against quality of search, as benchmarks/retrieval.py measured them."""
    rows, where = _results("retrieval.avx2")
    points = {row["contender"]: (float(row[f"x {BEST}"]), float(row["top 10 kept, %"])) for row in rows}
    words = (
        "Search with packed weights: share of results kept against speed",
        "Search with the real all-MiniLM-L6-v2: results kept, and texts per second",
        "of float32's ten nearest texts kept",
        f"texts per second, {BEST} = 1",
    )
    return _speeds(points, words, where, most=2, least=80)


def ocr() -> str:
    """Returns speed against quality of reading, as benchmarks/ocr.py measured them."""
    rows, where = _results("ocr.avx2")
    # The control, pages that are moved by a pixel, has no time.
    timed = [row for row in rows if row["x float32"]]
    points = {row["contender"]: (float(row["x float32"]), float(row["read as float32, %"])) for row in timed}
    words = (
        "Reading with packed weights: share of lines read as in float32 against speed",
        "Pages read with the real PP-OCRv4: lines as in float32, and speed",
        "of lines read as float32 reads them, spaces aside",
        "pages per second, float32 = 1",
    )
    return _speeds(points, words, where, most=2, least=50)


def masters() -> str:
    """Returns the losses of weights in MXFP8, with and without masters, as benchmarks/te_training.py measured them."""
    results = json.loads((RESULTS / "te_training.json").read_text(encoding="utf-8"))
    steps = [int(column.removeprefix("loss at ")) for column in results["columns"][3:]]
    colors = {"float32": FAINT, "MXFP8 and masters": STRONG, "MXFP8 without masters": RED}
    shapes = []
    for left, optimizer in ((70, "AdamW, 1e-3"), (450, "SGD, 0.05")):
        shapes.append(text(left, 28, f"Loss in 100 steps of {optimizer}", "title"))
        shapes += [text(left - 8, 265 - 300 * loss, f"{loss:g}", "note", "end") for loss in (0, 0.2, 0.4, 0.6)]
        # Float32 is dashed and comes last: it lies on the line of the masters.
        for name, values in reversed([(row[1], row[3:]) for row in results["rows"] if row[0] == optimizer]):
            at = (f"{left + 2.8 * s:g},{260 - 300 * float(v):.1f}" for s, v in zip(steps, values, strict=True))
            dashes = ' stroke-dasharray="6 6"' if name == "float32" else ""
            line = f'fill="none" stroke="{colors[name]}" stroke-width="3"{dashes}'
            shapes.append(f'<polyline points="{" ".join(at)}" {line}/>')
    for x, (name, color) in zip((70, 250, 500), colors.items(), strict=True):
        shapes += [box(x, 290, 16, 12, color), text(x + 24, 301, f"{name} weights" if x == 70 else name, "plain")]
    return picture(760, 320, "Training with weights that are stored in MXFP8 only", shapes)


def graph() -> str:
    """Returns two linears of a graph, before and after a rewrite."""
    before = (("MatMul", GREY), ("Add", GREY), ("Gelu", GREY), ("MatMul", GREY), ("Add", GREY))
    after = (("MXFP8Quantize", GREEN), ("MXFP8FusedGemm", BLUE), ("MXFP8Quantize", GREEN), ("MXFP8Gemm", BLUE))
    weights = {
        60: {0: "W1 [N, K] float32", 1: "b1", 3: "W2 [K, N] float32", 4: "b2"},
        420: {1: "W1: elements, scales; b1; Gelu", 3: "W2: elements, scales; b2"},
    }
    shapes = [text(60, 30, "model.onnx", "title"), text(420, 30, "model.mxfp8.onnx", "title")]
    for left, nodes in ((60, before), (420, after)):
        step = 260 / (len(nodes) - 1)
        for i, (name, fill) in enumerate(nodes):
            y = 60 + step * i
            if i:
                shapes.append(
                    f'<line x1="{left + 66}" y1="{y - step + 32:g}" x2="{left + 66}" y2="{y:g}" stroke="{FAINT}"/>'
                )
            shapes += [box(left, y, 132, 32, fill), text(left + 66, y + 21, name, "cell", "middle")]
            if i in weights[left]:
                shapes.append(text(left + 142, y + 21, weights[left][i], "note"))
    shapes.append(
        text(
            60,
            380,
            "Weights are packed once. Activations are quantized at each run. The bias and Gelu are part of the gemm.",
            "note",
        )
    )
    return picture(800, 400, "Two linears of a graph, before and after a rewrite", shapes)


PICTURES = {
    "block.svg": block,
    "graph.svg": graph,
    "kernels.svg": kernels,
    "retrieval.svg": retrieval,
    "ocr.svg": ocr,
    "masters.svg": masters,
}
"""File -> the function that draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
