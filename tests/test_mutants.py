"""The mutants of `make mutants`: names that outlive edits, and changes that compile."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.points import Mutant, mutants, mutated_cpp, mutated_tree, sample

pytestmark = pytest.mark.tools

SOURCE = '''
LIMIT = 3
class Site:
    def fits(self, n: int | None) -> bool:
        """Whether n < 3."""
        if not self.open:
            raise ValueError(f"{n + 1}")
        return n is not None and n * 2 < LIMIT
'''


@pytest.fixture
def points(tmp_path: Path) -> dict[str, Mutant]:
    (tmp_path / "site.py").write_text(SOURCE)
    return {mutant.name.partition("::")[2]: mutant for mutant in mutants(tmp_path, "site.py")}


def test_mutants_are_in_the_code_of_functions(points: dict[str, Mutant]) -> None:
    kinds = ("Not->", "And->Or", "IsNot->Is", "Lt->LtE", "Mult->Div", "Int->Int+1")
    assert sorted(points) == sorted(f"Site.fits::{kind}#0" for kind in kinds)
    assert points["Site.fits::Lt->LtE#0"].lines == (8, 8)


@pytest.mark.parametrize(("name", "line"), [("Lt->LtE", "n * 2 <= LIMIT"), ("Not->", "if +bool(self.open):")])
def test_a_mutant_changes_one_place(name: str, line: str) -> None:
    changed = ast.unparse(mutated_tree(SOURCE, f"site.py::Site.fits::{name}#0")).splitlines()
    (difference,) = set(changed) - set(ast.unparse(ast.parse(SOURCE)).splitlines())
    assert line in difference


def test_a_name_means_the_same_after_an_edit_elsewhere() -> None:
    edited = SOURCE.replace("class Site", "def other(a):\n    return a < 1\n\n\nclass Site")
    assert "n * 2 <= LIMIT" in ast.unparse(mutated_tree(edited, "site.py::Site.fits::Lt->LtE#0"))
    with pytest.raises(LookupError):
        mutated_tree(edited, "site.py::Site.fits::Lt->LtE#1")


def test_cpp_operators_are_changed_outside_of_comments_and_text() -> None:
    source = 'auto f(const T* a) {\n  // a < b\n  return a[0] < size<int>() ? " + " : a[1];\n}\n'
    assert mutated_cpp(source, "f.cpp::cpp::<-><=#0") == source.replace("a[0] < size", "a[0] <= size")
    with pytest.raises(LookupError):
        mutated_cpp(source, "f.cpp::cpp::+->-#0")


def test_a_sample_changes_little_with_one_more_mutant(points: dict[str, Mutant]) -> None:
    chosen = sample(list(points.values()), 3, seed=0)
    more = sample([*points.values(), Mutant("b.py", "f", "Lt->LtE", 0, (1, 1))], 3, seed=0)
    assert len(set(chosen) & set(more)) >= 2
