"""All private and version-dependent APIs of torch that the package uses, in one module.

The undocumented names, and why each is used:

    ExportedProgram._update            the only way to give a program other parameters; it verifies the result
    GraphModule.__deepcopy__           renames placeholders that shadow builtins; `clone` puts the names back
    OpOverload._schema                 says which arguments an op writes to
    ExportedProgram._example_inputs    to save sample inputs without their containers
    torch.utils._pytree                the containers that a program takes and returns
    Node.meta["from_node"]             the op of a node before decomposition
    pt2_archive._package.load_pt2      torch.export.load hides the error in a file
    torch._C.PyTorchFileReader         reads a record of a .pt2 file before torch reads the program
    torch._export.utils                decomposes one op alone
    torch._dispatch.python             evaluates ops in Python: in C++, torch 2.10 fixes sizes that vary
    torch.fx.experimental._config      torch.export fixes a dynamic size whose example is 1, unless this is set
    CHECKPOINT_PREFIX                  the prefix that checkpoint_wrapper adds to the names of parameters
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy.typing as npt
import torch
import torch.fx.experimental._config
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher  # noqa: PLC0414 - used elsewhere
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputSpec
from torch.fx import GraphModule, Node

from mxfp8_ops import torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.errors import BackendError

OLDEST: Final = (2, 10)
"""2.9 cannot decompose the guards that it writes into programs of varying sizes; older ones lose custom metadata."""
NEWEST_TESTED: Final = (2, 15)

CHECKPOINT_PREFIX: Final = "_checkpoint_wrapped_module."
"""The name of the module inside a `checkpoint_wrapper`, a part of the names of its parameters and modules."""

_AUTOCAST, _SET_GRAD = "wrap_with_autocast", "wrap_with_set_grad_enabled"

_UPDATE: Final = ("self", "graph_module", "graph_signature", "state_dict", "constants")


def sizes_of_one_vary() -> contextlib.AbstractContextManager[Any]:
    """In this context, torch.export keeps a dynamic size whose example is 1; transformers exports in the same way."""
    config: Any = torch.fx.experimental._config
    patch: contextlib.AbstractContextManager[Any] = config.patch(backed_size_oblivious=True)
    return patch


def check_torch() -> str | None:
    """Returns a note if this torch is newer than the tested versions but has the same private API, else None.

    Raises:
        BackendError: torch is too old, or newer with another private API; the message names the versions that work.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    works = f"torch {_dotted(OLDEST)} to {_dotted(NEWEST_TESTED)}"
    if version < OLDEST:
        raise BackendError(f"torch {torch.__version__}", "too old", expected=works, advice="pip install -U torch")
    # By the signature and not by the version alone: nightly builds have the number of a release that is not out.
    update = getattr(ExportedProgram, "_update", None)
    if update is None or not set(_UPDATE) <= set(inspect.signature(update).parameters):
        what = "ExportedProgram._update is not the one this pass knows"
        advice = "install one of those, or a newer mxfp8-graph"
        raise BackendError(f"torch {torch.__version__}", what, expected=works, advice=advice)
    if version > NEWEST_TESTED:
        return f"torch {torch.__version__} is newer than the last one tested ({_dotted(NEWEST_TESTED)})"
    return None


def updated(
    program: ExportedProgram,
    module: GraphModule,
    inputs: Sequence[InputSpec],
    state: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
) -> ExportedProgram:
    """Returns `program` with another graph and other weights; outputs, ranges and module calls stay."""
    signature = ExportGraphSignature(input_specs=list(inputs), output_specs=program.graph_signature.output_specs)
    with quiet():
        new: ExportedProgram = program._update(module, signature, state_dict=dict(state), constants=dict(constants))
    return new


def with_samples(program: ExportedProgram, samples: Any) -> ExportedProgram:
    """Returns a shallow copy of `program` with other sample inputs, which need not fit its arguments."""
    other = copy.copy(program)
    other._example_inputs = samples
    return other


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's warnings about its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def graphs(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.fx.Graph]]:
    """Yields (name, submodule, graph) of each submodule that runs a graph, also after `unflatten`."""
    for name, each in module.named_modules():
        # Not getattr: a checkpoint_wrapper has the attributes of the module inside.
        graph = each.graph if isinstance(each, torch.fx.GraphModule) else each.__dict__.get("graph")
        if isinstance(graph, torch.fx.Graph):
            yield name, each, graph


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has values: it is neither on the meta device nor fake."""
    return not tensor.is_meta and not isinstance(tensor, torch._subclasses.FakeTensor)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns the values of a tensor, bfloat16 as ml_dtypes.bfloat16. A tensor on the CPU shares its memory."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type; ml_dtypes does, and the bits are the same
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def inlined(program: ExportedProgram, *, training: bool) -> ExportedProgram:
    """Returns `program` with each einsum as permutes, views and a bmm, and without autocast and no_grad around weights.

    Training keeps a program with a no_grad region as it is: gradients would pass through the ops inside.
    """
    from torch._export.utils import _get_decomp_for_cia

    ops = {op_name(node) for _, _, graph in graphs(program.graph_module) for node in graph.nodes}
    # Tracing again changes views too, so a region without a weight, such as rotary embeddings, stays.
    stored = [(s.arg.name, program.state_dict.get(s.target or "")) for s in program.graph_signature.input_specs]
    matrices = {name for name, tensor in stored if tensor is not None and tensor.dim() > 1}
    calls = [node for node in program.graph.nodes if op_name(node) in {_AUTOCAST, _SET_GRAD}]
    regions = any(source.name in matrices for call in calls for source in call.all_input_nodes)
    if not (regions or "einsum" in ops) or (training and _SET_GRAD in ops):
        return program
    op = torch.ops.aten.einsum.default
    with quiet():
        result: ExportedProgram = program.run_decompositions({op: _get_decomp_for_cia(op)})
    return result


def op_names(names: str) -> frozenset[str]:
    """Returns a set of names as `op_name` gives them, written with spaces between."""
    return frozenset(names.split())


def op_name(node: Node) -> str:
    """Returns the name of the op that a node calls, such as "linear", "mxfp8::gemm" or "cond"; "" if it calls none."""
    target = node.target
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        name: str = target._schema.name
        return name.removeprefix("aten::")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target._name)
    return str(getattr(target, "__name__", target))


def is_higher_order(node: Node) -> bool:
    """Whether `node` calls an op that runs graphs of its own."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def inner_graphs(node: Node) -> list[tuple[str, GraphModule]]:
    """Returns (name, graph) of each graph that a call of a higher-order op runs; none for other nodes."""
    if not is_higher_order(node):
        return []
    owner = node.graph.owning_module
    modules = [(str(a.target), getattr(owner, str(a.target), None)) for a in node.all_input_nodes if a.op == "get_attr"]
    return [(name, module) for name, module in modules if isinstance(module, GraphModule)]


def module_path(node: Node) -> str:
    """Returns the path of the module that made `node`, such as "model.layers.0.mlp.up_proj"; "" for the model."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Returns an argument of an op call by its name in the op's schema, however it was passed."""
    if name in node.kwargs:
        return node.kwargs[name]
    # By the schema: exporters pass the same argument by position or by keyword.
    formals = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for index, formal in enumerate(formals):
        if formal.name == name and not formal.kwarg_only:
            if index < len(node.args):
                return node.args[index]
            return formal.default_value if formal.has_default_value() else default
    return default


def arguments(node: Node) -> dict[str, Any]:
    """Returns every argument of an op call by its name in the op's schema; of other nodes, the keyword arguments."""
    formals = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    return {**node.kwargs, **{formal.name: argument(node, formal.name) for formal in formals}}


def set_argument(node: Node, name: str, value: Any) -> None:
    """Sets an argument of an op call by its name in the op's schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    index = [formal.name for formal in node.target._schema.arguments].index(name)
    if index < len(node.args):
        node.update_arg(index, value)
    else:
        node.update_kwarg(name, value)


def unusual(target: torch._ops.OpOverload, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that differ from the op's defaults. Each costs half a microsecond per call."""
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    return {name: value for name, value in keywords.items() if name not in defaults or defaults[name] != value}


def written(node: Node) -> list[Node]:
    """Returns the arguments that the op of `node` writes to; all arguments of a higher-order op that writes to any."""
    target = node.target
    if any(written(inner) for _, module in inner_graphs(node) for inner in module.graph.nodes):
        return node.all_input_nodes
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    formals = [f for f in target._schema.arguments if f.alias_info is not None and f.alias_info.is_write]
    values = [argument(node, formal.name) for formal in formals]
    flat = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [each for each in flat if isinstance(each, Node)]


def written_names(graph: torch.fx.Graph, stored_name: Callable[[Node], str | None]) -> set[str]:
    """Returns the names of the stored tensors that ops of the main graph may write to."""
    origins = {argument for node in graph.nodes for argument in written(node)}
    # A view shows its first input. Ops that are no views add names of tensors that stay the same, which does no harm.
    while inner := {node for node in origins if node.op == "call_function" and node.all_input_nodes}:
        origins = (origins - inner) | {node.all_input_nodes[0] for node in inner}
    return {name for node in origins if (name := stored_name(node))}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
