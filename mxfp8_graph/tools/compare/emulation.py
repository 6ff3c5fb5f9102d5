"""A model in a number format that has no kernels here: its matmuls multiply fake-quantized values in float32.

The pass finds the sites and lays them out as it always does, with every matmul as MXFP8WeightGemm(X, W [..., N, K]).
Here each of these nodes becomes standard ops:

    MXFP8WeightGemm(X, W, bias)  ->  Add(MatMul(round(X), W [..., K, N]), bias)

W are graph inputs, fed with weights that are rounded before: they enter no file. `round` is a function of
`fake_quantize.py`, called once per activation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.graph import name_of, opset_of
from mxfp8_graph.onnx_pass.load import bytes_of, load, path_of
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.onnx_pass.protos import iter_graphs, to_proto
from mxfp8_graph.onnx_pass.replace import Editor
from mxfp8_graph.onnx_pass.run import find_and_plan
from mxfp8_graph.onnx_pass.weights import rows_of
from mxfp8_graph.policy.plan import NothingEligibleError
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.sessions import Execution, Session
from mxfp8_graph.tools.compare.fake_quantize import DOMAIN, FakeQuantize, function
from mxfp8_graph.tools.compare.number_formats import HISTORY, Peer, Quantizer
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

Weight = npt.NDArray[np.float32]

_ROUND: Final = "Round"
"""Name of the function that rounds activations."""


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """A model whose matmuls are laid out for emulation; see `lay_out`."""

    model: ir.Model
    """Its gemms read weights and scales that nothing defines: see `weights`."""
    weights: Mapping[str, OnnxSite]
    """The site that each stored operand B of an MXFP8WeightGemm stands for; several sites may share one."""
    sites: int
    """How many matmuls that is."""
    other_bytes: int
    """Bytes of the model but for these weights."""

    def weight(self, name: str) -> Weight:
        """Returns a weight as the site multiplies by it, [..., N, K]."""
        site = self.weights[name]
        static = site.w.static
        assert static is not None  # `lay_out` keeps those
        rows, flipped = rows_of(static)
        *lead, height, _ = rows.shape
        assert rows.read is not None
        values = np.empty(rows.shape, np.float32)
        for at in np.ndindex(*lead):
            values[at] = rows.read(at, 0, height)
        if site.w.transposed != flipped:
            values = np.ascontiguousarray(values.swapaxes(-1, -2))
        return values if site.form.alpha == 1.0 else values * np.float32(site.form.alpha)


def lay_out(model: Any, recipe: Recipe) -> Emulator:
    """Returns the model with each matmul that `recipe` rewrites as an MXFP8WeightGemm, its weights not packed.

    Raises:
        ContractError: the model cannot be read or converted.
        RecipeError: the recipe does not fit the model.
        NothingEligibleError: no matmul with a stored weight is rewritten.
    """
    graph = prepare(load(model), recipe.for_cpu(), [])
    sites, decisions = find_and_plan(graph, recipe)
    count = 0
    weights: dict[str, OnnxSite] = {}
    replaced: dict[ir.Value, int] = {}
    editor = Editor(graph, allow_nonfinite=True)
    for site, decision in zip(sites, decisions, strict=True):
        if decision.quantize and (static := site.w.static) is not None and not site.form.picks_rows:
            weight = editor.apply(site, replace(decision, activations="unchanged")).weight
            assert weight is not None
            count += 1
            weights[str(weight.elements.name)] = site
            replaced[static.value] = static.stored_bytes
    editor.finish()
    if not weights:
        what, advice = "no matmul with a stored weight is eligible", "see the reasons and adapt the recipe"
        raise NothingEligibleError(name_of(graph), what, advice, decisions)
    for part in graph.graphs():
        for name, value in list(part.initializers.items()):
            if isinstance(value.const_value, ir.LazyTensor):  # a packed weight, which no one is to pack
                del part.initializers[name]
    other_bytes = bytes_of(graph) - sum(size for value, size in replaced.items() if not value.uses())
    return Emulator(model=graph, weights=weights, sites=count, other_bytes=other_bytes)


class Emulated:
    """The model in the format of `peer`, ready to run; samples are run in their order, as DelayedScaling needs it."""

    def __init__(self, emulator: Emulator, peer: Peer) -> None:
        """Rounds the weights and makes the session.

        Raises:
            ContractError: something in the model is not emulated.
            BackendError: ONNX Runtime refuses the model.
        """
        self._delayed = peer.activations.scale == "delayed"
        proto, self._activations = _model(emulator, peer)
        self.weights = RoundedWeights(emulator, peer.weights)
        path = path_of(emulator.model)
        self._session = Session(
            proto,
            kernels=False,
            where=f"{name_of(emulator.model)} as {peer.name}",
            folder=None if path is None else path.parent,
            execution=Execution(takes_turns=True),
        )
        outputs = {output.name for output in emulator.model.graph.outputs}
        self._outputs = [name for name in self._session.output_names if name in outputs]
        self._history = [deque[float](maxlen=HISTORY) for _ in self._activations]

    def run(self, inputs: Inputs) -> Inputs:
        """Returns the outputs of the next sample; errors as `Session.run`."""
        feeds: Inputs = {**inputs, **self.weights.values}
        if self._delayed:
            before = [max(history, default=0.0) for history in self._history]
            feeds |= {_before(number): np.array(amax, np.float32) for number, amax in enumerate(before)}
        results = self._session.run(feeds)
        if self._delayed:
            for number, history in enumerate(self._history):
                history.append(float(results[_after(number)]))
        return {name: results[name] for name in self._outputs}


class RoundedWeights:
    """All weights of a model, rounded: what they become, how large they are, and how far off."""

    def __init__(self, emulator: Emulator, quantizer: Quantizer) -> None:
        rounded = FakeQuantize(quantizer)
        self.values: dict[str, Weight] = {}
        """[..., K, N] float32, by name."""
        self.byte_size = self.count = 0
        """Bytes in the format, and numbers."""
        errors = []
        for name in emulator.weights:
            weight = emulator.weight(name)
            result = rounded(weight)
            self.byte_size += quantizer.stored_bytes(weight.shape)
            self.count += weight.size
            errors.append(difference(weight, result).relative_l2)
            self.values[name] = np.ascontiguousarray(result.swapaxes(-1, -2))
        self.relative_l2 = statistics.fmean(errors)
        """|w - rounded| / |w|, a mean over the weights."""


def _model(emulator: Emulator, peer: Peer) -> tuple[onnx.ModelProto, list[str]]:
    """Returns (the model as standard ops, with weights as inputs; the activations that it rounds)."""
    proto, where = to_proto(emulator.model), name_of(emulator.model)
    activations: list[str] = []
    delayed = peer.activations.scale == "delayed"
    main, *inner = iter_graphs(proto.graph)
    for graph in (*reversed(inner), main):  # inner ones first: editing an outer one copies what is inside
        if delayed and graph is not main and any(node.domain == contract.DOMAIN for node in graph.node):
            what = "a matmul in a subgraph, which has no history of amax"
            advice = f"leave {peer.name} out of the recipes"
            raise ContractError(where, what, expected="matmuls in the main graph", advice=advice)
        _edit(graph, activations, delayed=delayed, where=where)
    for name, site in emulator.weights.items():
        rank = len(site.w.shape or ())
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank))
    for number in range(len(activations) if delayed else 0):
        proto.graph.input.append(helper.make_tensor_value_info(_before(number), TensorProto.FLOAT, []))
        proto.graph.output.append(helper.make_tensor_value_info(_after(number), TensorProto.FLOAT, []))
    proto.functions.append(function(_ROUND, peer.activations, opset_of(emulator.model)))
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return proto, activations


def _edit(graph: onnx.GraphProto, activations: list[str], *, delayed: bool, where: str) -> None:
    """Puts standard ops in the place of the gemms of one graph; adds to `activations` what they round."""
    nodes: list[onnx.NodeProto] = []
    rounded: dict[str, str] = {}
    for node in graph.node:
        if node.domain != contract.DOMAIN:
            nodes.append(node)
            continue
        if contract.OPS[node.op_type].indices_at is not None:
            what, expected = f"{node.op_type}, whose weights are picked while the model runs", "stored weights"
            raise ContractError(where, what, expected=expected, advice="exclude it; it is not emulated")
        x, weight, _, *bias = node.input
        if x not in rounded:
            number, rounded[x] = len(activations), f"{x}/rounded"
            activations.append(x)
            nodes.append(helper.make_node("Cast", [x], [f"{x}/float"], to=TensorProto.FLOAT))
            inputs = [f"{x}/float", *([_before(number)] if delayed else [])]
            outputs = [rounded[x], *([_after(number)] if delayed else [])]
            nodes.append(helper.make_node(_ROUND, inputs, outputs, domain=DOMAIN))
        (y,) = node.output
        steps = [helper.make_node("MatMul", [rounded[x], weight], [f"{y}/product"])]
        if bias:
            steps.append(helper.make_node("Add", [f"{y}/product", *bias], [f"{y}/sum"]))
        dtype = helper.get_node_attr_value(node, "output_dtype")
        nodes += [*steps, helper.make_node("Cast", [steps[-1].output[0]], [y], to=dtype)]
    del graph.node[:]
    graph.node.extend(nodes)


def _before(number: int) -> str:
    return f"amax_before/{number}"


def _after(number: int) -> str:
    return f"amax/{number}"
