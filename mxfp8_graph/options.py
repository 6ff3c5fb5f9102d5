"""The options of the functions that write models, each documented at its field: `documented` puts that in `help`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypedDict, TypeVar, get_args, get_type_hints

from mxfp8_graph.files import data_path_of, is_any_of
from mxfp8_ops.errors import ContractError, Option

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# At run time too: `typing.get_type_hints` of the functions that have options needs it.
if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack  # noqa: PLC0414 - used elsewhere
else:
    from typing_extensions import Unpack as Unpack  # noqa: PLC0414 - used elsewhere

_Class = TypeVar("_Class", bound=type)

Progress = Callable[[str, int, int], None]
"""Called as progress(site_name, bytes_done, bytes_total) while weights are packed."""


def documented(options: _Class) -> _Class:
    """Returns a TypedDict of `Annotated[type, "text"]` whose docstring lists every option with its text and default.

    The default follows from the type: None where that may be, the first of several texts, else False or 0.
    """
    lines = []
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, text = get_args(hint)
        choices = get_args(kind)
        default = None if NoneType in choices else choices[0] if choices else kind()
        lines.append(f"    {name}: {text} Default: {default!r}.")
    options.__doc__ = "\n".join([f"{options.__doc__}\n", *lines])
    return options


Bodies = Annotated[
    Literal["folded", "small", "none"],
    'how an ONNX file computes its nodes where our library is not registered: "folded" decodes weights to float32 when '
    'a session opens, "small" keeps them in 8 bits and decodes them at every run, "none" cannot run there.',
]


@documented
class WriteOptions(TypedDict, total=False):
    """The options of every function that writes a model."""

    external_data: Annotated[
        Literal["auto", "always", "never"],
        'whether tensors go to OUTPUT.data: "always", "never", or "auto": as the source has them, and near 2 GB.',
    ]
    overwrite: Annotated[bool, "whether an existing output may be replaced. The input never is."]


@documented
class ExportOptions(WriteOptions, total=False):
    """The options of a function that reads a model, perhaps a .pt2 file, and writes one."""

    bodies: Bodies


@documented
class PackOptions(WriteOptions, total=False):
    """The options of a function that packs weights."""

    allow_nonfinite: Annotated[bool, "take weights that hold NaN or Inf (their blocks become NaN); else refuse them."]
    progress: Annotated[Progress | None, "called as progress(site_name, bytes_done, bytes_total) after each weight."]


@documented
class RewriteOptions(ExportOptions, PackOptions, total=False):
    """The options of `rewrite` for any model."""

    dry_run: Annotated[
        bool,
        "plan, report, check that the output could be written (it may exist), write nothing; the first result is None.",
    ]


def check_options(function: str, options: Mapping[str, Any], known: type) -> None:
    """Raises Python's TypeError for an option that `known`, a TypedDict, does not have."""
    # The call would fail without this too, but in an inner function, and perhaps after minutes.
    for name in options.keys() - known.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class StoredWeight(Protocol):
    """A packed weight of a checkpoint, which is read on each access."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements, [..., N, K]."""

    @property
    def element_format(self) -> str:
        """Either "e4m3" or "e5m2"."""

    @property
    def elements(self) -> npt.NDArray[np.uint8]:
        """uint8 codes [..., N, K]."""

    @property
    def scales(self) -> npt.NDArray[np.uint8]:
        """uint8 E8M0 codes [..., N, ceil(K / 32)]."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """Packed weights of a checkpoint, whose bytes replace the model's own weights."""

    where: str
    """Name of the checkpoint in messages."""
    weights: Mapping[str, StoredWeight]
    """Weights by their name in the checkpoint."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a weight, node or module in the model -> name of its weight in the checkpoint, where they differ."""
    instead: bool = False
    """Whether the model has no values of its own, so that every weight must be used."""
    others: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are not in MXFP8; the model keeps its own values for them."""
    files: frozenset[Path] = frozenset()
    """Files of the weights and of their names."""

    def keep(self, output: Path) -> None:
        """Raises ContractError if a result would replace one of the files, itself or by its external data."""
        for path in (output, data_path_of(output)):
            if is_any_of(path, self.files):
                another = ("pass another ", Option("output"))
                raise ContractError(path, "is a file of the checkpoint", expected="another file", advice=another)


@dataclass(frozen=True, kw_only=True)
class Options:
    """`RewriteOptions` with their defaults, and what `rewrite` makes of its other arguments."""

    name: str
    """Name of the model in messages and in the report: its path, "model" or "program"."""
    output: Path | None = None
    """File to write; None keeps the result in memory."""
    copy_to: Path | None = None
    """File to copy a model to that is rewritten already; None does not copy it."""
    external_data: Literal["auto", "always", "never"] = "auto"
    overwrite: bool = False
    dry_run: bool = False
    allow_nonfinite: bool = False
    training: bool = False
    bodies: str = "folded"
    weights: CheckpointWeights | None = None
    progress: Progress | None = None
