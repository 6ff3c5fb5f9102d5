"""Everybody who runs one model on the processor: ONNX Runtime as it is and at its best, its 8-bit quantizers, OpenVINO,
llama.cpp and ours, on the same inputs, in turns, with the distance of their outputs from ONNX Runtime's float32.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import onnx
import onnxruntime
from harness import THREADS, Timing, noise_notes, options, take_turns
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from peers import Feeds, Peer
from settings import BEST, BITS8, INT8, STOCK, exact_sums, int8_dynamic

import mxfp8_graph
from mxfp8_graph import Recipe
from mxfp8_ops import ort

LLAMA = "llama.cpp Q8_0"
OV_BF16 = "OpenVINO bf16"
OV_INT8 = "OpenVINO bf16, int8 weights"
OV_MXFP8 = "OpenVINO bf16, MXFP8 weights"
OPENVINO = {
    OV_BF16: ("bf16", "as they are"),
    OV_INT8: ("bf16", "int8"),
    OV_MXFP8: ("bf16", "mxfp8"),
    "OpenVINO fp32": ("f32", "as they are"),
}
"""The precision of its sums, and the format of the weights by NNCF."""
COMPARED = (STOCK, BEST, BITS8, INT8, OV_BF16, OV_INT8, OV_MXFP8, LLAMA)
"""Each has a column that says how many times as fast ours is."""
PREPACK = {"mxint8, never": ("mxint8", "never")}
"""Ours that run the file of another contender in a session with this `prepack`."""


Found = TypeVar("Found")


class Runner(Protocol):
    """An open model. A call returns seconds if it ran in another process."""

    def feed(self, feeds: Feeds) -> None:
        """Sets the inputs of the calls that follow."""

    def __call__(self) -> float | None:
        """Runs the model once."""

    def output(self) -> np.ndarray:
        """Runs the model and returns its first output."""

    def close(self) -> None:
        """Gives its memory back."""


class Session:
    """A session of ONNX Runtime in this process."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session: onnxruntime.InferenceSession | None = session
        self._feeds: Feeds = {}

    def feed(self, feeds: Feeds) -> None:
        """Takes those inputs that the model has."""
        self._feeds = {port.name: feeds[port.name] for port in self._session.get_inputs()}

    def __call__(self) -> None:
        """Runs the model once."""
        self._session.run(None, self._feeds)

    def output(self) -> np.ndarray:
        """Runs the model and returns its first output."""
        return np.asarray(self._session.run(None, self._feeds)[0])

    def close(self) -> None:
        """Gives its memory back."""
        self._session = None


@dataclass(frozen=True)
class Workload:
    """Inputs of a model: the first are timed, and the outputs of all are compared.

    `targets` has, by contender, how many times as fast as others it should be.
    """

    label: str
    feeds: list[Feeds]
    rounds: int
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pooled: bool = False
    """Compare means over the tokens, as sentence embeddings are, in place of every token."""

    def vectors(self, output: np.ndarray) -> np.ndarray:
        """Returns what is compared, one vector a row."""
        rows = output.mean(axis=1) if self.pooled else output
        return rows.reshape(-1, rows.shape[-1]).astype(np.float64)


@dataclass
class Outcome:
    """The result of one contender on one workload."""

    timings: list[Timing] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """How many times as fast as `STOCK` in the same heat."""
    cosines: np.ndarray | None = None

    @property
    def speed(self) -> float:
        """Over all heats."""
        return statistics.median(self.speeds)


class Field:
    """The contenders of one ONNX model.

    Args:
        path: the float32 model; the other forms of it are written beside it, those of the peers once.
        recipes: ours, by name; those of `PREPACK` after the one whose file they run.
        openvino: an interpreter that has openvino and nncf, or None.
        llama: opens llama.cpp's form of the model, or None.
        together: how many run in one heat besides `STOCK`, which runs in all: as many as fit in memory.
    """

    def __init__(
        self,
        path: Path,
        recipes: Mapping[str, Recipe | str],
        *,
        openvino: str | None = None,
        llama: Callable[[], Peer] | None = None,
        together: int = 99,
    ) -> None:
        self.path, self.recipes, self.together = path, recipes, together
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        # Ours and those whose ratios count most come first, so that they share a heat.
        self.openers: dict[str, Callable[[], Runner]] = {name: functools.partial(self._ours, name) for name in recipes}
        if openvino is not None:
            self.openers |= {name: functools.partial(self._openvino, name, openvino) for name in OPENVINO}
        if llama is not None:
            self.openers[LLAMA] = llama
        self.openers |= {BITS8: self._bits8, INT8: self._int8_dynamic, BEST: self._best_settings}

    def race(self, workloads: list[Workload]) -> dict[str, dict[str, Outcome]]:
        """Returns the outcomes by workload and contender; who cannot run is in the notes."""
        outcomes: dict[str, dict[str, Outcome]] = {workload.label: {} for workload in workloads}
        for name in (BITS8, INT8):  # their files take several times the model to make: before anybody is in memory
            runner = self._try(name, self.openers[name])
            if runner is not None:
                runner.close()
        waiting = list(self.openers)
        while waiting:
            heat, waiting = waiting[: self.together], waiting[self.together :]
            runners: dict[str, Runner] = {STOCK: Session(onnxruntime.InferenceSession(self.path, options()))}
            for name in heat:
                runner = self._try(name, self.openers[name])
                runners |= {name: runner} if runner is not None else {}
            for workload in workloads:
                self._heat(workload, runners, outcomes[workload.label])
            for runner in runners.values():
                runner.close()
        return outcomes

    def _heat(self, workload: Workload, runners: dict[str, Runner], outcomes: dict[str, Outcome]) -> None:
        outputs: dict[str, list[np.ndarray]] = {}
        for name, runner in list(runners.items()):
            vectors = self._try(name, functools.partial(outputs_of, runner, workload))
            if vectors is None:
                runners.pop(name).close()
            else:
                outputs[name] = vectors
        timings = take_turns(runners, rounds=workload.rounds)
        self.notes += [f"{workload.label}: {note}" for note in noise_notes(timings)]
        for name, timing in timings.items():
            outcome = outcomes.setdefault(name, Outcome())
            outcome.timings.append(timing)
            outcome.speeds.append(timings[STOCK].median / timing.median)
            outcome.cosines = np.concatenate(list(map(cosines, outputs[STOCK], outputs[name])))

    def _try(self, name: str, act: Callable[[], Found]) -> Found | None:
        try:
            return act()
        except Exception as error:  # whatever a peer raises: its row is missing, and the notes say why
            if name == STOCK or name in self.recipes:
                raise
            self.notes.append(f"{self.path.stem}: {name} does not run: {str(error).strip().splitlines()[-1][:300]}")
            return None

    def file(self, contender: str) -> Path:
        """Returns where the model that a contender runs is kept."""
        contender, _ = PREPACK.get(contender, (contender, ""))
        return self.path.with_suffix(f".{contender.replace(', ', '.').replace(' ', '-')}.onnx")

    def _best_settings(self) -> Session:
        chosen = options()
        chosen.add_session_config_entry(ort.DISABLE, ";".join(ort.FASTER_WITHOUT))
        return Session(onnxruntime.InferenceSession(self.path, chosen))

    def _ours(self, name: str) -> Session:
        target = self.file(name)
        _, prepack = PREPACK.get(name, ("", "auto"))
        if name not in PREPACK:
            _, report = mxfp8_graph.rewrite(self.path, self.recipes[name], output=target, overwrite=True)
            print(f"{self.path.name}, {name}: {len(report.rewritten)} of {len(report.sites)} matmuls")
        return Session(ort.session(target, session_options=options(), prepack=prepack))

    def _bits8(self) -> Session:
        target = self.file("bits8")
        if not target.exists():
            quantizer = MatMulNBitsQuantizer(
                onnx.load(self.path), bits=8, block_size=32, is_symmetric=True, accuracy_level=4
            )
            quantizer.process()
            quantizer.model.save_model_to_file(str(target), use_external_data_format=True)
        return Session(onnxruntime.InferenceSession(target, options()))

    def _int8_dynamic(self) -> Session:
        target = self.file("int8")
        int8_dynamic(self.path, target)
        return Session(onnxruntime.InferenceSession(target, exact_sums(options())))

    def _openvino(self, name: str, python: str) -> Peer:
        precision, weights = OPENVINO[name]
        settings = {"model": str(self.path), "precision": precision, "weights": weights, "threads": THREADS}
        peer = Peer("openvino_peer.py", settings, python=python)
        self.versions["openvino"] = peer.version
        return peer


def outputs_of(runner: Runner, workload: Workload) -> list[np.ndarray]:
    """Returns what a contender answers to each of the feeds; the first remain set."""
    answers = []
    for feeds in [*workload.feeds[1:], workload.feeds[0]]:
        runner.feed(feeds)
        answers.append(workload.vectors(runner.output()))
    return answers


def cosines(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Returns the cosine of each pair of rows."""
    lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(actual, axis=1)
    return np.asarray((expected * actual).sum(axis=1) / lengths)


COLUMNS = ["workload", "contender", "ms", "spread", *(f"x {name}" for name in COMPARED), "mean cosine", "worst cosine"]
LEGEND = (
    'Columns "x ...": how many times as fast as that contender; "a < b" is slower than it or than its target b, '
    '"a >= b" meets the target. Cosines: each output vector with that of ORT fp32.'
)


def table(workload: Workload, outcomes: Mapping[str, Outcome], ours: Mapping[str, Recipe]) -> list[list[str]]:
    """Returns a row per contender; peers are compared with ONNX Runtime's float32 alone."""
    rows = []
    for name, outcome in outcomes.items():
        timing = min(outcome.timings, key=lambda each: each.median)
        targets = workload.targets.get(name, {})
        ratios = {
            peer: compared(outcome.speed / outcomes[peer].speed, targets.get(peer)) if name in ours else ""
            for peer in COMPARED
            if peer in outcomes
        }
        if name not in ours:
            ratios[STOCK] = f"{outcome.speed:.2f}"
        assert outcome.cosines is not None
        rows.append(
            [
                workload.label,
                name,
                f"{timing.median * 1e3:.4g}",
                f"{timing.spread / timing.median:.0%}",
                *(ratios.get(peer, "") for peer in COMPARED),
                f"{outcome.cosines.mean():.5f}",
                f"{outcome.cosines.min():.5f}",
            ]
        )
    return rows


def compared(ratio: float, target: float | None) -> str:
    """Returns a cell of a row of ours.

    >>> compared(1.624, 1.6), compared(1.624, 1.7), compared(0.98, None), compared(1.02, None)
    ('1.62 >= 1.6', '1.62 < 1.7', '0.98 < 1', '1.02')
    """
    ratio = round(ratio, 2)
    if target is None:
        return f"{ratio:.2f}" + (" < 1" if ratio < 1 else "")
    return f"{ratio:.2f} {'>=' if ratio >= target else '<'} {target:g}"
