"""Recipes made to crash, hang or fill the memory: each is a RecipeError within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxfp8_graph import Recipe, load_recipe
from mxfp8_graph.policy import patterns
from mxfp8_graph.policy.plan import MatMulSite, plan
from mxfp8_ops.errors import RecipeError

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)) + "include: *a59\n"
MERGES = "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        ("yaml", LAUGHS, r":2: an alias, \*a0; expected valid YAML"),
        ("yaml", MERGES, r":2: an alias, \*a0; expected valid YAML"),
        ("yaml", "a: &a [*a]", r":1: an alias, \*a; expected valid YAML"),
        ("yaml", "include: " + "[" * 100 + "]" * 100, "include.0: .*; expected text"),
        ("yaml", "[" * 100_000, "nested without end"),
        ("toml", "include = " + "[" * 100_000, "nested without end"),
        ("yaml", "name: x\n" + "#" * 2**20, "more than 1048576 bytes"),
        ("yaml", f"min_dim: {'9' * 5000}", "Exceeds the limit"),
        ("toml", f"min_dim = {'9' * 5000}", "Exceeds the limit"),
        ("yaml", f"min_dim: 0x{'f' * 5000}", "a number of thousands of digits; expected less than 9223372036854775808"),
        ("yaml", f"name: [0x{'f' * 5000}]", r"name: .*; expected text|thousands of digits; expected text"),
        ("yaml", "? [a, b]\n: c", "unhashable key"),
        ("yaml", "name: 2020-13-45", "month must be in 1..12"),
        ("toml", "name = 2020-02-30", "is out of range for month|[Ii]nvalid date"),
        ("yaml", "".join(f"key{n}: 1\n" for n in range(5000)), "and 4950 more"),
        ("yaml", f"exclude: ['{'(' * 3000 + ')' * 3000}']", "nested too deeply"),
        ("yaml", f"exclude: ['{'a' * 20_000}']", "a pattern of 20000 characters"),
        ("yaml", "exclude: ['a{99999999999}']", "is not a regular expression"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_files(suffix: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"bad.{suffix}"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


SITE = MatMulSite(name="a" * 40 + "b" + "x" * 20 + "!", op="MatMul", n=64, k=64)


@pytest.mark.parametrize("pattern", [r"^(a|aa)+$", r"^(a|a)*!"])
def test_patterns_that_backtrack_for_ever(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_BUDGET", 0.1)
    recipes = [{"exclude": (pattern,)}, {"include": (pattern,)}, {"rules": ({"name": pattern},)}]
    for fields in recipes:
        with pytest.raises(RecipeError, match=r"takes more than 0.1 s to search for"):
            plan([SITE], Recipe(**fields))


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (r"layers\.(?!0\b)\d+\.up", "layers.10.up", True),
        (r"layers\.(?!0\b)\d+\.up", "layers.0.up", False),
        (r"(?<=mlp\.)(up|gate)_proj$", "mlp.up_proj", True),
        (r"(\w)\1", "book", True),
        (r"(?P<n>\d+)/(?P=n)", "7/7", True),
        (r"(?i)LM_HEAD", "lm_head", True),
        (r"x{e}", "x{e}", True),
        (r"x{e}", "x", False),
        (r"[[:alpha:]]", "a]", True),
        (r"[[:alpha:]]", "z", False),
        (r"[]{]", "{", True),
        (r"[^]a]", "]a", False),
        (r"\[0\]", "[0]", True),
        (r"a{2}", "aa", True),
        (r"a{,2}b", "b", True),
    ],
)
def test_patterns_mean_what_they_mean_to_re(pattern: str, name: str, found: bool) -> None:
    sites = [MatMulSite(name=name, op="MatMul", n=64, k=64), MatMulSite(name="other!", op="MatMul", n=64, k=64)]
    decisions = plan(sites, Recipe(exclude=(rf"(?:{pattern})|^other!$" if "?i" not in pattern else pattern,)))
    assert decisions[0].quantize is not found, decisions[0]
