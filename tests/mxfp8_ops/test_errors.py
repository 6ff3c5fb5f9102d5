"""The parts of an error, the message they make, and the options that an advice names."""

from pathlib import Path

import pytest

from mxfp8_ops.errors import BackendError, ContractError, Mxfp8Error, Option, ShapeError


def test_the_parts_make_the_message() -> None:
    error = ShapeError(Path("m.onnx"), "a scalar", expected="a matrix", advice="reshape it")
    assert (error.where, error.what, error.expected, error.advice) == ("m.onnx", "a scalar", "a matrix", "reshape it")
    assert str(error) == "m.onnx: a scalar; expected a matrix; reshape it"


FULL, MISSING = OSError(28, "No space left on device"), FileNotFoundError(2, "No such file or directory")
MAPPED = PermissionError(13, "The process cannot access the file", "f.data")
MAPPED.winerror = 1224


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Mxfp8Error("all in one"), "all in one"),
        (Mxfp8Error("node 'a'", "is broken"), "node 'a': is broken"),
        (Mxfp8Error("device 'x'", expected="cpu"), "device 'x'; expected cpu"),
        (Mxfp8Error("here", "it is", advice="mend it"), "here: it is; mend it"),
        (ContractError.unknown("preset", "x", ("a", "b")), "preset: 'x'; expected one of a, b; correct the name"),
        (BackendError.unreadable("f", MISSING, "a readable library"),
         "f: No such file or directory; expected a readable library; check the path"),
        (ContractError.unwritable("f", FULL),
         "f: cannot be written: No space left on device; expected a writable folder with enough space; choose another"),
        (ContractError.unwritable("none/f", MISSING),
         "none/f: folder none does not exist; expected a file in an existing folder; create the folder"),
        (ContractError.unwritable("f", MAPPED),
         "f: cannot be written: The process cannot access the file (f.data); expected files that no program has open "
         "or mapped; close them first"),
    ],
)  # fmt: skip
def test_the_message_of_common_errors_and_of_errors_with_few_parts(error: Mxfp8Error, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize(
    ("option", "python"),
    [
        (Option("output"), "output"),
        (Option("overwrite", True), "overwrite=True"),
        (Option("external_data", "always"), 'external_data="always"'),
        (Option("shapes", {"batch": 2, "ids.1": 16}), 'shapes={"batch": 2, "ids.1": 16}'),
    ],
)
def test_an_option_as_python_has_it(option: Option, python: str) -> None:
    assert str(option) == python


def test_an_advice_names_options_for_whoever_asks() -> None:
    advice = ("pass ", Option("overwrite", True), " or another ", Option("output"))
    error = ContractError("m.onnx", "exists already", expected="a new file", advice=advice)
    assert error.advice == "pass overwrite=True or another output"
    assert str(error) == f"m.onnx: exists already; expected a new file; {error.advice}"
    assert error.message(lambda option: f"--{option.name}") == (
        "m.onnx: exists already; expected a new file; pass --overwrite or another --output"
    )
