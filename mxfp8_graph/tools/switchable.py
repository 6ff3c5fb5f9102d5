"""A model with one switch per rewritten site, whichever framework runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.running.inputs import Array, Inputs, Signature
from mxfp8_ops.errors import ContractError


class Switchable(ABC):
    """A model with one switch per rewritten site."""

    signature: Signature
    note: str = ""
    """Note on changes of the model before its sites were listed."""
    sites: tuple[SiteReport, ...]
    """Every site in graph order, the kept ones too."""
    observed: tuple[Any, ...]
    """Per switch, the activation of its site as `observe` takes it; None if it cannot be observed."""

    @property
    def switched(self) -> tuple[SiteReport, ...]:
        """The sites that have a switch, in the order of the switches."""
        return tuple(site for site in self.sites if site.decision.quantize)

    @abstractmethod
    def run(self, feeds: Mapping[str, Array], on: Sequence[bool]) -> Inputs:
        """Returns the outputs; raises as `Runnable.run`."""

    @abstractmethod
    def observe(self, feeds: Mapping[str, Array], activations: Sequence[Any]) -> list[Array]:
        """Returns activations [..., K], items of `observed`, with all switches off; raises as `run`."""


def refuse_rewritten(is_rewritten: bool, name: str) -> None:
    """Raises ContractError for a rewritten model, which no longer has the original form of its sites."""
    if is_rewritten:
        advice = "name the model it was made from"
        raise ContractError(name, "is rewritten already", expected="the original model", advice=advice)
