"""Reports of commands as data, as text on a terminal, and as an HTML page; and how a rewrite makes its own."""
