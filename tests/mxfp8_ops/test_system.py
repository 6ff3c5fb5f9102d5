"""What systems differ in, as Windows has it where that can be tried elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mxfp8_ops import system

WINDOWS = SimpleNamespace(platform="win32")


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
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_folder_whose_files_are_mapped_goes_at_the_end(monkeypatch):
    later = []
    monkeypatch.setattr(system, "sys", WINDOWS)
    monkeypatch.setattr(system.atexit, "register", lambda *call, **options: later.append((call, options)))
    with monkeypatch.context() as context:

        def unlink(*arguments: object, **options: object) -> None:
            raise PermissionError(13, "The process cannot access the file")

        context.setattr(os, "unlink", unlink)
        with system.temporary_folder() as folder:
            (folder / "mapped").touch()
    assert folder.exists()
    assert later == [((shutil.rmtree, folder), {"ignore_errors": True})]
    shutil.rmtree(folder)
