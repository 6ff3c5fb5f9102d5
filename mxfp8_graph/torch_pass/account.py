"""Lists the tensors that a program stores, for `report.account`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mxfp8_graph.report.data import StoredTensor
from mxfp8_graph.torch_pass import torchao_weights
from mxfp8_graph.torch_pass.program import storage_of
from mxfp8_ops.checks import dtype_name


def stored_tensors(state: Mapping[str, torch.Tensor], constants: Mapping[str, Any]) -> list[StoredTensor]:
    """Returns the parameters, buffers (`state`) and constants by storage: tied weights and views share one."""
    storages: dict[int, StoredTensor] = {}
    for name, tensor in (*state.items(), *constants.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        packed: Any = tensor if torchao_weights.is_mx(tensor) else None
        if packed is None:
            # The whole storage: a view may show a part of it, and the file has all. One without memory is itself.
            place, dtype, size = storage_of(tensor) or id(tensor), tensor.dtype, tensor.untyped_storage().nbytes()
        else:  # torchao's subclass has no storage of its own: its bytes are those of its two inner tensors
            place, dtype, size = id(tensor), packed.qdata.dtype, packed.qdata.nbytes + packed.scale.nbytes
        stored = storages.get(place) or StoredTensor((), tuple(tensor.shape), dtype_name(dtype), size)
        storages[place] = stored._replace(names=(*stored.names, name))
    return list(storages.values())
