"""Master weights: float32 parameters for an optimizer, beside weights that are stored in MXFP8 only."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mxfp8_graph.te.tensor import MXFP8Tensor


class _Master(nn.Parameter):
    """A float32 copy of a quantized weight, whose gradient it has. Only the optimizer keeps it."""

    quantized: MXFP8Tensor

    # One gradient for both, so that zero_grad and clip_grad_norm_ work on the optimizer's and on the module's side.
    @property
    def grad(self) -> Tensor | None:
        return self.quantized.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.quantized.grad = value


def master_weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of `module` for an optimizer: a float32 master in place of each weight in MXFP8.

        optimizer = torch.optim.AdamW(te.master_weights(module), lr=1e-3)

    Every torch.optim optimizer with these parameters quantizes the weights anew after each step. The order is that of
    `module.parameters()`. Masters live as long as the optimizer: the module holds MXFP8 only, and so do its
    checkpoints. To go on with the same masters, save them too.
    """
    _quantize_after_steps()
    return [_master(each) if isinstance(each, MXFP8Tensor) else each for each in module.parameters()]


def _master(weight: MXFP8Tensor) -> nn.Parameter:
    values = weight._dequantized() if weight.initial is None else weight.initial
    master = _Master(values.to(weight.device, torch.float32, copy=True), requires_grad=weight.requires_grad)
    master.quantized = weight
    weight.grad_dtype = torch.float32
    return master


@functools.cache
def _quantize_after_steps() -> None:
    """Registers, once for a process, a hook on all optimizers."""

    def quantize(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, _Master):
                    parameter.quantized.quantize_(parameter.detach())

    register_optimizer_step_post_hook(quantize)
