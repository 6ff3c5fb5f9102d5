"""Claim: rewriting 2.4 GB takes no longer than ONNX Runtime's 8-bit MatMulNBits quantizer, in a third of the memory.

And an exported program of a billion bfloat16 parameters is rewritten at 0.5 GB/s or more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import numpy as np
from harness import NOISY, publish

TESTS = Path(__file__).parents[1] / "tests"

# Each runs in a process of its own: seconds of the work, without imports, and peak memory with them.
OURS = """
    import mxfp8_graph
    from mxfp8_graph import onnx_pass
    from mxfp8_ops import cpu
    cpu.isa()
    def work():
        mxfp8_graph.rewrite(source, recipe, output=result, external_data="always", overwrite=True)
"""
PROGRAM = """
    import mxfp8_graph
    from mxfp8_ops import cpu
    cpu.isa()
    program = mxfp8_graph.load(source)
    mxfp8_graph.rewrite(program, recipe, dry_run=True)  # imports what a rewrite needs
    def work():
        mxfp8_graph.rewrite(program, recipe)
"""
PROGRAM_FILE = """
    import mxfp8_graph
    from mxfp8_graph import torch_pass
    from mxfp8_ops import cpu
    cpu.isa()
    def work():
        mxfp8_graph.rewrite(source, recipe, output=result, overwrite=True)
"""
THEIRS = """
    import logging
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    logging.disable()
    def work():
        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=8)
        quantizer = MatMulNBitsQuantizer(source, bits=8, block_size=32, is_symmetric=True, algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(result, use_external_data_format=True)
"""
MEASURE = """
    import json, sys, time
    from pathlib import Path
    source, result, recipe = sys.argv[1:]
    CASE
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print("RESULT" + json.dumps({"seconds": seconds, "peak": peak * 1024}))
"""


def write_program(path: Path, layers: int) -> Path:
    """Writes an exported program of bfloat16 linears, 4096 x 4096 each; returns its path."""
    import torch

    import mxfp8_graph

    stack = torch.nn.Sequential(
        *(torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(layers)), torch.nn.ReLU()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(stack, (torch.ones(1, 4096, dtype=torch.bfloat16),))
        return mxfp8_graph.save(program, path)


def run(code: str, source: Path, folder: Path, recipe: str) -> dict[str, float]:
    """Returns the seconds and peak bytes of one run, in a new process; the result is removed."""
    program = textwrap.dedent(MEASURE).replace("CASE", textwrap.dedent(code))
    result = folder / f"result{source.suffix}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(source), str(result), recipe]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    size = sum(path.stat().st_size for path in folder.glob("result.*"))
    for path in folder.glob("result.*"):
        path.unlink()
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return {**json.loads(line.removeprefix("RESULT")), "size": size}


def main() -> None:
    """Runs each tool in a process of its own, on the same models, and writes results/rewrite_speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36, help="layers of the ONNX model, 67 MB each")
    parser.add_argument("--program-layers", type=int, default=60, help="layers of the exported program, 34 MB each")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from models import write_large

    theirs = "ONNX Runtime MatMulNBits, 8 bits, blocks of 32"
    cases = {
        "mxfp8-graph, mxfp8": (OURS, "mxfp8"),
        "mxfp8-graph, mxfp8-weight-only": (OURS, "mxfp8-weight-only"),
        theirs: (THEIRS, ""),
        "mxfp8-graph, exported program in memory": (PROGRAM, "mxfp8"),
        "mxfp8-graph, exported program, file to file": (PROGRAM_FILE, "mxfp8"),
    }
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        source = write_large(Path(folder) / "source.onnx", layers=arguments.layers)
        total = sum(path.stat().st_size for path in Path(folder).glob("source.onnx*"))
        program = write_program(Path(folder) / "program.pt2", arguments.program_layers)
        program_size = program.stat().st_size
        totals = {name: program_size if "program" in name else total for name in cases}
        for _ in range(arguments.rounds + 1):  # the first round warms the page cache
            for name, (code, recipe) in cases.items():
                model = program if "program" in name else source
                samples[name].append(run(code, model, Path(folder), recipe))
    median = {
        name: {key: float(np.median([sample[key] for sample in runs[1:]])) for key in runs[0]}
        for name, runs in samples.items()
    }
    base = median[theirs]
    rows = [
        [
            name,
            f"{m['seconds']:.2f}",
            f"{totals[name] / m['seconds'] / 1e9:.1f}",
            "" if "program" in name else f"{base['seconds'] / m['seconds']:.1f}x",
            f"{m['peak'] / 1e6:.0f}",
            "" if "program" in name else f"{m['peak'] / base['peak']:.2f}",
            f"{m['size'] / 1e6:.0f}" if m["size"] else "",
        ]
        for name, m in median.items()
    ]
    notes = [
        f"Source: {arguments.layers} MatMuls of 4096x4096, {total / 1e9:.2f} GB of external float32, page cache warm.",
        f"Median of {arguments.rounds} interleaved rounds, each run in a process of its own. Seconds are without "
        "imports; the peak resident size (VmHWM) is of the whole process.",
        "MatMulNBits quantizes weights only, to 8-bit integers with one float scale per 32.",
        f"Exported program: {arguments.program_layers} bfloat16 linears of 4096x4096, "
        f"{program_size / 1e9:.2f} GB; in memory, its weights are there before the clock starts; they and torch are in "
        "the peak.",
    ]
    for name, runs in samples.items():
        seconds = [sample["seconds"] for sample in runs[1:]]
        if np.ptp(seconds) > NOISY * np.median(seconds):
            notes.append(f"Noisy: {name} took {min(seconds):.2f} to {max(seconds):.2f} s.")
    columns = ["quantizer", "seconds", "GB/s", "faster", "peak MB", "of their peak", "result MB"]
    publish(
        "rewrite_speed", "Time and memory to quantize a 2.4 GB model, and a program of 2 GB", columns, rows, notes=notes
    )


if __name__ == "__main__":
    main()
