"""Rewrites every ONNX model below a folder, each as a Ray task; run it again and it goes on where it stopped.

python rewrite_folder.py MODELS OUTPUT [RECIPE]

A result is put in place whole, so one that is there is done. MODELS and OUTPUT have to be at the same paths on every
machine (a file system that they share). RAY_ADDRESS names a running cluster; without it one of this machine is started.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray

import mxfp8_graph
from mxfp8_ops.errors import Mxfp8Error


@ray.remote(max_retries=3)  # for a machine that dies; a model that is refused is not tried again
def rewrite(model: Path, output: Path, recipe: str) -> dict[str, Any]:
    """Returns the result of one model."""
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _, report = mxfp8_graph.rewrite(model, recipe, output=output, overwrite=True)
    except Mxfp8Error as error:
        return {"model": str(model), "error": str(error)}
    return {"model": str(model), "output": str(output), "rewritten": len(report.rewritten), "of": len(report.sites)}


def main() -> None:
    """Starts a task per model that has no result yet, and prints a line of JSON as each ends."""
    models, results = (Path(path).resolve() for path in sys.argv[1:3])
    recipe = sys.argv[3] if len(sys.argv) > 3 else "mxfp8"
    wanted = {model: results / model.relative_to(models) for model in sorted(models.rglob("*.onnx"))}
    missing = {model: output for model, output in wanted.items() if not output.exists()}
    print(f"{len(wanted)} models, {len(wanted) - len(missing)} rewritten before", flush=True)
    if not missing:
        return
    ray.init(include_dashboard=False, log_to_driver=False)
    under_way = [rewrite.remote(model, output, recipe) for model, output in missing.items()]
    failed = 0
    while under_way:
        done, under_way = ray.wait(under_way)
        for result in ray.get(done):
            failed += "error" in result
            print(json.dumps(result), flush=True)
    if failed:
        sys.exit(f"{failed} of {len(missing)} were not rewritten")


if __name__ == "__main__":
    main()
