"""Goes on looking for inputs that break a promise of SECURITY.md.

A target is a module of this package with three functions:

    seeds() -> list[bytes]                          small inputs to start from, good ones among them
    mutate(data: bytes, random: Random) -> bytes    a changed input
    check(data: bytes, folder: Path) -> None        hands one to the code under test; raises on a defect

`check` may write into `folder`, which is emptied afterwards. It lets an `Mxfp8Error` through, or swallows it: both
count as a refusal. Any other exception is a finding, and so are a signal, a hang, and too much memory.

run.py          the command, and what it prints and saves
supervisor.py   starts workers, watches them, and knows which input ended one
worker.py       tries one input after the other; guided.py: those that libFuzzer chooses
trial.py        tries one input
verdicts.py     the verdict on one input
corpus/         a folder per target: inputs that once reached something new, tried first
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"

TARGETS = {
    "onnx_models": 400,
    "recipes": 1500,
    "safetensors_files": 2000,
    "torch_calls": 2000,
    "hf_folders": 30,
    "conversions": 30,
    "sample_files": 500,
    "tune_states": 6,
}
"""The targets, and how many inputs of each the test suite tries: together less than 30 seconds."""


def exists(target: str) -> bool:
    """Whether there is a module for a target."""
    return (Path(__file__).parent / f"{target}.py").is_file()
