"""Shared by all benchmarks: take turns, take medians, report the spread, keep the losing rows, write the results.

Peers run in the same process and take turns round by round, so that a slow moment of the machine hits all of them. A
row's spread is its interquartile range over its median; above `NOISY` the report says so, as it does when other
processes wanted the processors too, and then writes nothing. Results of different processors stand side by side:
`results/NAME.md` is of an AMD, `results/NAME.avx2.md` of one without AVX-512, `results/NAME.intel.md` of an Intel with
AMX, `results/NAME.intel-no-amx.md` of one without.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import settings
from rich.console import Console
from rich.table import Table

from mxfp8_ops import cpu

RESULTS = Path(__file__).parent / "results"
ENDINGS = ("json", "md")
NOISY = 0.15
THREADS = os.cpu_count() or 1
BUSY = 1.5
"""Threads that want to run, per processor, above which a result is not published."""
LOAD = os.getloadavg()[0]
"""Threads that wanted to run before the benchmark."""
MAKERS = {"AuthenticAMD": "", "GenuineIntel": ".intel"}
"""The suffix of the files of results, by the maker of the processor; others have ".other"."""
FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
"""The features of a processor that the kernels of the contenders use, as Linux names them."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median and interquartile range over the rounds."""

    median: float
    spread: float

    @property
    def noisy(self) -> bool:
        """Whether the rounds differ too much to trust the last digits."""
        return self.spread > NOISY * self.median


def take_turns(
    cases: Mapping[str, Callable[[], Any]], *, rounds: int = 9, least_seconds: float = 0.02
) -> dict[str, Timing]:
    """Returns the timing of each case; every round runs each case once, long enough for the clock.

    A case that returns a float took that many seconds, by its own clock: it runs in another process.
    """
    counts: dict[str, int] = {}
    for name, call in cases.items():
        call()  # warm-up: allocations, caches, code
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(least_seconds / max(time.perf_counter() - start, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            call()  # the last contender's threads may still be spinning, and its data is in the caches
            start, reported = time.perf_counter(), 0.0
            for _ in range(counts[name]):
                result = call()
                reported += result if isinstance(result, float) else 0.0
                del result  # its memory is there for the next call
            samples[name].append((reported or time.perf_counter() - start) / counts[name])
    result = {}
    for name, values in samples.items():
        low, middle, high = np.percentile(values, [25, 50, 75])
        result[name] = Timing(float(middle), float(high - low))
    return result


def options(threads: int = THREADS) -> onnxruntime.SessionOptions:
    """Returns what every session runs with. Idle threads of one session must not spin while another has its turn."""
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = threads
    chosen.log_severity_level = 3
    chosen.add_session_config_entry("session.force_spinning_stop", "1")
    return chosen


def _processor(key: str) -> str:
    """Returns what Linux says about the first processor, or nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")


def results_file(name: str, ending: str) -> Path:
    """Returns where a result of this machine goes."""
    kind, flags = MAKERS.get(_processor("vendor_id"), ".other"), _processor("flags").split()
    if kind == ".intel" and "amx_bf16" not in flags:
        kind = ".intel-no-amx"
    if "avx2" in flags and "avx512f" not in flags:
        kind = f"{kind.removesuffix('-no-amx')}{'-' if kind else '.'}avx2"
    return RESULTS / f"{name}{kind}.{ending}"


def machine(threads: int = THREADS) -> dict[str, Any]:
    """Returns what a reader needs to judge the numbers."""
    versions = {}
    for name in ("numpy", "onnxruntime", "torch", "torchao", "ml_dtypes", "openvino"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    flags = set(_processor("flags").split())
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor("model name") or platform.processor(),
        "features": [feature for feature in FEATURES if feature in flags],
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": cpu.isa(),
        "versions": versions,
    }


def publish(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    notes: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    keep: bool = True,
    per_processor: bool = True,
    threads: int = THREADS,
    own: int = THREADS,
) -> None:
    """Prints the table and, if it is to be kept, writes it to the `results_file`s in JSON and Markdown.

    It adds the settings of the peers to the notes. `versions` has the versions of peers in other environments.
    Results that do not depend on the processor have one file. `own` is the most threads that the benchmark itself ran.

    Raises:
        ValueError: the table names a peer without a setting.
        SystemExit: the results depend on a processor that other processes wanted too; nothing is written.
    """
    facts = machine(threads)
    facts["versions"] |= versions or {}
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*map(str, row))
    peers = settings.named(cell for row in (columns, *rows) for cell in row)
    notes = [*notes, *(f"{name}: {setting}." for name, setting in peers.items())]
    # Before the benchmark every thread is another's; at its end its own count, too.
    load = max(LOAD, os.getloadavg()[0] - max(0, own - THREADS))
    console = Console(width=200)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    if per_processor and load > BUSY * THREADS:
        kept = "; nothing is written: run again when idle" if keep else ""
        console.print(f"Busy machine: {load:.1f} threads wanted to run on {THREADS} processors{kept}.", markup=False)
        if keep:
            raise SystemExit(1)
    if not keep:
        return
    content = {
        "title": title,
        "machine": facts,
        "columns": list(columns),
        "rows": [list(r) for r in rows],
        "notes": list(notes),
    }
    _write(content, {end: results_file(name, end) if per_processor else RESULTS / f"{name}.{end}" for end in ENDINGS})


def _write(content: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Writes a result to its files, by ending."""
    RESULTS.mkdir(exist_ok=True)
    files["json"].write_text(json.dumps(content, indent=1) + "\n")
    facts, columns = content["machine"], content["columns"]
    lines = [
        f"# {content['title']}",
        "",
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores with {' '.join(facts['features'])}, "
        f"{facts['threads']} threads, ISA {facts['isa']}; ",
    ]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    lines += ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in content["rows"]]
    lines += ["", *(f"- {note}" for note in content["notes"]), ""]
    files["md"].write_text("\n".join(lines))


def noise_notes(timings: Mapping[str, Timing]) -> list[str]:
    """Returns a warning naming the rows whose spread is large, or nothing."""
    loud = [f"{name} ({t.spread / t.median:.0%})" for name, t in timings.items() if t.noisy]
    return [f"Noisy machine: spread above {NOISY:.0%} of the median in {', '.join(loud)}."] if loud else []
