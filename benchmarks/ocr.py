"""Claim: PP-OCRv4 reads pages in mxint8, without calibration, as it reads them in float32.

It uses the pages and the program of samples/16_ocr, which is RapidOCR's own; int8 is calibrated with other pages. A
line is read as float32 reads it if the program finds a line at its place that says the same, spaces aside: they depend
on less than quantization changes, as the row of float32 on pages that are moved by one pixel shows. Both counts are
published.

Milliseconds are the median over the pages of the whole program; contenders take turns page by page.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import THREADS, Timing, noise_notes, publish
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "samples" / "16_ocr"))
from int8 import METHODS
from read_page import FLOAT32, Line, Program, contenders, opened, page, same

RECIPES = ("mxint8", "mxint8-weight-only")
MOVED = "float32, pages moved by a pixel"
COLUMNS = ("contender", "setting", "ms a page", "spread", "x float32", "read as float32, %", "with its spaces, %")


def moved(image: Image.Image) -> Image.Image:
    """Returns the page one pixel further down and to the right."""
    return Image.fromarray(np.roll(np.asarray(image), (1, 1), axis=(0, 1)))


def main() -> None:
    """Reads the pages with each contender, and writes results/ocr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=6, help="about 17 lines each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calibrations", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--trial", action="store_true", help="writes nothing")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the quantizers advise what is done already
    program, images = Program(), [page(seed) for seed in range(options.pages)]
    with tempfile.TemporaryDirectory() as folder:
        others = [page(seed) for seed in range(500, 508)]
        settings, sessions = {}, {}
        for name, settings[name], files in contenders(program, Path(folder), RECIPES, others, options.calibrations):
            sessions[name] = opened(name, files, THREADS)
        read: dict[str, list[list[Line]]] = {name: [] for name in (*sessions, MOVED)}
        samples: dict[str, list[float]] = {name: [] for name in sessions}
        for image in images:
            for name, pair in sessions.items():
                read[name].append(program.read(image, pair))  # and a warm-up
            read[MOVED].append(program.read(moved(image), sessions[FLOAT32]))
            for _ in range(options.rounds):
                for name, pair in sessions.items():
                    start = time.perf_counter()
                    program.read(image, pair)
                    samples[name].append(time.perf_counter() - start)
    timings = {}
    for name, seconds in samples.items():
        low, middle, high = np.percentile(seconds, [25, 50, 75])
        timings[name] = Timing(float(middle), float(high - low))
    lines, rows = sum(map(len, read[FLOAT32])), []
    for name, pages in read.items():
        row = [name, settings.get(name, settings[FLOAT32])]
        if name in timings:
            timing = timings[name]
            row += [f"{1e3 * timing.median:.0f}", f"{timing.spread / timing.median:.0%}"]
            row.append(f"{timings[FLOAT32].median / timing.median:.2f}")
        else:
            row += [""] * 3
        for spaces in (False, True):
            counts = (sum(same(e, a, spaces=spaces)) for e, a in zip(read[FLOAT32], pages, strict=True))
            row.append(f"{100 * sum(counts) / lines:.1f}")
        rows.append(row)
    notes = [f"{lines} lines on {len(images)} pages of 736 x 736 pixels; static int8 is calibrated with 8 other pages."]
    notes += ["Where a quantizer has a choice, that with the least error on the calibration pages runs, and is named."]
    title = "Pages read with PP-OCRv4"
    publish("ocr", title, COLUMNS, rows, notes=[*notes, *noise_notes(timings)], keep=not options.trial)


if __name__ == "__main__":
    main()
