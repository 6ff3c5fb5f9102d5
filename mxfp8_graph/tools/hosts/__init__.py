"""Writes folders for serving programs: a rewritten model, the native library, and a configuration that names it."""

from __future__ import annotations

from mxfp8_graph.tools.hosts.write import HOSTS as HOSTS
from mxfp8_graph.tools.hosts.write import package as package
