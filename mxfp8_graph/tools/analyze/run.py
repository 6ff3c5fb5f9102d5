"""analyze(): which site causes the error. One model with switches, many runs; every run differs by one site.

    nothing rewritten               the reference, and the activations
    everything rewritten            the error there is
    one site alone rewritten        the damage of the site: sites are ranked by it
    everything but one rewritten    the gain of keeping it
    everything but the worst        what the proposed exclusion gives

At most 2 * sites + 10 runs for each sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import yaml

from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import plan
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.running.compare import sameness
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.runner import Model
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.tools import exclusion
from mxfp8_graph.tools.analyze.analysis import Analysis, Exclusion, Scores, SiteDamage, layers_of
from mxfp8_graph.tools.analyze.input_statistics import InputObserver, InputStatistics
from mxfp8_graph.tools.metrics import RELATIVE_L2, Metric, Score, check_measurable, metric_called
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.tools.switches import open_switchable
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError

_PARTS: Final = 4
"""Runs that share the activations that are looked at: not all of them are in memory at once."""


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
        off = [False] * len(switchable.switched)
        samples = make_samples(switchable.signature, inputs, run=lambda feeds: switchable.run(feeds, off))
        measured = Damages(switchable, samples.feeds, ranked_by, progress)
        measured.reference(samples)
        inputs_seen = _inputs_seen(measured)
        everything = measured.scores([True] * len(off), "everything")
        alone = measured.alone()
        without = [measured.scores([i != j for j in range(len(off))], name) for i, name in enumerate(measured.names)]
        damages = [
            SiteDamage(site=site, depth=i, alone=alone[i], without=without[i], input=inputs_seen[i])
            for i, site in enumerate(switchable.switched)
        ]
        ranking = measured.ranking(alone)
        worst = _worst(ranking, [damage.square for damage in damages], keep)
        excluded = _exclusion(measured, worst, chosen) if worst else None
    notes = ["the inputs are synthesised; other inputs may give another ranking"] * samples.synthesised
    return Analysis(
        source=switchable.signature.name,
        recipe=chosen.model_dump(mode="json"),
        inputs=str(samples),
        synthesised=samples.synthesised,
        samples=len(samples),
        isa=cpu.isa(),
        metric=ranked_by,
        everything=everything,
        sites=tuple(damages[index] for index in ranking),
        layers=tuple(layers_of(damages)),
        kept=tuple(site for site in switchable.sites if not site.decision.quantize),
        exclusion=excluded,
        runs=measured.runs,
        seconds=time.perf_counter() - start,
        notes=(*notes, *filter(None, [switchable.note]), *measured.notes),
    )


class Damages:
    """Runs a switchable model, and compares its outputs with the outputs with all switches off."""

    def __init__(
        self, switchable: Switchable, feeds: Sequence[Inputs], ranked_by: Metric, progress: Progress | None
    ) -> None:
        self.switchable, self.feeds = switchable, feeds
        self.names = [site.decision.site.name for site in switchable.switched]
        self.runs = 0
        self.notes: list[str] = []
        self._ranked_by = ranked_by
        self._metrics = list({metric.name: metric for metric in (ranked_by, RELATIVE_L2)}.values())
        self._progress = progress
        self._expected: list[Inputs] = []

    def reference(self, samples: Samples) -> None:
        """Runs the original on every sample; ShapeError if it has no finite output, of which there is no error."""
        off = [False] * len(self.names)
        self._expected = [self.tick("original", self.switchable.run(feeds, off)) for feeds in self.feeds]
        for sample, outputs in zip(samples.names, self._expected, strict=False):
            check_measurable(sample, outputs)
        for outputs in self._expected:
            for name, values in outputs.items():
                text = f"output {name!r} is {sameness(values)}, which proves little"
                if sameness(values) and text not in self.notes:
                    self.notes.append(text)

    def scores(self, on: Sequence[bool], what: str) -> Scores:
        """Returns the errors with some sites rewritten, by the name of the metric."""
        values: dict[str, list[float]] = {metric.name: [] for metric in self._metrics}
        for feeds, expected in zip(self.feeds, self._expected, strict=True):
            outputs = self.tick(what, self.switchable.run(feeds, on))
            for metric in self._metrics:
                values[metric.name].append(metric.of(expected, outputs))
        return {metric.name: Score(metric=metric, values=tuple(values[metric.name])) for metric in self._metrics}

    def alone(self) -> list[Scores]:
        """Returns the errors of each site alone."""
        count = len(self.names)
        return [self.scores([i == j for j in range(count)], name) for i, name in enumerate(self.names)]

    def ranking(self, alone: Sequence[Scores]) -> list[int]:
        """Returns the sites, the one that does the most damage by itself first."""
        metrics = (self._ranked_by, RELATIVE_L2)
        damage = [[m.badness(scores[m.name].mean) for m in metrics] for scores in alone]
        return sorted(range(len(alone)), key=damage.__getitem__, reverse=True)

    def tick(self, what: str, outputs: Inputs) -> Inputs:
        """Returns the outputs of a run that the progress is told of."""
        self.runs += 1
        if self._progress is not None:
            planned = len(self.feeds) * (2 * len(self.names) + _PARTS + 2)
            self._progress(what, self.runs, max(planned, self.runs))
        return outputs


def _inputs_seen(measured: Damages) -> list[InputStatistics | None]:
    """Returns the activations of all sites in numbers; a site that cannot be observed has none."""
    model = measured.switchable
    # Sites that multiply one activation share what is fetched.
    readers: dict[object, list[int]] = {}
    for index, seen in enumerate(model.observed):
        if seen is not None:
            readers.setdefault(seen, []).append(index)
    observers = [InputObserver(site.decision) for site in model.switched]
    groups = list(readers.values())
    for part in np.array_split(np.arange(len(groups)), min(_PARTS, len(groups)) or 1):
        first = [groups[number][0] for number in part]
        for feeds in measured.feeds if first else ():
            arrays = model.observe(feeds, first)
            measured.tick("activations", {})
            for number, x in zip(part, arrays, strict=True):
                for index in groups[number]:
                    observers[index].add(x)
    return [o.result() if seen is not None else None for o, seen in zip(observers, model.observed, strict=True)]


def _worst(ranking: Sequence[int], squares: Sequence[float], keep: int | None) -> list[int]:
    """Returns the sites to exclude, worst first; never all of them."""
    if keep is None:
        total, left, keep = sum(squares), sum(squares), 0
        while keep < len(ranking) and left > total / 2:
            left = math.fsum(squares[index] for index in ranking[keep + 1 :])
            keep += 1
    return list(ranking[: min(keep, len(ranking) - 1)])


def _exclusion(measured: Damages, worst: Sequence[int], recipe: Recipe) -> Exclusion | None:
    names = [measured.names[index] for index in worst]
    matmuls = [site.decision.site for site in measured.switchable.sites]
    patterns = exclusion.patterns(names, matmuls)
    left = {decision.site.name for decision in plan(matmuls, recipe.excluding(patterns)) if decision.quantize}
    if left != set(measured.names) - set(names):
        measured.notes.append("no exclusion is proposed: matmuls share names and module paths; name the nodes")
        return None

    def size(indices: Iterable[int]) -> int:  # a weight that sites share counts once
        sites = (measured.switchable.switched[index] for index in indices)
        return sum({site.packed or site: site.bytes_before for site in sites}.values())

    return Exclusion(
        sites=tuple(names),
        patterns=patterns,
        yaml=yaml.safe_dump({"exclude": [*recipe.exclude, *patterns]}, width=10_000),
        weight_bytes=size(worst),
        all_weight_bytes=size(range(len(measured.names))),
        scores=measured.scores([index not in worst for index in range(len(measured.names))], "the exclusion"),
    )
