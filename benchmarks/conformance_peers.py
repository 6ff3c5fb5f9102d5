"""MXFP8 quantizers of others as peers; see peers.py. Each needs what its function imports, here or elsewhere.

Settings: "quantizer", a name of `QUANTIZERS`; "element_format", "e4m3" or "e5m2". The feed is "x", float32 [rows, K]
with K a multiple of 32. The output is uint8 [rows, K + K / 32], elements and then scale codes, of those that have codes
and of those that give values back float32 [rows, K].
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
from peers import Feeds, serve

Quantize = Callable[[Any, str], Any]


def _codes(elements: Any, scales: Any) -> np.ndarray:
    """Returns elements and scales of a torch tensor each, or of NumPy, as one array of bytes."""
    pair = [np.asarray(part).view(np.uint8) for part in (elements, scales)]
    return np.concatenate([part.reshape(len(pair[0]), -1) for part in pair], axis=1)


def torchao(mode: str) -> Quantize:
    """Runs `to_mx`: mode is one of its ScaleCalculationMode."""

    def quantize(x: np.ndarray, element_format: str) -> np.ndarray:
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element_format]
        scales, elements = to_mx(torch.from_numpy(x), dtype, 32, ScaleCalculationMode[mode])
        return _codes(elements.view(torch.uint8), scales.view(torch.uint8))

    return quantize


def modelopt(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs MXFP8QTensor."""
    import torch
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    packed, scales = MXFP8QTensor.quantize(torch.from_numpy(x))
    return _codes(packed._quantized_data.view(torch.uint8), scales)


def quark(mode: str) -> Quantize:
    """Runs `fake_quantize_mx`, which returns values; mode is its scale_calculation_mode."""

    def quantize(x: np.ndarray, element_format: str) -> np.ndarray:
        import torch
        from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

        dtype = f"fp8_{element_format}"
        return np.asarray(
            fake_quantize_mx(torch.from_numpy(x), -1, 32, scale_calculation_mode=mode, mx_element_dtype=dtype)
        )

    return quantize


def auto_round(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs `quant_mx`: its shared exponents, and its values as elements under them."""
    import torch
    from auto_round.data_type.mxfp import quant_mx

    values, exponents, _ = quant_mx(torch.from_numpy(x), 8, 32, data_type=f"mx_fp8{element_format}")
    scales = (exponents.reshape(len(x), -1).nan_to_num(nan=128) + 127).to(torch.uint8)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element_format]
    blocks = values.reshape(len(x), -1, 32) / torch.exp2(exponents.reshape(len(x), -1, 1))
    return _codes(blocks.to(dtype).view(torch.uint8).reshape(x.shape), scales)


def compressed_tensors(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs the MXFP8 compressor, with the scales of its observers' `calculate_qparams`."""
    import torch
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    args = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    values = torch.from_numpy(x)
    blocks = values.reshape(len(x), -1, 32)
    scales, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    elements = quantize(values, scales, zeros, args, dtype=torch.float8_e4m3fn)
    return _codes(elements.view(torch.uint8), compress_mx_scale(scales, torch.uint8))


def nncf(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs the weight compression to MXFP8_E4M3, which OpenVINO runs."""
    import ml_dtypes  # noqa: F401 - NumPy's float8
    from nncf import CompressWeightsMode
    from nncf.quantization.algorithms.weight_compression.config import WeightCompressionConfig
    from nncf.quantization.algorithms.weight_compression.weight_lowering import do_float_quantization
    from nncf.tensor import Tensor

    config = WeightCompressionConfig(CompressWeightsMode.MXFP8_E4M3, group_size=32)
    packed = do_float_quantization(Tensor(x), config, reduction_axes=(1,))
    elements, scales = (np.asarray(part.as_numpy_tensor().data) for part in (packed.tensor, packed.scale))
    scales = scales.reshape(len(x), -1)
    codes = np.where(np.isnan(scales), 255, np.log2(scales.astype(np.float64)) + 127).astype(np.uint8)
    return _codes(elements.reshape(x.shape).astype("float8_e4m3fn"), codes)


def gfloat(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs `encode_block`, with its `compute_scale_amax`."""
    from gfloat import encode_block, formats
    from gfloat.block import compute_scale_amax

    info = getattr(formats, f"format_info_mxfp8_{element_format}")
    blocks = x.reshape(-1, 32).astype(np.float64)
    codes = np.empty((len(blocks), 33), np.uint8)
    for row, values in zip(codes, blocks, strict=True):
        scale = compute_scale_amax(info.etype.emax, values)
        row[:] = list(encode_block(info, scale, values / scale))
    return _codes(codes[:, 1:].reshape(x.shape), codes[:, 0].reshape(len(x), -1))


def microxcaling(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs Microsoft's `quantize_mx_op` in neural-compressor's copy, with its default rounding; it returns values."""
    import torch
    from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op

    return np.asarray(quantize_mx_op(torch.from_numpy(x), f"fp8_{element_format}", "nearest", 32, axes=[-1]))


def brevitas(x: np.ndarray, element_format: str) -> np.ndarray:
    """Runs MXFloat8e4m3Weight on a linear layer; it returns values."""
    import torch
    from brevitas.nn import QuantLinear
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight

    layer = QuantLinear(x.shape[1], len(x), bias=False, weight_quant=MXFloat8e4m3Weight)
    layer.weight.data = torch.from_numpy(x)
    return layer.quant_weight().value.detach().numpy()


QUANTIZERS: dict[str, tuple[str, Quantize]] = {
    "torchao floor": ("torchao", torchao("FLOOR")),
    "torchao rceil": ("torchao", torchao("RCEIL")),
    "torchao ceil": ("torchao", torchao("CEIL")),
    "torchao even": ("torchao", torchao("EVEN")),
    "modelopt": ("nvidia-modelopt", modelopt),
    "quark floor": ("amd-quark", quark("floor")),
    "quark ceil": ("amd-quark", quark("ceil")),
    "quark even": ("amd-quark", quark("even")),
    "auto-round": ("auto-round", auto_round),
    "compressed-tensors": ("compressed-tensors", compressed_tensors),
    "nncf": ("nncf", nncf),
    "gfloat": ("gfloat", gfloat),
    "microxcaling": ("neural-compressor-pt", microxcaling),
    "brevitas": ("brevitas", brevitas),
}
"""The distribution that has it, and the function."""


class Quantizer:
    """One of them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        distribution, self._quantize = QUANTIZERS[settings["quantizer"]]
        self.version = importlib.metadata.version(distribution)
        self._format = settings["element_format"]
        self._x = np.zeros((1, 32), np.float32)

    def feed(self, feeds: Feeds) -> None:
        """Takes the values."""
        self._x = feeds["x"]

    def run(self) -> None:
        """Does nothing: `output` quantizes."""

    def output(self) -> np.ndarray:
        """Quantizes."""
        with np.errstate(all="ignore"):
            return self._quantize(self._x, self._format)


if __name__ == "__main__":
    serve(Quantizer)
