"""Rewritten programs in many processes. Needs torch; imported by `from mxfp8_graph import distributed`.

modules.py          the module of a program with its submodules; copies trained values back into the program
fsdp.py             FSDP2 over such a module: which weights are gathered in MXFP8
sharded_weight.py   the tensors that FSDP2 gathers in MXFP8
reduction.py        sums of gradients in place of means
tensor_parallel.py  products split among processes: a part of each weight in every process
products.py         the products in the graphs of a module, and the reasons against splitting one
experts.py          experts of a module in the processes that hold them
routes.py           the rows of experts, sent to those processes in MXFP8 and back
memory.py           bytes that a process holds and receives, from shapes
patterns.py         patterns for the names of modules and tensors
"""

from mxfp8_graph.distributed.experts import ExpertReport, expert_parallel
from mxfp8_graph.distributed.fsdp import ShardReport, shard
from mxfp8_graph.distributed.memory import MemoryReport, bytes_per_process
from mxfp8_graph.distributed.modules import CollectReport, collect, module
from mxfp8_graph.distributed.reduction import sum_gradients
from mxfp8_graph.distributed.tensor_parallel import ParallelReport, parallelize

__all__ = [
    "CollectReport",
    "ExpertReport",
    "MemoryReport",
    "ParallelReport",
    "ShardReport",
    "bytes_per_process",
    "collect",
    "expert_parallel",
    "module",
    "parallelize",
    "shard",
    "sum_gradients",
]
