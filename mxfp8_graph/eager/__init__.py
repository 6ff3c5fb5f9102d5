"""quantize_() and pack(): modules with packed weights, without an export. The import loads no torch.

quantize.py  the steps: plan, pack, put in place
sites.py     the modules of a model as the plan sees them: roles, and normalizations to fold
modules.py   modules with packed weights, and linears that train
experts.py   stacks of experts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxfp8_graph.options import Options, Progress
from mxfp8_graph.policy import presets
from mxfp8_graph.report.data import RewriteReport
from mxfp8_graph.rewriting import AnyRecipe

if TYPE_CHECKING:
    from torch.nn import Module


def quantize_(
    model: Module,
    recipe: AnyRecipe = presets.DEFAULT,
    *,
    training: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> RewriteReport:
    """Packs the weights of a trained model in place, without an export; returns the report of `rewrite`.

    nn.Linear, the Conv1D and the stacks of experts of transformers, and where the recipe has them nn.Conv1d, nn.Conv2d
    and nn.Embedding, become modules with two uint8 buffers in place of a weight. Choice, names and bytes are as in
    `rewrite`. A batch normalization that alone reads a convolution becomes an identity. Products outside of modules
    (attention, functional calls) stay. All parameters are frozen: set `requires_grad` of those that an adapter trains.
    torch.export of the result gives a rewritten program.

    Args:
        model: the module. On the meta device it becomes a model that loads packed weights.
        recipe: as in `rewrite`. Patterns match the dotted path of a module.
        training: replace linears by layers that train in MXFP8 (`te.Linear`). `pack` packs them afterwards.
        allow_nonfinite: pack weights with NaN or Inf instead of refusing them.
        progress: called as progress(module, bytes_done, bytes_total) after each weight. If it raises, the model is
            packed in part; another call packs the rest.

    Raises:
        ContractError: `model` is no module, or a weight cannot be packed. The model is unchanged.
        RecipeError: the recipe is malformed, does not fit the model, or another recipe packed the model before.
        NothingEligibleError: no weight is eligible; the error has the reasons.
    """
    import mxfp8_graph.torch_pass  # noqa: F401 - its error says how to install torch
    from mxfp8_graph.eager.quantize import quantized

    options = Options(name="", training=training, allow_nonfinite=allow_nonfinite, progress=progress)
    return quantized(model, recipe, options)


def pack(model: Module) -> RewriteReport:
    """Packs a model that `quantize_(model, training=True)` prepared, by the recipe of its layers; returns the report.

    Raises:
        ContractError: the model has no such layers, or a weight has NaN or Inf.
    """
    from mxfp8_graph.eager.quantize import packed

    return packed(model)
