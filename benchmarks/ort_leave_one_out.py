"""Claim: no optimization of ONNX Runtime but those in `ort.FASTER_WITHOUT` slows MiniLM down by 3% on the processor.

Each is left out in turn, beside those in `ort.FASTER_WITHOUT`. Most leave the same graph then and are not timed. The
rest take turns on one thread, and times are the least of that thread's processor time: a busy machine does not decide.
"""

from __future__ import annotations

import argparse
import collections
import functools
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from exports import OPSET, export_minilm
from harness import options, publish

from mxfp8_ops import ort

NAMES = [
    "AttentionFusion",
    "BiasDropoutFusion",
    "BiasGeluFusion",
    "BiasSkipLayerNormFusion",
    "BiasSoftmaxFusion",
    "CastChainElimination",
    "CastElimination",
    "ClipQuantRewrite",
    "CommonSubexpressionElimination",
    "ConstantFolding",
    "ConstantSharing",
    "ConvAddActivationFusion",
    "ConvAddFusion",
    "ConvBNFusion",
    "ConvMulFusion",
    "DivMulFusion",
    "DoubleQDQPairsRemover",
    "DynamicQuantizeMatMulFusion",
    "EliminateDropout",
    "EliminateIdentity",
    "EliminateSlice",
    "EmbedLayerNormFusion",
    "ExpandElimination",
    "FastGeluFusion",
    "FreeDimensionOverrideTransformer",
    "FuseReluClip",
    "GatherSliceToSplitFusion",
    "GatherToSliceFusion",
    "GeluFusionL1",
    "GeluFusionL2",
    "GemmActivationFusion",
    "GemmSumFusion",
    "GemmTransposeFusion",
    "GroupQueryAttentionFusion",
    "LabelEncoderFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "MatMulActivationFusion",
    "MatMulAddFusion",
    "MatMulIntegerToFloatFusion",
    "MatMulScaleFusion",
    "MatMul_BatchNormalization_Fusion",
    "MatmulTransposeFusion",
    "NchwcTransformer",
    "NhwcTransformer",
    "NoopElimination",
    "NotWhereFusion",
    "PreShapeNodeElimination",
    "QDQFinalCleanupTransformer",
    "QDQPropagationTransformer",
    "QuickGeluFusion",
    "ReluQuantRewrite",
    "ReshapeFusion",
    "SimplifiedLayerNormFusion",
    "SkipLayerNormFusion",
    "SliceConcatToSpaceToDepthFusion",
    "TransposeOptimizer",
    "TransposeOptimizer_CPUExecutionProvider",
    "UnsqueezeElimination",
    "WeightBiasQuantization",
]
"""Those that ONNX Runtime 1.31 has for the processor. It passes over names that it does not know."""
NOTE = (
    'Least processor time of all rounds. Every row but "nothing" leaves out '
    f"{', '.join(ort.FASTER_WITHOUT)} too, and is compared with leaving out that alone."
)


def session(model: Path, without: tuple[str, ...], saved: Path | None = None) -> onnxruntime.InferenceSession:
    """Returns a session without some optimizations, which may save the graph that they leave."""
    chosen = options()
    chosen.intra_op_num_threads = 1
    if saved is not None:
        chosen.optimized_model_filepath = str(saved)
    if without:
        chosen.add_session_config_entry(ort.DISABLE, ";".join(without))
    return onnxruntime.InferenceSession(model, chosen, providers=["CPUExecutionProvider"])


def ops_of(model: Path, without: tuple[str, ...], saved: Path) -> collections.Counter[str]:
    """Returns how many nodes of each op are left."""
    session(model, without, saved)
    return collections.Counter(node.op_type for node in onnx.load(saved).graph.node)


def minima(sessions: dict[str, onnxruntime.InferenceSession], rounds: int) -> dict[str, float]:
    """Returns the least processor seconds of each, in turns."""
    ids = np.random.default_rng(0).integers(1000, 20000, (8, 128))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    calls = {}
    for name, each in sessions.items():
        calls[name] = functools.partial(each.run, None, {i.name: feeds[i.name] for i in each.get_inputs()})
    least = dict.fromkeys(sessions, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            least[name] = min(least[name], time.thread_time() - start)
    return least


def main() -> None:
    """Times each at both opsets, and writes results/ort_leave_one_out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="where the models stay for the next run; by default they do not")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for opset in (OPSET, None):
            label = str(opset or "default")
            path = folder / f"minilm-{label}.onnx"
            if not path.exists():
                export_minilm(path, opset)
            rows += leave_out(label, path, arguments.rounds, Path(temporary) / "optimized.onnx")
    columns = ["opset", "left out", "ms", "less time", "nodes then"]
    title = f"MiniLM, 8 x 128, ONNX Runtime {onnxruntime.__version__} without one optimization, one thread"
    publish("ort_leave_one_out", title, columns, rows, notes=[NOTE])


def leave_out(label: str, path: Path, rounds: int, saved: Path) -> list[list[str]]:
    """Returns the rows of one model, the fastest first."""
    always = tuple(ort.FASTER_WITHOUT)
    base = ops_of(path, always, saved)
    changes = {}
    for name in NAMES:
        left = ops_of(path, (*always, name), saved)
        more = {op: left[op] - base[op] for op in sorted(left | base) if left[op] != base[op]}
        if more:
            changes[name] = ", ".join(f"{count:+d} {op}" for op, count in more.items())
    sessions = {"nothing": session(path, ()), ", ".join(always): session(path, always)}
    sessions |= {name: session(path, (*always, name)) for name in changes}
    least = minima(sessions, rounds)
    reference = least[", ".join(always)]
    return [
        [label, name, f"{1e3 * seconds:.1f}", f"{1 - seconds / reference:+.1%}", changes.get(name, "")]
        for name, seconds in sorted(least.items(), key=lambda item: item[1])
    ]


if __name__ == "__main__":
    main()
