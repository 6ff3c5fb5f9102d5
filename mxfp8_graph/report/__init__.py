"""Reports of commands as data, as text on a terminal, and as an HTML page; and the account of stored bytes."""
