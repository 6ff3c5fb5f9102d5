"""`python -m mxfp8_ops.conformance`: checks Python functions, and the answers of programs in other languages."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxfp8_ops.conformance import check_dequantizer, check_gemm, check_quantizer, folder
from mxfp8_ops.conformance.result import Result
from mxfp8_ops.errors import BackendError, ContractError, Mxfp8Error
from mxfp8_ops.formats import ELEMENT_FORMATS, SCALE_ROUNDINGS


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if everything passed, 1 if not, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        result = options.run(options)
    except Mxfp8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result is None:
        return 0
    print(result)
    return 0 if result.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mxfp8_ops.conformance", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for kind, run in (("quantizer", _quantizer), ("dequantizer", _dequantizer), ("gemm", _gemm)):
        command = commands.add_parser(kind, help=f"check a Python {kind}")
        command.add_argument("function", metavar="MODULE:FUNCTION", help=f"called as mxfp8_ops.numpy_nodes's {kind}")
        command.add_argument("--formats", nargs="+", choices=ELEMENT_FORMATS, default=list(ELEMENT_FORMATS))
        command.set_defaults(run=run)
        if kind == "quantizer":
            command.add_argument("--roundings", nargs="+", choices=SCALE_ROUNDINGS, default=list(SCALE_ROUNDINGS))
            command.add_argument("--rows-only", action="store_true", help="leave out blocks along the first axis")
            command.add_argument("--whole-blocks", action="store_true", help="pad with zeros to multiples of 32")
    for name, description, call in (
        ("export", "write the inputs as raw files to a new FOLDER, for a program in any language", _export),
        ("check", "judge the answers that such a program has written to FOLDER", _check),
    ):
        command = commands.add_parser(name, help=description)
        command.add_argument("folder", metavar="FOLDER", type=Path)
        command.set_defaults(run=call)
    return parser


def _quantizer(options: argparse.Namespace) -> Result:
    return check_quantizer(
        _function(options.function),
        element_formats=options.formats,
        scale_roundings=options.roundings,
        axes=(-1,) if options.rows_only else (-1, 0),
        partial_blocks=not options.whole_blocks,
    )


def _dequantizer(options: argparse.Namespace) -> Result:
    return check_dequantizer(_function(options.function), element_formats=options.formats)


def _gemm(options: argparse.Namespace) -> Result:
    return check_gemm(_function(options.function), formats=options.formats)


def _export(options: argparse.Namespace) -> None:
    folder.export(options.folder)


def _check(options: argparse.Namespace) -> Result:
    return folder.check(options.folder)


def _function(name: str) -> Callable[..., Any]:
    """Returns the function that MODULE:FUNCTION names."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ContractError(
            name, "not MODULE:FUNCTION", expected="a name such as mxfp8_ops.numpy_nodes:quantize", advice="correct it"
        )
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # foreign code may raise anything while it is imported
        raise BackendError(
            module, f"cannot be imported: {type(error).__name__}: {error}", advice="correct it"
        ) from None
    if not callable(function):
        raise ContractError(name, "no such function", expected=f"a function of {module}", advice="correct the name")
    return function  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
