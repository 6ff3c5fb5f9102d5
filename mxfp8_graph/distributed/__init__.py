"""Training of rewritten programs in many processes. Needs torch.

memory.py      bytes that a process holds and receives, from shapes
"""

from mxfp8_graph.distributed.memory import MemoryReport, bytes_per_process

__all__ = ["MemoryReport", "bytes_per_process"]
