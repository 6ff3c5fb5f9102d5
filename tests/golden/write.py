"""Writes golden.json and conversions.json anew, says what changed: `python tests/golden/write.py`. The commit says why.

`python tests/golden/write.py NAME ...` writes nothing and prints all that is recorded of these cases, also texts that
are too long for golden.json: two commits can be compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILE = Path(__file__).with_name("golden.json")


def main(names: list[str]) -> None:
    # As pyproject.toml has it for pytest; golden is a package of tests.
    sys.path[:0] = [str(TESTS), str(TESTS / "mxfp8_graph"), str(TESTS / "mxfp8_ops")]
    import onnx
    from golden import conversions
    from golden.cases import CASES
    from golden.digests import record, summary

    before = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    models = {}
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            parts = record(CASES[name], Path(folder))
        models[name] = summary(parts)
        digests, old = models[name]["digests"], before.get(name, {}).get("digests", {})
        if changed := sorted(part for part in digests.keys() | old.keys() if digests.get(part) != old.get(part)):
            print(f"{name}: {', '.join(changed)}")
        for part, text in parts.items() if names else ():
            print(f"--- {name}: {part}\n{text}")
    if not names:
        print("gone:", sorted(before.keys() - models.keys()))
        FILE.write_text(json.dumps({"onnx": onnx.__version__, "models": models}, indent=0, ensure_ascii=False) + "\n")
        print(f"{len(models)} models, {FILE.stat().st_size / 1e3:.0f} kB")
        conversions.write()


if __name__ == "__main__":
    main(sys.argv[1:])
