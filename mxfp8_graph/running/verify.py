"""verify(): is the rewritten model still the original one, and do the kernels compute what the file says?

Three runs on the same inputs: the original; the rewritten file with our kernels; the rewritten file in stock ONNX
Runtime, which runs its function bodies. Original against rewritten gives the quantization error, which fails above the
caller's limit (`max_rel_l2`) or the format's (`plausible`). Kernels are compared with function bodies node by node,
see `node_check.py`. Outputs are compared on every sample, nodes on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.blame import blame_models_if_checker_complains
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.options import Unpack, check_options
from mxfp8_graph.running.compare import difference, sameness
from mxfp8_graph.running.inputs import Array, Signature
from mxfp8_graph.running.node_check import NodeCheck, check_nodes
from mxfp8_graph.running.report import OutputCheck, VerifyReport, plausible, worst_of
from mxfp8_graph.running.runner import Model, is_program, open_runnable
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.running.sessions import Runnable, Session
from mxfp8_ops import contract, cpu
from mxfp8_ops.errors import ContractError, ShapeError

_ORIGINAL: Final = "the original {} (the rewrite is not to blame)"
"""Name of the original model in errors."""


@blame_models_if_checker_complains("original", "rewritten")
def verify(
    original: Model, rewritten: Model, *, max_rel_l2: float | None = None, **samples: Unpack[SampleOptions]
) -> VerifyReport:
    """Returns the errors of each output against the original, and of each kernel against its function body.

    The verification fails if a NaN or Inf is in one result and not in the other, if an output has another shape or no
    finite value, if a kernel differs from its function body by more than the bound of `node_check.py`, or if an
    output's relative L2 error is above its limit.

    Args:
        original: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        rewritten: the result of `rewrite`. One may be ONNX and the other a torch program: inputs and outputs are then
            matched by name, or by position if the names differ. Function bodies are checked in ONNX models only.
        max_rel_l2: limit of the relative L2 error of each output. None sets the one of `running.report.plausible`
            for floating-point outputs (INT8 0.2, E4M3 0.3, E5M2 0.5) and none for integers (labels, ids), which are
            then not judged. Infinity allows every finite error.
        **samples: see `samples.SampleOptions`.

    Raises:
        ContractError: a model cannot be read, or `original` is rewritten and `rewritten` is not.
        ShapeError: the two models have different inputs or outputs, or `inputs` does not fit them.
        BackendError: ONNX Runtime cannot run one of them, or the native library is missing.
    """
    check_options("verify", samples, SampleOptions)
    old, before = open_runnable(original, _ORIGINAL)
    new, after = open_runnable(rewritten)
    if old.rewritten and not new.rewritten:
        expected, advice = "the original first, and its rewrite second", "swap the two"
        raise ContractError(old.name, f"is rewritten, and {new.name} is not", expected=expected, advice=advice)
    in_onnx = not (is_program(original) or is_program(rewritten))
    notes = [before.note.replace(before.name, old.name)] if before.note else []
    new_input, new_output = _matched((old, before), (new, after), None if in_onnx else notes)
    bodies = Session(rewritten, kernels=False, where=new.name) if in_onnx else None
    chosen = make_samples(old, samples, run=before.run)
    usual = plausible(new.recipe)
    checks = _OutputChecks(max_rel_l2, usual.limit)
    for which, feeds in zip(chosen.names if len(chosen) > 1 else [""], chosen.feeds, strict=True):
        wanted = before.run(feeds)
        results = after.run({new_input[name]: array for name, array in feeds.items()})
        by_bodies = bodies.run(feeds) if bodies else {}
        for name, array in wanted.items():
            checks.add(which, name, array, results[new_output[name]], by_bodies.get(name))
    outputs, nodes = checks.outputs(), list[NodeCheck]()
    if in_onnx:
        # After the runs, so that an error on these inputs first names the original.
        model = load(rewritten)
        nodes = check_nodes(model, chosen.feeds[0])
        notes += _node_notes(model.graph, nodes, chosen)
        if not new.rewritten:
            notes.append(f"{new.name} is not rewritten: this compares a model with another, not with its rewrite")
    return VerifyReport(
        original=old.name,
        rewritten=new.name,
        plausible=usual,
        inputs=str(chosen),
        isa=cpu.isa(),
        outputs=outputs,
        nodes=tuple(nodes),
        output_failures=checks.failures(),
        notes=(*notes, *_output_notes(outputs), *checks.notes),
    )


class _OutputChecks:
    """Collects the comparison of each output, sample by sample."""

    def __init__(self, max_rel_l2: float | None, usual: float) -> None:
        self.notes: list[str] = []
        self._usual = usual
        self._max_rel_l2 = max_rel_l2
        self._checks: dict[str, list[OutputCheck]] = {}
        self._mismatches: list[str] = []

    def add(self, which: str, name: str, expected: Array, result: Array, body: Array | None) -> None:
        """Compares one output of one sample; `which` is the sample's name if there are several."""
        results = {"": result} if body is None else {" with kernels": result, " with function bodies": body}
        place, wanted = f"output {name!r}{f' of {which}' if which else ''}", _kind(expected)
        kinds = ((_kind(array), how) for how, array in results.items())
        if wrong := [f"{place}: {kind}{how}; expected {wanted}" for kind, how in kinds if kind != wanted]:
            self._mismatches += wrong
            return
        if not self._checks.get(name):  # the first sample is enough
            self.notes += _sameness_notes(name, expected, result)
        # A relative error of labels or ids means little: their distances have no meaning.
        limit = self._usual if "float" in expected.dtype.name else None
        rewritten = difference(expected, result)
        check = OutputCheck(
            name=name,
            dtype=expected.dtype.name,
            shape=expected.shape,
            rewritten=rewritten,
            body=difference(expected, body) if body is not None else None,
            kernel=difference(body, result) if body is not None else None,
            sample=which,
            mean_relative_l2=rewritten.relative_l2,
            mean_cosine=rewritten.cosine,
            limit=limit if self._max_rel_l2 is None else self._max_rel_l2,
        )
        self._checks.setdefault(name, []).append(check)

    def outputs(self) -> tuple[OutputCheck, ...]:
        """Returns the worst sample of each output; none if a shape differs."""
        return () if self._mismatches else tuple(worst_of(checks) for checks in self._checks.values())

    def failures(self) -> tuple[str, ...]:
        """Returns the failures of outputs in words."""
        return (*self._mismatches, *(text for output in self.outputs() for text in _output_failures(output)))


def _matched(
    original: tuple[Signature, Runnable], rewritten: tuple[Signature, Runnable], by_position: list[str] | None
) -> list[dict[str, str]]:
    """Returns two maps, of inputs and of outputs: the name in `original` -> the name in `rewritten`.

    Other names are matched by position, with a note in `by_position`, or refused if `by_position` is None.
    """
    pairs = []
    (old, before), (new, after) = original, rewritten
    for what, ours, theirs in (
        ("inputs", {i.name: str(i) for i in old.specs}, {i.name: str(i) for i in new.specs}),
        ("outputs", {name: name for name in before.output_names}, {name: name for name in after.output_names}),
    ):
        if ours.keys() == theirs.keys():
            pairs.append({name: name for name in ours})
            continue
        if by_position is None or len(ours) != len(theirs):
            expected = f"those of {old.name}, {', '.join(ours.values()) or 'none'}"
            advice = "verify a model against the one it was made from"
            listed = f"{what} {', '.join(theirs.values()) or 'none'}"
            raise ShapeError(new.name, listed, expected=expected, advice=advice)
        names = f"{', '.join(ours)} with {', '.join(theirs)}"
        by_position.append(f"{what} have other names and are matched by position: {names}")
        pairs.append(dict(zip(ours, theirs, strict=True)))
    return pairs


def _kind(array: Array) -> str:
    return f"{list(array.shape)} {array.dtype.name}"


def _output_failures(output: OutputCheck) -> list[str]:
    failures, error = [], output.rewritten
    name = f"output {output.name!r}{f' of {output.sample}' if output.sample else ''}"
    for what, comparison in (
        ("rewritten and original", output.rewritten),
        ("kernels and function bodies", output.kernel),
    ):
        if comparison and comparison.nonfinite:
            where = f"{comparison.nonfinite} of {comparison.count} positions"
            failures.append(f"{name}: NaN or Inf in only one of {what} at {where}")
    # Without a finite position nothing was compared, which must not count as passed.
    if error.count and not error.compared:
        failures.append(f"{name}: no position is finite in both models: nothing is compared")
    elif output.limit is not None and not error.relative_l2 <= output.limit:
        failures.append(f"{name}: relative L2 {error.relative_l2:.3g} is above the limit {output.limit:g}")
    return failures


def _node_notes(graph: ir.Graph, nodes: list[NodeCheck], samples: Samples) -> list[str]:
    notes = []
    if nodes and len(samples) > 1:
        notes.append("kernels are compared with function bodies, node by node, on the first sample")
    # The inputs of a node in a subgraph exist only there, and twins are added to the main graph.
    hidden = sum(node.domain == contract.DOMAIN for node in graph.all_nodes()) - len(nodes)
    if hidden:
        notes.append(f"{hidden} MXFP8 nodes in subgraphs are compared at the model's outputs only")
    skipped = [
        str(o.name) for o in graph.outputs if o.dtype == ir.DataType.STRING or not isinstance(o.type, ir.TensorType)
    ]
    if skipped:
        notes.append(f"outputs that are not tensors of numbers are not compared: {', '.join(skipped)}")
    return notes


def _output_notes(outputs: Sequence[OutputCheck]) -> list[str]:
    notes = []
    for output in outputs:
        error = output.rewritten
        if output.limit is None or not error.count:
            why = f"{output.dtype}, and no limit is set" if error.count else "it has no values"
            notes.append(f"output {output.name!r} is not judged: {why}")
        if error.compared < error.count:
            finite = f"{error.compared} of {error.count}"
            notes.append(f"output {output.name!r}: only {finite} positions are finite in both models and compared")
    return notes


def _sameness_notes(name: str, expected: Array, result: Array) -> list[str]:
    """Returns a note for an output whose values would hide most errors."""
    sides = (("original", sameness(expected)), ("rewritten", sameness(result)))
    facts = " and ".join(f"is {what} in the {which} model" for which, what in sides if what)
    return [f"output {name!r} {facts}: this says little about the rewrite; try other inputs"] if facts else []
