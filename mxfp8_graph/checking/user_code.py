"""Loads functions that a user names as module:function. Loading one runs the user's code."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mxfp8_ops.errors import ContractError

REFERENCE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Name of a function: my_data:feeds, or package.module:function."""


def is_reference(text: object) -> bool:
    """Whether `text` names a function as module:function."""
    return isinstance(text, str) and REFERENCE.fullmatch(text) is not None


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function that module:function names; the module may be in the current folder.

    Importing the module runs it.

    Raises:
        ContractError: there is no such module or function, or the module fails.
    """
    module, _, name = reference.partition(":")
    here = str(Path.cwd())
    # As `python -m` does: an installed command has no current folder in its path.
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the user's module raises
        raise failed(reference, error) from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        what = f"{module} has no function called {name!r}"
        raise ContractError(reference, what, expected="module:function", advice="correct the name")
    return function  # type: ignore[no-any-return]  # of whatever type the user's function is


def failed(reference: str, error: Exception) -> ContractError:
    """Returns the error for an exception of a user's function."""
    reason = next(iter(str(error).splitlines()), "")
    what = f"raised {type(error).__name__}{f': {reason}' if reason else ''}"
    return ContractError(reference, what, expected="a function that runs", advice="correct it; --debug shows where")
