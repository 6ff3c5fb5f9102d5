"""A model whose sites are switched on and off while it runs: it has the original and the rewritten form of each site.

    y = MatMul(X, w)   ->   y = If(switches[i]) { MXFP8Gemm(MXFP8Quantize(X), packed w) } else { MatMul(X, w) }

ONNX Runtime computes only the branch that is taken, so one session measures any choice of sites, with the nodes and
packed weights of a rewrite without fusion. `switched_program.py` is the same for a program.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from mxfp8_graph.onnx_pass import record
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.forms import Lookup
from mxfp8_graph.onnx_pass.graph import name_of
from mxfp8_graph.onnx_pass.load import bytes_of, load
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.onnx_pass.replace import Replaced, Replacer
from mxfp8_graph.onnx_pass.replacement import REPLACES, Fresh, NewNodes, Replacement, insert, value_replacing
from mxfp8_graph.onnx_pass.run import WANTED, find_and_plan, site_report
from mxfp8_graph.onnx_pass.save import save
from mxfp8_graph.options import Progress
from mxfp8_graph.policy.plan import require_eligible
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.inputs import Array, Inputs, Signature
from mxfp8_graph.running.runner import Model, is_program
from mxfp8_graph.running.sessions import Session
from mxfp8_graph.tools.switchable import Switchable, refuse_rewritten
from mxfp8_ops import system
from mxfp8_ops.errors import ContractError

_ROOM: Final = 1.3
"""Size of a model with its packed weights, relative to the model: a packed weight has 8.25 of 32 bits."""


@contextmanager
def open_switchable(
    model: Model, recipe: Recipe, *, allow_nonfinite: bool = False, progress: Progress | None = None
) -> Iterator[Switchable]:
    """Yields `model` with a switch per site that `recipe` rewrites, none of them fused.

    An ONNX model is written with its switches to a temporary folder, from where ONNX Runtime maps the weights.

    Raises:
        ContractError: the model cannot be read, is rewritten already, or the temporary folder has too little space.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: the recipe rewrites nothing.
        BackendError: ONNX Runtime cannot run it, or the native library is missing.
    """
    recipe = recipe.without_fusion().for_cpu()
    if is_program(model):
        # Imports torch.
        from mxfp8_graph.tools.switched_program import SwitchedProgram

        yield SwitchedProgram(model, recipe, allow_nonfinite=allow_nonfinite, progress=progress)
        return
    loaded = load(model)
    with system.temporary_folder() as folder:
        if (free := shutil.disk_usage(folder).free) < (needed := round(bytes_of(loaded) * _ROOM)):
            what = f"{folder.parent} has {free / 1e9:.1f} GB free"
            expected = f"{needed / 1e9:.1f} GB for the model with its switches"
            raise ContractError(name_of(loaded), what, expected=expected, advice="set TMPDIR to a folder with more")
        path = folder / "model.onnx"
        yield _SwitchedModel(loaded, recipe, path, allow_nonfinite=allow_nonfinite, progress=progress)


class _SwitchedModel(Switchable):
    """An ONNX model in one session of ONNX Runtime."""

    def __init__(
        self, model: ir.Model, recipe: Recipe, path: Path, *, allow_nonfinite: bool, progress: Progress | None
    ) -> None:
        self.signature = Signature.from_model(model)
        refuse_rewritten(record.find(model) is not None, name_of(model))
        model, notes = prepare(model, recipe)
        self.note = "; ".join(notes)
        sites, decisions = find_and_plan(model, recipe)
        require_eligible(decisions, name_of(model), wanted=WANTED)
        outputs = [output.name for output in model.graph.outputs]
        # A branch cannot read the values of another branch.
        replacer = Replacer(model, allow_nonfinite=allow_nonfinite, progress=progress, shares=False)
        switches = _Switches(model, replacer.fresh)
        outcomes = [*map(replacer.outcome, sites, decisions)]
        pairs = [(site, done) for site, done in zip(sites, outcomes, strict=True) if isinstance(done, Replaced)]
        # Ids are no activation, and a value inside of a subgraph cannot become an output of the model.
        chosen = [site for site, _ in pairs]
        activations = [None if isinstance(site.form, Lookup) or site.matmul.subgraph else site.x for site in chosen]
        self.observed = tuple(x and (x.value, x.perm, x.merged) for x in activations)
        # Before the insertion, after which these values may have replacements.
        self._observed = switches.observe([x.value for x in activations if x is not None])
        # Both branches stay, so no weight is unused.
        insert(model, [switches.switched(site, done.replacement) for site, done in pairs], lambda _: False)
        self._inputs = switches.add_inputs()
        record.complete(model, recipe.to_record())
        save(model, path, external=True, overwrite=False)  # external data, so that ONNX Runtime maps the weights
        self.sites = tuple(map(site_report, outcomes))
        self._session = Session(path, kernels=True, where=self.signature.name)
        self._outputs = [name for name in self._session.output_names if name in outputs]

    def run(self, feeds: Mapping[str, Array], on: Sequence[bool]) -> Inputs:
        return self._fetch(feeds, self._outputs, on)

    def observe(self, feeds: Mapping[str, Array], activations: Sequence[Any]) -> list[Array]:
        names = dict.fromkeys(self._observed[value] for value, _, _ in activations)
        values, arrays = self._fetch(feeds, list(names), [False] * len(self.observed)), []
        for value, perm, merged in activations:
            x = values[self._observed[value]]
            x = x if perm is None else x.transpose(perm)
            # As in ONNX's Reshape, 0 keeps the size of the axis.
            sizes = [size or x.shape[axis] for axis, size in enumerate(merged or ())]
            arrays.append(x if merged is None else x.reshape(sizes))
        return arrays

    def _fetch(self, feeds: Mapping[str, Array], outputs: list[str], on: Sequence[bool]) -> Inputs:
        self._session.output_names = outputs
        seen = np.isin(list(self._observed.values()), outputs)
        return self._session.run({**feeds, **dict(zip(self._inputs, (np.array(on, bool), seen), strict=True))})


class _Switches:
    """Puts the old and the new nodes of a site into the branches of an If."""

    def __init__(self, model: ir.Model, fresh: Fresh) -> None:
        self._model, self._fresh = model, fresh
        kind = ir.TensorType(ir.DataType.BOOL)
        self._switches, self._seen = (ir.Value(name=fresh(f"mxfp8_{n}"), type=kind) for n in ("switches", "seen"))
        self._counts = {self._switches: 0, self._seen: 0}

    def add_inputs(self) -> list[str]:
        """Adds the inputs bool [switches] and bool [observed], and returns their names."""
        for value, count in self._counts.items():
            value.shape = ir.Shape([count])
            self._model.graph.inputs.append(value)
        return [str(value.name) for value in self._counts]

    def observe(self, values: Sequence[ir.Value]) -> dict[ir.Value, str]:
        """Returns the names of new outputs, each a copy of an activation if its switch is on, else empty.

        ONNX Runtime keeps an output until the end of a run, so the activations themselves would fill the memory.
        """
        names = {}
        for value in dict.fromkeys(values):
            dtype = value.dtype or ir.DataType.FLOAT
            empty = ir.tensor(np.empty(0, dtype.numpy()), dtype)
            output = ir.Value(name=self._fresh(f"{value.name}_observed"), type=ir.TensorType(dtype))
            copied, nothing = ir.node("Identity", [value]), ir.node("Constant", [], {"value": empty})
            self._model.graph.extend(self._choice(self._seen, output, [copied], [nothing], dtype))
            self._model.graph.outputs.append(output)
            names[value] = str(output.name)
        return names

    def switched(self, site: OnnxSite, replacement: Replacement) -> Replacement:
        """Returns the If in place of the old nodes; its branches have the new ones, and copies of the old ones."""
        dtype = ir.DataType(site.dtype)
        *before, choice = self._choice(
            self._switches, value_replacing(site.added.output), replacement.new, _copies(replacement.gone), dtype
        )
        # Before the last old node, where all inputs of both branches are computed.
        return Replacement(node=choice, before=tuple(before), gone=replacement.gone, place=replacement.gone[-1])

    def _choice(
        self,
        switches: ir.Value,
        result: ir.Value,
        then: Sequence[ir.Node],
        otherwise: Sequence[ir.Node],
        dtype: ir.DataType,
    ) -> list[ir.Node]:
        """Returns the nodes that choose by the next switch; the last is the If, whose branches have the nodes."""
        index = ir.tensor(self._counts[switches], ir.DataType.INT64)
        self._counts[switches] += 1
        new = NewNodes(self._fresh)
        at = new.constant(index, f"{result.name}_index")
        switch = new.result("Gather", switches, at, wanted=f"{result.name}_switch")
        branches = [self._branch(result, nodes, dtype) for nodes in (then, otherwise)]
        name = self._fresh(f"{result.name}_if")
        new.add("If", [switch], [result], name=name, then_branch=branches[0], else_branch=branches[1])
        return new.nodes

    def _branch(self, result: ir.Value, nodes: Sequence[ir.Node], dtype: ir.DataType) -> ir.Graph:
        """Returns a branch of `nodes`, whose last one computes a value of another name than `result`."""
        output = nodes[-1].outputs[0]
        output.name = self._fresh(f"{result.name}_branch")
        output.type, output.shape, output.doc_string = ir.TensorType(dtype), None, None
        output.metadata_props.clear()
        output.meta.pop(REPLACES, None)
        return ir.Graph([], [output], nodes=nodes, name=output.name)


def _copies(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Returns copies of nodes, of which each reads the one before."""
    copies: dict[ir.Value | None, ir.Value] = {}
    new = []
    for node in nodes:
        outputs = [ir.Value(name=value.name) for value in node.outputs]
        inputs = [copies.get(value, value) for value in node.inputs]
        settings = node.attributes.values()
        new.append(ir.Node(node.domain, node.op_type, inputs, settings, outputs=outputs, name=node.name))
        copies |= dict(zip(node.outputs, outputs, strict=True))
    return new
