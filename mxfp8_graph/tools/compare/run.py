"""compare(): what each recipe does to a model, on the user's own data.

Recipes of ours are rewritten for real, and run with our kernels; those of others are emulated (`emulation.py`) at the
same matmuls. An exported program is compared as the ONNX model that torch makes of it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mxfp8_graph import rewriting
from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import bytes_of, load
from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.data import RewriteReport
from mxfp8_graph.running.compare import sqnr
from mxfp8_graph.running.inputs import Inputs, Signature, describe
from mxfp8_graph.running.runner import Model, is_program
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.running.sessions import Execution, Runnable, Session
from mxfp8_graph.tools.compare.comparison import Comparison, Row
from mxfp8_graph.tools.compare.emulation import Emulated, Emulator, lay_out
from mxfp8_graph.tools.compare.number_formats import PEERS, Peer
from mxfp8_graph.tools.metrics import Metric, Score, metric_called, score
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError, Mxfp8Error, RecipeError
from mxfp8_ops.formats import VALUE_DTYPES

NAMED: Final = tuple(name for name in presets.PRESETS if name != "MXFP8BlockScaling")
"""The presets, each once: one of them is another by a second name."""

VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "mxfp8-even": {"scale_rounding": "even"},
    "mxfp8-e5m2": {"weight_format": "e5m2", "activations": "e5m2"},
}
"""Recipes that are compared beside the presets, and are none: the fields that differ from the defaults."""

WORDS: Final[Mapping[str, str]] = {
    "mxfp8": "E4M3, ceil scales (TransformerEngine's MXFP8BlockScaling), blocks of 32",
    "MXFP8BlockScaling": "mxfp8 by TransformerEngine's name",
    "mxfp8-bf16": "E4M3 weights, ceil scales; activations in bfloat16",
    "mxfp8-weight-only": "E4M3 weights, ceil scales; activations as they are",
    "mxint8": "INT8, floor scales (MXINT8 of the OCP specification)",
    "mxint8-weight-only": "INT8 weights, floor scales; activations as they are",
    "ocp": "E4M3, floor scales (the OCP specification's)",
    "all": "E4M3, ceil scales; also output projections, routers, embeddings and attention products",
    "mxfp8-even": "E4M3, even scales",
    "mxfp8-e5m2": "E5M2, ceil scales",
}
"""What is said of a recipe of ours."""

METRICS: Final = ("relative_l2", "cosine")
"""What is computed if nothing else is asked for."""

ORIGINAL: Final = "original"
"""What the row of the model as it is is called."""

SYNTHESISED: Final = 8
"""Samples that are made where none are given."""


def choices() -> str:
    """Returns what a user may name as recipes, in words."""
    return f"{', '.join((*presets.PRESETS, *VARIANTS, *PEERS))}, or a .yaml or .toml file"


def compare(
    model: Model,
    recipes: Sequence[str | Path | Recipe] = (),
    *,
    settings: Sequence[str] = (),
    metrics: Sequence[str] = METRICS,
    repeat: int = 7,
    progress: Progress | None = None,
    **inputs: Unpack[SampleOptions],
) -> Comparison:
    """Returns what each recipe does to the outputs of a model, to its weights, its size and its speed.

    A recipe that does not fit the model has a row that says why. Rewritten models are in the temporary folder while
    this runs, and the outputs of all samples in memory.

    Args:
        model: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        recipes: presets, `VARIANTS` and `number_formats.PEERS` by name, files, `Recipe`s; all with a name if empty.
        settings: fields that are set in every recipe of ours: "embeddings=true"; see `Recipe.setting`.
        metrics: `metrics.METRICS` by name, or "module:function".
        repeat: how many runs of each real model are timed, at least 1.
        progress: called as progress(recipe, samples done, samples in all).
        **inputs: see `running.samples.SampleOptions`.

    Raises:
        ContractError: the model cannot be read, exported or is rewritten already; an unknown metric.
        RecipeError: a recipe is unknown or malformed.
        ShapeError: the samples do not fit.
        BackendError: ONNX Runtime cannot run the model, or the native library is missing.
        NothingEligibleError: no recipe rewrites anything.
    """
    check_options("compare", inputs, SampleOptions)
    chosen_metrics = [metric_called(name) for name in metrics]
    candidates = _candidates(recipes, settings)
    with tempfile.TemporaryDirectory(prefix="mxfp8-graph-") as scratch:
        folder = Path(scratch)
        notes = [f"recipes of ours with {', '.join(settings)}"] if settings else []
        name = "model"
        if is_program(model):
            name = str(model) if isinstance(model, (str, Path)) else "program"
            model = _exported(model, folder / "model.onnx")
            notes.append("the program is compared as the ONNX model that torch.onnx makes of it")
        graph = load(model)
        where = name_of(graph)
        name = where if name == "model" else name
        if made := record.find(graph):
            what = f"node {made.node!r} is rewritten already"
            raise ContractError(where, what, expected="the original model", advice="compare recipes on that one")
        session = Session(model, kernels=False, where=where, execution=Execution(takes_turns=True), float32=True)
        samples = make_samples(Signature.of(graph), inputs, count=SYNTHESISED, run=session.run)
        if samples.synthesised:
            notes.append("synthesised inputs: errors on your own data may differ; pass --inputs")
        trial = _Trial(
            model=model,
            where=where,
            byte_size=bytes_of(graph),
            samples=samples,
            metrics=chosen_metrics,
            folder=folder,
            count=len(candidates) + 1,
            progress=progress,
        )
        notes += filter(None, [session.note])
        rows = [trial.original(session), *(trial.row(candidate) for candidate in candidates)]
        rows = trial.with_latencies(rows, repeat)
    return Comparison(
        model=name,
        inputs=str(samples),
        timed=describe(samples.largest),
        synthesised=samples.synthesised,
        sample_names=samples.names,
        metrics=tuple(chosen_metrics),
        isa=cpu.isa(),
        rows=tuple(rows),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A recipe to try: one of ours, or a peer's."""

    name: str
    recipe: Recipe | None = None
    peer: Peer | None = None

    @property
    def what(self) -> str:
        if self.peer is not None:
            return self.peer.what
        return WORDS.get(self.name, "")


def _candidates(recipes: Sequence[str | Path | Recipe], settings: Sequence[str]) -> list[_Candidate]:
    chosen = [_candidate(recipe) for recipe in recipes or (*NAMED, *VARIANTS, *PEERS)]
    chosen = [replace(one, recipe=one.recipe and one.recipe.setting(settings)) for one in chosen]
    names = [candidate.name for candidate in chosen]
    for name in names:
        if names.count(name) > 1:
            what = f"{name!r} is named {names.count(name)} times"
            raise RecipeError("compare", what, expected="a different name for each recipe", advice="name each once")
    return chosen


def _candidate(recipe: str | Path | Recipe) -> _Candidate:
    if isinstance(recipe, str) and recipe in PEERS:
        return _Candidate(name=recipe, peer=PEERS[recipe])
    if isinstance(recipe, str) and recipe in VARIANTS:
        return _Candidate(name=recipe, recipe=Recipe(name=recipe, **VARIANTS[recipe]))
    if isinstance(recipe, str) and recipe not in presets.PRESETS and not Path(recipe).suffix:
        raise RecipeError("recipe", repr(recipe), expected=f"one of {choices()}", advice="correct the name")
    loaded = load_recipe(recipe)
    return _Candidate(name=loaded.name, recipe=loaded)


def _exported(model: Any, path: Path) -> Path:
    from mxfp8_graph.torch_pass.to_onnx import plain_to_onnx

    return plain_to_onnx(model, path)


@dataclass(kw_only=True)
class _Trial:
    """A model and samples, on which one recipe is tried after another."""

    model: Any
    where: str
    """Its name in errors."""
    byte_size: int
    samples: Samples
    metrics: Sequence[Metric]
    folder: Path
    """For rewritten models."""
    count: int
    """How many models are run, the original among them."""
    progress: Progress | None
    _done: int = 0
    _sessions: dict[str, Runnable] = field(default_factory=dict)
    """Those that are timed."""
    _expected: list[Inputs] = field(default_factory=list)
    _emulator: Emulator | None = None
    _errors: list[Mxfp8Error] = field(default_factory=list)

    def original(self, session: Session) -> Row:
        """Returns the row of the model as it is, whose outputs the others are compared with."""
        self._sessions[ORIGINAL] = session
        self._expected = self._run(ORIGINAL, session.run)
        return Row(name=ORIGINAL, what="the model as it is", emulated=False, byte_size=self.byte_size)

    def row(self, candidate: _Candidate) -> Row:
        """Returns the row of a recipe; one that does not fit the model says why."""
        before = self._done
        empty = Row(name=candidate.name, what=candidate.what, emulated=candidate.peer is not None)
        try:
            return self._emulated(empty, candidate.peer) if candidate.peer else self._real(empty, candidate.recipe)
        except Mxfp8Error as error:
            self._errors.append(error)
            self._done = before + len(self.samples)
            return replace(empty, problem=str(error))

    def with_latencies(self, rows: Sequence[Row], repeat: int) -> list[Row]:
        """Returns the rows with the median seconds of real models, which take turns on the largest sample.

        Raises:
            Mxfp8Error: the first row's error, if no recipe has a result.
        """
        if all(row.problem for row in rows[1:]):
            raise self._errors[0]
        seconds: dict[str, list[float]] = {name: [] for name in self._sessions}
        feeds = self.samples.largest
        for _ in range(repeat):
            for name, session in self._sessions.items():
                self._tell(f"latency of {name}")
                session.run(feeds)  # a warm-up: the caches hold what ran before
                start = time.perf_counter()
                session.run(feeds)
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        return [replace(row, seconds=medians.get(row.name)) for row in rows]

    def _real(self, row: Row, recipe: Recipe | None) -> Row:
        output = self.folder / f"{len(self._sessions)}.mxfp8.onnx"
        self._tell(row.name)
        assert recipe is not None
        recipe = recipe.for_cpu() if self._sessions[ORIGINAL].note else recipe
        _, report = rewriting.rewrite(self.model, recipe, output=output)
        session = Session(
            output, kernels=True, where=f"{self.where} as {row.name}", execution=Execution(takes_turns=True)
        )
        scores = self._scores(row.name, session.run)
        self._sessions[row.name] = session
        error, (packed, count) = report.weight_error, _packed(report)
        return replace(
            row,
            recipe=recipe.to_yaml(),
            scores=scores,
            sites=len(report.rewritten),
            weight_sqnr=None if error is None else sqnr(error.mean),
            byte_size=report.bytes_after,
            bytes_per_weight=packed / count if count else None,
            formula="1 + 1/32",
        )

    def _emulated(self, row: Row, peer: Peer) -> Row:
        self._tell(row.name)
        if self._emulator is None:
            self._emulator = lay_out(self.model, load_recipe(presets.DEFAULT))
        emulated = Emulated(self._emulator, peer)
        weights = emulated.weights
        return replace(
            row,
            scores=self._scores(row.name, emulated.run),
            sites=self._emulator.sites,
            weight_sqnr=sqnr(weights.relative_l2),
            byte_size=self._emulator.other_bytes + weights.byte_size,
            bytes_per_weight=weights.byte_size / weights.count,
            formula=peer.weights.formula,
        )

    def _scores(self, name: str, run: Callable[[Inputs], Inputs]) -> tuple[Score, ...]:
        results = self._run(name, run)
        return tuple(score(metric, self._expected, results) for metric in self.metrics)

    def _run(self, name: str, run: Callable[[Inputs], Inputs]) -> list[Inputs]:
        results = []
        for feeds in self.samples.feeds:
            results.append(run(feeds))
            self._done += 1
            self._tell(name)
        return results

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self._done, self.count * len(self.samples))


def _packed(report: RewriteReport) -> tuple[int, int]:
    """Returns (bytes of the packed weights, how many numbers they hold), each weight once."""
    sites = {site.packed: site for site in report.rewritten if site.packed is not None}.values()
    widths = [VALUE_DTYPES[site.decision.site.dtype or "float32"].bytes for site in sites]
    count = sum(site.bytes_before // width for site, width in zip(sites, widths, strict=True))
    return sum(site.bytes_after for site in sites), count
