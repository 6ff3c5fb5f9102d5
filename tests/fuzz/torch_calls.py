"""Calls of the torch ops with hostile arguments: a result, or an error in words.

An input seeds the generator that draws one call. In a process with AddressSanitizer, and with the library built so
(`-DMXFP8_SANITIZE=address`), a read or write outside a tensor's memory ends the worker, which is a finding.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from mxfp8_ops import (
    formats,
    torch_ops,  # noqa: F401 - registers torch.ops.mxfp8
)

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_ODD_DTYPES: Final = (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
_SIZES: Final = (0, 1, 2, 3, 31, 32, 33, 64, 65, 100)


def seeds() -> list[bytes]:
    """Returns the seeds of a few calls."""
    return [struct.pack("<q", seed) for seed in range(20)]


def mutate(data: bytes, random: random.Random) -> bytes:
    """Returns another seed."""
    return random.randbytes(8)


def check(data: bytes, folder: Path) -> None:
    """Makes the call that `data` stands for."""
    rng = random.Random(data)
    op = rng.choice((_quantize, _quantize_both, _dequantize, _gemm, _weight_gemm, _embedding))
    try:
        _read(op(rng))
    except NotImplementedError as error:
        if "Could not run 'mxfp8::" not in str(error):  # torch's own refusal of a layout without a kernel
            raise


def _read(result: Any) -> None:
    """Reads every value of a result, which the sanitizer then sees."""
    for tensor in result if isinstance(result, tuple) else (result,):
        if tensor.numel() and not tensor.is_meta:
            bytes(tensor.contiguous().view(torch.uint8).numpy())


def _quantize(rng: random.Random) -> Any:
    x = _tensor(rng, _shape(rng), _dtype(rng))
    axis = rng.choice((-1, -1, 0, 1, -2, 5, 2**40, -(2**62)))
    return torch.ops.mxfp8.quantize(x, axis, *_names(rng))


def _quantize_both(rng: random.Random) -> Any:
    return torch.ops.mxfp8.quantize_both(_tensor(rng, _shape(rng, rank=2), _dtype(rng)), *_names(rng))


def _dequantize(rng: random.Random) -> Any:
    shape = _shape(rng)
    axis = rng.randrange(max(1, len(shape)))
    elements, scales = _packed(rng, shape, axis)
    return torch.ops.mxfp8.dequantize(elements, scales, axis, _names(rng)[0], rng.choice((None, *_DTYPES, torch.int32)))


def _gemm(rng: random.Random) -> Any:
    x, w = _operands(rng)
    a, b = _packed(rng, x, -1), _packed(rng, w, -1)
    return torch.ops.mxfp8.gemm(*a, *b, _bias(rng, w), _names(rng)[0], _names(rng)[0], rng.choice((None, *_DTYPES)))


def _weight_gemm(rng: random.Random) -> Any:
    x, w = _operands(rng)
    values = _tensor(rng, x, _dtype(rng))
    b, bias, b_format = _packed(rng, w, -1), _bias(rng, w), _names(rng)[0]
    return torch.ops.mxfp8.weight_gemm(values, *b, bias, b_format, None, rng.choice((None, torch.bfloat16, *_DTYPES)))


def _embedding(rng: random.Random) -> Any:
    table = _shape(rng, rank=2 if rng.random() < 0.95 else None)
    rows = max(1, table[0] if table else 1)
    index = rng.choice((torch.int64, torch.int64, torch.int32))
    ids = torch.tensor([rng.randrange(-rows, rows) for _ in range(rng.choice(_SIZES))], dtype=index)
    if rng.random() < 0.3:
        ids = _tensor(rng, _shape(rng), index)
    return torch.ops.mxfp8.embedding(ids, *_packed(rng, table, -1), _names(rng)[0], rng.choice((None, *_DTYPES)))


def _operands(rng: random.Random) -> tuple[list[int], list[int]]:
    k, batch = rng.choice(_SIZES), [rng.choice((1, 2, 3)) for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    x = [*batch, rng.choice(_SIZES), k]
    w = [*(batch if rng.random() < 0.3 else []), rng.choice(_SIZES), k if rng.random() < 0.9 else rng.choice(_SIZES)]
    return x[-1:] if rng.random() < 0.1 else x, w


def _bias(rng: random.Random, w: list[int]) -> torch.Tensor | None:
    if rng.random() < 0.5:
        return None
    size = w[-2] if rng.random() < 0.9 else rng.choice(_SIZES)
    return _tensor(rng, [size], torch.float32 if rng.random() < 0.9 else _dtype(rng))


def _packed(rng: random.Random, shape: list[int], axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = list(shape)
    if scales:
        scales[axis] = -(-scales[axis] // formats.BLOCK_SIZE) + rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 3))
    return _tensor(rng, shape, torch.uint8), _tensor(rng, scales, torch.uint8)


def _tensor(rng: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns random bits in a memory of exactly that size, in one of many layouts; sometimes without its memory."""
    layouts: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
        lambda t: torch.stack((t, t), -1)[..., 0],
        lambda t: t[..., :1].expand(t.shape) if t.dim() and t.shape[-1] else t,
        lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]] if t.dim() else t,
        lambda t: t.flip(0) if t.dim() and t.dtype is not torch.float8_e4m3fn else t,  # torch cannot flip float8
    )
    count = 1
    for size in shape:
        count *= size
    made = torch.frombuffer(bytearray(rng.randbytes(count * dtype.itemsize) or b"\0" * 16), dtype=torch.uint8)
    if dtype is torch.bool:
        made = made & 1
    tensor = made[: count * dtype.itemsize].clone().view(dtype).reshape(shape)
    if rng.random() < 0.4:
        tensor = rng.choice(layouts)(tensor)
    if rng.random() < 0.04:
        tensor.untyped_storage().resize_(rng.choice((0, tensor.untyped_storage().nbytes() // 2)))
    elif rng.random() < 0.02:
        change = rng.choice((lambda t: t.to("meta"), lambda t: t.to_sparse(), lambda t: t.to(torch.complex64)))
        with contextlib.suppress(NotImplementedError):  # torch has no sparse float8 tensors
            tensor = change(tensor)
    return tensor


def _shape(rng: random.Random, rank: int | None = None) -> list[int]:
    return [rng.choice(_SIZES) for _ in range(rank if rank is not None else rng.choice((0, 1, 2, 2, 2, 3)))]


def _dtype(rng: random.Random) -> torch.dtype:
    return rng.choice(_DTYPES if rng.random() < 0.95 else _ODD_DTYPES)


def _names(rng: random.Random) -> tuple[str, str]:
    right = rng.random() < 0.97
    return rng.choice(("e4m3", "e5m2") if right else ("", "e4m3\0", "float8")), rng.choice(("ceil", "floor", "even"))
