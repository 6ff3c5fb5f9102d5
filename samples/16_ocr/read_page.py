"""Reads a page with PP-OCRv4 in float32, in MXINT8 and in ONNX Runtime's int8, and compares what they read.

The program is RapidOCR's own, of the package rapidocr-onnxruntime, which carries the models: its sessions of the text
detector and of the text recognizer change, and nothing else does.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from int8 import METHODS, Feeds, dynamic_ways, nearest, prepared, static_ways
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from rich.console import Console
from rich.table import Table

import mxfp8_graph
from mxfp8_ops import cpu, ort

Line = tuple[np.ndarray, str]
"""The corners of a line [4, 2], and what it says."""
Sessions = Sequence[Any]
"""The sessions of the detector and of the recognizer."""

WORDS = """
    invoice total amount due 2026 payment received from the customer order number shipping address quantity price
    description thank you for your business Berlin Tokyo Paris 1,204.50 EUR page please contact support within thirty
    days of delivery returns policy applies quick brown fox jumps over lazy dog
""".split()  # noqa: SIM905
FLOAT32, STATIC, DYNAMIC = "float32", "int8 static, per channel", "int8 dynamic, per channel, of Conv"


def background(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Returns paper: a light color with a slope and noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    slope = columns[..., None] / width * rng.uniform(-50, 20, 3) + rows[..., None] / height * rng.uniform(-50, 20, 3)
    values = rng.uniform(150, 250, 3) + slope + rng.normal(0, rng.uniform(1, 9), (height, width, 1))
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def page(seed: int, size: int = 736) -> Image.Image:
    """Returns about 17 lines of words, in the font that Pillow carries; every other page is blurred as a scan is."""
    rng = np.random.default_rng(seed)
    image, y = background(rng, size, size), 20
    while y < size - 50:
        font, text = ImageFont.load_default(int(rng.integers(14, 34))), " ".join(rng.choice(WORDS, rng.integers(2, 7)))
        while font.getlength(text) > size - 40:
            text = text.rpartition(" ")[0]
        at = (int(rng.integers(10, size - 20 - int(font.getlength(text)))), y)
        ImageDraw.Draw(image).text(at, text, fill=tuple(map(int, rng.integers(0, 110, 3))), font=font)
        y += int(font.size * rng.uniform(1.4, 2.2))
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.1))) if seed % 2 else image


class Program:
    """RapidOCR with sessions that change."""

    def __init__(self) -> None:
        import rapidocr_onnxruntime

        models = Path(rapidocr_onnxruntime.__file__).parent / "models"
        self.models = [models / f"ch_PP-OCRv4_{part}_infer.onnx" for part in ("det", "rec")]
        self._engine = rapidocr_onnxruntime.RapidOCR()

    def read(self, image: Image.Image, sessions: Sequence[Any]) -> list[Line]:
        """Returns the lines of a page from top to bottom."""
        self._engine.text_det.infer.session, self._engine.text_rec.session.session = sessions
        lines, _ = self._engine(np.asarray(image)[..., ::-1], use_cls=False)  # no line is upside down
        return [(np.array(box), text) for box, text, _ in lines or []]


# --- Contenders


def inputs_of(program: Program, sessions: Sessions, images: Sequence[Image.Image]) -> list[list[Feeds]]:
    """Returns what both models get for the images; of the recognizer four lines an image, padded to one width."""
    feeds: list[list[Feeds]] = [[], []]

    def recorded(session: onnxruntime.InferenceSession, to: list[Feeds]) -> SimpleNamespace:
        def run(outputs: Sequence[str], inputs: Feeds) -> list[np.ndarray]:
            to.append(inputs)
            return session.run(outputs, inputs)

        return SimpleNamespace(run=run, get_inputs=session.get_inputs, get_outputs=session.get_outputs)

    for image in images:
        program.read(image, list(map(recorded, sessions, feeds)))
    crops = sorted((crop for batch in feeds[1] for crop in batch["x"]), key=lambda crop: crop.shape[-1])
    chosen = [crops[at] for at in np.linspace(0, len(crops) - 1, 4 * len(images)).astype(int)]
    widest = chosen[-1].shape[-1]  # calibration by histograms wants one shape, and RapidOCR itself pads with zeros
    return [feeds[0], [{"x": np.pad(c[None], [(0, 0)] * 3 + [(0, widest - c.shape[-1])])} for c in chosen]]


def contenders(
    program: Program, folder: Path, recipes: Sequence[str], images: Sequence[Image.Image], methods: Sequence[str]
) -> Iterator[tuple[str, str, list[Path]]]:
    """Yields the name, the setting and the two files of each; static int8 is calibrated with the images."""
    yield FLOAT32, "ONNX Runtime", program.models
    for recipe in recipes:
        files = [folder / f"{model.stem}.{recipe}.onnx" for model in program.models]
        for model, file in zip(program.models, files, strict=True):
            mxfp8_graph.rewrite(model, recipe, output=file, overwrite=True)
        yield recipe, "no calibration", files
    feeds = inputs_of(program, list(map(onnxruntime.InferenceSession, program.models)), images)
    for name, form in ((STATIC, "QDQ, per channel"), (DYNAMIC, "per channel")):
        best = []
        for model, inputs in zip(program.models, feeds, strict=True):
            source = prepared(model, folder / f"{model.stem}.prepared.onnx", numbers=False)
            ways = static_ways(source, inputs, methods) if name == STATIC else dynamic_ways(source)
            best.append(nearest(source, inputs, ways, folder / f"{model.stem}.{name.split(',')[0].replace(' ', '-')}"))
        yield name, f"{form}; {' and '.join(dict.fromkeys(way for way, _ in best))}", [file for _, file in best]


def opened(name: str, files: Sequence[Path], threads: int) -> Sessions:
    """Returns the sessions of a contender; threads of one do not spin while another has its turn."""
    sessions = []
    for file in files:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if name.startswith("mx"):
            sessions.append(ort.session(file, session_options=options))
        else:
            sessions.append(onnxruntime.InferenceSession(file, options))
    return sessions


# --- What is read


def same(expected: Sequence[Line], actual: Sequence[Line], *, spaces: bool) -> list[bool]:
    """Returns for each line whether one of `actual` at its place reads the same, with or without spaces."""

    def text(line: Line) -> str:
        return line[1] if spaces else line[1].replace(" ", "")

    def near(a: Line, b: Line) -> bool:
        return float(np.abs(a[0].mean(0) - b[0].mean(0)).max()) < 10  # pixels: less than the distance of two lines

    return [any(text(a) == text(b) and near(a, b) for b in actual) for a in expected]


def with_boxes(image: Image.Image, lines: Sequence[Line], right: Sequence[bool]) -> Image.Image:
    """Returns the page with a box around each line: green as in float32, red otherwise."""
    marked = image.copy()
    for (corners, _), good in zip(lines, right, strict=True):
        ImageDraw.Draw(marked).polygon(list(map(tuple, corners)), outline="green" if good else "red", width=2)
    return marked


def main() -> None:
    """Reads one page with each contender, prints what they read, and writes the page with its boxes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("ocr"), help="where models and pictures go")
    parser.add_argument("--rounds", type=int, default=3, help="how often each reads the page")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calibrations", nargs="+", default=["MinMax"], choices=METHODS, help="of static int8")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the quantizers advise what is done already
    options.folder.mkdir(parents=True, exist_ok=True)
    program, image = Program(), page(0)
    sessions, settings = {}, {}
    read: dict[str, list[Line]] = {}
    for name, settings[name], files in contenders(
        program, options.folder, ("mxint8",), [page(500)], options.calibrations
    ):
        sessions[name] = opened(name, files, options.threads)
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(options.rounds + 1):
        for name, pair in sessions.items():
            start = time.perf_counter()
            read[name] = program.read(image, pair)
            seconds[name] += [time.perf_counter() - start] * (turn > 0)  # the first is a warm-up
    table = Table(title=f"PP-OCRv4 reads {len(read[FLOAT32])} lines; {options.threads} threads, {cpu.isa()}")
    for column in ("models", "setting"):
        table.add_column(column)
    for column in ("ms a page", "lines as in float32", "with its spaces"):
        table.add_column(column, justify="right")
    for name, lines in read.items():
        right = same(read[FLOAT32], lines, spaces=False)
        file = f"page.{name.split(',')[0].replace(' ', '-')}.png"
        with_boxes(image, read[FLOAT32], right).save(options.folder / file)
        counts = (str(sum(same(read[FLOAT32], lines, spaces=spaces))) for spaces in (False, True))
        table.add_row(name, settings[name], f"{1e3 * statistics.median(seconds[name]):.0f}", *counts)
    print(*(text for _, text in read["mxint8"]), sep="\n")
    Console().print(table)


if __name__ == "__main__":
    main()
