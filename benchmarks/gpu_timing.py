"""How the GPU benchmark measures: see `take_turns`.

Every case is captured into a CUDA graph that goes through enough sets of operands to leave nothing in the L2 cache;
peers take turns, and the median of all rounds counts. The GPU is kept busy until a graph is queued, so that no sample
counts the time in which it waits for the processor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

LEAST_CALLS = 20
"""Calls in a graph: its start and end are then little of what is measured."""
DELAY_CLOCKS = 1_000_000
"""Clocks that the GPU is busy before each sample: half a millisecond, longer than queuing a graph takes."""


@dataclass(frozen=True)
class Row:
    """One line of the table: `value` against what it must and could reach, in units of `peer`."""

    name: str
    microseconds: float
    value: float
    peer: str
    must: float | None = None
    stretch: float | None = None

    @property
    def verdict(self) -> str:
        """The value compared with the targets, in words; empty without targets."""
        if self.must is None:
            return ""
        return (
            "stretch" if self.stretch and self.value >= self.stretch else "ok" if self.value >= self.must else "MISSED"
        )


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Returns a graph that makes all calls; each has run before, so everything is compiled and loaded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def take_turns(cases: dict[str, Sequence[Call]], rounds: int) -> dict[str, float]:
    """Returns the median microseconds of one call of each case; every round replays each case once."""
    repeated = {name: [*calls] * -(-LEAST_CALLS // len(calls)) for name, calls in cases.items()}
    graphs = {name: captured(calls) for name, calls in repeated.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 3):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU has drained: without this it would record `start` and wait for the graph to be launched.
            torch.cuda._sleep(DELAY_CLOCKS)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first ones warm up
                samples[name].append(start.elapsed_time(end) * 1e3 / len(repeated[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def sets(nbytes: int) -> int:
    """Returns how many sets of operands of this size outgrow the L2 cache three times over, at least 4."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(4, -(-3 * cache // nbytes))


def copy_calls(nbytes: int) -> list[Call]:
    """Copies that read and write `nbytes` in all."""
    pairs = [torch.randint(256, (2, nbytes // 2), dtype=torch.uint8, device="cuda") for _ in range(sets(nbytes))]
    return [lambda p=pair: p[1].copy_(p[0]) for pair in pairs]
