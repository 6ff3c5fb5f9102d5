"""The report of a rewrite, as data, as text on a terminal, and as an HTML page."""
