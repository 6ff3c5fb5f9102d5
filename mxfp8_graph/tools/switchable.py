"""A model whose rewritten sites can be switched on and off one by one, whichever framework runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mxfp8_graph.report.data import SiteReport
from mxfp8_graph.running.inputs import Array, Inputs, Signature


class Switchable(ABC):
    """A model with one switch per rewritten site."""

    signature: Signature
    note: str = ""
    """What to say of a model that does not run as it is."""
    sites: tuple[SiteReport, ...]
    """Every site in graph order, the kept ones too."""
    observed_by: tuple[int | None, ...]
    """Per switch, the number of the activation that its site multiplies; None where it cannot be observed."""

    @property
    def switched(self) -> tuple[SiteReport, ...]:
        """The sites that have a switch, in the order of the switches."""
        return tuple(site for site in self.sites if site.decision.quantize)

    @abstractmethod
    def run(
        self, feeds: Mapping[str, Array], on: Sequence[bool], observe: Sequence[int] = ()
    ) -> tuple[Inputs, list[Array]]:
        """Returns (the outputs, the activations that `observe` numbers, with K last); errors as `Runnable.run`."""
