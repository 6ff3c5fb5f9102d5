"""Rewritten programs in many processes. Needs torch; imported by `from mxfp8_graph import distributed`.

tensor_parallel.py  products split among processes: a part of each weight in every process
products.py         the products in the graphs of a module, and what stands against splitting one
"""

from mxfp8_graph.distributed.tensor_parallel import ParallelReport, parallelize

__all__ = ["ParallelReport", "parallelize"]
