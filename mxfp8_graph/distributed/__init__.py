"""Training of rewritten programs in many processes. Needs torch; imported by `from mxfp8_graph import distributed`.

experts.py     experts of a module in the processes that hold them
routes.py      the rows of experts, sent to those processes in MXFP8 and back
memory.py      bytes that a process holds and receives, from shapes
"""

from mxfp8_graph.distributed.experts import ExpertReport, expert_parallel
from mxfp8_graph.distributed.memory import MemoryReport, bytes_per_process

__all__ = ["ExpertReport", "MemoryReport", "bytes_per_process", "expert_parallel"]
