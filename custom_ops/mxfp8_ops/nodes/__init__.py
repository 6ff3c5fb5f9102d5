"""The nodes, a file for each kind: contract row, NumPy reference, bound of its error, shape rule, portable body."""
