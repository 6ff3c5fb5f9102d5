"""Writes folders for serving programs: a rewritten model, the native library, and a configuration that names it.

A host is a row of `HOSTS` and a file of this folder; `write.py` has `package`. This file imports nothing, so that the
command line can name the hosts.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

HOSTS: Final[MutableMapping[str, str]] = {
    "genai": "mxfp8_graph.tools.hosts.genai:layout",
    "optimum": "mxfp8_graph.tools.hosts.hugging_face:optimum",
    "sentence-transformers": "mxfp8_graph.tools.hosts.hugging_face:sentence_transformers",
    "triton": "mxfp8_graph.tools.hosts.triton:layout",
}
"""Name of a host -> "module:function" that returns the `Layout` of its folder for a `Request`."""
