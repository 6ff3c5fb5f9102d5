"""Describes the modules that can be packed: their weights, roles, and normalizations to fold.

torch.fx traces the code of a model without inputs. If it cannot, the names of modules tell their roles.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import fx, nn

from mxfp8_graph.eager.experts import stacks
from mxfp8_graph.eager.modules import KINDS, Packed, PackedTransposed, kind_of
from mxfp8_graph.policy import eligibility
from mxfp8_graph.policy.plan import MatMulSite, Role
from mxfp8_graph.policy.roles import Roles
from mxfp8_graph.torch_pass import convolutions, ops
from mxfp8_graph.torch_pass.convolutions import Affine
from mxfp8_graph.torch_pass.operands import Static
from mxfp8_graph.torch_pass.program import place_of, storage_of
from mxfp8_ops.checks import dtype_name

_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_REPORTED: Final = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, *_CONVOLUTIONS)
"""Modules that a report lists, packed or not."""
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d)
_HEADS: Final = frozenset(
    {"lm_head", "embed_out", "logits", "classifier", "classification_head", "score", "head", "heads", "fc"}
    | {"qa_outputs", "cls", "proj_out", "output_projection"}
)
"""Names of modules at the top of a model whose last linear is its head."""
_ROUTERS: Final = frozenset({"gate", "router", "gating"})


@dataclass(frozen=True, kw_only=True)
class ModuleSite:
    """A weight of a module, as the plan and the packing need it."""

    matmul: MatMulSite
    module: nn.Module
    static: Static
    """Steps from the parameter to rows [..., N, K]."""
    transposed: bool = False
    """The rows are [..., K, N]."""
    affine: Affine | None = None
    norm: nn.Module | None = None
    """The normalization to fold into the weight of a convolution."""

    @property
    def weight(self) -> Any:
        """The parameter."""
        return weight_of(self.module, self.static.name.rpartition(".")[2])


def weight_of(module: nn.Module, name: str = "weight") -> Any:
    """Returns a parameter of a module; None if it has no parameter of this name."""
    return module._parameters.get(name)


def identity(weight: torch.Tensor) -> tuple[object, ...]:
    """Returns a key that is equal for two names of one tensor, as long as both live."""
    return place_of(weight) if storage_of(weight) else (id(weight),)


def sites_of(model: nn.Module) -> list[ModuleSite]:
    """Returns the sites of a model, in the order of its modules."""
    known = [(path, m) for path, m in model.named_modules() if isinstance(m, _REPORTED) or kind_of(m)]
    uses = Counter(identity(weight) for _, m in known if (weight := weight_of(m)) is not None)
    empty = _without_values(model)
    roles, norms = _roles(empty or model, traceable=empty is not None), dict(_norms(empty) if empty else ())
    sites = []
    for path, module in known:
        if not isinstance(module, Packed):
            norm = model.get_submodule(norms[path]) if path in norms else None
            sites.append(_site(path, module, roles.get(path), norm, uses))
    for path, module, name in stacks(model):
        sites.append(_stack_site(path, module, name))
    return sites


def _site(
    path: str, module: nn.Module, role: Role | None, norm: nn.Module | None, uses: Counter[tuple[object, ...]]
) -> ModuleSite:
    kind, weight = kind_of(module), weight_of(module)
    blocker, affine, shape = _blocker(module), None, tuple(weight.shape) if weight is not None else ()
    dtype = torch.float32 if weight is None else weight.dtype
    name = ".".join(filter(None, (path, "weight")))
    static = Static(name=name, shape=shape, dtype=dtype)
    transposed = kind is PackedTransposed
    if isinstance(module, _CONVOLUTIONS):
        role = "convolution"
        if not blocker and not (blocker := eligibility.convolution_blocker(shape, module.groups, False)):
            static, shape = convolutions.packed_weight(static)
            affine = _folded(module, norm)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        role = "embedding"
    if not blocker:
        blocker = eligibility.dtype_blocker(dtype_name(dtype), "cast the model first") or (
            eligibility.weight_blocker(shape)
        )
    shape = eligibility.k_last(shape, transposed)
    matmul = MatMulSite(
        name=path or type(module).__name__,
        op=_op(module),
        module=path,
        role=role or "linear",
        n=shape[0] if shape else None,
        k=math.prod(shape[1:]) if shape else None,
        dtype=dtype_name(dtype),
        weight=name,
        weight_shape=shape,
        weight_factor=math.nan if affine is not None and affine.factors is not None else 1.0,
        weight_bytes=static.byte_size,
        shared_with=uses[identity(weight)] - 1 if weight is not None else 0,
        has_bias=getattr(module, "bias", None) is not None,
        blocker=blocker,
    )
    return ModuleSite(
        matmul=matmul, module=module, static=static, transposed=transposed, affine=affine, norm=norm if affine else None
    )


def _stack_site(path: str, module: nn.Module, name: str) -> ModuleSite:
    """Returns the site of the weights [E, N, K] of experts, or [E, K, N]."""
    weight, transposed = weight_of(module, name), bool(getattr(module, "is_transposed", False))
    static = Static(name=f"{path}.{name}", shape=tuple(weight.shape), dtype=weight.dtype)
    shape = eligibility.k_last(static.shape, transposed)
    matmul = MatMulSite(
        name=static.name,
        op="_grouped_mm",
        module=path,
        n=shape[1],
        k=shape[2],
        dtype=dtype_name(weight.dtype),
        weight=static.name,
        weight_shape=shape,
        weight_bytes=static.byte_size,
        blocker=eligibility.dtype_blocker(dtype_name(weight.dtype), "cast the model first"),
    )
    return ModuleSite(matmul=matmul, module=module, static=static, transposed=transposed)


def _op(module: nn.Module) -> str:
    """Returns the name that `rewrite` has for the op of a module."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    return type(module).__name__.lower() if isinstance(module, _CONVOLUTIONS) else "linear"


def _blocker(module: nn.Module) -> str | None:
    """Returns the reason why a module cannot be packed, or None."""
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by parameters of its own; rewrite an exported program to pack them"
    if weight_of(module) is None:
        return "its weight is computed at run time (parametrization, weight_norm); make it a parameter first"
    if kind_of(module) is None:
        return f"{name} may compute another way than the module of torch that it extends; rewrite an exported program"
    if type(weight_of(module).data) is not torch.Tensor:
        return f"its weight is a {type(weight_of(module).data).__name__}; expected a plain tensor"
    if "forward" in module.__dict__:
        return "its forward was replaced in this instance; pack the model before"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"padding_mode {module.padding_mode!r}; expected zeros"
    if getattr(module, "max_norm", None) is not None:
        return "its table is changed by max_norm while the model runs; expected it fixed"
    return None


# --- The graph of a module


def _without_values(model: nn.Module) -> nn.Module | None:
    """Returns a copy of a model on the meta device, or None if it has something that cannot be copied.

    A trace runs the code of the model, which may change its own state.
    """
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    empty = {id(x): torch.empty_like(x, device="meta") for _, x in tensors}
    parameters = {id(x): nn.Parameter(empty[id(x)], x.requires_grad) for x in model.parameters()}
    with contextlib.suppress(Exception):  # the model may hold a lock or a session, which cannot be copied
        return copy.deepcopy(model, {**empty, **parameters})
    return None


class _Tracer(fx.Tracer):
    """Traces the code of a module and of the modules in it, but torch's own, those of transformers, and packed ones."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in KINDS or isinstance(m, Packed) or super().is_leaf_module(m, module_qualified_name)


def _traced(module: nn.Module) -> list[fx.Node]:
    """Returns the nodes of a module's graph; [] if torch.fx cannot trace it."""
    with contextlib.suppress(Exception), warnings.catch_warnings():  # whatever the code of a module raises
        warnings.simplefilter("ignore")
        return list(_Tracer().trace(module).nodes)
    return []


class _View:
    """The graph of a module as a `policy.roles.GraphView`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def consumers(self, value: fx.Node) -> Iterator[tuple[fx.Node | None, fx.Node]]:
        return ((user, user) for user in value.users if user.op != "output")

    def producer(self, value: Any) -> fx.Node | None:
        return value if isinstance(value, fx.Node) and value.op.startswith("call") else None

    def operands(self, op: fx.Node) -> Sequence[Any]:
        return (*op.args, *op.kwargs.values())

    def name(self, op: fx.Node) -> str:
        if op.op != "call_module":
            name = op.target if isinstance(op.target, str) else op.target.__name__
            return name.rstrip("_")
        module = self._model.get_submodule(str(op.target))
        has_matrix = isinstance(module, Packed) or any(parameter.dim() > 1 for parameter in module.parameters())
        return "linear" if has_matrix else type(module).__name__.lower().replace("identity", "alias")

    def is_constant(self, value: Any) -> bool:
        return not isinstance(value, fx.Node) or value.op == "get_attr"

    def is_model_output(self, value: fx.Node) -> bool:
        return any(user.op == "output" for user in value.users)


def _roles(model: nn.Module, traceable: bool) -> dict[str, Role]:
    """Returns the roles of linears, by path; without those of role "linear"."""
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    result: dict[str, Role] = {}
    if traceable and (nodes := _traced(model)):
        roles: Roles[fx.Node, fx.Node] = Roles(_View(model), ops.ROLE_OPS)
        calls = {str(node.target): node for node in nodes if node.op == "call_module"}
        by_path = {path: roles.of_linear(calls[path]) for path in linears if path in calls}
        result = {path: role for path, role in by_path.items() if role != "linear"}
    else:
        result |= {path: "router" for path in linears if path.rpartition(".")[2] in _ROUTERS}
        top, inner = "", model
        # A model inside of a wrapper has its head one name further down.
        while len(children := list(inner.named_children())) == 1 and children[0][0] not in _HEADS:
            top, inner = f"{top}{children[0][0]}.", children[0][1]
        for name in _HEADS & {name for name, _ in inner.named_children()}:
            if below := [path for path in linears if f"{path}.".startswith(f"{top}{name}.")]:
                result[below[-1]] = "output_projection"
    heads = set(_heads(model.modules()))
    return result | {path: "output_projection" for path, module in linears.items() if module in heads}


def _heads(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yields the output embeddings of models of transformers."""
    for module in modules:
        if callable(get := getattr(module, "get_output_embeddings", None)):
            with contextlib.suppress(Exception):  # some models raise where they have none
                if isinstance(head := get(), nn.Module):
                    yield head


def _norms(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (convolution, batch normalization behind it), by path, where nothing else reads its result.

    The graph of the outermost module that torch.fx can trace decides, because it shows most readers.
    """
    owners = Counter(m for _, m in model.named_modules(remove_duplicate=False))
    pending = [("", model)]
    while pending:
        start, parent = pending.pop()
        kinds = {type(m) for m in parent.modules()}
        if not kinds & {*_NORMS} or not kinds & {*_CONVOLUTIONS}:
            continue
        nodes = _traced(parent)
        if not nodes:
            pending += [(f"{start}{name}.", child) for name, child in parent.named_children()]
        calls: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            if node.op == "call_module":
                calls.setdefault(node.target, []).append(node)
        read = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
        for path, results in calls.items():
            readers = {user for result in results for user in result.users}
            norm_path = next(iter(readers)).target if readers else None
            if readers != {*calls.get(norm_path, ())} or read & {path, norm_path}:
                continue
            conv, norm = parent.get_submodule(path), parent.get_submodule(str(norm_path))
            if owners[conv] == owners[norm] == 1 and _foldable(conv, norm):
                yield f"{start}{path}", f"{start}{norm_path}"


def _foldable(conv: nn.Module, norm: nn.Module) -> bool:
    """Returns whether the two are known, and no hook sees the value between them."""
    known = type(conv) in KINDS and type(norm) in _NORMS and "forward" not in norm.__dict__
    return known and norm.running_var is not None and not (conv._forward_hooks or norm._forward_pre_hooks)


def _folded(conv: Any, norm: Any) -> Affine:
    """Returns the steps behind a convolution: its normalization by running statistics, if there is one."""
    lines = []
    if norm is not None:
        mean, variance, scale, shift = map(_values, (norm.running_mean, norm.running_var, norm.weight, norm.bias))
        lines.append(convolutions.norm_line(mean, variance, scale, shift, norm.eps))
    return convolutions.affine_of(conv.weight.shape[0], _values(conv.bias), lines)


def _values(x: torch.Tensor | None) -> Any:
    """Returns the values of a vector as float64; on the meta device any numbers."""
    if x is None:
        return None
    return np.full(x.shape, 2.0) if x.is_meta else x.detach().double().cpu().numpy()
