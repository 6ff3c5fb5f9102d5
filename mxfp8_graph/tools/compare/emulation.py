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
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from mxfp8_graph.onnx_model import cpu_provider
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel, open_model
from mxfp8_graph.onnx_model.tensor_data import hold, inside
from mxfp8_graph.onnx_model.upgrade import upgrade
from mxfp8_graph.onnx_model.walk import iter_graphs, iter_tensors
from mxfp8_graph.onnx_model.write import open_target
from mxfp8_graph.onnx_pass.find import OnnxSite, find_sites
from mxfp8_graph.onnx_pass.graph import infer, proto_of, put_graph, to_ir
from mxfp8_graph.onnx_pass.ops import multiplies
from mxfp8_graph.onnx_pass.replace import Editor, bytes_after
from mxfp8_graph.onnx_pass.views import open_rows
from mxfp8_graph.policy.plan import NothingEligibleError, plan
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.sessions import Execution, Session
from mxfp8_graph.tools.compare.fake_quantize import DOMAIN, FakeQuantize, attach, function
from mxfp8_graph.tools.compare.number_formats import HISTORY, Peer, Quantizer
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

Weight = npt.NDArray[np.float32]

_ROUND: Final = "Round"
"""Name of the function that rounds activations."""


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """A model whose matmuls are laid out for emulation; see `lay_out`."""

    opened: OpenedModel
    weights: Mapping[str, OnnxSite]
    """The site that each stored operand B of an MXFP8WeightGemm stands for; several sites may share one."""
    stored: Mapping[str, onnx.TensorProto]
    """The tensor that holds the values of each of these, before its views."""
    stubs: Set[str]
    """Initializers that the pass added: weights and their scales, with sizes and no data."""
    sites: int
    """How many matmuls that is."""
    other_bytes: int
    """Bytes of the model but for these weights."""

    def weight(self, name: str) -> Weight:
        """Returns a weight as the site multiplies by it, [..., N, K]."""
        site = self.weights[name]
        static = site.w.static
        assert static is not None  # `lay_out` keeps those
        with open_rows(self.stored[name], static.steps, self.opened.folder, self.opened.name) as (rows, flipped):
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
    opened = open_model(model)
    upgrade(opened, multiplies)
    graph = infer(opened, to_ir(opened))
    cpu_provider.widen(opened, graph)
    sites = find_sites(graph)
    decisions = plan([site.matmul for site in sites], recipe)
    other_bytes = bytes_after(opened, sites, decisions)
    count = 0
    weights: dict[str, OnnxSite] = {}
    stored: dict[str, onnx.TensorProto] = {}
    with open_target(opened, None, external=False, overwrite=False) as target:
        editor = Editor(opened, graph, target, allow_nonfinite=True, sizes_only=True)
        for site, decision in zip(sites, decisions, strict=True):
            if decision.quantize and site.w.static is not None and not site.form.picks_rows:
                done = editor.apply(site, replace(decision, activations="unchanged"))
                assert done.packed is not None
                count += 1
                other_bytes -= 0 if done.packed in weights else done.bytes_after
                weights[done.packed] = site
                # `finish` removes what nothing uses any more, from the skeleton and from its tensors.
                stored[done.packed] = _kept(proto_of(site.w.static.tensor))
        editor.finish()
        put_graph(opened, graph)
    if not weights:
        what, advice = "no matmul with a stored weight is eligible", "see the reasons and adapt the recipe"
        raise NothingEligibleError(opened.name, what, advice, decisions)
    nodes = (node for graph in iter_graphs(opened.proto.graph) for node in graph.node if node.domain == contract.DOMAIN)
    places = ((node, contract.OPS[node.op_type].packed_at or 0) for node in nodes)
    stubs = {name for node, at in places for name in node.input[at : at + 2]}
    return Emulator(opened=opened, weights=weights, stored=stored, stubs=stubs, sites=count, other_bytes=other_bytes)


def _kept(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Returns a tensor that stays when its model changes; large ones are in no model, and not copied."""
    if tensor.ByteSize() > INLINE_BYTES:
        return tensor
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    return copy


class Emulated:
    """The model in the format of `peer`, ready to run; samples are run in their order, as DelayedScaling needs it."""

    def __init__(self, emulator: Emulator, peer: Peer) -> None:
        """Rounds the weights and makes the session.

        Raises:
            ContractError: something in the model is not emulated.
            BackendError: ONNX Runtime refuses the model.
        """
        opened, self._delayed = emulator.opened, peer.activations.scale == "delayed"
        proto, self._activations = _model(emulator, peer)
        self.weights = RoundedWeights(emulator, peer.weights)
        folder = opened.folder.path if opened.folder else None
        self._session = Session(
            proto,
            kernels=False,
            where=f"{opened.name} as {peer.name}",
            folder=folder,
            execution=Execution(takes_turns=True),
        )
        outputs = {output.name for output in opened.proto.graph.output}
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
    proto = onnx.ModelProto()
    proto.CopyFrom(emulator.opened.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in emulator.opened.tensors:
            tensor.CopyFrom(emulator.opened.tensors[tensor.name])
    for tensor in filter(inside, iter_tensors(proto)):  # ONNX Runtime gets no file of it
        hold(tensor, emulator.opened.folder, emulator.opened.name)
    activations: list[str] = []
    delayed = peer.activations.scale == "delayed"
    main, *inner = iter_graphs(proto.graph)
    for graph in (*reversed(inner), main):  # inner ones first: editing an outer one copies what is inside
        if delayed and graph is not main and any(node.domain == contract.DOMAIN for node in graph.node):
            what = "a matmul in a subgraph, which has no history of amax"
            advice = f"leave {peer.name} out of the recipes"
            raise ContractError(emulator.opened.name, what, expected="matmuls in the main graph", advice=advice)
        _edit(graph, activations, delayed=delayed, where=emulator.opened.name)
    for graph in iter_graphs(proto.graph):
        kept = [tensor for tensor in graph.initializer if tensor.name not in emulator.stubs]
        del graph.initializer[:]
        graph.initializer.extend(kept)
    for name, site in emulator.weights.items():
        rank = len(site.w.shape or ())
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank))
    for number in range(len(activations) if delayed else 0):
        proto.graph.input.append(helper.make_tensor_value_info(_before(number), TensorProto.FLOAT, []))
        proto.graph.output.append(helper.make_tensor_value_info(_after(number), TensorProto.FLOAT, []))
    attach(proto, [function(_ROUND, peer.activations, emulator.opened.opset)])
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
