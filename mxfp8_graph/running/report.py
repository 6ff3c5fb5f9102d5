"""The result of a verification."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from mxfp8_graph.report.base import Data, Report
from mxfp8_graph.report.section import Columns, Head, Section, Tile, filled, number, shape_text
from mxfp8_graph.running.compare import Difference
from mxfp8_graph.running.node_check import NodeCheck


class Plausible(NamedTuple):
    """The relative L2 errors of correct rewrites."""

    formats: str
    """The element formats of the recipe."""
    typical: float
    """The largest of real models, such as decoders of 24 layers and detectors; NaN if it is not known."""
    limit: float
    """The default limit of `verify`: twice that. A weight in a wrong order gives about 1."""


_PLAUSIBLE: Final = (Plausible("E5M2", 0.25, 0.5), Plausible("E4M3", 0.15, 0.3), Plausible("INT8", 0.1, 0.2))
"""The least accurate format first."""


def plausible(recipe: str | None) -> Plausible:
    """Returns what to expect of the least accurate format that a recorded recipe (JSON) names, in its rules too."""
    try:
        fields = json.loads(recipe or "")
        wholes = [fields, *fields.get("rules", [])]
        names = {each.get(key) for each in wholes for key in ("weight_format", "activations")}
    except (ValueError, AttributeError):  # no record, or one of a later version
        names = set()
    known = (each for each in _PLAUSIBLE if each.formats.lower() in names)
    return next(known, Plausible("", math.nan, max(each.limit for each in _PLAUSIBLE)))


@dataclass(frozen=True, kw_only=True)
class OutputCheck(Data):
    """The error of one output: of the worst sample if there are several, with the means of all samples."""

    KEYS = (
        "name dtype shape worst_sample=sample? mean_relative_l2 mean_cosine limit rewritten_vs_original=rewritten "
        "body_vs_original=body kernel_vs_body=kernel"
    )

    name: str
    dtype: str
    shape: tuple[int, ...]
    rewritten: Difference
    """With our kernels, against the original."""
    body: Difference | None = None
    """Function bodies in stock ONNX Runtime, against the original; None for a torch program, which has none."""
    kernel: Difference | None = None
    """With our kernels, against the function bodies."""
    sample: str = ""
    """Name of the worst sample; "" if there is one sample only."""
    mean_relative_l2: float
    """Mean of `rewritten.relative_l2` over the samples."""
    mean_cosine: float
    limit: float | None = None
    """Limit of `rewritten.relative_l2`; None if the output is not judged."""


def worst_of(checks: Sequence[OutputCheck]) -> OutputCheck:
    """Returns the check of the worst sample: most NaN and Inf in one result only, then the largest error, NaN first."""

    def badness(check: OutputCheck) -> tuple[int, float]:
        error = check.rewritten.relative_l2
        nonfinite = check.rewritten.nonfinite + (check.kernel.nonfinite if check.kernel else 0)
        return nonfinite, math.inf if math.isnan(error) else error

    return replace(
        max(checks, key=badness),
        mean_relative_l2=statistics.fmean(check.rewritten.relative_l2 for check in checks),
        mean_cosine=statistics.fmean(check.rewritten.cosine for check in checks),
    )


@dataclass(frozen=True, kw_only=True)
class Measurement(Report):
    """The result of runs of a model."""

    inputs: str
    """The samples in words."""
    isa: str
    """The instruction set of the kernels."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Measurement):
    """The result of a verification. It passed if `failures` is empty and an output was judged."""

    TITLE = "Verification of {rewritten}"
    FILES = ("original", "rewritten")
    KEYS = "original rewritten inputs isa passed kernels_agree outputs_close failures notes outputs nodes"

    original: str
    rewritten: str
    plausible: Plausible
    """The errors of correct rewrites in the formats of this one."""
    outputs: tuple[OutputCheck, ...]
    nodes: tuple[NodeCheck, ...]
    output_failures: tuple[str, ...]
    """Failures of outputs; `nodes` has the failures of kernels."""

    @property
    def failures(self) -> tuple[str, ...]:
        """All failures, outputs before kernels."""
        return (*self.output_failures, *(str(node) for node in self.nodes if not node.passed))

    @property
    def passed(self) -> bool:
        """Whether an output was judged, and nothing failed."""
        # Kernels alone prove nothing about the rewrite: they are compared with function bodies of the same file.
        return bool(self.outputs_close) and not self.failures

    @property
    def kernels_agree(self) -> bool | None:
        """Whether all kernels agree with their function bodies; None if no node was compared."""
        return all(node.passed for node in self.nodes) if self.nodes else None

    @property
    def outputs_close(self) -> bool | None:
        """Whether all outputs with a limit are close to the original; None if none of them has a value."""
        judged = [output for output in self.outputs if output.limit is not None and output.rewritten.compared]
        return not self.output_failures if judged or self.output_failures else None

    def answer(self) -> str:
        """Returns the verdict, with the number of failures or the largest error and its limit."""
        if self.failures:
            outputs = len(self.output_failures)
            counts = f"{outputs} of outputs, {len(self.failures) - outputs} of kernels"
            return f"Failed checks: {counts}; do not use {self.rewritten}."
        if not self.passed:
            advice = "set --max-rel-l2 to judge integers, or pass other inputs"
            return f"Not judged: 0 of {len(self.outputs)} outputs have a limit and a value; {advice}."
        judged = [(o.rewritten.relative_l2, o.limit, o.name) for o in self.outputs if o.limit is not None]
        error, limit, name = max(judged)
        agree = f"{len(self.nodes)} kernels agree with their nodes, and " if self.nodes else ""
        formats, typical, _ = self.plausible
        usual = f"; of {formats} at most {typical:g} is typical" if formats else ""
        return f"Passed: {agree}the relative L2 of {name} is {error:.3g}, limit {limit:g}{usual}."

    def head(self) -> Head:
        """Returns the verdict, error, cosine and kernels, and the command that times the result."""
        tiles = []
        if self.outputs:
            limits = {output.limit for output in self.outputs if output.limit is not None}
            note = f"relative L2, limit {max(limits):g}" if len(limits) == 1 else "relative L2"
            cosine = min(output.rewritten.cosine for output in self.outputs)
            tiles.append(Tile("error", f"{self.worst_relative_l2:.3g}", note=note))
            tiles.append(Tile("cosine", f"{cosine:.5f}", note="of the worst output"))
        if self.nodes:
            agree = sum(node.passed for node in self.nodes)
            tiles.append(Tile("kernels", f"{agree} of {len(self.nodes)}", note="agree with their nodes"))
        usable = self.passed and Path(self.rewritten).suffix
        command = f"mxfp8-graph run {shlex.quote(self.rewritten)} --profile" if usable else ""
        verdict = "good" if self.passed else "bad" if self.failures else "warning"
        return Head(verdict=verdict, tiles=tiles, command=command)

    @property
    def worst_relative_l2(self) -> float:
        """The largest relative L2 error of an output against the original's; NaN if one could not be compared."""
        errors = [output.rewritten.relative_l2 for output in self.outputs]
        # max() would pass over a NaN that is not the first.
        return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)

    def table(self) -> Columns:
        """Returns (header, a row per output), without columns that are empty."""
        rows = []
        for o in self.outputs:
            error = o.rewritten
            of_all = (number(o.mean_relative_l2), number(o.mean_cosine, ".6f"), o.sample) if o.sample else [""] * 3
            numbers = (number(error.relative_l2), number(error.max_abs), number(error.cosine, ".6f"))
            rows.append((o.name, o.dtype, shape_text(o.shape), *of_all, *numbers))
        means = ("mean rel. L2", "mean cosine", "worst sample")
        return filled(("output", "dtype", "shape", *means, "rel. L2", "max error", "cosine"), rows)

    def sections(self) -> Iterator[Section]:
        """Yields the facts (failures, kernels, notes), the table of outputs, and the table of nodes."""
        ops = dict.fromkeys(node.op for node in self.nodes)
        facts = [("failed", failure) for failure in self.failures]
        facts += [("nodes", _node_line(op, [node for node in self.nodes if node.op == op])) for op in ops]
        facts += [("inputs", self.inputs), ("kernels", self.isa), *(("note", note) for note in self.notes)]
        yield Section(facts=facts)
        yield Section(title="Outputs against the original's", columns=self.table())
        worst = sorted(self.nodes, key=lambda node: (node.passed, -node.excess))
        nodes = [(n.name, n.op, n.kernel, number(n.excess), "" if n.passed else "failed") for n in worst]
        header = ("node", "op", "kernel", "bounds, or values that differ", "")
        yield Section(title="Kernels against function bodies", columns=filled(header, nodes), detail=True)
        # Beside the error of the rewrite it would look like a defect.
        flips = [(o.name, number(o.kernel.relative_l2), number(o.kernel.max_abs)) for o in self.outputs if o.kernel]
        title = "Outputs with kernels against those with bodies: rounding that flips, as between any two correct runs"
        yield Section(title=title, columns=filled(("output", "rel. L2", "max error"), flips), detail=True)


def _node_line(op: str, nodes: Sequence[NodeCheck]) -> str:
    """Returns a sentence on how far the kernels of one op differ from their function bodies."""
    worst = max(node.excess for node in nodes)
    kernels = ", ".join(dict.fromkeys(node.kernel for node in nodes if node.kernel))
    named = f"{len(nodes)} {op} ({kernels})" if kernels else f"{len(nodes)} {op}"
    if nodes[0].has_bound:
        return f"{named}: kernel and function body differ by at most {worst:.2g} of the fp32 accumulation bound"
    return f"{named}: kernel and function body {f'differ in {worst:.0f} values' if worst else 'give the same bytes'}"
