"""The nodes, a file for each kind: contract row, NumPy reference, error bound, shape rule, portable body."""
