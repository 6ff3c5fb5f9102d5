"""How far a search is: it counts runs of the model, against how many it may take at most."""

from __future__ import annotations

from mxfp8_graph.options import Progress


class Ticker:
    """Tells a progress callback; what a search need not do counts as done."""

    def __init__(self, progress: Progress | None) -> None:
        self.total = 1
        self._progress = progress
        self._done = 0

    def tick(self, what: str, runs: int = 1) -> None:
        """Counts runs that were made, or that a search before this one made."""
        self._done = min(self._done + runs, self.total)
        self.say(what)

    def finish(self) -> None:
        """Counts what need not be done as done."""
        self._done = self.total
        self.say("done")

    def say(self, what: str) -> None:
        """Says what is being done."""
        if self._progress is not None:
            self._progress(what, self._done, self.total)
