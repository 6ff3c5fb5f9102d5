"""A pytest plugin: writes which lines of the product each test runs, and how long the test takes.

One JSON file a process in the folder MUTANTS_COVERAGE:
{"lines": {file: {line: [tests]}}, "seconds": {test: seconds}, "failed": [tests]}.
A test is a function without its parameters. Lines of a fixture count for the whole file: another test may check what it
returns.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_ROOT = Path(__file__).parents[2]
_SOURCES = [str(_ROOT / "mxfp8_graph"), str(_ROOT / "custom_ops" / "mxfp8_ops")]


class Contexts:
    """Switches coverage's context at each phase of each test."""

    def __init__(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, source=_SOURCES, config_file=False)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid.partition("::")[0])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid.partition("[")[0])
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        self.seconds[test] += report.duration
        if report.failed:
            self.failed.add(test)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            tests = {line: sorted({*names} - {""}) for line, names in data.contexts_by_lineno(file).items()}
            lines[str(Path(file).relative_to(_ROOT))] = {line: names for line, names in tests.items() if names}
        path = Path(os.environ["MUTANTS_COVERAGE"]) / f"{os.getpid()}.json"
        path.write_text(json.dumps({"lines": lines, "seconds": self.seconds, "failed": sorted(self.failed)}))


def pytest_configure(config: pytest.Config) -> None:
    """Measures in the processes that run tests: xdist's workers, or the only one."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Contexts())
