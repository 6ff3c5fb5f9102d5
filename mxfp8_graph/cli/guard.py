"""The app that commands are registered with, and its errors: one message and an exit code.

Exit codes: 0 done; 1 verification failed, or a budget not met; 2 usage or bad input; 3 nothing eligible; 70 a defect of
ours; 130 and 143 interrupted and terminated. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec

import typer
import typer.core

from mxfp8_graph import provenance
from mxfp8_graph._version import __version__
from mxfp8_graph.naming import printable
from mxfp8_graph.terminal import say, show
from mxfp8_ops.errors import Mxfp8Error, Option

FAILED: Final = 1
BAD_INPUT: Final = 2
NOTHING_ELIGIBLE: Final = 3
DEFECT: Final = 70
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


_UsageError: Final[Any] = typer.BadParameter.__base__
"""click's UsageError; newer versions of typer have their own copy of it."""


class _Commands(typer.core.TyperGroup):
    """The group of the commands. Escapes control characters in errors about arguments, which may be file names."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **settings: Any) -> Any:
        self._arguments = tuple(args)  # parsing empties the list
        with _printable_usage():
            return super().make_context(info_name, args, *rest, **settings)

    def invoke(self, ctx: Any) -> Any:
        command = provenance.COMMAND.set(self._arguments)
        try:
            with _printable_usage():
                return super().invoke(ctx)
        finally:
            provenance.COMMAND.reset(command)


@contextlib.contextmanager
def _printable_usage() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        error.message = printable(error.message)
        raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_P = ParamSpec("_P")
_debug: ContextVar[bool] = ContextVar("debug", default=False)


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that open files and folders are cleaned up."""


def command(function: Callable[_P, None]) -> Callable[_P, None]:
    """Registers a command; what it raises becomes one message on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (typer.Exit, typer.BadParameter):
            raise
        except Mxfp8Error as error:
            raise typer.Exit(refuse(error)) from None
        except KeyboardInterrupt as error:
            # 128 + the signal, as shells report a process that a signal ended.
            code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
            say("terminated" if code == TERMINATED else "interrupted")
            raise typer.Exit(code) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of stdout is gone, so no message can reach it
                raise
            say(f"error: {error.filename or 'system'}: {error.strerror or error}")
            raise typer.Exit(BAD_INPUT) from None
        except Exception as error:
            # A missing package is the installation's fault; a missing module of ours is a defect.
            if isinstance(error, ImportError) and not (error.name or "").startswith("mxfp8_"):
                say(f"error: {error}; expected the packages that mxfp8-graph needs; reinstall it with pip")
                raise typer.Exit(BAD_INPUT) from None
            if _debug.get():
                say(traceback.format_exc())
            # Paths among the arguments are the files that the report of a defect should identify.
            _admit(error, [value for value in (*args, *kwargs.values()) if isinstance(value, Path)])
            raise typer.Exit(DEFECT) from None

    return app.command(name=function.__name__.replace("_", "-"))(guarded)


def refuse(error: Mxfp8Error) -> int:
    """Prints the message of an error, and returns the exit code."""
    from mxfp8_graph.policy.plan import NothingEligibleError

    message = error.message(_flag)
    say(
        f"error: {printable(message) if error.what else message}"
    )  # without `what` it is a list of one finding per line
    if _debug.get():
        say(traceback.format_exc())
    # The reasons of all sites go to stderr too: stdout is for results.
    if not isinstance(error, NothingEligibleError):
        return BAD_INPUT
    if error.decisions:
        from mxfp8_graph.report.data import reasons

        show(reasons(error.decisions), fold=False, stderr=True)
    return NOTHING_ELIGIBLE


def _admit(error: Exception, files: Sequence[Path]) -> None:
    say(
        f"internal error: {type(error).__name__}: {error}\nThis is a defect of mxfp8-graph, not of your model. "
        "Please report it, with the output of `mxfp8-graph --debug ...` and `mxfp8-graph doctor`."
    )
    for label, value in provenance.facts(files):
        say(printable(f"{label}: {value}"))


def _flag(option: Option) -> str:
    """Returns an option of the Python API as a command-line option: --overwrite, --output FILE, --dim NAME=SIZE."""
    flag = "--dim" if option.name == "shapes" else f"--{option.name.replace('_', '-')}"
    if isinstance(option.value, Mapping):
        return " ".join(f"{flag} {name}={size}" for name, size in option.value.items())
    return flag if option.value in {None, True} else f"{flag} {option.value}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mxfp8-graph {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    """Rewrites exported models to MXFP8 or MXINT8, checks them, and runs them."""
    _debug.set(debug)
