"""The app with all commands; prints and writes their results; turns their errors into messages and exit codes.

Exit codes: 0 success; 1 verification failed, or a budget not met; 2 usage or bad input; 3 nothing eligible; 70 a defect
of ours; 128 + n stopped by signal n. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import typer.core
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from mxfp8_graph._version import __version__
from mxfp8_graph.naming import first_line, printable
from mxfp8_graph.options import Progress as ProgressCallback
from mxfp8_graph.report import origin
from mxfp8_ops.errors import Mxfp8Error, Option

if TYPE_CHECKING:
    from mxfp8_graph.report.base import Report

FAILED: Final = 1
BAD_INPUT: Final = 2
NOTHING_ELIGIBLE: Final = 3
DEFECT: Final = 70

_UsageError: Final[Any] = typer.BadParameter.__base__
"""click's UsageError; newer versions of typer have their own copy of it."""

_NO_MEMORY: Final = re.compile("(can't|[Cc]annot) allocate memory|failed to map segment|[Ff]ailed to allocate memory")
"""What allocators and loaders say without memory."""

_debug: ContextVar[bool] = ContextVar("debug", default=False)


class _Commands(typer.core.TyperGroup):
    """The group of all commands. An exception in a command becomes a message on stderr and an exit code."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **settings: Any) -> Any:
        self._arguments = tuple(args)  # parsing empties the list
        return super().make_context(info_name, args, *rest, **settings)

    def invoke(self, ctx: Any) -> Any:
        command = origin.COMMAND.set(self._arguments)
        try:
            return super().invoke(ctx)
        except (typer.Exit, BrokenPipeError):  # when the reader of stdout is gone, no message can reach it
            raise
        except _UsageError as error:
            # Where pydantic checks a choice, its messages begin with these words, and typer passes them on.
            error.message = printable(error.message).replace("Value error, ", "")
            raise
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(refuse(error)) from None
        finally:
            origin.COMMAND.reset(command)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def say(message: str) -> None:
    """Prints a message on stderr."""
    # Line by line, since `printable` escapes line ends: names in messages may have some.
    typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


def show(result: RenderableType, *, stderr: bool = False) -> None:
    """Prints a result on stdout: tables as wide as the terminal, and no wider than `section.WIDTH` elsewhere."""
    from mxfp8_graph.report.section import plain_text

    out = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if out.is_terminal:
        out.print(result, crop=False)
    else:
        typer.echo(plain_text(result), err=stderr)


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressCallback | None]:
    """Yields a callback for progress, which updates a bar on stderr, or None if stderr is no terminal.

    A new total restarts the count.
    """
    err = Console(stderr=True)
    # No bar in logs: it would be thousands of lines.
    if not err.is_terminal:
        yield None
        return
    fits = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    name = TextColumn("{task.description}", markup=False, table_column=fits)
    columns = (name, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, expand=True) as bar:
        task = bar.add_task("planning", total=None)

        def advance(name: str, done: int, total: int) -> None:
            if bar.tasks[0].total not in {None, total}:
                bar.reset(task)  # the time that earlier steps took does not predict the time of this one
            bar.update(task, description=printable(name), completed=done, total=total)

        yield advance


def check_reports(reports: Sequence[Path] | None, models: Iterable[Path | None], *, overwrite: bool) -> None:
    """Raises Mxfp8Error if a report cannot be written. Commands call it before the work, which may take minutes."""
    from mxfp8_graph.report.base import check_report_path

    for report in reports or ():
        check_report_path(report, filter(None, models), overwrite=overwrite)


def print_result(
    result: Report, *, json: bool, reports: Sequence[Path] | None, overwrite: bool, every: bool = False
) -> None:
    """Prints a result, as JSON or as text, and writes the reports; see `Report.to_text`."""
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        show(result.to_text(every=every))
    # A path that appears twice is written once: a second write would fail without --overwrite.
    for report in dict.fromkeys(reports or ()):
        result.write(report, overwrite=overwrite)


def refuse(error: BaseException) -> int:
    """Prints the message of an error, and returns the exit code."""
    code, message = _message(error)
    say(message)
    if _debug.get():
        say(traceback.format_exc())
    # The reasons of all sites go to stderr too: stdout is for results.
    if code == NOTHING_ELIGIBLE and (decisions := getattr(error, "decisions", ())):
        from mxfp8_graph.report import data, section

        show(section.table(*data.site_table([data.SiteReport(decision=each) for each in decisions])), stderr=True)
    return code


def _message(error: BaseException) -> tuple[int, str]:
    """Returns (the exit code of an error, its message)."""
    if not isinstance(error, Mxfp8Error) and _is_out_of_memory(error):
        advice = "free memory, use a machine with more, or raise the limit (ulimit -v)"
        return BAD_INPUT, f"error: mxfp8-graph: out of memory; expected enough for the model; {advice}"
    if isinstance(error, Mxfp8Error):
        from mxfp8_graph.policy.plan import NothingEligibleError

        message = error.message(_flag)
        # Without `what` the message has one finding per line, and its line ends stay.
        shown = printable(message) if error.what else message
        return NOTHING_ELIGIBLE if isinstance(error, NothingEligibleError) else BAD_INPUT, f"error: {shown}"
    if isinstance(error, KeyboardInterrupt):
        signum = error.args[0] if error.args else signal.SIGINT
        # 128 + the signal, as shells report a process that a signal ended.
        return 128 + signum, "terminated" if signum == signal.SIGTERM else "interrupted"
    if isinstance(error, OSError):
        return BAD_INPUT, f"error: {error.filename or 'system'}: {error.strerror or error}"
    # A missing package is an error of the installation; a missing module of ours is a defect.
    if isinstance(error, ImportError) and not (error.name or "").startswith("mxfp8_"):
        return BAD_INPUT, f"error: {error}; expected the packages that mxfp8-graph needs; reinstall it with pip"
    return DEFECT, (
        f"internal error: {type(error).__name__}: {first_line(error)}; a defect of mxfp8-graph {__version__}, not of "
        "your model; please report it, with the output of `mxfp8-graph --debug ...` and `mxfp8-graph doctor`"
    )


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether memory ran out; another error may have this as its cause."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        # torch raises RuntimeError, and the loader of libraries ImportError.
        if isinstance(error, (RuntimeError, ImportError)) and _NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _flag(option: Option) -> str:
    """Returns an option of the Python API as a command-line option: --overwrite, --output FILE, --dim NAME=SIZE."""
    # The command line has --dim for each size of `shapes`.
    flag = "--dim" if option.name == "shapes" else f"--{option.name.replace('_', '-')}"
    if isinstance(option.value, Mapping):
        return " ".join(f"{flag} {name}={size}" for name, size in option.value.items())
    return flag if option.value is None or option.value is True else f"{flag} {option.value}"


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
