"""A copy of an exported program to edit: its graphs, its signature, and references to its weights."""

from __future__ import annotations

import copy
import itertools
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from mxfp8_graph.naming import unique_name
from mxfp8_graph.torch_pass import internals
from mxfp8_graph.torch_pass.torchao_weights import is_mx

STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class GraphScope:
    """One graph of the program: the main graph, or one that a higher-order op (cond, while_loop, scan) runs."""

    path: str
    """Names of the subgraphs down to it; "" is the main graph."""
    module: GraphModule
    blocker: str | None = None
    """Why nothing inside can be rewritten; None for the main graph."""

    @property
    def placeholders(self) -> list[Node]:
        """The inputs, in order."""
        return list(itertools.takewhile(lambda node: node.op == "placeholder", self.module.graph.nodes))

    @property
    def results(self) -> list[Any]:
        """The outputs, flat, in order."""
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        value = output.args[0]
        return list(value) if isinstance(value, (tuple, list)) else [value]


class Program:
    """An editable copy of a program; `finish` turns it into an ExportedProgram. The source is never modified.

    The copy shares tensors with the source. `finish` copies the tensors that a run writes to, since running the result
    would change the source.
    """

    def __init__(self, source: ExportedProgram) -> None:
        self.source = source
        self.module = clone(source.graph_module)
        self.state: dict[str, torch.Tensor] = dict(source.state_dict)
        self.constants: dict[str, Any] = dict(source.constants)
        values = (node.meta.get("val") for node in self.module.graph.nodes)
        # New nodes must be traced in the mode of the old ones: torch refuses to mix fake tensors of two modes.
        self.fake_mode: Any = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
        self.labels: dict[Node, str] = {}
        """Node -> op name for reports, if the source program calls another op there."""
        main = GraphScope("", self.module)
        self._specs = dict(zip(main.placeholders, source.graph_signature.input_specs, strict=True))
        self._added: dict[str, Node] = {}
        """Placeholders of the added buffers, by buffer name."""
        self.scopes = [main, *_inner(main)]
        signature = source.graph_signature
        self.mutated = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
        outputs = zip(main.results, signature.output_specs, strict=True)
        self.outputs = {node for node, spec in outputs if spec.kind == OutputKind.USER_OUTPUT}

    def _own(self, names: set[str]) -> None:
        """Copies these tensors, and all tensors that share memory with them."""
        # 0 is a tensor without memory, which has nothing to copy.
        places = {storage_of(self.tensor(name)) for name in names} - {0}
        memo: dict[int, Any] = {}
        copies: dict[int, torch.Tensor] = {}
        for stored in (self.state, self.constants):
            for name, tensor in stored.items():
                if storage_of(tensor) in places:
                    if id(tensor) not in copies:
                        # One memo: views of a storage, and tied weights, have to share memory in the copy too.
                        own = copy.deepcopy(tensor.detach(), memo)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        copies[id(tensor)] = torch.nn.Parameter(own, tensor.requires_grad) if is_parameter else own
                    stored[name] = copies[id(tensor)]

    def stored_name(self, node: Node) -> str | None:
        """Returns the name of the parameter, buffer or constant that a placeholder stands for, or None."""
        spec = self._specs.get(node)
        return spec.target if spec is not None and spec.kind in STORED else None

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a parameter, buffer or constant."""
        value: torch.Tensor = self.state[name] if name in self.state else self.constants[name]
        return value

    def fresh(self, wanted: str) -> str:
        """Returns `wanted`, or `wanted` with a number, as a name that no tensor of the program has."""
        return unique_name(wanted, ChainMap(self.state, self.constants))

    def weight(self, name: str) -> Node:
        """Returns the node of a tensor that was added to `state`, as a buffer."""
        if name not in self._added:
            # Parameters and buffers come before the user's inputs, as ExportedProgram requires.
            graph, user_input = self.module.graph, InputKind.USER_INPUT
            inputs = (node for node, spec in self._specs.items() if spec.kind == user_input)
            others = (node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(next(inputs, None) or next(others)):
                node = graph.placeholder("b_" + name.replace(".", "_"))
            node.target = node.name
            node.meta["val"] = self.fake_mode.from_tensor(self.state[name], static_shapes=True)
            self._specs[node] = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=True)
            self._added[name] = node
        return self._added[name]

    def forget(self, placeholder: Node) -> None:
        """Removes an unused placeholder of the main graph and, with its last alias, the tensor."""
        name = self._specs.pop(placeholder).target
        placeholder.graph.erase_node(placeholder)
        # Tied weights: another placeholder may still stand for this tensor.
        if name is not None and all(spec.target != name for spec in self._specs.values()):
            self.state.pop(name, None)
            self.constants.pop(name, None)

    def ask_for_gradients(self, wanted: bool) -> None:
        """Sets requires_grad of every parameter, by new parameters on the same memory. Tied weights stay tied."""
        parameters: dict[tuple[object, ...], torch.nn.Parameter] = {}
        for name, tensor in self.state.items():
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad != wanted and tensor.is_floating_point():
                place = storage_of(tensor) or id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
                if place not in parameters:
                    parameters[place] = torch.nn.Parameter(tensor.detach(), requires_grad=wanted)
                self.state[name] = parameters[place]

    def finish(self) -> ExportedProgram:
        """Returns the edited program, verified."""
        self._own(self.mutated | internals.written_names(self.module.graph, self.stored_name))
        for scope in self.scopes:
            scope.module.graph.lint()
            scope.module.recompile()
        inputs = [self._specs[node] for node in self.scopes[0].placeholders]
        return internals.updated(self.source, self.module, inputs, self.state, self.constants)


def flattened(source: ExportedProgram) -> ExportedProgram:
    """Returns `source` with plain tensors in place of tensor subclasses that dequantize; `source` if it has none.

    torch.export leaves access_subclass_inner_tensor(weight, "_mxfp8") in the graph: its result becomes the buffer
    weight_mxfp8. Another use of the weight reads its values. torchao's weights stay, see `torchao_weights`.
    """
    plain = torch.Tensor.dequantize
    names = {n for n, t in source.state_dict.items() if not is_mx(t) and getattr(type(t), "dequantize", plain) != plain}
    if not names:
        return source
    program = Program(source)
    access: Any = torch.ops.export.access_subclass_inner_tensor.default
    for placeholder in program.scopes[0].placeholders:
        name = program.stored_name(placeholder)
        if name is None or name not in names:
            continue
        weight = source.state_dict[name]
        for node in [node for node in placeholder.users if node.target is access]:
            buffer = f"{name}{node.args[1]}"
            program.state.setdefault(buffer, getattr(weight, str(node.args[1])))
            node.replace_all_uses_with(program.weight(buffer))
            node.graph.erase_node(node)
        program.state[name] = torch.nn.Parameter(weight.detach().dequantize())
        if not placeholder.users:
            program.forget(placeholder)
    # Integers have no gradients, and quantize refuses an activation that has one.
    program.ask_for_gradients(False)
    return program.finish()


def _inner(scope: GraphScope) -> Iterator[GraphScope]:
    """Yields every graph that higher-order calls in `scope` run, at any depth."""
    for call in scope.module.graph.nodes:
        # A packed weight would have to become an operand of the call and of all its graphs, so their matmuls stay.
        blocker = scope.blocker or f"inside {internals.op_name(call)}, whose graphs stay in high precision"
        for name, module in internals.inner_graphs(call):
            inner = GraphScope("/".join(filter(None, (scope.path, name))), module, blocker)
            yield inner
            yield from _inner(inner)


def clone(module: GraphModule) -> GraphModule:
    """Returns a copy of a graph module and the graphs inside it, node for node with the same names."""
    # The copy shares the objects in the metadata; unflatten leaves a module there that cannot be copied.
    shared: dict[int, Any] = {}
    for graph_module in module.modules():
        if isinstance(graph_module, GraphModule):
            shared[id(graph_module.meta)] = {k: v for k, v in graph_module.meta.items() if k != "unflattened_module"}
    with internals.quiet():
        copied: GraphModule = copy.deepcopy(module, shared)
    for path, old in module.named_modules():
        if isinstance(old, GraphModule):
            new = copied.get_submodule(path)
            assert isinstance(new, GraphModule)
            for before, after in zip(old.graph.nodes, new.graph.nodes, strict=True):
                # A copy renames placeholders that shadow builtins (input, max), and the signature refers to names.
                if before.name != after.name:
                    after.name = before.name
                if before.op == "placeholder":
                    after.target = before.target
    return copied


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for two names of one tensor: address, offset, shape, strides, dtype."""
    return (storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def storage_of(tensor: Any) -> int:
    """Returns the address where the memory of a tensor begins; 0 for a tensor without memory of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, RuntimeError, NotImplementedError):
        return 0
