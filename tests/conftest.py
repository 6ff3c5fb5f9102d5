"""Fixtures shared by all tests. The model builders are in `builders.py`, which pytest puts on the path from here."""
