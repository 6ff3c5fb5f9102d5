"""ONNX Runtime's int8 quantizers at their strongest settings for convolutions."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from mxfp8_ops import cpu

Feeds = dict[str, np.ndarray]
Ways = dict[str, Callable[[Path], None]]
"""Each writes a file."""

METHODS = ("MinMax", "Entropy", "Percentile")
SATURATES = cpu.isa() in ("avx512", "avx2", "portable")
"""Without dot products of 8 bits, ONNX Runtime adds two products in 16 bits: its weights then get 7 bits."""


def prepared(model: Path, target: Path, *, numbers: bool) -> Path:
    """Returns the file optimized, at an opset with scales per channel, and if sizes are `numbers` with all shapes."""
    if not target.exists():
        quant_pre_process(model, target, skip_symbolic_shape=not numbers)
        proto = onnx.load(target)
        if proto.opset_import[0].version < 13:
            onnx.save(onnx.version_converter.convert_version(proto, 17), target)
    return target


def static_ways(
    source: Path, feeds: Sequence[Feeds], methods: Sequence[str] = METHODS, ops: Sequence[str] | None = ("Conv",)
) -> Ways:
    """Returns QDQ with weights per channel, by calibration with `feeds`; `ops` None is all nodes that can be."""

    def write(target: Path, method: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # the quantizer tells what it does
            quantize_static(
                source, target, SimpleNamespace(get_next=partial(next, iter(feeds), None)), op_types_to_quantize=ops,
                per_channel=True, reduce_range=SATURATES, activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod[method],
            )  # fmt: skip

    return {f"{method}{', 7 bits' * SATURATES}": partial(write, method=method) for method in methods}


def dynamic_ways(source: Path) -> Ways:
    """Returns convolutions of integers with weights per channel, by the sign of the weights."""

    def write(target: Path, kind: QuantType) -> None:
        quantize_dynamic(source, target, op_types_to_quantize=["Conv"], per_channel=True, weight_type=kind)

    return {kind.name: partial(write, kind=kind) for kind in (QuantType.QInt8, QuantType.QUInt8)}


def nearest(source: Path, feeds: Sequence[Feeds], ways: Ways, stem: Path) -> tuple[str, Path]:
    """Returns the way whose outputs are nearest to those of `source`, and its file; all are written beside `stem`."""

    def outputs(path: Path) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(path)
        return [session.run(None, each)[0] for each in feeds]

    files = {way: stem.with_name(f"{stem.name}.{way.replace(', ', '.').replace(' ', '-')}.onnx") for way in ways}
    for way, write in ways.items():
        write(files[way])
    errors = dict.fromkeys(ways, 0.0)
    if len(ways) > 1:
        expected = outputs(source)
        for way, file in files.items():
            errors[way] = sum(float(np.linalg.norm(a - e)) for a, e in zip(outputs(file), expected, strict=True))
    best = min(errors, key=errors.__getitem__)
    return best, files[best]
