"""Fixtures shared by all tests. The model builders are in `builders.py`, which pyproject.toml puts on the path."""
