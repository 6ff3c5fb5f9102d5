"""Containers of a program's inputs and outputs: the ones that a file names, and those of transformers.

A tree of containers names its classes. torch reads the ones that are registered in pytree, and whoever defines a class
registers it: transformers' model outputs when their module is imported, its caches on request. That is
done here, so a program with a cache can be read in a new process. Never is a class looked up that is not listed here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from torch.utils import _pytree as pytree  # trees of containers are its

_DEFINES_CONTAINERS: Final = re.compile(
    r"transformers\.(modeling_\w+|cache_utils|utils\.generic|models(\.[a-z0-9_]+)+\.modeling_\w+)"
)
"""Modules that are imported because a file asks for them."""

_CACHES: Final = "transformers.cache_utils"
_CACHE_CLASSES: Final = {"EncoderDecoderCache"} | frozenset(
    f"{kind}{part}" for kind in ("Dynamic", "Static") for part in ("Cache", "Layer", "SlidingWindowLayer")
)
"""Classes of `_CACHES` that hold tensors and plain values."""
_PLAIN_CLASSES: Final = frozenset(
    [f"builtins:{name}" for name in ("tuple", "list", "dict", "set", "frozenset")] + ["collections:OrderedDict"]
)

_NAMED: Final = re.compile(rb'\\"type\\": ?\\"(transformers(?:\.\w+)*)([.:])(\w+)\\"')
"""A class in a tree, which is text inside the JSON of a program."""


def import_modules(modules: Iterable[str]) -> None:
    """Imports those of `modules` that define containers of transformers; they register themselves."""
    for module in modules:
        if _DEFINES_CONTAINERS.fullmatch(module):
            # A file of a program that needs no cache has to load without transformers.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def register_named(program: bytes) -> None:
    """Registers the containers of transformers that a program, as JSON, names; without transformers, none."""
    # A search in the text, before torch parses it: torch raises for a class that is not registered by then.
    named = {tuple(part.decode() for part in match) for match in _NAMED.findall(program)}
    import_modules({module for module, _, _ in named})
    for module, separator, name in sorted(named):
        if module == _CACHES and name in _CACHE_CLASSES:
            with contextlib.suppress(ImportError, AttributeError):  # none, or another version, of transformers
                _register_cache(name, separator)


def _register_cache(name: str, separator: str) -> None:
    """Registers a cache in one of two ways: each writes the name of the class behind a separator of its own."""
    cache = getattr(importlib.import_module(_CACHES), name)
    if cache in pytree.SUPPORTED_NODES:
        return
    if separator == ":":
        importlib.import_module("transformers.exporters.exporter_dynamo").register_pytree_node(cache)
    elif name == "DynamicCache":
        importlib.import_module("transformers.integrations.executorch").register_dynamic_cache_export_support()


def unpickled_as(names: Iterable[str]) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Returns the stand-ins for those of `names` (classes with their modules) that are caches, each with its name."""
    caches = [name for name in names if name.startswith(f"{_CACHES}.") and name.split(".")[-1] in _CACHE_CLASSES]
    with contextlib.suppress(ImportError, AttributeError):  # none, or another version, of transformers
        return [(_stand_in(name.removeprefix(f"{_CACHES}.")), name) for name in caches]
    return []


@functools.cache
def _stand_in(name: str) -> type:
    """Returns a subclass of a cache whose objects change into that cache when they get their attributes.

    So no constructor of a cache runs, which would copy a tensor as often as a pickle repeats it.
    """
    real: type = getattr(importlib.import_module(_CACHES), name)

    def refuse(self: Any) -> None:
        raise TypeError(f"makes {name} by a call")

    def become(self: Any, state: dict[str, Any]) -> None:
        self.__class__ = real
        vars(self).update({key: getattr(value, "real_class", value) for key, value in state.items()})

    # Layers that have a type would register themselves.
    members = {"__init__": refuse, "__setstate__": become, "real_class": real, "_layer_type": None}
    return type(name, (real,), members)


def is_harmless(context: dict[str, Any]) -> bool:
    """Whether a part of a container's context names no class, or one that is safe to make.

    transformers' exporter writes objects into contexts, {"_t": kind, "p": class, ...}, and makes them by name.
    """
    if "_t" not in context or context.get("p") is None:
        return True
    named = str(context["p"])
    # "map" and "seq" are called with their items, other kinds are made without a call.
    if context["_t"] in {"map", "seq"}:
        return named in _PLAIN_CLASSES
    module, _, name = named.partition(":")
    return module == _CACHES and name in _CACHE_CLASSES
