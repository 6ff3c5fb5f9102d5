"""The command line: arguments, progress, exit codes. What it does is in the modules it calls.

Exit codes: 0 done; 1 verification failed; 2 usage or bad input; 3 nothing eligible; 70 a defect of ours; 130 and 143
interrupted and terminated. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, ParamSpec

import typer
import typer.core

from mxfp8_graph._version import __version__
from mxfp8_graph.naming import printable
from mxfp8_graph.policy import presets
from mxfp8_graph.terminal import progress_bar, say, show
from mxfp8_ops.errors import Mxfp8Error, Option

FAILED: Final = 1
BAD_INPUT: Final = 2
NOTHING_ELIGIBLE: Final = 3
DEFECT: Final = 70
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


_UsageError: Final[Any] = typer.BadParameter.__base__
"""Of click, which newer versions of typer bring as their own."""


class _Commands(typer.core.TyperGroup):
    """The commands; what is wrong with their arguments, file names among them, is told in printable text."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage():
            return super().invoke(ctx)


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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_P = ParamSpec("_P")
_debug: ContextVar[bool] = ContextVar("debug", default=False)


class ExternalData(str, enum.Enum):
    """Where packed weights go."""

    auto = "auto"
    always = "always"
    never = "never"


ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An ONNX model or a .pt2 program.", show_default=False)
]
InputsPath = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="DATA.npz", help="One array per input, by name. Synthesised if not given."),
]
SamplesPath = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="DATA",
        help="An .npz file; a folder of .npz or .npy files or a .jsonl file, a sample each or a line; or "
        "module:function, your code, which is run and yields mappings. Synthesised if not given.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", metavar="NAME=SIZE", help="Size of a free dimension of synthesised inputs: batch=4, input_ids.1=128."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of synthesised inputs.")]


TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle", help="Let a .pt2 MODEL run code that it brings. Only for files of people you trust."
    ),
]


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that whatever is open cleans up."""


def main() -> None:
    """Runs the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding lacks
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="mxfp8-graph")


def _terminate(signum: int, frame: object) -> NoReturn:
    raise Terminated


def command(function: Callable[_P, None]) -> Callable[_P, None]:
    """Registers a command; what it raises becomes one message on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (typer.Exit, typer.BadParameter):
            raise
        except Mxfp8Error as error:
            raise typer.Exit(_refuse(error)) from None
        except KeyboardInterrupt as error:
            code = TERMINATED if isinstance(error, Terminated) else INTERRUPTED
            say("terminated" if code == TERMINATED else "interrupted")
            raise typer.Exit(code) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our stdout has gone, and nobody is left to be told
                raise
            say(f"error: {error.filename or 'system'}: {error.strerror or error}")
            raise typer.Exit(BAD_INPUT) from None
        except Exception as error:
            if isinstance(error, ImportError) and not (error.name or "").startswith("mxfp8_"):
                say(f"error: {error}; expected the packages that mxfp8-graph needs; reinstall it with pip")
                raise typer.Exit(BAD_INPUT) from None
            if _debug.get():
                say(traceback.format_exc())
            _admit(error, [value for value in (*args, *kwargs.values()) if isinstance(value, Path)])
            raise typer.Exit(DEFECT) from None

    return app.command(name=function.__name__.replace("_", "-"))(guarded)


def _refuse(error: Mxfp8Error) -> int:
    from mxfp8_graph.policy.plan import NothingEligibleError

    message = error.message(_flag)
    say(f"error: {printable(message) if error.what else message}")  # without `what` it is a list, one finding a line
    if _debug.get():
        say(traceback.format_exc())
    if not isinstance(error, NothingEligibleError):
        return BAD_INPUT
    if error.decisions:
        from mxfp8_graph.report import text

        show(text.reasons(error.decisions), fold=False, stderr=True)
    return NOTHING_ELIGIBLE


def _admit(error: Exception, files: Sequence[Path]) -> None:
    from mxfp8_graph import reproduction

    say(
        f"internal error: {type(error).__name__}: {error}\nThis is a defect of mxfp8-graph, not of your model. "
        "Please report it, with the output of `mxfp8-graph --debug ...` and `mxfp8-graph doctor`."
    )
    for line in reproduction.lines(sys.argv[1:], files):
        say(printable(line))


def _flag(option: Option) -> str:
    """Returns an option of a Python call as this command line has it: --overwrite, --output FILE, --dim NAME=SIZE."""
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
    """Rewrites exported models to MXFP8, checks them, and runs them."""
    _debug.set(debug)


@command
def rewrite(
    model: ModelPath,
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Default: MODEL.mxfp8.onnx, or .pt2.", show_default=False)
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", help=f"{presets.choices()}.")] = presets.DEFAULT,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="REGEX",
            help="Keep matmuls whose name or module path matches; beside the recipe's own. Repeatable.",
        ),
    ] = None,
    no_fuse: Annotated[
        bool,
        typer.Option("--no-fuse", help="ONNX: leave activations, normalizations and attention beside matmuls alone."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done to each matmul; stop.")] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write the report, .json or .html.")
    ] = None,
    external_data: Annotated[
        ExternalData, typer.Option("--external-data", help="Weights in OUTPUT.data; auto: as the model has them.")
    ] = ExternalData.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Pack weights that hold NaN or Inf instead of refusing them.")
    ] = False,
    training: Annotated[
        bool,
        typer.Option("--training", help=".pt2: keep weights as parameters to train; of a packed one, train the rest."),
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every site and tensor.")] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Rewrites the matmuls of MODEL to MXFP8."""
    from mxfp8_graph import rewriting
    from mxfp8_graph.policy.recipe import load_recipe
    from mxfp8_graph.report import text
    from mxfp8_graph.report.data import check_report_path

    if report is not None:
        check_report_path(report, models=[model, *([output] if output else [])])
    chosen = load_recipe(recipe).excluding(exclude or ())
    chosen = chosen.without_fusion() if no_fuse else chosen
    with progress_bar() as progress:
        _, done = rewriting.rewrite(
            model,
            chosen,
            output=output,
            external_data=external_data.value,
            overwrite=overwrite,
            dry_run=dry_run,
            allow_nonfinite=allow_nonfinite,
            training=training,
            trust_pickle=trust_pickle,
            progress=progress,
        )
    if (dry_run or verbose) and done.sites:
        show(text.plan(done, weights=verbose), fold=False)
        show("")
    if verbose and done.account.tensors:
        show(text.tensors(done), fold=False)
        show("")
    show(text.closing(done))
    if report is not None:
        done.write(report)


@command
def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model.", show_default=False)],
    rewritten: Annotated[
        Path, typer.Argument(metavar="REWRITTEN", help="What rewrite made of it.", show_default=False)
    ],
    *,
    inputs: SamplesPath = None,
    max_rel_l2: Annotated[
        float | None,
        typer.Option(
            "--max-rel-l2", metavar="X", min=0, help="Limit of each output's relative L2 error. Default: none."
        ),
    ] = None,
    dim: Dims = None,
    seed: Seed = 0,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report, .json.")] = None,
    trust_pickle: TrustPickle = False,
) -> None:
    """Compares a rewritten model with its original.

    Prints the error of each output, and how far our kernels are from the function bodies in the file. Exit code 1 if a
    NaN or Inf is in only one of them, if a kernel disagrees with its function body, or if an error is above
    --max-rel-l2.
    """
    from mxfp8_graph.checking import text
    from mxfp8_graph.checking.verify import verify as run_verify
    from mxfp8_graph.report.data import check_report_path

    if report is not None:
        check_report_path(report, (".json",), models=[original, rewritten])
    found = run_verify(
        original,
        rewritten,
        inputs=inputs,
        shapes=_shapes(dim),
        seed=seed,
        max_rel_l2=max_rel_l2,
        trust_pickle=trust_pickle,
    )
    show(text.verification(found))
    if report is not None:
        found.write(report)
    if not found.passed:
        raise typer.Exit(FAILED)


@command
def run(
    model: ModelPath,
    *,
    inputs: InputsPath = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs that are timed.", min=1)] = 10,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also say which kernel each node ran, and how long.")
    ] = False,
    dim: Dims = None,
    seed: Seed = 0,
    trust_pickle: TrustPickle = False,
) -> None:
    """Runs a model with our kernels and times it."""
    from mxfp8_graph.checking import text
    from mxfp8_graph.checking.runner import run_model

    found = run_model(
        model,
        inputs=inputs,
        shapes=_shapes(dim),
        seed=seed,
        repeat=repeat,
        profile=profile,
        trust_pickle=trust_pickle,
    )
    show(text.run(found))


@command
def compare(
    model: ModelPath,
    *,
    recipes: Annotated[
        str | None,
        typer.Option(
            "--recipes",
            metavar="A,B,...",
            help="Presets, recipe files and formats of others, by commas. Default: all but files; a wrong name lists "
            "them.",
            show_default=False,
        ),
    ] = None,
    inputs: SamplesPath = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="relative_l2, sqnr, cosine, max_error, top1, kl, or module:function, your code. Repeatable. "
            "Default: relative_l2 and cosine.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Runs that are timed.", min=1)] = 7,
    dim: Dims = None,
    seed: Seed = 0,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", "--html", metavar="FILE", help="Write the comparison, .json or .html. Repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Says what each recipe does to MODEL: errors at its outputs, size and latency.

    Recipes of ours are rewritten and run; formats of others are emulated, and marked so. Needs room for the rewritten
    models in the temporary folder; TMPDIR says where that is.
    """
    from mxfp8_graph.evidence import comparison_text
    from mxfp8_graph.evidence.compare import METRICS
    from mxfp8_graph.evidence.compare import compare as run_comparison
    from mxfp8_graph.report.data import check_report_path

    for file in report or ():
        check_report_path(file, models=[model])
    with progress_bar(steps=True) as progress:
        found = run_comparison(
            model,
            [name.strip() for name in recipes.split(",")] if recipes else (),
            inputs=inputs,
            metrics=metric or METRICS,
            shapes=_shapes(dim),
            seed=seed,
            repeat=repeat,
            trust_pickle=trust_pickle,
            progress=progress,
        )
    if json:
        typer.echo(found.to_json(), nl=False)
    else:
        show(comparison_text.comparison(found), fold=False)
    for file in report or ():
        found.write(file)


@command
def analyze(
    model: ModelPath,
    *,
    recipe: Annotated[
        str, typer.Option("--recipe", help=f"Whose matmuls are analyzed: {presets.choices()}.")
    ] = presets.DEFAULT,
    inputs: SamplesPath = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="What sites are ranked by: relative_l2, sqnr, cosine, max_error, top1, kl, or module:function.",
        ),
    ] = "relative_l2",
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep", metavar="N", min=0, help="Exclude the N worst. Default: the fewest that do half of the damage."
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option("--report", "--html", metavar="FILE", help="Write the analysis, .json or .html. Repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the analysis as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print every site and layer.")] = False,
    dim: Dims = None,
    seed: Seed = 0,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Analyze weights that hold NaN or Inf instead of refusing them.")
    ] = False,
    trust_pickle: TrustPickle = False,
) -> None:
    """Says which matmul hurts: the error at the outputs with each alone in MXFP8, and with all but it.

    Prints the matmuls, the worst first, and an exclude list to paste into a recipe. Takes two runs of the model per
    matmul and sample. Needs room for a copy of an ONNX MODEL in the temporary folder; TMPDIR says where that is.
    """
    from mxfp8_graph.evidence import analysis_text
    from mxfp8_graph.evidence.analyze import analyze as run_analysis
    from mxfp8_graph.report.data import check_report_path

    for file in report or ():
        check_report_path(file, models=[model])
    with progress_bar(steps=True) as progress:
        found = run_analysis(
            model,
            recipe,
            inputs=inputs,
            shapes=_shapes(dim),
            seed=seed,
            metric=metric,
            keep=keep,
            allow_nonfinite=allow_nonfinite,
            trust_pickle=trust_pickle,
            progress=progress,
        )
    if json:
        typer.echo(found.to_json(), nl=False)
    else:
        show(analysis_text.analysis(found, every=verbose), fold=False)
    for file in report or ():
        found.write(file)


@command
def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model in MXFP8.", show_default=False)],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="DIALECT",
            help="mxfp8 (ours), qdq (standard Q/DQ), trt (TensorRT), ort-cuda (ONNX Runtime's CUDA op) or standard "
            "(standard ops alone).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Default: MODEL.DIALECT.onnx.", show_default=False)
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="LOSS",
            help="What may be lost: activations (are quantized), rounding (of their scales), half (float32 around "
            "products). Repeatable.",
        ),
    ] = None,
    external_data: Annotated[
        ExternalData, typer.Option("--external-data", help="Weights in OUTPUT.data; auto: as the model has them.")
    ] = ExternalData.auto,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")] = False,
) -> None:
    """Writes an MXFP8 model of any dialect in another one; elements and scales stay the same bytes.

    Reads ours, TensorRT's (modelopt, TransformerEngine), standard Q/DQ, ONNX Runtime's CUDA op and Quark's, and says
    what it found and what the other dialect cannot say.
    """
    from mxfp8_graph.dialects import convert as run_conversion
    from mxfp8_graph.report import text

    _, done = run_conversion(
        model, to, output=output, allow=allow or (), external_data=external_data.value, overwrite=overwrite
    )
    show(text.lines(done.facts()))


@command
def doctor(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="An ONNX model to look at too.", show_default=False)
    ] = None,
) -> None:
    """Says what works here and what is missing; of MODEL, what it is and what tools have done to it.

    Exit code 2 if models cannot run.
    """
    from mxfp8_graph.doctor import diagnose, healthy, table
    from mxfp8_graph.file_diagnosis import diagnose_file

    checks = [*diagnose(), *([diagnose_file(model)] if model else [])]
    show(table(checks))
    if not healthy(checks):
        say("error: the CPU path does not work here; expected no failed check; follow the advice above")
        raise typer.Exit(BAD_INPUT)


@command
def library_path() -> None:
    """Prints where the native library is.

    For RegisterCustomOpsLibrary in C, C++, C# or Rust.
    """
    from mxfp8_ops import cpu

    typer.echo(cpu.library_path())


def _shapes(dims: list[str] | None) -> dict[str, int]:
    shapes = {}
    for dim in dims or ():
        name, _, size = dim.rpartition("=")
        if not name or not size.isdecimal():
            raise typer.BadParameter(f"{dim!r}; expected NAME=SIZE, as in batch=4", param_hint="--dim")
        shapes[name] = int(size)
    return shapes
