"""Claim: one numerics. All ways to quantize here give the same bytes; and where those of others differ, and how often.

Each quantizes every pattern of a float32's upper 16 bits, alone in its block, and every amax at, one bit below and one
bit above where a rule of scales steps (the groups `patterns` and `boundaries` of `mxfp8_ops.conformance`), to E4M3.
They are compared with our reference under the scale rounding that is nearest. Another rule is not an error: OCP MX v1.0
describes one way to make a block in section 6.3, "floor" here.

Peers run in processes of their own (conformance_peers.py names their packages), here or where `--python` says:

    python benchmarks/conformance.py --python modelopt=/venv/bin/python --python quark=/other/bin/python
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 - NumPy's float8
import numpy as np
import onnx
import onnx.reference
import onnxruntime
from conformance_peers import QUANTIZERS
from harness import publish
from onnx import helper
from peers import Peer

from mxfp8_ops import conformance, contract, cpu, numerics, numpy_nodes, ort
from mxfp8_ops.formats import E4M3, ELEMENT_NAN, SCALE_ROUNDINGS
from mxfp8_ops.onnx_functions import functions

Answer = tuple[np.ndarray, ...]
"""Elements and scales; the values alone of a quantizer that returns no codes."""
Quantize = Callable[[np.ndarray, str], Answer]

COLUMNS = (
    "quantizer",
    "version",
    "rule",
    "finite, of 65,280: bytes",
    "values",
    "NaN and Inf, of 256",
    "boundaries, of 3,297: bytes",
    "values",
    "first that differs",
)
NOTES = (
    "Numbers are of blocks that differ from our NumPy reference under the rule that is nearest to each quantizer; "
    "ceil, floor and even are our words for it. "
    "Bytes are scale and elements, a NaN of either sign being one; values are what they stand for. "
    "Another rule, or another byte for the same value, is not an error.",
    "A quantizer without bytes has none to compare: it gives values back (fake quantization).",
    "First that differs: a value, the answer of the quantizer (scale code and element, or value), and that of the "
    "reference does; finite ones before NaN and infinity.",
)


@dataclass(frozen=True)
class Blocks:
    """The values to quantize: one group, each row a block of 32, the first values of the group and zeros."""

    x: np.ndarray
    reference: dict[str, Answer]
    """By scale rounding, elements, scales and values."""

    @classmethod
    def of(cls, group: str) -> Blocks:
        """Returns those of a group of the conformance vectors."""
        (case,) = (case for case in conformance.cases("quantize") if case.name == f"quantize/{group}/e4m3-ceil")
        x = np.pad(case.inputs[0], ((0, 0), (0, 32 - case.inputs[0].shape[1])))
        codes = {rounding: numpy_nodes.quantize(x, scale_rounding=rounding) for rounding in SCALE_ROUNDINGS}
        return cls(x, {name: (*pair, numpy_nodes.dequantize(*pair)) for name, pair in codes.items()})

    @property
    def finite(self) -> np.ndarray:
        """Which rows have neither NaN nor infinity."""
        return np.isfinite(self.x).all(1)


@dataclass(frozen=True)
class Compared:
    """Which rows of some blocks differ."""

    bytes: np.ndarray | None
    values: np.ndarray


def compared(blocks: Blocks, rounding: str, answer: Answer) -> Compared:
    """Returns where an answer is not the reference's."""
    elements, scales, values = blocks.reference[rounding]
    actual = answer[0] if len(answer) == 1 else numpy_nodes.dequantize(*answer)
    differ = ~((actual == values) | (np.isnan(actual) & np.isnan(values))).all(1)
    if len(answer) == 1:
        return Compared(None, differ)
    return Compared((_plain(answer[0]) != elements).any(1) | (answer[1] != scales).any(1), differ)


def _plain(elements: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(numerics.decode(elements, E4M3)), ELEMENT_NAN, elements)


def row(name: str, version: str, answers: dict[str, list[Answer]], groups: list[Blocks]) -> list[str]:
    """Returns a row of the table: the rule with the fewest differences of finite values.

    Args:
        name: of the quantizer.
        version: of its package.
        answers: by each scale rounding that it may be compared with, one for each of `groups`.
        groups: the patterns and the boundaries.
    """
    compared_groups = {
        rounding: [compared(blocks, rounding, answer) for blocks, answer in zip(groups, of_groups, strict=True)]
        for rounding, of_groups in answers.items()
    }

    def finite(rounding: str) -> int:
        pairs = zip(groups, compared_groups[rounding], strict=True)
        return sum(int((_any(each) & blocks.finite).sum()) for blocks, each in pairs)

    rule = min(compared_groups, key=finite)
    patterns, boundaries = compared_groups[rule]
    alone = groups[0].finite
    return [
        name,
        version,
        rule,
        _count(patterns.bytes, alone),
        _count(patterns.values, alone),
        _count(_any(patterns), ~alone),
        _count(boundaries.bytes, True),
        _count(boundaries.values, True),
        next(_examples(groups, answers[rule], compared_groups[rule], rule), ""),
    ]


def _any(each: Compared) -> np.ndarray:
    return each.values if each.bytes is None else each.bytes


def _count(differ: np.ndarray | None, where: np.ndarray | bool) -> str:
    return "-" if differ is None else f"{int((differ & where).sum()):,}"


def _examples(groups: list[Blocks], answers: list[Answer], results: list[Compared], rule: str) -> Iterator[str]:
    """Yields blocks that differ, finite ones first."""
    for finite in (True, False):
        for blocks, answer, each in zip(groups, answers, results, strict=True):
            for at in np.flatnonzero(_any(each) & (blocks.finite == finite))[:1]:
                elements, scales, values = (part[at] for part in blocks.reference[rule])
                actual = answer[0][at]
                differ = actual != (values if len(answer) == 1 else elements)
                if len(answer) == 2 and answer[1][at, 0] != scales[0]:  # for the reason, which amax is
                    differ = blocks.x[at].view(np.uint32) & 0x7FFFFFFF
                which = int(np.argmax(differ))
                x = f"{blocks.x[at, which]:.9g}"
                if len(answer) == 1:
                    yield f"{x}: {actual[which]:.7g}, not {values[which]:.7g}"
                else:
                    yield f"{x}: {answer[1][at, 0]} {actual[which]:02x}, not {scales[0]} {elements[which]:02x}"


def ours() -> Iterator[tuple[str, Quantize]]:
    """Yields every way to quantize here: name and function."""
    yield "ours: NumPy reference", lambda x, rounding: numpy_nodes.quantize(x, scale_rounding=rounding)

    def native(isa: str) -> Quantize:
        def quantize(x: np.ndarray, rounding: str) -> Answer:
            with cpu.forced_isa(isa):
                return cpu.quantize(x, scale_rounding=rounding)

        return quantize

    for isa in cpu.available_isas():
        yield f"ours: native kernel, {isa}", native(isa)
    yield "ours: node in ONNX Runtime, native", in_onnxruntime(registered=True)
    yield "ours: node in ONNX Runtime, function body", in_onnxruntime(registered=False)
    yield "ours: node in onnx.reference, function body", in_onnx_reference
    try:
        import torch

        from mxfp8_ops import torch_ops  # noqa: F401 - registers them
    except ImportError:
        return

    def in_torch(x: np.ndarray, rounding: str) -> Answer:
        pair = torch.ops.mxfp8.quantize(torch.from_numpy(x), -1, "e4m3", rounding)
        return tuple(part.numpy() for part in pair)

    yield "ours: torch op", in_torch


def node_model(rounding: str) -> onnx.ModelProto:
    """Returns a model of one MXFP8Quantize; its elements are cast to float32, so that NumPy takes them."""
    attributes = {**contract.QUANTIZE.attributes, "scale_rounding": rounding}
    nodes = [
        helper.make_node("MXFP8Quantize", ["X"], ["e", "scales"], domain=contract.DOMAIN, **attributes),
        helper.make_node("Cast", ["e"], ["elements"], to=contract.FLOAT),
    ]
    shapes = {"X": (contract.FLOAT, ["n", 32]), "elements": (contract.FLOAT, None), "scales": (contract.UINT8, None)}
    values = {name: helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()}
    graph = helper.make_graph(nodes, "quantize", [values["X"]], [values["elements"], values["scales"]])
    opset = 23
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model.functions.extend(functions(model))
    return model


def in_onnxruntime(*, registered: bool) -> Quantize:
    """Returns a quantizer that runs the node in ONNX Runtime, by its kernel or by its body."""

    def quantize(x: np.ndarray, rounding: str) -> Answer:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if registered:
            ort.register(options)
        content = node_model(rounding).SerializeToString()
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return encoded(*session.run(None, {"X": x}))

    return quantize


def in_onnx_reference(x: np.ndarray, rounding: str) -> Answer:
    """Quantizes by the node's body in onnx's reference evaluator."""
    with np.errstate(all="ignore"):
        return encoded(*onnx.reference.ReferenceEvaluator(node_model(rounding)).run(None, {"X": x}))


def encoded(elements: np.ndarray, scales: np.ndarray) -> Answer:
    """Returns the codes of elements that are values."""
    return numerics.encode(elements, E4M3), scales


def rows_of_ours(groups: list[Blocks]) -> Iterator[list[str]]:
    """Yields a row per way to quantize here: the rule whose answers differ most, if one does."""
    for name, quantize in ours():
        rows = []
        for rounding in SCALE_ROUNDINGS:
            answers = {rounding: [quantize(blocks.x, rounding) for blocks in groups]}
            rows.append(row(name, "", answers, groups))
        worst = next((each for each in rows if each[-1]), rows[0])
        yield [*worst[:2], worst[2] if worst[-1] else "ceil, floor and even", *worst[3:]]


def transformer_engine(x: np.ndarray) -> Answer:
    """Quantizes rows of a block each by TransformerEngine's rule: amax times the rounded reciprocal of 448, rounded up.

    Source: transformer_engine/common/util/ptx.cuh, float_to_e8m0, and exp2f_rcp since pull request 2647.
    """
    with np.errstate(all="ignore"):
        amax = np.nanmax(np.abs(x), -1, initial=0, keepdims=True)
        mantissa, exponent = np.frexp(amax * (np.float32(1) / np.float32(E4M3.max)))
        exponent = np.where(mantissa == 0, -127, np.clip(exponent - (mantissa == 0.5), -127, 127))
        scales = np.where(np.isinf(amax), 254, exponent + 127)
        elements = numerics.encode(x * np.ldexp(np.float32(1), 127 - scales), E4M3)
    return elements, scales.astype(np.uint8)


def rows_of_peers(groups: list[Blocks], pythons: dict[str, str]) -> Iterator[list[str]]:
    """Yields a row per peer."""
    for name in QUANTIZERS:
        settings = {"quantizer": name, "element_format": "e4m3"}
        try:
            peer = Peer("conformance_peers.py", settings, python=pythons.get(name.split()[0], sys.executable))
            outputs = []
            for blocks in groups:
                peer.feed({"x": blocks.x})
                outputs.append(peer.output())
            peer.close()
        except RuntimeError as error:
            absent = "PackageNotFoundError" in str(error) or "ModuleNotFoundError" in str(error)
            yield [name, "not installed" if absent else str(error), *[""] * (len(COLUMNS) - 2)]
            continue
        answers = [(y[:, :32], y[:, 32:]) if y.dtype == np.uint8 else (y,) for y in outputs]
        yield row(name, peer.version, dict.fromkeys(SCALE_ROUNDINGS, answers), groups)


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="where a peer is installed")
    parser.add_argument("--quick", action="store_true", help="ours alone; nothing is written")
    options = parser.parse_args()
    pythons = dict(argument.partition("=")[::2] for argument in options.python)
    unknown = set(pythons) - {name.split()[0] for name in QUANTIZERS}
    if unknown or not all(pythons.values()):
        peers = dict.fromkeys(name.split()[0] for name in QUANTIZERS)
        parser.error(f"--python {' '.join(options.python)}; expected PEER=PATH with one of {', '.join(peers)}")
    groups = [Blocks.of("patterns"), Blocks.of("boundaries")]
    name, answers = (
        "TransformerEngine: its rule written out (needs CUDA to build)",
        [transformer_engine(blocks.x) for blocks in groups],
    )
    rows = [*rows_of_ours(groups), row(name, "", dict.fromkeys(SCALE_ROUNDINGS, answers), groups)]
    if not options.quick:
        rows += rows_of_peers(groups, pythons)
    title = "MXFP8 quantizers against every pattern of a float32's upper 16 bits, and every boundary of scales: E4M3"
    publish("conformance", title, COLUMNS, rows, notes=NOTES, keep=not options.quick, per_processor=False)


if __name__ == "__main__":
    main()
