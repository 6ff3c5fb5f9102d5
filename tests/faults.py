"""Kills rewrites at random moments: is a file ever lost, or a model left beside another's data?

    python tests/faults.py [--kills 300] [--seed 0]

Prints how often which output was found after a kill, and exits with 1 if one of them was wrong. Workers are forked from
one process that has imported everything, so that most kills hit the rewrite.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import builders

import mxfp8_graph


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def state(folder: Path, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """Returns which output is in a folder: "absent", "old", "new" or "wrong"."""
    left = contents(folder)
    if any(path.is_dir() and not path.name.startswith(".mxfp8-graph-") for path in folder.iterdir()):
        return "wrong"
    if "o.onnx" not in left and left.keys() <= old.keys() | new.keys():
        return "absent"
    return "new" if left == new else "old" if left == old else "wrong"


def main() -> None:
    """Kills writers of a model in one file and with external data, over nothing and over an older pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, counts = random.Random(options.seed), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name, "out")
        builders.save(builders.chain_model((1024, 2048, 1024)), folder / "m.onnx", external=True)
        source = contents(folder)
        results = []
        for recipe, external in (("mxfp8-weight-only", "always"), ("mxfp8", "always"), ("mxfp8", "never")):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            begin = time.perf_counter()
            mxfp8_graph.rewrite(folder / "m.onnx", recipe, output=out / "o.onnx", external_data=external)
            results.append((contents(out), time.perf_counter() - begin))
        for turn in range(options.kills):
            old, (new, seconds) = results[0][0] if turn % 2 else {}, results[1 + turn // 2 % 2]
            shutil.rmtree(out)
            out.mkdir()
            for file, content in old.items():
                (out / file).write_bytes(content)
            if (pid := os.fork()) == 0:
                how = {"external_data": "always" if len(new) > 1 else "never", "overwrite": bool(old)}
                mxfp8_graph.rewrite(folder / "m.onnx", output=out / "o.onnx", **how)
                os._exit(0)
            time.sleep(rng.uniform(0, 3 * seconds))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            found = state(out, old, new) if contents(folder) == source else "wrong: the input changed"
            counts[f"{' and '.join(new)}{' over a pair' if old else ''}: {found}"] += 1
    print(f"{options.kills} kills (seed {options.seed})")
    print(*(f"{count:6}  {label}" for label, count in sorted(counts.items())), sep="\n")
    sys.exit(any("wrong" in label for label in counts))


if __name__ == "__main__":
    main()
