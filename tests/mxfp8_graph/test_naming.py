"""Names that nothing else has."""

import pytest

from mxfp8_graph.naming import take_name, unique_name


def test_a_name_that_many_have_is_numbered_in_order() -> None:
    taken: set[str] = set()
    assert [take_name("x", taken, "#") for _ in range(40)] == ["x", *(f"x#{number}" for number in range(2, 41))]


@pytest.mark.parametrize("taken", [{"x", "x_3"}, {"x", "x_2", "x_4"}, {"x", "x_2", "x_3", "x_5", "x_6"}])
def test_gaps_do_not_matter(taken: set[str]) -> None:
    name = unique_name("x", taken)
    assert name.startswith("x_")
    assert name not in taken
