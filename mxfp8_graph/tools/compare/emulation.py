"""A model in a number format without kernels here: its matmuls multiply fake-quantized values in float32.

The pass turns every site into MXFP8WeightGemm(X, W [..., N, K]); here each of these nodes becomes standard ops:

    MXFP8WeightGemm(X, W, bias)  ->  Add(MatMul(Round(Cast(X)), W [..., K, N]), bias)
    MXFP8Conv(X, W, bias)        ->  Conv(Round(X) along the channels, W [O, C / group, k...], bias)

W are graph inputs, which receive weights that were rounded before, so no file has them. Formats differ only in the body
of Round, a function of `fake_quantize.py` that is called once per activation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from mxfp8_graph.onnx_pass.convolutions import Convolution
from mxfp8_graph.onnx_pass.find import OnnxSite
from mxfp8_graph.onnx_pass.forms import Lookup
from mxfp8_graph.onnx_pass.graph import name_of, opset_of
from mxfp8_graph.onnx_pass.load import bytes_of, load, path_of
from mxfp8_graph.onnx_pass.prepare import prepare
from mxfp8_graph.onnx_pass.protos import iter_graphs, to_proto
from mxfp8_graph.onnx_pass.replace import Replaced, Replacer, insert_all
from mxfp8_graph.onnx_pass.run import find_and_plan
from mxfp8_graph.onnx_pass.views import apply
from mxfp8_graph.policy.plan import Decision, NothingEligibleError
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.compare import difference
from mxfp8_graph.running.inputs import Inputs
from mxfp8_graph.running.sessions import Execution, Session
from mxfp8_graph.tools.compare.fake_quantize import DOMAIN, NAME, fake_quantizer, function
from mxfp8_graph.tools.compare.number_formats import HISTORY, Peer
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError

Weight = npt.NDArray[np.float32]


class Emulator:
    """A model whose matmuls are prepared for emulation; `Emulated` is that model in one format."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        """Prepares each matmul that `recipe` rewrites.

        Raises:
            ContractError: the model cannot be read or converted, or has a node that cannot be emulated.
            RecipeError: the recipe does not fit the model.
            NothingEligibleError: no matmul with a stored weight is rewritten.
        """
        graph, _ = prepare(load(model), recipe.for_cpu())
        self.name, self.opset, self.path = name_of(graph), opset_of(graph), path_of(graph)
        self.weights: dict[str, OnnxSite] = {}
        """A site for each stored operand B, by its name; other sites may multiply by it too."""
        self.sites = 0
        """Number of matmuls that are emulated."""
        replaced: dict[ir.Value, int] = {}
        sites, decisions = find_and_plan(graph, recipe)
        replacer, outcomes = Replacer(graph, allow_nonfinite=True), list[Replaced | Decision]()
        for site, decision in zip(sites, decisions, strict=True):
            if decision.quantize and (static := site.w.static) is not None and not isinstance(site.form, Lookup):
                # As weight-only, so that the activation reaches the node in high precision, for Round. A convolution
                # quantizes it inside.
                activations = "int8" if isinstance(site.form, Convolution) else "unchanged"
                outcomes.append(outcome := replacer.outcome(site, replace(decision, activations=activations)))
                assert isinstance(outcome, Replaced)
                assert outcome.weight is not None  # a stored weight is packed
                self.sites += 1
                self.weights[str(outcome.weight.elements.name)] = site
                replaced[static.value] = static.stored_bytes
        insert_all(graph, outcomes)
        if not self.weights:
            what, advice = "no matmul with a stored weight is eligible", "see the reasons and adapt the recipe"
            raise NothingEligibleError(self.name, what, advice, decisions)
        for scope in graph.graphs():
            for name, value in list(scope.initializers.items()):
                if isinstance(value.const_value, ir.LazyTensor):  # a packed weight, which must not be packed
                    del scope.initializers[name]
        # A weight that other nodes still use stays in the model beside its emulated form.
        self.other_bytes = bytes_of(graph) - sum(size for value, size in replaced.items() if not value.uses())
        """Bytes of the model without the weights that are emulated."""
        self._proto = to_proto(graph)
        self.outputs = [output.name for output in self._proto.graph.output]
        self._ranks = {name: len(site.w.shape or ()) for name, site in self.weights.items()}
        main, *inner = iter_graphs(self._proto.graph)
        for part in (*reversed(inner), main):  # inner graphs first: editing an outer graph copies the graphs inside
            self._edit(part)
        for name, rank in self._ranks.items():
            main.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank))
        self._proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))

    def weight(self, name: str) -> Weight:
        """Returns the values [..., N, K] by which a site multiplies; of a convolution, [O, k..., C / group]."""
        site = self.weights[name]
        assert site.w.static is not None  # only sites with a stored weight are prepared
        values = apply(site.w.static.steps, site.w.static.tensor.numpy()).astype(np.float32)
        values = np.ascontiguousarray(values.swapaxes(-1, -2) if site.w.transposed else values)
        factors = np.asarray(site.factor, np.float32).reshape(-1, 1)
        return np.asarray(values * factors).reshape(site.matmul.weight_shape)

    def fed(self, name: str, weight: Weight) -> Weight:
        """Returns a weight of `weight` as the nodes of the emulation read it."""
        last = 1 if isinstance(self.weights[name].form, Convolution) else -2
        return np.ascontiguousarray(np.moveaxis(weight, -1, last))

    def proto(self, peer: Peer) -> tuple[onnx.ModelProto, list[str]]:
        """Returns (the model in a format, the names of activations that have a history of amax)."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        proto.functions.append(function(peer.activations, self.opset))
        if peer.activations.scale != "delayed":
            return proto, []
        main, *inner = iter_graphs(proto.graph)
        if any(node.domain == DOMAIN for part in inner for node in part.node):
            what, advice = "a matmul in a subgraph, which has no history of amax", f"leave {peer.name} out"
            raise ContractError(self.name, what, expected="matmuls in the main graph", advice=advice)
        rounds = [node for node in main.node if node.domain == DOMAIN]
        for node in rounds:
            before, after = (f"{node.output[0]}/{name}" for name in ("amax_before", "amax"))
            node.input.append(before)
            node.output.append(after)
            main.input.append(helper.make_tensor_value_info(before, TensorProto.FLOAT, []))
            main.output.append(helper.make_tensor_value_info(after, TensorProto.FLOAT, []))
        return proto, [node.output[0] for node in rounds]

    def _edit(self, graph: onnx.GraphProto) -> None:
        """Replaces the gemms of one graph by standard ops."""
        nodes: list[onnx.NodeProto] = []
        rounded: dict[tuple[str, int], str] = {}
        for node in graph.node:
            if node.domain != contract.DOMAIN:
                nodes.append(node)
                continue
            if contract.OPS[node.op_type].indices_at is not None:
                what, expected = f"{node.op_type}, whose weights are picked while the model runs", "stored weights"
                raise ContractError(self.name, what, expected=expected, advice="exclude it; it is not emulated")
            (x, weight, _, *bias), (y,) = node.input, node.output
            rank = self._ranks[weight] if node.op_type == contract.CONV.name else 0
            # Gemms with the same activation share its Round.
            if (x, rank) not in rounded:
                rounded[x, rank], more = _rounded(x, rank)
                nodes += more
            values = rounded[x, rank]
            if rank:
                nodes.append(helper.make_node("Conv", [values, weight, *bias], [f"{y}/sum"]))
                window = {"strides", "pads", "dilations", "group"}
                nodes[-1].attribute.extend(each for each in node.attribute if each.name in window)
            else:
                nodes.append(helper.make_node("MatMul", [values, weight], [f"{y}/product"]))
                if bias:
                    nodes.append(helper.make_node("Add", [f"{y}/product", *bias], [f"{y}/sum"]))
            dtype = helper.get_node_attr_value(node, "output_dtype")
            nodes.append(helper.make_node("Cast", [nodes[-1].output[0]], [y], to=dtype))
        del graph.node[:]
        graph.node.extend(nodes)


def _rounded(x: str, rank: int) -> tuple[str, list[onnx.NodeProto]]:
    """Returns (the name of x after Round, its nodes); with a rank, blocks are along the channels of x [N, C, ...]."""
    last, first = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    y = f"{x}/rounded_channels" if rank else f"{x}/rounded"
    turned = [f"{y}/float", f"{y}/last", f"{y}/values", y]
    nodes = [helper.make_node("Cast", [x], turned[:1], to=TensorProto.FLOAT)]
    if not rank:
        return y, [*nodes, helper.make_node(NAME, turned[:1], [y], domain=DOMAIN)]
    nodes.append(helper.make_node("Transpose", turned[:1], turned[1:2], perm=last))
    nodes.append(helper.make_node(NAME, turned[1:2], turned[2:3], domain=DOMAIN))
    return y, [*nodes, helper.make_node("Transpose", turned[2:3], [y], perm=first)]


class Emulated:
    """The model in the format of `peer`, ready to run. Run samples in order: DelayedScaling uses earlier ones."""

    def __init__(self, emulator: Emulator, peer: Peer) -> None:
        """Rounds the weights and makes the session.

        Raises:
            ContractError: the model has a node that cannot be emulated.
            BackendError: ONNX Runtime refuses the model.
        """
        proto, delayed = emulator.proto(peer)
        self.byte_size = 0
        """Bytes of the weights in the format."""
        self._weights: dict[str, Weight] = {}
        rounded, errors = fake_quantizer(peer.weights), []
        for name in emulator.weights:
            weight = emulator.weight(name)
            result = rounded(weight)
            self.byte_size += peer.weights.stored_bytes(weight.shape)
            errors.append(difference(weight, result).relative_l2)
            self._weights[name] = emulator.fed(name, result)
        self.relative_l2 = statistics.fmean(errors)
        """|w - rounded| / |w|, a mean over the weights."""
        self._session = Session(
            proto,
            kernels=False,
            where=f"{emulator.name} as {peer.name}",
            folder=None if emulator.path is None else emulator.path.parent,
            execution=Execution(takes_turns=True),
        )
        self._outputs = [name for name in self._session.output_names if name in emulator.outputs]
        self._history = {x: deque[float](maxlen=HISTORY) for x in delayed}

    def run(self, inputs: Mapping[str, Any]) -> Inputs:
        """Returns the outputs of the next sample; raises as `Session.run`."""
        # Before the first sample amax is 0, for which the scale is 1.
        past = {f"{x}/amax_before": np.array(max(h, default=0.0), np.float32) for x, h in self._history.items()}
        results = self._session.run({**inputs, **self._weights, **past})
        for x, history in self._history.items():
            history.append(float(results[f"{x}/amax"]))
        return {name: results[name] for name in self._outputs}
