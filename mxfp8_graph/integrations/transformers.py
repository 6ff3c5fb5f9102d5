"""transformers >= 5: `from_pretrained(folder, quantization_config=MXQuantizationConfig("mxint8"))`.

A model loads as usual, then `quantize_` packs it. The saved folder has the packed weights, and the recipe in its
config.json. When it loads, `quantize_` first makes empty packed modules of the model on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mxfp8_graph.eager.experts import Stack
from mxfp8_graph.eager.modules import CODES, Packed
from mxfp8_graph.eager.quantize import quantize_
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_ops.errors import BackendError, ContractError

try:
    import transformers
except ModuleNotFoundError as error:
    raise BackendError("transformers", "not installed", advice="pip install 'transformers>=5'") from error
if int(transformers.__version__.partition(".")[0]) < 5:
    raise BackendError("transformers", transformers.__version__, expected=">= 5", advice="pip install -U transformers")

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD: Final = "mxfp8_graph"


@register_quantization_config(_METHOD)
class MXQuantizationConfig(QuantizationConfigMixin):
    """The recipe of a model, for `from_pretrained`, and in the config.json of a saved folder."""

    def __init__(
        self,
        recipe: str | Path | Recipe | Mapping[str, Any] = "mxint8",
        modules_to_not_convert: Sequence[str] | None = None,
        quant_method: str = _METHOD,
    ) -> None:
        """Loads the recipe.

        Args:
            recipe: a preset, a recipe file, a `Recipe`, or its fields.
            modules_to_not_convert: patterns for the recipe's `exclude`.
            quant_method: the name of this method; config.json has it.

        Raises:
            RecipeError: as `load_recipe`.
        """
        self.quant_method = quant_method
        chosen = Recipe(**recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)
        self.recipe = chosen.excluding(modules_to_not_convert or ())

    def to_dict(self) -> dict[str, Any]:
        """Returns what config.json stores: the whole recipe as data."""
        return {"quant_method": self.quant_method, "recipe": self.recipe.model_dump(mode="json", exclude_none=True)}


@register_quantizer(_METHOD)
class MXQuantizer(HfQuantizer):
    """Calls `quantize_` after weights have been loaded, or before packed ones are."""

    quantization_config: MXQuantizationConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            _as_loaded(model)
            quantize_(model, self.quantization_config.recipe)
            self._ties = _untie(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if "disk" in {*getattr(model, "hf_device_map", {}).values()}:
            what, advice = "weights on the disk", 'pass device_map="cpu"'
            raise ContractError("device_map", what, expected="all weights in memory", advice=advice)
        if not self.pre_quantized:
            quantize_(model, self.quantization_config.recipe)
            _untie(model)
            return
        for target, source in self._ties.items():
            for name in CODES:
                model.get_submodule(target)._buffers[name] = model.get_submodule(source)._buffers[name]
        for path, module in model.named_modules():
            # transformers marks what it read. What it did not read is not initialized, and it only prints a report.
            if isinstance(module, (Packed, Stack)) and not hasattr(module.weight_mxfp8, "_is_hf_initialized"):
                what, advice = "no packed weight in the folder", "load it with the class of model that saved it"
                raise ContractError(f"module {path!r}", what, expected=f"{path}.{CODES[0]}", advice=advice)

    def is_serializable(self, **kwargs: Any) -> bool:
        """Returns True: `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train beside the packed weights."""
        return True


def _as_loaded(model: Any) -> None:
    """Gives an empty model the dtypes and ties that it will have with its weights: `quantize_` decides by them."""
    plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else model.dtype_plan
    for name, parameter in model.named_parameters():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in plan):
            parameter.data = parameter.data.float()
    for target, source in model.all_tied_weights_keys.items():
        path, _, name = target.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(source))


def _untie(model: Any) -> dict[str, str]:
    """Removes ties of packed weights, which transformers would tie as parameters; returns the modules that share."""
    ties = {}
    for target, source in list(model.all_tied_weights_keys.items()):
        paths = [name.rpartition(".")[0] for name in (target, source)]
        packed = [isinstance(model.get_submodule(path), Packed) for path in paths]
        if any(packed):
            del model.all_tied_weights_keys[target]
        if all(packed):
            ties[paths[0]] = paths[1]
            ignored = [re.escape(f"{paths[0]}.{name}") for name in CODES]
            model._keys_to_ignore_on_load_missing = [*(model._keys_to_ignore_on_load_missing or ()), *ignored]
    return ties
