"""Olive: the pass that rewrites an ONNX model, and the model whose sessions run our kernels.

`python -m mxfp8_graph.integrations.olive` prints the configuration that `olive run` takes as --package-config.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import field_validator

from mxfp8_graph import Recipe, load_recipe, rewrite
from mxfp8_ops import ort
from mxfp8_ops.errors import BackendError, ContractError, Mxfp8Error, RecipeError

try:
    import onnxruntime
    from olive.common.ort_inference import check_ort_fallback
    from olive.model import ONNXModelHandler
    from olive.model.config.registry import model_handler_registry
    from olive.model.utils.onnx_utils import resolve_onnx_path
    from olive.package_config import OlivePackageConfig
    from olive.passes import Pass
    from olive.passes.pass_config import PassConfigParam, PassParamDefault
    from olive.search.search_parameter import Categorical
except ImportError as error:
    what, advice = f"cannot be imported ({error})", "pip install olive-ai==0.13.0 'pydantic<=2.13.5' requests"
    raise BackendError("olive", what, expected="olive-ai 0.13 for its pass", advice=advice) from error

ENUMS = {"graph_optimization_level": "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
"""The session options that Olive's settings have as numbers, and their classes."""
FIELDS = [name for name in Recipe.model_fields if name not in {"name", "margin"} and not name.startswith("fp8_")]
"""The fields of a recipe that the pass takes: all but the name, and those for training."""


@model_handler_registry("MXONNXModel")
class MXONNXModel(ONNXModelHandler):
    """An ONNX model with our nodes. Olive cannot register a library with a session, so this class opens the session."""

    def prepare_session(
        self, inference_settings: Any = None, device: Any = None, execution_providers: Any = None, rank: Any = None
    ) -> onnxruntime.InferenceSession:
        """Returns a session with the session options and execution providers of the settings."""
        settings = self.merge_inference_settings(inference_settings, execution_providers)
        options = onnxruntime.SessionOptions()
        for name, value in (settings.get("session_options") or {}).items():
            if name == "extra_session_config":
                for key, text in (value or {}).items():
                    options.add_session_config_entry(key, text)
            elif value is not None:
                setattr(options, name, getattr(onnxruntime, ENUMS[name])(value) if name in ENUMS else value)
        providers, arguments = settings["execution_provider"] or ["CPUExecutionProvider"], settings["provider_options"]
        session = ort.session(self.model_path, session_options=options, providers=providers, provider_options=arguments)
        check_ort_fallback(session, [name if isinstance(name, str) else name[0] for name in providers])
        return session


class MXQuantization(Pass):
    """Rewrites an ONNX model to MXINT8 or MXFP8."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, Any]:
        options = {name: PassConfigParam(type_=Any, description=f"the recipe's field {name}") for name in FIELDS}
        recipe = {"default_value": "auto", "search_defaults": Categorical(["mxint8", "mxfp8"])}
        options["recipe"] = PassConfigParam(type_=str | dict, description="preset, file or fields", **recipe)
        native = "whether Olive's sessions of the model run our kernels"
        return {**options, "native": PassConfigParam(type_=bool, default_value=True, description=native)}

    @classmethod
    def get_config_params(cls, accelerator_spec: Any, config: Any = None, disable_search: bool = False) -> Any:
        """Returns the parameters of a pass; raises RecipeError for an unknown option, which Olive would ignore."""
        known = cls.default_config(accelerator_spec)
        for name in (config or {}).keys() - known.keys():
            raise RecipeError.unknown("MXQuantization", name, known)
        return super().get_config_params(accelerator_spec, config, disable_search)

    @classmethod
    def _validators(cls) -> dict[str, Callable[..., Any]]:
        def fields(value: Any) -> Any:
            if not isinstance(value, str) or value in set(PassParamDefault):
                return value
            # Olive makes an absolute path of a text that is a path here, even of the name of a preset.
            recipe = load_recipe(value if Path(value).suffix else Path(value).name)
            # As fields, so that Olive's cache, which compares configurations, sees when a recipe file has changed.
            return recipe.model_dump(mode="json", exclude_unset=True)

        return {"fields_of_recipe": field_validator("recipe", mode="before")(fields)}

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        output = Path(resolve_onnx_path(output_model_path))
        try:
            if not isinstance(model, ONNXModelHandler):
                advice = "run the pass OnnxConversion first"
                raise ContractError(f"a {model.model_type}", expected="an ONNX model", advice=advice)
            fields = {name: getattr(config, name) for name in FIELDS if getattr(config, name) is not None}
            recipe = load_recipe(Recipe(**config.recipe), **fields)
            _, report = rewrite(model.model_path, recipe, output=output, overwrite=True)
        except Mxfp8Error as error:
            raise error.with_traceback(None) from None  # Olive prints the traceback
        attributes = {**(model.model_attributes or {}), "mxfp8_graph": f"{len(report.rewritten)} rewritten"}
        kind = MXONNXModel if config.native else ONNXModelHandler
        output_model = kind(str(output), inference_settings=model.inference_settings, model_attributes=attributes)
        if output.with_name(f"{output.name}.data").exists():
            output_model.change_model_path_to_dir()  # so that Olive copies both files
        return output_model


def package_config() -> dict[str, Any]:
    """Returns Olive's configuration of its package, with our pass; it replaces Olive's own."""
    ours = json.loads(Path(__file__).with_name("olive_package.json").read_text(encoding="utf-8"))
    olives = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text(encoding="utf-8"))
    return {**olives, "passes": {**olives["passes"], **ours["passes"]}}


if __name__ == "__main__":
    print(json.dumps(package_config(), indent=2))
