"""Packs the weights of a module in place, by the policy of `rewrite`; or replaces linears by layers that train."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mxfp8_graph.eager import modules
from mxfp8_graph.eager.experts import Stack
from mxfp8_graph.eager.modules import Packed, TrainingLinear
from mxfp8_graph.eager.sites import ModuleSite, identity, sites_of
from mxfp8_graph.earlier_rewrite import already_rewritten
from mxfp8_graph.naming import printable
from mxfp8_graph.options import Options
from mxfp8_graph.packing import NonFiniteError
from mxfp8_graph.packing import pack as packed_rows
from mxfp8_graph.policy.plan import Decision, of_layers, plan, require_eligible, tied
from mxfp8_graph.policy.recipe import Recipe, load_recipe
from mxfp8_graph.provenance import RewriteRecord
from mxfp8_graph.report.build import build_report
from mxfp8_graph.report.data import RewriteReport, SiteReport, StoredTensor, account
from mxfp8_graph.rewriting import AnyRecipe
from mxfp8_graph.te import Linear
from mxfp8_graph.torch_pass import internals, train
from mxfp8_graph.torch_pass.operands import rows_of
from mxfp8_graph.torch_pass.run import stored_tensors
from mxfp8_ops.checks import scale_count
from mxfp8_ops.errors import ContractError, Option, RecipeError


def quantized(model: nn.Module, recipe: AnyRecipe, options: Options) -> RewriteReport:
    """Packs a model in place; see `mxfp8_graph.quantize_`."""
    if not isinstance(model, nn.Module):
        what, advice = f"model is a {type(model).__name__}", "call rewrite for files and exported programs"
        raise ContractError("quantize_", what, expected="a torch.nn.Module", advice=advice)
    for tensor_name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            what, advice = f"{tensor_name!r} has no shape yet", "call the model once on its inputs"
            raise ContractError("quantize_", what, expected="an initialized tensor", advice=advice)
    chosen, training = load_recipe(recipe), options.training
    name = type(model).__name__
    options = replace(options, name=name)
    size, previous = byte_size(model), _record(model)
    again = already_rewritten(previous, chosen, options, what="model")
    if previous is not None and previous.packed and not again:
        what, advice = f"{previous.node!r} is packed", "load the original, or train adapters beside the packed weights"
        raise ContractError(name, what, expected="a model in high precision", advice=advice)
    if again and training:
        return build_report(chosen, options, size, already_rewritten=True, bytes_after=size)
    sites, decisions = _rest(model, chosen) if again else planned(model, chosen, training=training)
    if again and not any(decision.quantize for decision in decisions):
        return build_report(chosen, options, size, already_rewritten=True, bytes_after=size)
    require_eligible(decisions, name, wanted="module with a weight to pack")
    notes = []
    if chosen.attention_scores or chosen.attention_values:
        notes.append("attention products are no modules, so they stay in high precision; rewrite quantizes them")
    if training and (left_out := train.note(decisions)):
        notes.append(left_out)
        warnings.warn(printable(left_out), stacklevel=3)  # the caller of quantize_
    if not (training or options.allow_nonfinite):
        _check_finite(sites, decisions)
    try:
        reports = _changed(sites, decisions, chosen, options)
    finally:  # also where `progress` raised: another call packs the rest
        _take_no_fast_path(model)
        if not training and any(isinstance(m, Packed) for m in model.modules()):
            _freeze(model)
    if not training:
        to_pack = (site for site, each in zip(sites, decisions, strict=True) if each.quantize)
        if any(site.norm is not None and site.norm.training for site in to_pack):
            notes.append("normalizations in training mode were folded; now they use their running statistics")
    accounts = account(decisions, size, _stored(model))
    results: Any = {"sites": reports, "account": accounts, "notes": notes, "bytes_after": accounts.bytes_after}
    return build_report(chosen, options, size, **results)


def _take_no_fast_path(model: nn.Module) -> None:
    """Makes encoders of torch call their linears: their fast paths multiply by the weights of these in float."""
    changed = (Packed, TrainingLinear)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and isinstance(layer.linear1, changed):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder) and any(isinstance(m, changed) for m in layer.modules()):
            layer.use_nested_tensor = False


def _freeze(model: nn.Module) -> None:
    """Freezes the parameters of a packed model, and refuses to save it in the format of transformers."""
    model.requires_grad_(False)
    for each in model.modules():
        # A quantizer of transformers writes the recipe. A PEFT model saves its adapters alone.
        is_whole = hasattr(each, "save_pretrained") and not hasattr(each, "peft_config")
        if is_whole and not getattr(each, "is_quantized", False):
            each.__dict__["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Raises ContractError: a folder without the recipe would load with random weights."""
    what, expected = "save_pretrained of a model that quantize_ packed", "a model that its quantizer packed"
    advice = "load it with MXQuantizationConfig of mxfp8_graph.integrations.transformers, or save its state_dict()"
    raise ContractError("save_pretrained", what, expected=expected, advice=advice)


def packed(model: nn.Module) -> RewriteReport:
    """Packs a model of training layers in place; see `mxfp8_graph.pack`."""
    layer = next((m for m in model.modules() if isinstance(m, TrainingLinear)), None)
    if layer is None:
        what, advice = "no layer of quantize_(model, training=True)", "call quantize_(model, recipe) to pack a model"
        raise ContractError(type(model).__name__, what, expected="at least one", advice=advice)
    return quantized(model, layer.recipe, Options(name=""))


def planned(model: nn.Module, recipe: Recipe, *, training: bool = False) -> tuple[list[ModuleSite], list[Decision]]:
    """Returns the sites of a model and their decisions; raises RecipeError as `quantize_`."""
    sites = sites_of(model)
    decisions = plan([site.matmul for site in sites], recipe)
    decisions = of_layers(decisions, [isinstance(site.module, Linear) for site in sites], recipe)
    if training:
        for index, (site, decision) in enumerate(zip(sites, decisions, strict=True)):
            if decision.quantize and not isinstance(site.module, nn.Linear):
                reason = "training quantizes linears only; this stays in high precision"
                decisions[index] = replace(decision, kind="unfit", rule="structure", reason=reason)
    decisions = tied(decisions, [_key(site) for site in sites])
    if training:
        train.check(recipe, decisions)
    return sites, decisions


def _rest(model: nn.Module, recipe: Recipe) -> tuple[list[ModuleSite], list[Decision]]:
    """Returns the sites of a model that are not packed yet: an earlier call may have packed a part of it."""
    try:
        return planned(model, recipe)
    except RecipeError:  # a pattern that matches packed modules only
        return [], []


def byte_size(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and buffers, shared ones counted once."""
    return sum(tensor.byte_size for tensor in _stored(model))


def _stored(model: nn.Module) -> list[StoredTensor]:
    named = itertools.chain(*(f(remove_duplicate=False) for f in (model.named_parameters, model.named_buffers)))
    return stored_tensors(dict(named), {})


def _record(model: nn.Module) -> RewriteRecord | None:
    """Returns the record of an earlier call; None if there was none."""
    for kinds, is_packed in (((Packed, Stack), True), ((TrainingLinear,), False)):
        for path, module in model.named_modules():
            if isinstance(module, kinds):
                recipe: Any = module.recipe
                return RewriteRecord(node=path, recipe=recipe.to_record(), packed=is_packed)
    return None


def _key(site: ModuleSite) -> Hashable:
    """Returns a key of the weight of a site; None if it has none."""
    return None if site.weight is None else identity(site.weight)


def _check_finite(sites: Sequence[ModuleSite], decisions: Sequence[Decision]) -> None:
    """Raises NonFiniteError if a weight to pack has NaN or Inf. It runs before the first change, which drops floats."""
    for site, decision in zip(sites, decisions, strict=True):
        if not decision.quantize or not internals.has_values(site.weight):
            continue
        advice = ("repair the checkpoint, or pass ", Option("allow_nonfinite", True), " to let it become NaN")
        least, most = site.weight.detach().aminmax()
        if not (least.isfinite() and most.isfinite()):
            what = f"values from {float(least)} to {float(most)}"
            raise NonFiniteError(f"weight {site.static.name!r}", what, expected="finite values", advice=advice)
        factors = None if site.affine is None else site.affine.factors
        if factors is not None:
            peaks = site.weight.detach().flatten(1).abs().amax(1).float().cpu().numpy()
            with np.errstate(over="ignore", invalid="ignore"):
                products = peaks * factors
            if not np.isfinite(products).all():
                where, what = f"the normalization behind {site.matmul.name!r}", "a factor that makes NaN or Inf"
                raise NonFiniteError(where, what, expected="finite products with the weight", advice=advice)


Codes = tuple[Tensor, Tensor, float | None]
"""Elements, scales, the rounding error where it is known."""


def _changed(
    sites: Sequence[ModuleSite], decisions: Sequence[Decision], recipe: Recipe, options: Options
) -> list[SiteReport]:
    """Packs each chosen site, or prepares it for training; returns the report of each site."""
    # Weights that share memory have equal keys. Keys are valid while all weights live.
    keys = [_key(site) for site in sites]
    total = sum(each.site.weight_bytes for each in decisions if each.quantize)
    done, codes_by_weight, reports = 0, dict[Hashable, Codes](), []
    for site, decision, weight in zip(sites, decisions, keys, strict=True):
        if not decision.quantize:
            reports.append(SiteReport(decision=decision))
            continue
        report = SiteReport(decision=decision, nodes=(site.matmul.name,), bytes_after=site.matmul.weight_bytes)
        if options.training:
            modules.train(site.module, decision, recipe)
        else:
            settings = decision.weight_format, decision.scale_rounding, site.transposed, _factor_key(site)
            key = weight, settings
            if key not in codes_by_weight:
                codes_by_weight[key] = codes_of(site, decision, allow_nonfinite=options.allow_nonfinite)
            *codes, error = codes_by_weight[key]
            put(site, decision, recipe, codes)
            size, name = sum(code.nbytes for code in codes), f"{site.static.name}_mxfp8"
            report = replace(report, packed=name, bytes_after=size, relative_l2=error)
        reports.append(report)
        done += site.matmul.weight_bytes
        if options.progress is not None:
            options.progress(site.matmul.name, done, total)
    return reports


def _factor_key(site: ModuleSite) -> Hashable:
    affine = site.affine
    return None if affine is None or affine.factors is None else affine.factors.tobytes()


def codes_of(site: ModuleSite, decision: Decision, *, allow_nonfinite: bool = False) -> Codes:
    """Returns the packed weight of a site; without values if it has none yet."""
    weight, shape = site.weight, site.matmul.weight_shape
    if not internals.has_values(weight):
        codes = (torch.empty(each, dtype=torch.uint8, device=weight.device) for each in (shape, _blocks(shape)))
        return *codes, None  # type: ignore[return-value]
    rows, flipped = rows_of(site.static, weight)
    factor: Any = 1.0
    if site.affine is not None and site.affine.factors is not None:
        factor = site.affine.factors.repeat(site.static.shape[0] // site.affine.factors.size)
    result = packed_rows(
        replace(rows, name=site.static.name),
        transposed=site.transposed != flipped,
        factor=factor,
        element_format=decision.weight_format,
        scale_rounding=decision.scale_rounding,
        allow_nonfinite=allow_nonfinite,
    )
    elements, scales = (torch.from_numpy(each).to(weight.device) for each in (result.elements, result.scales))
    return elements.reshape(shape), scales.reshape(_blocks(shape)), result.relative_l2


def _blocks(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], scale_count(shape[-1]))


def put(site: ModuleSite, decision: Decision, recipe: Recipe, codes: Sequence[Tensor]) -> None:
    """Puts packed codes in the place of a site's weight."""
    if site.matmul.op == "_grouped_mm":
        name = site.static.name.rpartition(".")[2]
        stack = Stack(codes, decision, recipe, (site.weight.dtype, site.transposed))
        delattr(site.module, name)
        site.module.add_module(name, stack)
        return
    bias = None
    if site.norm is not None and site.affine is not None and site.affine.numbers is not None:
        bias = torch.from_numpy(site.affine.numbers).to(site.weight.device)
        for name in [*site.norm._parameters, *site.norm._buffers]:
            delattr(site.norm, name)
        site.norm.__class__ = nn.Identity
    modules.pack(site.module, codes, decision, recipe, bias)
