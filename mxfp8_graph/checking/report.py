"""What a verification found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxfp8_graph.checking.compare import Difference
from mxfp8_graph.checking.node_check import NodeCheck
from mxfp8_graph.report import html
from mxfp8_graph.report.data import write_report
from mxfp8_graph.report.json_text import json_text


@dataclass(frozen=True, kw_only=True)
class OutputCheck:
    """What became of one output: of several samples, that of the worst one, with the means of all."""

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
    """Which sample that is; "" if there is but one."""
    mean_relative_l2: float
    """Of `rewritten`, over the samples."""
    mean_cosine: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the check with JSON types only."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "worst_sample": self.sample or None,
            "mean_relative_l2": self.mean_relative_l2 if math.isfinite(self.mean_relative_l2) else None,
            "mean_cosine": self.mean_cosine,
            "rewritten_vs_original": self.rewritten.to_dict(),
            "body_vs_original": self.body.to_dict() if self.body else None,
            "kernel_vs_body": self.kernel.to_dict() if self.kernel else None,
        }


def worst_of(checks: Sequence[OutputCheck]) -> OutputCheck:
    """Returns the check of the sample with most NaN and Inf in only one result, then the largest error."""

    def badness(check: OutputCheck) -> tuple[int, float]:
        return check.rewritten.nonfinite + (check.kernel.nonfinite if check.kernel else 0), check.rewritten.relative_l2

    return replace(
        max(checks, key=badness),
        mean_relative_l2=statistics.fmean(check.rewritten.relative_l2 for check in checks),
        mean_cosine=statistics.fmean(check.rewritten.cosine for check in checks),
    )


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What verification found. It passed if `failures` is empty."""

    original: str
    rewritten: str
    inputs: str
    """The inputs in words."""
    isa: str
    """The instruction set the kernels ran on."""
    outputs: tuple[OutputCheck, ...]
    nodes: tuple[NodeCheck, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def worst_relative_l2(self) -> float:
        """The largest relative L2 error of an output against the original's."""
        return max((output.rewritten.relative_l2 for output in self.outputs), default=0.0)

    @property
    def nodes_by_op(self) -> dict[str, tuple[NodeCheck, ...]]:
        """The node checks by op type."""
        return {op: tuple(n for n in self.nodes if n.op == op) for op in dict.fromkeys(n.op for n in self.nodes)}

    def to_html(self) -> str:
        """Returns one self-contained page: the verdict, the error of each output, and what each kernel did."""
        header = ("output", "mean rel. L2", "worst", "its 1-cosine", "max error", "kernel vs body: rel. L2")
        rows = []
        for o in self.outputs:
            error, kernel = o.rewritten, o.kernel.relative_l2 if o.kernel else None
            numbers = (o.mean_relative_l2, error.relative_l2, 1 - error.cosine, error.max_abs, kernel)
            rows.append((o.name, *map(html.number, numbers)))
        notes = [f"{o.dtype} {list(o.shape)}{'; worst: ' * bool(o.sample)}{o.sample}" for o in self.outputs]
        nodes = [(n.name, n.op, n.kernel, html.number(n.excess), "" if n.passed else "FAILED") for n in self.nodes]
        difference = "bounds, or values that differ"
        parts = [
            html.facts([("inputs", self.inputs), ("kernels", self.isa), *(("note", note) for note in self.notes)]),
            html.Table("Outputs against the original's", header, rows, notes=notes).html(),
            html.Table("Kernels against function bodies", ("node", "op", "kernel", difference, ""), nodes).html(),
        ]
        lead = [f"Verification {'passed' if self.passed else 'FAILED'}.", *self.failures]
        files = (self.original, self.rewritten)
        return html.page(f"Verification of {self.rewritten}", parts, lead=lead, files=files)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything with JSON types only."""
        return {
            "original": self.original,
            "rewritten": self.rewritten,
            "inputs": self.inputs,
            "isa": self.isa,
            "passed": self.passed,
            "failures": list(self.failures),
            "notes": list(self.notes),
            "outputs": [output.to_dict() for output in self.outputs],
            "nodes": [node.to_dict() for node in self.nodes],
        }

    def to_json(self) -> str:
        """Returns `to_dict` as JSON, an output and a node per line."""
        return json_text(self.to_dict())

    def write(self, path: str | Path) -> Path:
        """Writes the report, as .json or .html, and returns the path.

        Raises:
            Mxfp8Error: it cannot be written there.
        """
        return write_report(path, self)
