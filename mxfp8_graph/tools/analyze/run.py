"""analyze(): which site hurts. One model with switches, many runs; every run differs by one site from another.

    nothing rewritten               the reference, and what goes into every site
    everything rewritten            the error there is, and what it did to what goes into every site
    one site alone rewritten        the damage it does by itself: what sites are ranked by
    everything but one rewritten    what is gained by keeping it
    everything but the worst        what the exclusion that is proposed gives

At most 2 * sites + 10 runs for each sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import MatMulSite
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.compare import sameness
from mxfp8_graph.running.inputs import Array, Inputs
from mxfp8_graph.running.runner import Model
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.tools import exclusion
from mxfp8_graph.tools.analyze.analysis import Analysis, Exclusion, Layer, Scores, SiteDamage, by_layer
from mxfp8_graph.tools.analyze.input_statistics import InputObserver
from mxfp8_graph.tools.metrics import METRICS, Metric, Outputs, Score, check_measurable, metric_called
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.tools.switched import open_switchable
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError, RecipeError

RELATIVE_L2: Final = METRICS["relative_l2"]
"""What sites are added up by, whatever they are ranked by."""

_PARTS: Final = 4
"""How many runs share the activations that are looked at: not all of them are in memory at once."""


def analyze(
    model: Model,
    recipe: str | Recipe = presets.DEFAULT,
    *,
    metric: str = RELATIVE_L2.name,
    keep: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    **inputs: Unpack[SampleOptions],
) -> Analysis:
    """Returns the damage that each rewritten matmul does at the outputs of a model, ranked, and what to exclude.

    The model is opened once and loaded once, with the nodes and weights that `rewrite` makes, not fused. An ONNX model
    is written to a temporary folder with its packed weights, 1.3 times its size; set TMPDIR to say where.

    Args:
        model: the path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`. It is not
            modified.
        recipe: whose sites are analyzed.
        metric: what sites are ranked by: one of `tools.metrics.METRICS`, or the user's own as module:function.
        keep: how many of the worst sites to exclude; None: the fewest that do half of the squared error.
        allow_nonfinite: pack weights that hold NaN or Inf.
        progress: called as progress(site, bytes, all bytes) while weights are packed, then with runs for bytes.
        **inputs: see `running.samples.SampleOptions`.

    Raises:
        ContractError: the model cannot be read or packed, or is rewritten already; there is no such metric.
        RecipeError: the recipe is malformed or does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        ShapeError: `inputs` does not fit the model, or the metric does not fit the outputs.
        BackendError: the model cannot be run, or the native library is missing.
    """
    check_options("analyze", inputs, SampleOptions)
    start = time.perf_counter()
    chosen, ranked_by = load_recipe(recipe), metric_called(metric)
    if keep is not None and keep < 0:
        raise ContractError("analyze", f"keep is {keep}", expected="0 or more", advice="correct it")
    with open_switchable(model, chosen, allow_nonfinite=allow_nonfinite, progress=progress) as switchable:
        run = partial(switchable.run, on=[False] * len(switchable.switched))
        samples = make_samples(switchable.signature, inputs, run=run)
        measured = _Measurement(switchable, samples, ranked_by, progress)
        measured.every_site()
        worst = measured.worst(keep)
        excluded = _exclusion(measured, worst, chosen) if worst else None
    return Analysis(
        source=switchable.signature.name,
        recipe=chosen.model_dump(mode="json"),
        inputs=str(samples),
        synthesised=samples.synthesised,
        samples=len(samples),
        isa=cpu.isa(),
        metric=ranked_by,
        everything=measured.everything.scores(),
        sites=tuple(measured.damages()),
        layers=tuple(measured.layers()),
        kept=tuple(site for site in switchable.sites if not site.decision.quantize),
        exclusion=excluded,
        runs=measured.runs,
        seconds=time.perf_counter() - start,
        notes=tuple(measured.notes),
    )


@dataclass
class _Tally:
    """The values of some metrics, growing by one each per sample."""

    metrics: Sequence[Metric]

    def __post_init__(self) -> None:
        self._values: list[list[float]] = [[] for _ in self.metrics]

    def add(self, reference: Outputs, outputs: Outputs) -> None:
        """Takes the outputs of one more sample."""
        for metric, values in zip(self.metrics, self._values, strict=True):
            values.append(metric.of(reference, outputs))

    def scores(self) -> Scores:
        """Returns a score by each metric's name."""
        pairs = zip(self.metrics, self._values, strict=True)
        return {metric.name: Score(metric=metric, values=tuple(values)) for metric, values in pairs}


class _Measurement:
    """Runs a switchable model, and keeps the numbers."""

    def __init__(self, switchable: Switchable, samples: Samples, ranked_by: Metric, progress: Progress | None) -> None:
        self.runs = 0
        self.notes: list[str] = []
        if samples.synthesised:
            self.notes.append("the inputs are synthesised; other inputs may give another ranking")
        self.notes += filter(None, [switchable.note])
        self._model = switchable
        self._samples = samples
        self._ranked_by = ranked_by
        self._metrics = list({metric.name: metric for metric in (ranked_by, RELATIVE_L2)}.values())
        self._progress = progress
        self._sites = switchable.switched
        self.names = [site.decision.site.name for site in self._sites]
        self.everything = self._tally()
        self._alone = [self._tally() for _ in self._sites]
        self._without = [self._tally() for _ in self._sites]
        self._inputs = [InputObserver(site.decision) for site in self._sites]
        observed = sorted({number for number in switchable.observed_by if number is not None})
        self._parts = [list(map(int, part)) for part in np.array_split(observed, min(_PARTS, max(len(observed), 1)))]
        self._planned = len(samples) * (2 * len(self._sites) + 2 * len(self._parts) + 2)

    def every_site(self) -> None:
        """Measures every site alone, and everything but it, with every sample."""
        count = len(self._sites)
        for sample, feeds in zip(self._samples.names, self._samples.feeds, strict=True):
            reference, everything = self._observing(feeds)
            check_measurable(sample, reference)
            self.everything.add(reference, everything)
            for index, name in enumerate(self.names):
                only = [other == index for other in range(count)]
                self._alone[index].add(reference, self._run(feeds, only, name))
                self._without[index].add(reference, self._run(feeds, [not on for on in only], name))

    def without(self, excluded: Sequence[int]) -> Scores:
        """Returns the error with all sites rewritten but some."""
        tally = self._tally()
        on = [index not in set(excluded) for index in range(len(self._sites))]
        for feeds in self._samples.feeds:
            reference = self._run(feeds, [False] * len(on), "the exclusion")
            tally.add(reference, self._run(feeds, on, "the exclusion"))
        return tally.scores()

    def ranking(self) -> list[int]:
        """Returns the sites, the one that does the most damage by itself first."""
        sign = -1.0 if self._ranked_by.higher_is_better else 1.0

        def damage(index: int) -> tuple[float, float]:
            scores = self._alone[index].scores()
            return _known(sign * scores[self._ranked_by.name].mean), _known(scores[RELATIVE_L2.name].mean)

        return sorted(range(len(self._sites)), key=damage, reverse=True)

    def worst(self, keep: int | None) -> list[int]:
        """Returns the sites to exclude, worst first; never all of them."""
        ranking, squares = self.ranking(), self._squares()
        if keep is None:
            total, left, keep = sum(squares), sum(squares), 0
            while keep < len(ranking) and left > total / 2:
                left = math.fsum(squares[index] for index in ranking[keep + 1 :])
                keep += 1
        return ranking[: min(keep, len(ranking) - 1)]

    def damages(self) -> Iterator[SiteDamage]:
        """Yields what was measured of each site, the worst first."""
        for index in self.ranking():
            seen = self._model.observed_by[index] is not None
            yield SiteDamage(
                site=self._sites[index],
                depth=index,
                alone=self._alone[index].scores(),
                without=self._without[index].scores(),
                input=self._inputs[index].result() if seen else None,
            )

    @property
    def matmuls(self) -> list[MatMulSite]:
        """All that the plan decided about, kept ones too."""
        return [site.decision.site for site in self._model.sites]

    def bytes_of(self, indices: Iterable[int]) -> int:
        """Returns the bytes of the weights of some sites, each weight counted once."""
        weights = {site.packed or site: site.bytes_before for site in (self._sites[index] for index in indices)}
        return sum(weights.values())

    def layers(self) -> list[Layer]:
        """Returns the layers, the one that does the most damage first."""
        squares = self._squares()
        total = sum(squares)
        layers = [
            Layer(
                name=name,
                sites=tuple(self.names[index] for index in indices),
                relative_l2=math.sqrt(sum(squares[index] for index in indices)),
                share=sum(squares[index] for index in indices) / total if 0 < total < math.inf else 0.0,
            )
            for name, indices in by_layer([site.decision.site for site in self._sites]).items()
        ]
        return sorted(layers, key=lambda layer: -layer.relative_l2)

    def _observing(self, feeds: Inputs) -> tuple[Inputs, Inputs]:
        """Returns the outputs with nothing and with everything rewritten, having looked at the inputs of all sites."""
        off, on = ([state] * len(self._sites) for state in (False, True))
        outputs: tuple[Inputs, Inputs] | None = None
        for part in self._parts:
            reference, before = self._look(feeds, off, part)
            everything, after = self._look(feeds, on, part)
            for number, x, rewritten in zip(part, before, after, strict=True):
                self._add_input(number, x, rewritten)
            outputs = outputs or (reference, everything)
        assert outputs is not None, "there is at least one part"
        self._note_sameness(outputs[0])
        return outputs

    def _add_input(self, number: int, x: Array, rewritten: Array) -> None:
        for index, read in enumerate(self._model.observed_by):
            if read == number:
                self._inputs[index].add(x, rewritten)

    def _look(self, feeds: Inputs, on: Sequence[bool], part: Sequence[int]) -> tuple[Inputs, list[Array]]:
        result = self._model.run(feeds, on, part)
        self._count("the activations")
        return result

    def _run(self, feeds: Inputs, on: Sequence[bool], name: str) -> Inputs:
        outputs, _ = self._model.run(feeds, on)
        self._count(name)
        return outputs

    def _count(self, name: str) -> None:
        self.runs += 1
        if self._progress is not None:
            self._progress(name, self.runs, self._planned)

    def _tally(self) -> _Tally:
        return _Tally(self._metrics)

    def _squares(self) -> list[float]:
        """Returns the squared relative L2 error that each site does alone: errors of sites add up like that."""
        return [_known(tally.scores()[RELATIVE_L2.name].mean) ** 2 for tally in self._alone]

    def _note_sameness(self, outputs: Outputs) -> None:
        for name, values in outputs.items():
            note = sameness(values)
            text = f"output {name!r} is {note}, which proves little"
            if note and text not in self.notes:
                self.notes.append(text)


def _known(damage: float) -> float:
    """Returns `damage`, or what is worse than any number if it is NaN."""
    return math.inf if math.isnan(damage) else damage


def _exclusion(measured: _Measurement, worst: Sequence[int], recipe: Recipe) -> Exclusion | None:
    names = [measured.names[index] for index in worst]
    try:
        patterns = exclusion.patterns(names, measured.matmuls, recipe)
    except RecipeError as error:
        measured.notes.append(f"no exclusion is proposed: {error}")
        return None
    return Exclusion(
        sites=tuple(names),
        patterns=patterns,
        yaml=exclusion.to_yaml((*recipe.exclude, *patterns)),
        weight_bytes=measured.bytes_of(worst),
        all_weight_bytes=measured.bytes_of(range(len(measured.names))),
        scores=measured.without(worst),
    )
