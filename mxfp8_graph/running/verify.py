"""verify(): is the rewritten model still the original one, and do the kernels compute what the file says?

Three runs on the same inputs: the original; the rewritten file with our kernels; the rewritten file in stock ONNX
Runtime, which runs its function bodies. Original against rewritten is the error of quantization: beyond `PLAUSIBLE`, or
what the caller says (`max_rel_l2`), it fails. Kernel against body is judged node by node, see `node_check.py`. Of
several samples the outputs of all are compared, and the nodes on the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import load
from mxfp8_graph.options import Unpack, check_options
from mxfp8_graph.running.compare import difference, sameness
from mxfp8_graph.running.inputs import Array, InputSpec, Signature, input_specs
from mxfp8_graph.running.node_check import NodeCheck, check_nodes, nodes_in_subgraphs
from mxfp8_graph.running.report import PLAUSIBLE, OutputCheck, VerifyReport, worst_of
from mxfp8_graph.running.runner import Model, is_program, open_runnable
from mxfp8_graph.running.samples import SampleOptions, Samples, make_samples
from mxfp8_graph.running.sessions import Runnable, Session
from mxfp8_ops import cpu
from mxfp8_ops.errors import ContractError, ShapeError

_ORIGINAL: Final = "the original {} (the rewrite is not to blame)"
"""Name of the original model in errors."""


def verify(
    original: Model, rewritten: Model, *, max_rel_l2: float | None = None, **samples: Unpack[SampleOptions]
) -> VerifyReport:
    """Returns how far `rewritten` is from `original`, output by output, and kernel from function body, node by node.

    It fails if a NaN or Inf is in one result and not in the other, if an output has another shape or no finite value,
    if a kernel disagrees with its function body (`node_check.py` says by how much it may), and if an output's relative
    L2 error is above its limit.

    Args:
        original: path of an ONNX model or .pt2 program, an `onnx.ModelProto`, or an `ExportedProgram`.
        rewritten: what `rewrite` made of it. One may be ONNX and the other a torch program: inputs and outputs are
            then matched by name, or by position if the names differ. Function bodies are checked in ONNX models only.
        max_rel_l2: limit for each output; None: `PLAUSIBLE` for those of floating-point numbers. Of integers (labels,
            ids) it says little, so they are not judged then. Infinity allows every finite error.
        **samples: see `samples.SampleOptions`.

    Raises:
        ContractError: a model cannot be read, or `original` is rewritten and `rewritten` is not.
        ShapeError: the two models have different inputs or outputs, or `inputs` does not fit them.
        BackendError: ONNX Runtime cannot run one of them, or the native library is missing.
    """
    check_options("verify", samples, SampleOptions)
    feed = partial(make_samples, options=samples)
    if is_program(original) or is_program(rewritten):
        runnable = [open_runnable(model) for model in (original, rewritten)]
        return _verify_programs(runnable[0], runnable[1], feed, max_rel_l2)
    before, after = (load(model) for model in (original, rewritten))
    old, new = name_of(before), name_of(after)
    signature = Signature.of(before)
    _check_order(signature, rewritten=record.is_rewritten(after), name=new)
    _check_signatures([before.graph, after.graph], (old, new))
    # An original with nodes of ours runs with kernels too: by function bodies it would differ from a copy of itself,
    # see `_drift_notes`.
    is_rewritten = signature.rewritten
    sessions = (
        Session(original, kernels=is_rewritten, where=_ORIGINAL.format(old), float32=not is_rewritten),
        Session(rewritten, kernels=True, where=new),
        Session(rewritten, kernels=False, where=new),
    )
    chosen = feed(signature, run=sessions[0].run)
    checks = _OutputChecks(chosen, max_rel_l2)
    for sample in range(len(chosen)):
        expected, results, bodies = (session.run(chosen.feeds[sample]) for session in sessions)
        for name, array in expected.items():
            checks.add(sample, name, array, results[name], bodies[name])
    # After the runs, so that what fails on these inputs is first said of the original.
    nodes = check_nodes(after, chosen.feeds[0])
    outputs = checks.outputs()
    notes = (
        *filter(None, [sessions[0].note.replace(sessions[0].name, old)]),
        *_notes(after.graph, new, nodes, outputs, chosen),
        *checks.notes,
        *_drift_notes(nodes, outputs),
    )
    return checks.report(old, new, nodes, notes)


def _verify_programs(
    original: tuple[Signature, Runnable],
    rewritten: tuple[Signature, Runnable],
    feed: Callable[..., Samples],
    max_rel_l2: float | None,
) -> VerifyReport:
    """Returns what `verify` does where at least one of the models is a torch program."""
    (old, before), (new, after) = original, rewritten
    _check_order(old, rewritten=new.rewritten, name=new.name)
    # An error of the original must not look like one of the rewrite.
    before.name = _ORIGINAL.format(old.name)
    samples = feed(old, run=before.run)
    notes: list[str] = []
    models = (old.name, new.name)
    new_input = _matched("inputs", [i.name for i in old.specs], [i.name for i in new.specs], models, notes)
    new_output = _matched("outputs", before.output_names, after.output_names, models, notes)
    checks = _OutputChecks(samples, max_rel_l2)
    for sample, feeds in enumerate(samples.feeds):
        expected = before.run(feeds)
        results = after.run({new_input[name]: array for name, array in feeds.items()})
        for name, array in expected.items():
            checks.add(sample, name, array, results[new_output[name]])
    return checks.report(*models, [], [*notes, *checks.notes])


class _OutputChecks:
    """Collects the comparison of each output, sample by sample."""

    def __init__(self, samples: Samples, max_rel_l2: float | None) -> None:
        self.notes: list[str] = []
        self._samples = samples
        self._max_rel_l2 = max_rel_l2
        self._checks: dict[str, list[OutputCheck]] = {}
        self._mismatches: list[str] = []

    def add(self, sample: int, name: str, expected: Array, result: Array, body: Array | None = None) -> None:
        """Compares one output of one sample."""
        which = self._samples.names[sample] if len(self._samples) > 1 else ""
        of_sample = f" of {which}" if which else ""
        if wrong := _shape_failures(expected, result, body):
            self._mismatches += [f"output {name!r}{of_sample}: {text}" for text in wrong]
            return
        if not self._checks.get(name):  # of one sample, or of the first
            self.notes += _sameness_notes(name, expected, result)
        check = _check_output(name, which, expected, result, body)
        # A relative error of labels or ids says little: the next id is as far away as the last.
        limit = PLAUSIBLE if "float" in expected.dtype.name else None
        limit = limit if self._max_rel_l2 is None else self._max_rel_l2
        self._checks.setdefault(name, []).append(replace(check, limit=limit))

    def outputs(self) -> tuple[OutputCheck, ...]:
        """Returns the worst sample of each output; none if a shape differs."""
        return () if self._mismatches else tuple(worst_of(checks) for checks in self._checks.values())

    def report(self, original: str, rewritten: str, nodes: Sequence[NodeCheck], notes: Sequence[str]) -> VerifyReport:
        """Returns the report, with the failures of outputs in words."""
        outputs = self.outputs()
        return VerifyReport(
            original=original,
            rewritten=rewritten,
            inputs=str(self._samples),
            isa=cpu.isa(),
            outputs=outputs,
            nodes=tuple(nodes),
            output_failures=(*self._mismatches, *(text for output in outputs for text in _output_failures(output))),
            notes=tuple(notes),
        )


def _matched(
    what: str, old: Sequence[str], new: Sequence[str], models: tuple[str, str], notes: list[str]
) -> dict[str, str]:
    """Returns name in `old` -> name in `new`: the same name, or the one at the same position."""
    if len(old) != len(new):
        raise _other_signature(what, old, new, models)
    if sorted(old) == sorted(new):
        return {name: name for name in old}
    notes.append(f"{what} have other names and are matched by position: {', '.join(old)} with {', '.join(new)}")
    return dict(zip(old, new, strict=True))


def _check_order(original: Signature, *, rewritten: bool, name: str) -> None:
    """Raises ContractError if the original is a rewritten model and the other one is not."""
    if original.rewritten and not rewritten:
        expected, advice = "the original, and then what was made of it", "swap the two"
        raise ContractError(original.name, f"is rewritten, and {name} is not", expected=expected, advice=advice)


def _check_signatures(graphs: Sequence[ir.Graph], names: tuple[str, str]) -> None:
    old_inputs, new_inputs = (input_specs(graph, name) for graph, name in zip(graphs, names, strict=True))
    old_outputs, new_outputs = ([str(output.name) for output in graph.outputs] for graph in graphs)
    for what, same, old, new in (
        ("inputs", _signature(old_inputs) == _signature(new_inputs), old_inputs, new_inputs),
        ("outputs", sorted(old_outputs) == sorted(new_outputs), old_outputs, new_outputs),
    ):
        if not same:
            raise _other_signature(what, old, new, names)


def _other_signature(what: str, old: Sequence[object], new: Sequence[object], models: tuple[str, str]) -> ShapeError:
    before, after = models
    what = f"{what} {', '.join(map(str, new)) or 'none'}"
    expected = f"those of {before}, {', '.join(map(str, old)) or 'none'}"
    return ShapeError(after, what, expected=expected, advice="verify a model against the one it was made from")


def _signature(specs: list[InputSpec]) -> dict[str, str]:
    return {spec.name: spec.dtype.name for spec in specs}


def _shape_failures(expected: Array, result: Array, body: Array | None) -> list[str]:
    wanted = _kind(expected)
    if body is None:
        return [f"{_kind(result)}; expected {wanted}"] if _kind(result) != wanted else []
    kinds = (("kernels", _kind(result)), ("function bodies", _kind(body)))
    return [f"{kind} with {who}; expected {wanted}" for who, kind in kinds if kind != wanted]


def _kind(array: Array) -> str:
    return f"{list(array.shape)} {array.dtype.name}"


def _check_output(name: str, sample: str, expected: Array, result: Array, body: Array | None) -> OutputCheck:
    rewritten = difference(expected, result)
    return OutputCheck(
        name=name,
        dtype=expected.dtype.name,
        shape=expected.shape,
        rewritten=rewritten,
        body=difference(expected, body) if body is not None else None,
        kernel=difference(body, result) if body is not None else None,
        sample=sample,
        mean_relative_l2=rewritten.relative_l2,
        mean_cosine=rewritten.cosine,
    )


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


def _notes(
    graph: ir.Graph, name: str, nodes: list[NodeCheck], outputs: tuple[OutputCheck, ...], samples: Samples
) -> list[str]:
    notes = []
    if nodes and len(samples) > 1:
        notes.append("kernels are compared with function bodies, node by node, on the first sample")
    # Their inputs exist inside of the subgraph only, where no twin is built.
    hidden = nodes_in_subgraphs(graph)
    if hidden:
        notes.append(f"{hidden} MXFP8 nodes in subgraphs are compared at the model's outputs only")
    if not nodes and not hidden:
        notes.append(f"{name} has no MXFP8 node: this compares a model with another, not with its rewrite")
    for output in outputs:
        if output.limit is None or not output.rewritten.count:
            why = f"{output.dtype}, and no limit is set" if output.rewritten.count else "it has no values"
            notes.append(f"output {output.name!r} is not judged: {why}")
        if output.rewritten.compared < output.rewritten.count:
            finite = f"{output.rewritten.compared} of {output.rewritten.count}"
            notes.append(f"output {output.name!r}: only {finite} positions are finite in both models and compared")
    skipped = [
        str(o.name) for o in graph.outputs if o.dtype == ir.DataType.STRING or not isinstance(o.type, ir.TensorType)
    ]
    if skipped:
        notes.append(f"outputs that are not tensors of numbers are not compared: {', '.join(skipped)}")
    return notes


def _sameness_notes(name: str, expected: Array, result: Array) -> list[str]:
    """Returns a note for an output whose values would hide most errors."""
    before, after = sameness(expected), sameness(result)
    if not (before or after):
        return []
    said = f"is {before} in both models" if before == after else _apart(before, after)
    return [f"output {name!r} {said}: this says little about the rewrite; try other inputs"]


def _apart(before: str | None, after: str | None) -> str:
    sides = (("original", before), ("rewritten", after))
    return " and ".join(f"is {said} in the {which} model" for which, said in sides if said)


def _drift_notes(nodes: Sequence[NodeCheck], outputs: Sequence[OutputCheck]) -> list[str]:
    """Returns a note on differences of kernels and bodies at outputs, if each node is within its bound."""
    drifting = [repr(o.name) for o in outputs if o.kernel and o.kernel.relative_l2 > 0]
    if not drifting or not nodes or not all(node.passed for node in nodes):
        return []
    return [
        f"kernel vs body at {', '.join(drifting)} is no error of the kernels, each of which is within its bound: sums "
        "that differ in the last bit round elements of later layers to another step, in all up to the rewrite's error"
    ]
