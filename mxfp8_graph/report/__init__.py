"""What a rewrite did, as data, as text on a terminal, and as an HTML page."""
