"""Master weights: float32 parameters for an optimizer, beside weights that are stored in MXFP8 only."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mxfp8_graph.te.tensor import MXFP8Tensor
from mxfp8_ops.errors import ContractError


class _Master(nn.Parameter):
    """A float32 copy of a quantized weight, whose gradient it has. Only the optimizer keeps it."""

    quantized: MXFP8Tensor
    seen: tuple[int, int]
    """The counts of changes, of this copy and of the codes, when they were equal last."""

    # One gradient for both, so that zero_grad and clip_grad_norm_ work on the optimizer's and on the module's side.
    @property
    def grad(self) -> Tensor | None:
        grad = self.quantized.grad
        if grad is not None and grad.dtype is not torch.float32:  # module.bfloat16() makes a new parameter
            self.quantized.grad = None
            self.quantized.grad_dtype = torch.float32
            self.quantized.grad = grad.float()
        return self.quantized.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.quantized.grad = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.setdefault(id(self), _Master(self.detach().clone(), self.requires_grad))
        copied.quantized = copy.deepcopy(self.quantized, memo)
        return copied.agree()

    def changes(self) -> tuple[int, int]:
        """Returns the counts of changes, of this copy and of the codes."""
        return self._version, next(iter(self.quantized.state_dict().values()))._version

    def agree(self) -> _Master:
        """Notes that this copy and the codes are equal."""
        self.seen = self.changes()
        return self


def master_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of `module` for an optimizer: a float32 master in place of each weight in MXFP8.

        optimizer = torch.optim.AdamW(te.master_weights(module), lr=1e-3)

    After each step of a torch.optim optimizer, the weights are quantized anew; LBFGS, which evaluates the loss within a
    step, raises a ContractError. The order is that of `module.parameters()`. If a weight was changed in another way,
    such as by `load_state_dict`, the next step begins with its values. Masters live as long as the optimizer: the
    module and its checkpoints have MXFP8 only. To go on with the same masters, save their values
    (`[each.detach() for each in masters]`), and `copy_` them into the new ones after loading the module.
    """
    _follow_optimizers()
    return [_master(each) if isinstance(each, MXFP8Tensor) else each for each in module.parameters()]


def _master(weight: MXFP8Tensor) -> nn.Parameter:
    # Two groups of an optimizer share the master of a weight.
    if weight.master is not None and (known := weight.master()) is not None:
        return known  # type: ignore[no-any-return]
    values = weight._dequantized() if weight.initial is None else weight.initial
    master = _Master(values.to(weight.device, torch.float32, copy=True), requires_grad=weight.requires_grad)
    master.quantized = weight
    weight.grad_dtype = torch.float32
    weight.master = weakref.ref(master)
    return master.agree()


def _masters(optimizer: torch.optim.Optimizer) -> list[_Master]:
    return [each for group in optimizer.param_groups for each in group["params"] if isinstance(each, _Master)]


@functools.cache
def _follow_optimizers() -> None:
    """Registers, once for a process, hooks on the steps of all optimizers."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for master in _masters(optimizer):
            if isinstance(optimizer, torch.optim.LBFGS):
                what, expected = "LBFGS evaluates the loss within a step", "an optimizer that steps once"
                raise ContractError("master_weights", what, expected=expected, advice="use another one")
            was, now = master.seen, master.changes()
            if was[0] == now[0] and was[1] != now[1]:
                master.data.copy_(master.quantized._dequantized())

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for master in _masters(optimizer):
            master.quantized.quantize_(master.detach())
            master.agree()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
