"""Hostile arguments to mxfp8_attention: refused in words, in a child, where a crash is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import byref
from typing import Any

import numpy as np

from mxfp8_ops import native
from mxfp8_ops.native import AttentionArguments

ROOM = np.zeros(4096, np.float32)
SIZES = {"batch": 2, "rows": 3, "keys": 4, "past": 1, "q_heads": 4, "kv_heads": 2, "d": 5, "dv": 6}
HUGE = [-1, -(2**63), 2**63 - 1, 2**62, 2**49]
WRONG: dict[str, list[Any]] = {
    "dtype": [0, 2, 9, 17, -1],
    "mask_dtype": [0, 2, 17, -1],
    "activation_dtype": [0, 10, -1],
    **dict.fromkeys(SIZES, HUGE),
    **{name: [None, ROOM.ctypes.data + 1] for name in ("q", "k", "v", "past_key", "past_value", "y")},
    **{name: [ROOM.ctypes.data + 1] for name in ("mask", "present_key", "present_value")},
}


def arguments(**changed: Any) -> AttentionArguments:
    """Returns arguments that are right but for those `changed`."""
    right: dict[str, Any] = {"dtype": 1, "mask_dtype": 1, "activation_dtype": 1, **SIZES}
    right |= dict.fromkeys(("q", "k", "v", "mask", "past_key", "past_value"), ROOM.ctypes.data)
    right |= {name: np.zeros(4096, np.float32) for name in ("y", "present_key", "present_value")}
    mask = changed.pop("mask_sizes", (2, 1, 3, 5))
    given = right | changed
    made = AttentionArguments(**{n: v.ctypes.data if isinstance(v, np.ndarray) else v for n, v in given.items()})
    made.mask_sizes[:] = mask
    made.kept = right
    return made


def work() -> None:
    """What the child does: every single fault, then empty calls."""
    library = native.load()
    assert library.mxfp8_attention(byref(arguments()), 1) == 0
    for name, values in WRONG.items():
        for value in values:
            status = library.mxfp8_attention(byref(arguments(**{name: value})), 1)
            text = library.mxfp8_last_error(0).decode()
            assert status == -1, f"{name} = {value} gives status {status}"
            assert "; expected " in text, f"{name} = {value} says {text!r}"
            # What is too large shows in an array; heads that are too many, in what is left over.
            assert name in text or name in SIZES, f"{name} = {value} says {text!r}"
    for sizes in ((2, 1, 3, 4), (-1, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2**62, 1), (0, 1, 1, 1)):
        assert library.mxfp8_attention(byref(arguments(mask_sizes=sizes)), 1) == -1, sizes
    assert library.mxfp8_attention(byref(arguments(q_heads=3)), 1) == -1
    assert library.mxfp8_attention(byref(arguments(kv_heads=0)), 1) == -1
    assert library.mxfp8_attention(byref(arguments()), -1) == -1
    assert library.mxfp8_attention(None, 1) == -1
    nothing = dict.fromkeys(("q", "k", "v", "mask", "past_key", "past_value", "y", "present_key", "present_value"))
    huge = {"rows": 2**62, "d": 2**62, "dv": 2**62, "keys": 2**40, "past": 2**40}
    assert library.mxfp8_attention(byref(arguments(**nothing, **huge, batch=0)), 1) == 0
    assert library.mxfp8_attention(byref(arguments(**nothing, batch=2**60, rows=0, keys=0, past=0)), 1) == 0
    assert library.mxfp8_attention(byref(arguments(**nothing, batch=2**60, d=0, dv=0, keys=2**40)), 1) == 0
    print("done")


def test_the_c_abi_refuses_what_is_no_attention() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, f"ended with {run.returncode}: {run.stderr}"
    assert run.stdout == "done\n"


if __name__ == "__main__":
    work()
