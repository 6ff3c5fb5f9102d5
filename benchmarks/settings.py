"""The peers and the settings that they run with: the strongest of each that we know. Every table names them.

`named` finds them in the cells of a table, and refuses a peer whose setting is not here. The models of ONNX Runtime's
dynamic quantizer are made here too, so that every benchmark compares with the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

STOCK = "ORT fp32"
BEST = "ORT fp32, best settings"
BITS8 = "ORT MatMulNBits 8"
INT8 = "ORT int8 dynamic, per channel"
INT8_CONV = "ORT int8 dynamic, per channel, of Conv"
STATIC = "ORT int8 static, per channel"
TORCH_INT8 = "torch int8 dynamic, per channel"

_STOCK = "ONNX Runtime as it is, all optimizations, the threads of the table"
_WEAK = "an older measurement with the default of its quantizer, one scale per tensor; per channel has less error"


def _short(name: str) -> str:
    """Returns the name of a quantizer of ONNX Runtime without ORT, as tables of that runtime alone have it."""
    return name.removeprefix("ORT ")


PEERS = {
    BEST: f"{_STOCK}, without the optimizers that slow this model down",
    STOCK: _STOCK,
    "ONNX Runtime Gather": _STOCK,
    BITS8: "MatMulNBitsQuantizer, 8 bits, blocks of 32, symmetric, accuracy level 4 (sums of int8)",
    "ONNX Runtime MatMulNBits, 8 bits, blocks of 32": "MatMulNBitsQuantizer, symmetric, accuracy level 4",
    TORCH_INT8: "quantize_dynamic with per_channel_dynamic_qconfig",
    "torch int8 dynamic, per tensor": _WEAK,
    _short(INT8_CONV): "quantize_dynamic(per_channel=True) of Conv, the better of int8 and uint8 weights",
    _short(INT8): "quantize_dynamic(per_channel=True), int8 weights of MatMul and Gemm; sums that cannot saturate",
    "int8 dynamic, per tensor": _WEAK,
    f"{_short(STATIC)}, all ops": "quantize_static(per_channel=True) of every op, the best of 3 calibrations",
    _short(STATIC): "quantize_static(per_channel=True), the best of 3 calibrations (minmax, entropy, percentile)",
    "OpenVINO bf16, int8 weights": "NNCF's compress_weights, INT8_SYM, sums in bfloat16",
    "OpenVINO bf16, MXFP8 weights": "NNCF's compress_weights, MXFP8_E4M3 in blocks of 32, sums in bfloat16",
    "OpenVINO int8": "NNCF's quantize with 8 inputs, the preset MIXED",
    "OpenVINO bf16": "the precision bf16, where the processor has it",
    "OpenVINO fp32": "the precision f32",
    "llama.cpp Q8_0": "weights in Q8_0, flash attention, the threads of the table",
    "torchao to_mx": "torchao's MXTensor.to_mx, eager, or compiled where the table says so",
    "torchao": "torchao's quantizer with that scale rounding, eager",
    "torch bf16 autocast": "a float32 program under torch.autocast(bfloat16)",
    "torch bf16": "the eager module in bfloat16",
    "torch fp32": "the eager module in float32",
    "stock ONNX Runtime": _STOCK,
    "ONNX Runtime": _STOCK,
}
"""The setting of each peer; a name that holds another comes before it."""

_PEER = re.compile(r"\b(ORT|ONNX Runtime|OpenVINO|llama\.cpp|torch|torchao|int8 (dynamic|static))\b")
_OURS = re.compile(r"^(ours\b|mx|MX)")


def named(cells: Iterable[object]) -> dict[str, str]:
    """Returns the settings of the peers whose names are in some cells.

    Raises:
        ValueError: a cell names a peer without a setting.

    >>> named(["x ORT fp32", "mxint8", 3.1])
    {'ORT fp32': 'ONNX Runtime as it is, all optimizations, the threads of the table'}
    """
    settings = {}
    for cell in map(str, cells):
        if not _PEER.search(cell) or _OURS.match(cell):
            continue
        name = next((name for name in PEERS if name in cell), None)
        if name is None:
            raise ValueError(f"{cell!r}: a peer without its setting; add it to PEERS of benchmarks/settings.py")
        settings[name] = PEERS[name]
    return settings


def int8_dynamic(source: Path, target: Path) -> None:
    """Writes ONNX Runtime's int8 dynamic form of a model, unless it is there already.

    Embedding tables stay as they are, as in our default: with them the mean cosine of MiniLM falls from .992 to .991.
    """
    if not target.exists():
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul", "Gemm"],  # it takes opset 23's Attention for ONNX Runtime's own
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=source.with_name(f"{source.name}.data").exists(),
        )


def exact_sums(options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    """Returns options whose int8 products cannot saturate; without VNNI those of int8 weights can."""
    options.add_session_config_entry("session.x64quantprecision", "1")
    return options
