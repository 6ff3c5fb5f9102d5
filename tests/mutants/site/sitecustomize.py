"""Runs in every Python process below `make mutants`: imports the module that MUTANT names with its change."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
from pathlib import Path

_NAME = os.environ.get("MUTANT", "")
_ROOT = Path(__file__).parents[3]


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the changed syntax tree; the cache of bytecode is neither read nor written."""

    def get_code(self, fullname: str) -> object:
        spec = importlib.util.spec_from_file_location("_mutation_points", Path(__file__).parents[1] / "points.py")
        points = importlib.util.module_from_spec(spec)
        sys.modules["_mutation_points"] = points  # dataclasses look their module up
        spec.loader.exec_module(points)
        tree = points.mutated_tree(Path(self.path).read_text(), _NAME)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one changed module."""

    def __init__(self, path: str) -> None:
        self.path = _ROOT / path
        self.module = ".".join(Path(path.removeprefix("custom_ops/")).with_suffix("").parts)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Loader(name, str(self.path)))


_LIBRARY = os.environ.get("MUTANT_LIBRARY")

if _NAME or _LIBRARY:  # a mutant may allocate without end
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
if _NAME:
    sys.meta_path.insert(0, _Finder(_NAME.partition("::")[0]))
if _LIBRARY:  # the folder of a changed library: `native.library_path` looks there first
    import mxfp8_ops

    mxfp8_ops.__path__.insert(0, _LIBRARY)
