"""analyze(): the sites that cause the error. One model with switches runs many times, with one site changed each time.

    nothing rewritten               the reference, and the activations
    everything rewritten            the error without an exclusion
    one site alone rewritten        the damage of the site, which ranks the sites
    everything but one rewritten    the gain of keeping it
    everything but the worst        the error with the proposed exclusion

At most 2 * sites + 10 runs for each sample.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import yaml

from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.options import Progress, Unpack, check_options
from mxfp8_graph.policy import presets
from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.report.build import better_preset
from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.running.compare import sameness
from mxfp8_graph.running.runner import Model
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.tools.analyze.analysis import Analysis, Exclusion, Scores, SiteDamage, layers_of
from mxfp8_graph.tools.analyze.input_statistics import InputObserver, InputStatistics
from mxfp8_graph.tools.metrics import RELATIVE_L2, check_measurable, metric_called
from mxfp8_graph.tools.switchable import Switchable
from mxfp8_graph.tools.switches import open_switchable
from mxfp8_graph.tools.trials import Measure
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError

_PARTS: Final = 4
"""Number of runs that fetch activations, each a part of them, since memory may not hold all."""


@blame_models_if_checker_complains("model")
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
    """Returns the rewritten matmuls of a model, ranked by the error of each at the outputs, and a proposed exclusion.

    The model is opened and loaded once, with the nodes and weights of a `rewrite` without fusion. An ONNX model is
    written to a temporary folder with its packed weights, 1.3 times its size; set TMPDIR to choose the folder.

    Args:
        model: the path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`. It is not
            modified.
        recipe: the recipe that selects the sites.
        metric: the metric of the ranking: one of `tools.metrics.METRICS`, or the user's own as module:function.
        keep: number of the worst sites to exclude; None takes the smallest number that causes half the squared error.
        allow_nonfinite: whether to pack weights that hold NaN or Inf.
        progress: called as progress(site, bytes, all bytes) while weights are packed, then with numbers of runs.
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
        count, names = len(switchable.switched), [site.decision.site.name for site in switchable.switched]
        original = partial(switchable.run, on=[False] * count)
        samples = make_samples(switchable.signature, inputs, run=original)
        metrics = list({each.name: each for each in (ranked_by, RELATIVE_L2)}.values())
        measure = Measure(feeds=samples.feeds, metrics=metrics, progress=progress)
        measure.total = len(samples) * (2 * count + _PARTS + 2)
        measure.expected = measure.outputs(original, "original")
        check_measurable(samples.names, measure.expected)
        seen = _inputs_seen(switchable, measure)
        everything = measure.scores(partial(switchable.run, on=[True] * count), "everything")
        alone = damages_alone(switchable, measure)
        sites = []
        for i, site in enumerate(switchable.switched):
            others = partial(switchable.run, on=[i != j for j in range(count)])
            without = measure.scores(others, names[i])
            sites.append(SiteDamage(site=site, depth=i, alone=alone[i], without=without, input=seen[i]))
        # Relative L2 orders sites that are equal in the user's metric.
        sites.sort(key=lambda site: [m.badness(site.alone[m.name].mean) for m in metrics], reverse=True)
        notes = _notes(samples, switchable, measure)
        worst = _worst(sites, keep)
        excluded = _exclusion(switchable, measure, worst, chosen) if worst else None
    if worst and excluded is None:
        notes.append("no exclusion is proposed: matmuls share names and module paths; name the nodes")
    return Analysis(
        source=switchable.signature.name,
        recipe=chosen.model_dump(mode="json"),
        inputs=str(samples),
        synthesised=samples.synthesised,
        samples=len(samples),
        isa=cpu.isa(),
        metric=ranked_by,
        everything=everything,
        sites=tuple(sites),
        layers=tuple(layers_of(sites)),
        kept=tuple(site for site in switchable.sites if not site.decision.quantize),
        exclusion=excluded,
        runs=measure.runs,
        seconds=time.perf_counter() - start,
        advice=better_preset(chosen),
        notes=tuple(notes),
    )


def damages_alone(switchable: Switchable, measure: Measure) -> list[Scores]:
    """Returns the errors of each site that is rewritten alone, in the order of the switches."""
    sites = switchable.switched
    runs = (partial(switchable.run, on=[other is site for other in sites]) for site in sites)
    return [measure.scores(run, site.decision.site.name) for run, site in zip(runs, sites, strict=True)]


def _notes(samples: Samples, switchable: Switchable, measure: Measure) -> list[str]:
    notes = ["the inputs are synthesised; other inputs may give another ranking"] * samples.synthesised
    notes += filter(None, [switchable.note])
    outputs = [pair for each in measure.expected for pair in each.items()]
    same = (f"output {name!r} is {why}, which proves little" for name, values in outputs if (why := sameness(values)))
    return [*notes, *dict.fromkeys(same)]


def _inputs_seen(model: Switchable, measure: Measure) -> list[InputStatistics | None]:
    """Returns the statistics of each site's activation, or None for a site that cannot be observed."""
    observers = [InputObserver(site.decision) for site in model.switched]
    # Sites that multiply the same activation share one fetch of it.
    readers: dict[object, list[InputObserver]] = defaultdict(list)
    for observer, seen in zip(observers, model.observed, strict=True):
        readers[seen].append(observer)
    activations = [seen for seen in readers if seen is not None]
    size = max(1, -(-len(activations) // _PARTS))
    for part in (activations[at : at + size] for at in range(0, len(activations), size)):
        for feeds in measure.feeds:
            for seen, x in zip(part, model.observe(feeds, part), strict=True):
                for observer in readers[seen]:
                    observer.add(x)
            measure.tick("activations")
    return [o.result() if seen is not None else None for o, seen in zip(observers, model.observed, strict=True)]


def _worst(sites: Sequence[SiteDamage], keep: int | None) -> Sequence[SiteDamage]:
    """Returns the sites to exclude, worst first; never all of them."""
    if keep is None:
        squares = [site.square for site in sites]
        # The limit is finite, so that all sites with an infinite square, those with a NaN, are excluded.
        half = min(sum(squares) / 2, sys.float_info.max)
        keep = next(count for count in range(len(sites) + 1) if sum(squares[count:]) <= half)
    return sites[: min(keep, len(sites) - 1)]


def patterns_of(names: Sequence[str], sites: Sequence[MatMulSite]) -> tuple[str, ...]:
    """Returns one pattern for a recipe per site in `names`, in that order, which matches no other site.

    It is the module path, which an ONNX model and a program of the same module have in common, or the name if another
    site has that path. If other sites match both, the pattern matches them, too.
    """
    by_name = {site.name: site for site in sites}
    patterns = []
    for site in (by_name[name] for name in names):
        choices = [f"^{re.escape(name)}$" for name in (site.module, site.name) if name]
        others = [other for other in sites if other is not site]
        own = (
            p for p in choices if not any(re.search(p, other.name) or re.search(p, other.module) for other in others)
        )
        patterns.append(next(own, choices[-1]))
    return tuple(patterns)


def _exclusion(model: Switchable, measure: Measure, worst: Sequence[SiteDamage], recipe: Recipe) -> Exclusion | None:
    """Returns the exclusion of the worst sites with its measured errors, or None if patterns cannot select them."""
    names = [damage.site.decision.site.name for damage in worst]
    matmuls = [site.decision.site for site in model.sites]
    patterns = patterns_of(names, matmuls)
    on = [site.decision.site.name not in names for site in model.switched]
    # A pattern may match other sites too, so the plan with the patterns must rewrite exactly the switched sites.
    left = [decision.site.name for decision in plan(matmuls, recipe.excluding(patterns)) if decision.quantize]
    if left != [site.decision.site.name for site, rewritten in zip(model.switched, on, strict=True) if rewritten]:
        return None

    def size(sites: Iterable[SiteReport]) -> int:  # a weight that sites share counts once
        return sum({site.packed or site: site.bytes_before for site in sites}.values())

    return Exclusion(
        sites=tuple(names),
        patterns=patterns,
        yaml=yaml.safe_dump({"exclude": [*recipe.exclude, *patterns]}, width=10_000),
        weight_bytes=size(damage.site for damage in worst),
        all_weight_bytes=size(model.switched),
        scores=measure.scores(partial(model.run, on=on), "the exclusion"),
    )
