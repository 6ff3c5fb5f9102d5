"""Builds the nodes that replace a matmul, and puts them in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import helper

from mxfp8_graph.onnx_pass.embeddings import Lookup
from mxfp8_graph.onnx_pass.find import OnnxSite, Scope
from mxfp8_graph.onnx_pass.form import Step
from mxfp8_graph.onnx_pass.matmul_forms import Operand
from mxfp8_graph.onnx_pass.picked import Picked
from mxfp8_ops import contract, formats


class ScopeEdit:
    """What changes in one graph: new nodes by the index they precede, and indices that go away."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.new: dict[int, list[onnx.NodeProto]] = {}
        self.gone: set[int] = set()
        self.shared: dict[tuple[object, ...], list[str]] = {}
        """Outputs of Quantize and Transpose nodes, by what they compute."""

    def rebuild(self) -> None:
        """Applies the edit."""
        graph = self.scope.proto
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(graph.node):
            nodes.extend(self.new.get(index, ()))
            if index not in self.gone:
                nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)


class Builder:
    """Adds nodes in front of one node of a graph, sharing those that other sites of the graph already added."""

    def __init__(self, edit: ScopeEdit, index: int, fresh: Callable[[str], str]) -> None:
        """`fresh` makes a name unique within the model."""
        self.new = edit.new.setdefault(index, [])
        self._shared = edit.shared
        self._fresh = fresh

    def add(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str, domain: str = "", **attributes: Any
    ) -> onnx.NodeProto:
        """Returns a new node, having added it."""
        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        self.new.append(node)
        return node

    def k_last(self, operand: Operand) -> str:
        """Returns the operand's name with its axes permuted, and merged, so that K is last."""
        name = operand.name
        if operand.perm is not None:
            name = self._view("Transpose", name, operand.perm, f"{name}_k_last")
        if operand.merged is not None:
            name = self._view("Reshape", name, operand.merged, f"{name}_merged")
        return name

    def _view(self, op: str, name: str, argument: Sequence[int], wanted: str) -> str:
        """Returns the name of a tensor transposed or reshaped."""
        key = (op, name, tuple(argument))
        if key not in self._shared:
            output = self._fresh(wanted)
            if op == "Transpose":
                self.add(op, [name], [output], name=output, perm=argument)
            else:
                shape = helper.make_tensor("", onnx.TensorProto.INT64, [len(argument)], argument)
                self.add(op, [name, self._constant(shape, f"{output}_shape")], [output], name=output)
            self._shared[key] = [output]
        return self._shared[key][0]

    def ids(self, lookup: Lookup) -> str:
        """Returns the name of a lookup's ids, as [...]."""
        ids = lookup.ids.name
        if not lookup.squeezed:
            return ids
        key = ("Squeeze", ids)
        if key not in self._shared:
            output, last = self._fresh(f"{ids}_squeezed"), self._fresh(f"{ids}_last")
            self.add(
                "Constant", [], [last], name=last, value=helper.make_tensor(last, onnx.TensorProto.INT64, [1], [-1])
            )
            self.add("Squeeze", [ids, last], [output], name=output)
            self._shared[key] = [output]
        return self._shared[key][0]

    def quantize(self, name: str, element_format: str, scale_rounding: str) -> list[str]:
        """Returns the names of the activation's elements and scales."""
        key = (contract.QUANTIZE.name, name, element_format, scale_rounding)
        if key not in self._shared:
            outputs = [self._fresh(f"{name}_mxfp8"), self._fresh(f"{name}_mxfp8_scales")]
            dtype = formats.element_format(element_format).onnx_dtype
            attributes = {**contract.QUANTIZE.attributes, "output_dtype": dtype, "scale_rounding": scale_rounding}
            label = self._fresh(f"{name}_mxfp8_quantize")
            self.add(contract.QUANTIZE.name, [name], outputs, name=label, domain=contract.DOMAIN, **attributes)
            self._shared[key] = outputs
        return list(self._shared[key])

    def experts(self, picked: Picked) -> str:
        """Returns the name of the int64 indices that the matrices of a weight are picked by."""
        key = ("experts", picked.index, picked.index_steps)
        if key not in self._shared:
            name = picked.index
            for op, axes in picked.index_steps:
                axes_name, before, name = self._fresh(f"{name}_axes"), name, self._fresh(f"{name}_{op.lower()}")
                self.add("Constant", [], [axes_name], name=axes_name, value_ints=axes)
                self.add(op, [before, axes_name], [name], name=name)
            if not picked.is_int64:
                before, name = name, self._fresh(f"{name}_int64")
                self.add("Cast", [before], [name], name=name, to=contract.INT64)
            self._shared[key] = [name]
        return self._shared[key][0]

    def epilogue(self, site: OnnxSite, tensor: str, steps: Sequence[Step]) -> None:
        """Adds the nodes that lead from the gemm's result, `tensor`, to the site's."""
        result, before = site.added.output, [tensor]
        for number, step in enumerate(steps, 1):
            wanted = f"{result}_{step.op.lower()}"
            outputs = [result] if number == len(steps) else [self._fresh(wanted) for _ in range(step.outputs)]
            name = self._fresh(f"{site.matmul.name}_{step.op.lower()}")
            inputs = [*before, *(self._input(given, site) for given in step.inputs)]
            while not inputs[-1]:
                inputs.pop()
            self.add(step.op, inputs, outputs, name=name, domain=step.domain, **step.attributes)
            before = outputs

    def _input(self, given: str | onnx.TensorProto | tuple[str, float], site: OnnxSite) -> str:
        """Returns the name of what a step takes besides the step before."""
        if isinstance(given, str):
            return given
        if isinstance(given, onnx.TensorProto):
            return self._constant(given, f"{site.matmul.name}_{'sizes' if given.dims else 'factor'}")
        tensor, factor = given
        if factor == 1.0:
            return tensor
        scaled = self._fresh(f"{tensor}_scaled")
        number = helper.make_tensor("", site.dtype, [], [factor])
        self.add("Mul", [tensor, self._constant(number, f"{site.matmul.name}_factor")], [scaled], name=scaled)
        return scaled

    def _constant(self, value: onnx.TensorProto, wanted: str) -> str:
        name = self._fresh(wanted)
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name = name
        self.add("Constant", [], [name], name=name, value=tensor)
        return name
