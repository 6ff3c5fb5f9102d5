"""Training of rewritten programs in many processes. Needs torch; imported by `from mxfp8_graph import distributed`.

experts.py     experts of a module in the processes that hold them
routes.py      the rows of experts, sent to those processes in MXFP8 and back
"""

from mxfp8_graph.distributed.experts import ExpertReport, expert_parallel

__all__ = ["ExpertReport", "expert_parallel"]
