"""Training mode and evaluation mode: what ops such as dropout do in the one and not in the other.

Export writes the mode into the calls: dropout(x, 0.1, True). `evaluated` writes evaluation mode into them, and `follow`
makes them read the module's own flag, so that train() and eval() work.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from mxfp8_graph.torch_program import internals

_FLAGS: Final = {"train": False, "training": False, "dropout_p": 0.0}
"""Arguments by which aten ops know the mode (dropouts, lstm; batch_norm, rrelu; attention), and evaluation's values."""
_RATES: Final = {"p", "dropout"}
"""Arguments with the share of values that an op drops, beside its flag."""


def active(module: GraphModule) -> Iterator[tuple[Node, str]]:
    """Yields each node that is in training mode, with the argument that says so."""
    for _, node, name in _switchable(module):
        if internals.argument(node, name):
            yield node, name


def random_ops(module: GraphModule) -> list[str]:
    """Returns the names of the ops that draw random numbers in either mode."""
    found = {
        internals.op_name(node)
        for graph_module in _graph_modules(module)
        for node in graph_module.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        and not _FLAGS.keys() & internals.argument_names(node)
    }
    return sorted(found)


def evaluated(program: ExportedProgram) -> ExportedProgram:
    """Returns `program` in evaluation mode, with the same tensors; the same object if it is in that mode already."""
    if not any(active(program.graph_module)):
        return program
    module = internals.clone(program.graph_module)
    for node, name in active(module):
        internals.set_argument(node, name, _FLAGS[name])
    for graph_module in _graph_modules(module):
        graph_module.recompile()
    return internals.updated(
        program, module, program.graph_signature.input_specs, program.state_dict, program.constants
    )


def follow(module: GraphModule) -> None:
    """Makes what `ExportedProgram.module` returned follow train() and eval(), in place."""
    found = list(_switchable(module))
    for graph_module in _graph_modules(module):
        nodes = [(n, name) for owner, n, name in found if owner is graph_module and internals.argument(n, name)]
        if not nodes:
            continue
        graph = graph_module.graph
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            flag = graph.create_node("get_attr", "training")  # nn.Module has it, and train() and eval() set it
        for node, name in nodes:
            value: Any = flag
            if name == "dropout_p":
                with graph.inserting_before(node):
                    value = graph.call_function(operator.mul, (flag, internals.argument(node, name)))
            internals.set_argument(node, name, value)
        graph_module.recompile()
    # Attention without dropout looks the same in both modes, so it is not known to have any.
    off = {internals.op_name(n) for _, n, name in found if name != "dropout_p" and not internals.argument(n, name)}

    def train(mode: bool = True) -> Any:
        if mode and off:
            what = f"train() leaves {', '.join(sorted(off))} in evaluation mode, as the program was exported or packed"
            warnings.warn(f"{what}; export the model in training mode to train with dropout", stacklevel=2)
        return torch.nn.Module.train(module, mode)

    # torch's own raise NotImplementedError. A local function keeps modules from being pickled, which would trace them
    # again and write the mode of that moment into the calls.
    module.train = train  # type: ignore[method-assign]
    module.__dict__.pop("eval", None)  # nn.Module's calls train(False)


def _switchable(module: GraphModule) -> Iterator[tuple[GraphModule, Node, str]]:
    """Yields (graph module, node, name of the flag) of each call that differs between the modes."""
    for graph_module in _graph_modules(module):
        for node in graph_module.graph.nodes:
            arguments = internals.argument_names(node)
            drops_nothing = any(not internals.argument(node, rate) for rate in arguments & _RATES)
            # Normalizations that keep no statistics use the batch's in both modes.
            no_statistics = "norm" in internals.op_name(node) and internals.argument(node, "running_mean") is None
            if not drops_nothing and not no_statistics:
                yield from ((graph_module, node, name) for name in sorted(arguments & _FLAGS.keys()))


def _graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    """Yields a graph module and those of its higher-order calls."""
    return (each for each in module.modules() if isinstance(each, GraphModule))
