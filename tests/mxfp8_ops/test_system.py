"""What systems differ in, as Windows has it where that can be tried elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from mxfp8_ops import system


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_windows_works_in_the_process_that_was_called(name):
    script = (
        "import os, signal, types\n"
        "from mxfp8_ops import system\n"
        "system.sys = types.SimpleNamespace(platform='win32')\n"
        "del os.fork, signal.pthread_sigmask\n"
        "assert system.fork_worker() is None\n"
        f"try: signal.raise_signal(signal.{name})\n"
        f"except KeyboardInterrupt as stop: assert stop.args == (signal.{name},)\n"
        f"signal.raise_signal(signal.{name})\n"  # a second one is ignored
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_folder_whose_files_are_mapped_goes_at_the_end(tmp_path, monkeypatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "The process cannot access the file")

    later = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(system, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(system.atexit, "register", lambda *call, **options: later.append(call[1]))
    monkeypatch.setattr(os, "rmdir", refuse)
    with system.temporary_folder() as folder:
        pass
    assert later == [folder]
