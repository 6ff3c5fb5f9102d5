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
from mxfp8_graph.onnx_pass.replace import Editor
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
        self.signature = Signature.of(model)
        refuse_rewritten(record.find(model) is not None, name_of(model))
        model, notes = prepare(model, recipe)
        self.note = "; ".join(notes)
        sites, decisions = find_and_plan(model, recipe)
        require_eligible(decisions, name_of(model), wanted=WANTED)
        outputs = [output.name for output in model.graph.outputs]
        editor = _SwitchEditor(model, allow_nonfinite=allow_nonfinite, progress=progress)
        pairs = list(zip(sites, decisions, strict=True))
        outcomes = [editor.apply(*pair) if pair[1].quantize else pair[1] for pair in pairs]
        # Ids are no activation, and a value inside of a subgraph cannot become an output of the model.
        chosen = [site for site, decision in pairs if decision.quantize]
        activations = [None if isinstance(site.form, Lookup) or site.matmul.subgraph else site.x for site in chosen]
        self.observed = tuple(x and (x.value, x.perm, x.merged) for x in activations)
        self._observed = editor.observe([x.value for x in activations if x is not None])
        self._inputs = editor.add_inputs()
        record.complete(model, recipe.to_record())  # without `finish`: both branches stay, so no weight is unused
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


class _SwitchEditor(Editor):
    """Moves the old and the new nodes of a site into the branches of an If."""

    def __init__(self, model: ir.Model, *, allow_nonfinite: bool, progress: Progress | None) -> None:
        super().__init__(model, allow_nonfinite=allow_nonfinite, progress=progress)
        kind = ir.TensorType(ir.DataType.BOOL)
        self._switches, self._seen = (ir.Value(name=self.fresh(f"mxfp8_{n}"), type=kind) for n in ("switches", "seen"))
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
        for old in dict.fromkeys(values):
            value = self._results.get(old, old)
            dtype = value.dtype or ir.DataType.FLOAT
            empty = ir.tensor(np.empty(0, dtype.numpy()), dtype)
            output = ir.Value(name=self.fresh(f"{value.name}_observed"), type=ir.TensorType(dtype))
            self._model.graph.extend(choice := self._choice(self._seen, output))
            copied, nothing = ir.node("Identity", [value]), ir.node("Constant", [], {"value": empty})
            self._branch(choice[-1], "then_branch", [copied], copied.outputs[0], dtype)
            self._branch(choice[-1], "else_branch", [nothing], nothing.outputs[0], dtype)
            self._model.graph.outputs.append(output)
            names[old] = str(output.name)
        return names

    def _replace(self, site: OnnxSite, result: ir.Value, new: Sequence[ir.Node]) -> None:
        old = [node for node in (site.node, site.added.node) if node is not None]
        value, chosen = site.added.output, ir.Value(name=site.added.output.name)
        # Before the last old node, where all inputs of both branches are computed.
        old[-1].prepend(choice := self._choice(self._switches, chosen))
        self._stand_for(value, chosen)
        dtype = ir.DataType(site.dtype)
        self._branch(choice[-1], "then_branch", new, result, dtype)
        self._branch(choice[-1], "else_branch", old, value, dtype)
        self._shared.clear()  # a branch cannot read the values of another branch

    def _choice(self, switches: ir.Value, result: ir.Value) -> list[ir.Node]:
        """Returns the nodes that choose by the next switch: an If, still without branches, is the last."""
        index = ir.tensor(self._counts[switches], ir.DataType.INT64)
        self._counts[switches] += 1
        at, switch, name = (self.fresh(f"{result.name}_{wanted}") for wanted in ("index", "switch", "if"))
        constant = ir.node("Constant", [], {"value": index}, outputs=[ir.Value(name=at)], name=at)
        gather = ir.node("Gather", [switches, *constant.outputs], outputs=[ir.Value(name=switch)], name=switch)
        return [constant, gather, ir.node("If", gather.outputs, outputs=[result], name=name)]

    def _branch(
        self, choice: ir.Node, name: str, nodes: Sequence[ir.Node], result: ir.Value, dtype: ir.DataType
    ) -> None:
        """Moves `nodes`, which compute `result`, into a branch; `result` gets another name than the If's output."""
        result.name = self.fresh(f"{choice.outputs[0].name}_branch")
        result.type, result.shape, result.doc_string = ir.TensorType(dtype), None, None
        result.metadata_props.clear()
        for node in nodes:
            if isinstance(node.graph, ir.Graph):
                node.graph.remove(node)
        choice.attributes.add(ir.AttrGraph(name, ir.Graph([], [result], nodes=nodes, name=result.name)))
