"""Counts the bytes of every tensor that a program stores, and says which nodes use it: the torch half of
`report.account`.

Counted are the storages of parameters, buffers and constants, each once: tied weights and views share one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Node

from mxfp8_graph.policy.plan import Decision
from mxfp8_graph.report.account import Account, OpKinds, StoredTensor, Use
from mxfp8_graph.torch_pass import internals, torchao_weights
from mxfp8_graph.torch_pass.find import Site, TorchSite
from mxfp8_graph.torch_pass.operands import VIEW_OPS
from mxfp8_graph.torch_pass.program import Program, storage_of
from mxfp8_ops import contract
from mxfp8_ops.checks import dtype_name

OP_KINDS: Final = OpKinds(
    lookups=internals.op_names("embedding embedding_bag _embedding_bag index index_select gather take"),
    convolutions=internals.op_names(
        "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    ),
    recurrent=internals.op_names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    quantized=internals.op_names("_scaled_mm _scaled_grouped_mm _weight_int4pack_mm _weight_int8pack_mm _int_mm"),
)
_QUANTIZED_FAMILIES: Final = (f"{contract.DOMAIN}::", "torchao::", "quantized", "_quantized")
"""Prefixes of the names of further ops with quantized weights."""


class Stored(NamedTuple):
    """A storage and the tensors in it."""

    names: list[str]
    dtype: str
    shape: tuple[int, ...]
    byte_size: int


Inventory = Mapping[int, Stored]
"""Storages by address; a tensor without memory has the id of its object."""


def inventory(state: Mapping[str, torch.Tensor], constants: Mapping[str, Any]) -> Inventory:
    """Returns the storages of a program with these parameters, buffers (`state`) and constants."""
    storages: dict[int, Stored] = {}
    for name, tensor in (*state.items(), *constants.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        packed: Any = tensor if torchao_weights.is_mx(tensor) else None
        if packed is None:
            # The whole storage: a view may show a part of it, and the file has all.
            dtype, size = tensor.dtype, tensor.untyped_storage().nbytes()
        else:  # torchao's subclass has no storage of its own: its bytes are those of its two inner tensors
            dtype, size = packed.qdata.dtype, packed.qdata.nbytes + packed.scale.nbytes
        stored = storages.setdefault(_place(tensor), Stored([], dtype_name(dtype), tuple(tensor.shape), size))
        stored.names.append(name)
    return storages


def account(
    before: Inventory,
    readers: Mapping[int, Sequence[Use]],
    after: Inventory,
    made_from: Mapping[str, torch.Tensor],
) -> Account:
    """Returns the account of all bytes, before and after.

    Args:
        before: storages of the program.
        readers: the nodes that read each storage, as `uses` returns them.
        after: storages of the result.
        made_from: name of each tensor that the rewrite added -> the tensor that it was made from.
    """
    places = {name: _place(tensor) for name, tensor in made_from.items()}
    sources = {key: places.get(stored.names[0]) for key, stored in after.items() if key not in before}
    # A new tensor stands in the place of its source, so both are one row of the account.
    parts = {key: source for key, source in sources.items() if source in before}
    new_bytes = Counter[int | None]()
    for key, source in parts.items():
        new_bytes[source] += after[key].byte_size
    tensors = [
        StoredTensor(
            name=storage.names[0],
            also_called=tuple(storage.names[1:]),
            dtype=storage.dtype,
            shape=storage.shape,
            bytes_before=before[key].byte_size if key in before else 0,
            bytes_kept=after[key].byte_size if key in after else 0,
            bytes_new=new_bytes[key],
            uses=tuple(readers.get(key, ())),
        )
        for key, storage in {**before, **after, **before}.items()  # in the order of both, as `before` has them
        if key not in parts
    ]
    return Account(partial(tuple, tensors))


def uses(program: Program, sites: Iterable[Site], decisions: Iterable[Decision]) -> dict[int, list[Use]]:
    """Returns the nodes that read each storage, through views and constant computations."""
    return _Uses(program, {site.node: (site, d) for site, d in zip(sites, decisions, strict=True)}).by_storage


class _Uses:
    """Follows storages to the nodes that read them."""

    def __init__(self, program: Program, sites: Mapping[Node, tuple[Site, Decision]]) -> None:
        self.by_storage: dict[int, list[Use]] = {}
        self._program = program
        self._sites = sites
        self._storages: dict[Node, tuple[int, ...]] = {}
        """Value -> the storages that it depends on, if it depends on nothing else."""
        handed: dict[int, list[Use]] = {}
        nodes = (node for scope in program.scopes for node in scope.module.graph.nodes)
        for number, node in enumerate(nodes):
            if node.op == "placeholder":
                name = program.stored_name(node)
                self._storages[node] = () if name is None else (_place(program.tensor(name)),)
            elif node.op in {"call_function", "output"} and (node in sites or not self._passes_on(node)):
                for key, use in self._uses(node, number):
                    kind = handed if internals.is_higher_order(node) else self.by_storage
                    kind.setdefault(key, []).append(use)
        # Calls of higher-order ops count where no node inside of their graphs reads the storage.
        self.by_storage = {**handed, **self.by_storage}

    def _passes_on(self, node: Node) -> bool:
        """Whether `node` is a view or computes a constant, so that its readers are readers of the storages."""
        op, sources = internals.op_name(node), node.all_input_nodes
        if node.op == "output" or internals.is_higher_order(node) or _is_quantized(op):
            return False
        view = op in VIEW_OPS and bool(sources) and node.args[0] is sources[0]
        constant = bool(sources) and all(self._storages.get(source) for source in sources)
        if not (constant or (view and self._storages.get(sources[0]))):
            return False
        made_of = sources[:1] if view else sources
        self._storages[node] = tuple(dict.fromkeys(key for source in made_of for key in self._storages[source]))
        return True

    def _uses(self, node: Node, number: int) -> Iterator[tuple[int, Use]]:
        site, decision = self._sites.get(node, (None, None))
        op = decision.site.op if decision else internals.op_name(node) or "graph output"
        what = "" if decision else OP_KINDS.describe(op)
        weight = self._weight(site)
        bias = site.form.c if isinstance(site, TorchSite) else None
        seen: set[int] = set()
        for source in node.all_input_nodes:
            for key in self._storages.get(source, ()):
                seen.add(key)
                # The bias is counted by itself: that the matmul was kept says nothing of it.
                operand = key == weight or (decision and not decision.quantize and source is not bias)
                chosen = decision if operand else None
                yield key, Use(node=number, op=op, what=what, quantized=_is_quantized(op), decision=chosen)
        if weight is not None and weight not in seen:  # experts that are picked while the program runs
            yield weight, Use(node=number, op=op, decision=decision)

    def _weight(self, site: Site | None) -> int | None:
        """Returns the storage of a site's static operand."""
        static = site.w.static if isinstance(site, TorchSite) else None
        return None if static is None else _place(self._program.tensor(static.name))


def _is_quantized(op: str) -> bool:
    return op in OP_KINDS.quantized or op.startswith(_QUANTIZED_FAMILIES)


def _place(tensor: torch.Tensor) -> int:
    return id(tensor) if torchao_weights.is_mx(tensor) else storage_of(tensor) or id(tensor)
