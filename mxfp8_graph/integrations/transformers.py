"""transformers >= 5: `from_pretrained(folder, quantization_config=MXQuantizationConfig("mxint8"))`.

A model loads as usual, then `quantize_` packs it. A saved folder has the packed weights, and the recipe in config.json.
When it loads, `quantize_` first packs the model without values, on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from mxfp8_graph.eager import quantize_
from mxfp8_graph.eager.experts import Stack
from mxfp8_graph.eager.modules import CODES, Packed
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.rewriting import AnyRecipe
from mxfp8_ops.errors import BackendError, ContractError

try:
    import transformers.core_model_loading as _  # noqa: F401  # of 5.0
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ModuleNotFoundError as error:
    raise BackendError("transformers", "not installed, or below 5", advice="pip install -U transformers") from error

_METHOD: Final = "mxfp8_graph"
_Source = AnyRecipe | Mapping[str, Any]


@register_quantization_config(_METHOD)
class MXQuantizationConfig(QuantizationConfigMixin):
    """A recipe: a preset, a file, a `Recipe` or its fields. `modules_to_not_convert` adds patterns to its `exclude`."""

    def __init__(
        self, recipe: _Source = "mxint8", modules_to_not_convert: Sequence[str] = (), quant_method: str = _METHOD
    ) -> None:
        self.quant_method: Any = quant_method
        chosen = Recipe(**recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
        self.recipe = chosen.excluding(modules_to_not_convert)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for config.json: the whole recipe as data."""
        return {"quant_method": self.quant_method, "recipe": self.recipe.model_dump(mode="json", exclude_none=True)}


@register_quantizer(_METHOD)
class MXQuantizer(HfQuantizer):
    """Calls `quantize_` when a model has its weights, or before packed ones are loaded."""

    quantization_config: Any
    is_trainable = True  # adapters beside the packed weights

    def is_serializable(self, **kwargs: Any) -> bool:
        """Whether `save_pretrained` works."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            _as_loaded(model)
            quantize_(model, self.quantization_config.recipe)
            self._shared = _untied(model)
            _ignore(model, "missing", [f"{path}.{name}" for path in self._shared for name in CODES])
            _ignore(model, "unexpected", [f"{path}.weight" for path in _packed(model)])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            quantize_(model, self.quantization_config.recipe)
            _untied(model)
            return
        packed = _packed(model)
        for target, source in self._shared.items():
            packed[target]._buffers.update({name: packed[source]._buffers[name] for name in CODES})
        for path, module in packed.items():
            # transformers marks the tensors that it read. Others have no values, and it only prints a report.
            if not all(hasattr(module._buffers[name], "_is_hf_initialized") for name in CODES):
                advice = "load the folder by the class of model that saved it"
                raise ContractError(f"{path}.weight", "not in the folder", expected="it packed", advice=advice)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the tensors to save, and no metadata."""
        # Each packed weight has beside it a tensor [1, 1] by the name of the original. Where this quantizer is not
        # imported, transformers would initialize a missing weight, but a wrong shape is an error.
        # Experts have none: transformers splits their stacks when it saves.
        paths = [path for path, module in _packed(model).items() if isinstance(module, Packed)]
        return {**model.state_dict(), **{f"{path}.weight": torch.zeros(1, 1) for path in paths}}, {}


def _packed(model: Any) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, (Packed, Stack))}


def _ignore(model: Any, kind: str, names: Sequence[str]) -> None:
    """Leaves names out of the report of what is "missing" or "unexpected" in a folder."""
    attribute = f"_keys_to_ignore_on_load_{kind}"
    known = [] if getattr(model, attribute) is None else getattr(model, attribute)
    setattr(model, attribute, type(known)([*known, *map(re.escape, names)]))


def _as_loaded(model: Any) -> None:
    """Gives an empty model the dtypes and ties that it will have with its weights: `quantize_` decides by them."""
    plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else model.dtype_plan
    for name, parameter in model.named_parameters():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in plan):
            parameter.data = parameter.data.float()
    model.dtype_plan = {f"{pattern}(?!*_mxfp8)": dtype for pattern, dtype in plan.items()}  # 5.0 casts codes by it
    for target, source in model.all_tied_weights_keys.items():
        path, _, name = target.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(source))


def _untied(model: Any) -> dict[str, str]:
    """Removes ties of packed weights, which are no parameters; returns modules -> those whose codes they share."""
    packed, ties = {f"{path}.weight" for path in _packed(model)}, model.all_tied_weights_keys
    model.all_tied_weights_keys = {one: other for one, other in ties.items() if not packed & {one, other}}
    shared = ((one, other) for one, other in ties.items() if packed >= {one, other})
    return {one.removesuffix(".weight"): other.removesuffix(".weight") for one, other in shared}
