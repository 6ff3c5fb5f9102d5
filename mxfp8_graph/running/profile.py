"""Profiles of models: each node's kernel, instruction set, precision and time.

ONNX Runtime measures its nodes; torch's ops are called and timed one by one. The native library records the kernels.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx_ir as ir

from mxfp8_graph.onnx_pass.graph import attribute
from mxfp8_graph.onnx_pass.ops import ROLE_OPS
from mxfp8_graph.report.base import Data
from mxfp8_ops import contract, cpu, formats


@dataclass(frozen=True, kw_only=True)
class NodeProfile(Data):
    """One node, over several runs of its model."""

    name: str
    op: str
    operands: str
    """Dtypes of its product: "e4m3 x e4m3", "float32 x float32".

    It is empty if the node does not multiply, and for values that a node in an inlined body multiplies.
    """
    kernel: str
    """The gemm kernels of the native library that ran, or on a GPU the row of its dispatch table.

    It is empty for other ops, and for kernels of the framework.
    """
    isa: str
    """The instruction set of our kernels, or "cuda"; empty if the framework runs the node itself."""
    seconds: float
    """Median of the times that it took in the runs, as for the model: one slow run is no property of a node."""


Event = Mapping[str, Any]
"""One entry of a profile of ONNX Runtime."""

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
"""Ops that a profile leaves out: their time is the time of the nodes in their bodies, which have entries."""

_FACTORS: Final = {
    **dict.fromkeys(ROLE_OPS.compute, (0, 1)),
    **{"MoE": (0, 2), "QMoE": (0, 2), "QLinearMatMul": (0, 3)},
    **{op.name: op.factors_at for op in contract.OPS.values() if op.factors_at is not None},
}
"""Op -> the two inputs that it multiplies."""

_DTYPES: Final = {"float": "float32", "double": "float64", "Float8E4M3FN": "e4m3", "Float8E5M2": "e5m2", "int8": "int8"}
"""ONNX Runtime's names of dtypes -> ours, where they differ."""


def of_session(model: ir.Model, events: Sequence[Event], calls: Iterable[cpu.Call], runs: int) -> list[NodeProfile]:
    """Returns the nodes of the last `runs` runs, in the order in which they ran first.

    Args:
        model: the model that ran; only attributes of its nodes are read.
        events: events of ONNX Runtime, of these runs and perhaps of earlier ones.
        calls: the calls that the native library recorded in these runs.
        runs: number of runs, at least 1.
    """
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")
    # The first run of a session is slower: it allocates memory and prepares kernels.
    starts = starts[-runs:]
    native = by_node(calls)
    rounded = {node.name: name for node in model.graph.all_nodes() if (name := _rounded(node))}
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    first: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: int(event["ts"])):
        op = event.get("args", {}).get("op_name")
        if event["cat"] != "Node" or op is None or op in CONTROL_FLOW or event["ts"] < starts[0]:
            continue
        name = event["name"].removesuffix("_kernel_time")
        first.setdefault(name, event)
        # A node in the body of a Loop has several entries in a run.
        seconds[name][bisect_right(starts, event["ts"]) - 1] += event["dur"] / 1e6
    _name_inlined(native, {name: event["args"]["op_name"] for name, event in first.items()}, runs)
    named = {node.name for node in model.graph.all_nodes()}
    return [
        NodeProfile(
            name=name,
            op=event["args"]["op_name"],
            operands=_operands(event["args"], rounded.get(name), inlined=name not in named),
            kernel=kernel,
            isa=isa,
            seconds=statistics.median(seconds[name]),
        )
        for name, event in first.items()
        for kernel, isa in [kernels_of(native[name])]
    ]


def _name_inlined(calls: dict[str, list[cpu.Call]], ops: Mapping[str, str], runs: int) -> None:
    """Adds the calls of our nodes in bodies that ONNX Runtime inlined, by the names that it shows for them.

    These nodes have no name, so each is found by its place among those of its op.

    Args:
        calls: the calls by name, "" for those of such nodes.
        ops: name of each node -> its op, in the order in which they ran.
        runs: number of runs.
    """
    for op in {call.op for call in calls.get("", ())}:
        same = [call for call in calls[""] if call.op == op]
        names = [name for name, other in ops.items() if other == op and name not in calls]
        # In a loop there are more calls, and nodes of two bodies may have one name. Then each gets all the calls.
        each_in_place = len(same) == len(names) * runs
        calls.update({name: same[i :: len(names)] if each_in_place else same for i, name in enumerate(names)})


def _rounded(node: ir.Node) -> str:
    """Returns the name of the dtype or format to which a node rounds its values; "" if it does not."""
    if attribute(node, "activation_dtype", 0) == contract.BFLOAT16:
        return formats.BFLOAT16.name
    return formats.ELEMENT_NAMES.get(attribute(node, "x_dtype", 0), "")


def by_node(calls: Iterable[cpu.Call]) -> dict[str, list[cpu.Call]]:
    """Returns the calls of each node, by name."""
    by_name: dict[str, list[cpu.Call]] = defaultdict(list)
    for call in calls:
        by_name[call.name].append(call)
    return by_name


def kernels_of(calls: Sequence[cpu.Call]) -> tuple[str, str]:
    """Returns the gemm kernels that ran, and the instruction sets that they and other kernels ran on."""
    gemms = dict.fromkeys(gemm for call in calls for gemm in call.gemms)
    # A node without rows calls no kernel, so its instruction set is empty.
    return ", ".join(gemms), ", ".join(dict.fromkeys(call.isa for call in calls if call.isa))


def _operands(args: Mapping[str, Any], rounded: str | None, *, inlined: bool) -> str:
    op, types = args["op_name"], [next(iter(entry)) for entry in args.get("input_type_shape", ())]
    factors = [at for at in _FACTORS.get(op, ()) if at < len(types)]
    names = {at: _DTYPES.get(types[at], types[at]) for at in factors}
    values = [at for at in factors if op in contract.OPS and contract.OPS[op].inputs[at].dtypes == contract.VALUES]
    if inlined and values:  # only the node that had the body tells to which dtype it rounds them
        return ""
    if rounded is not None:  # packed operands are not rounded
        names |= dict.fromkeys(values, rounded)
    return " x ".join(names.values())
