"""Draws the pictures of docs/, each as an SVG file beside this script: `python docs/pictures/draw.py`.

The numbers of the block are those that mxfp8_ops computes. test_documentation.py says if a file is stale.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from mxfp8_ops import formats, numerics, numpy_nodes

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
    lefts = (20, 292, 404, 540, 676)
    shapes = [text(left + 2, 34, head, "title") for left, head in zip(lefts, heads, strict=True)]
    for line, (processor, isa, *products) in enumerate(KERNELS):
        y = 48 + 36 * line
        shapes += [text(22, y + 20, processor), text(294, y + 20, isa, "cell")]
        for left, (words, color) in zip(lefts[2:], products, strict=True):
            width = 132 if left < lefts[-1] else 176
            shapes += [box(left, y, width, 30, color), text(left + width / 2, y + 20, words, "cell", "middle")]
    y = 48 + 36 * len(KERNELS) + 20
    shapes.append(
        text(22, y, "The first row that fits applies. Integers and bfloat16 are faster than float32.", "note")
    )
    shapes.append(
        text(22, y + 20, "16-bit integers multiply E4M3 from 9 rows on (AVX2: 12); fewer rows use float32.", "note")
    )
    return picture(872, y + 38, "What each processor multiplies the products of each preset as", shapes)


PICTURES = {"block.svg": block, "kernels.svg": kernels}
"""File -> the function that draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")
