"""An ONNX Runtime with a CUDA provider, as far as the nodes see it: the C API in Python, memory of the emulated driver.

The library is loaded once more from a copy, because it keeps one table of the C API per process.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p, cast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mxfp8_ops import contract, native, numerics

LEGACY_STREAM = 0
STREAM, DEFAULT_MEMORY, MEMORY_INFO, ALLOCATOR = 0x57, 0, 0x3E, 0xA1
HANDLE, SIZE, OUT = c_void_p, POINTER(c_size_t), POINTER(c_void_p)

# OrtCustomOp: where its functions stand, counting `version` as the first.
GET_NAME, GET_PROVIDER, INPUT_TYPE, INPUT_COUNT, OUTPUT_TYPE, OUTPUT_COUNT, DESTROY = 2, 3, 4, 5, 6, 7, 9
CREATE_V2, COMPUTE_V2 = 17, 18


_DOMAINS: dict[Path, list[list[Any]]] = {}
"""The domains of each library, which makes them once: their overloads."""


_FOLDER = tempfile.TemporaryDirectory(prefix="mxfp8-ops-")


@functools.cache
def own_library(name: str = "provider") -> Path:
    """Returns a copy of the library. Each name has tables of its own."""
    return Path(shutil.copy(native.library_path(), Path(_FOLDER.name) / f"{name}.so"))


@dataclass
class Tensor:
    """A tensor on the GPU."""

    dtype: int
    shape: tuple[int, ...]
    address: int


@dataclass
class Node:
    """The context of kernel creation and compute: attributes and inputs go in, outputs come out."""

    attributes: Mapping[str, int | float | str]
    inputs: Sequence[Tensor | None]
    output_dtypes: tuple[int, ...]
    wanted: tuple[bool, ...]
    constants: frozenset[int]
    outputs: list[Tensor | None] = field(default_factory=list)


class Memory(Protocol):
    """A GPU's memory, and which kernels were loaded for it."""

    loaded: list[str]

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, size: int) -> bytes: ...


class NodeError(Exception):
    """A status other than null."""


class CudaProvider:
    """Registers the library for device "cuda" and runs single nodes on a GPU of its own making."""

    def __init__(self, library: Path, driver: Memory, *, stream: int = STREAM, keep_wide: bool = False) -> None:
        self.options = {b"mxfp8.device": "cuda", **({b"mxfp8.keep_wide": "1"} if keep_wide else {})}
        self.driver, self.stream, self.gpu = driver, stream, 0
        self.library = ctypes.CDLL(str(library))
        self.domains = _DOMAINS.setdefault(library, [])
        self.ops: list[Any] = []  # those of the domain it registers
        self.things: list[Any] = [None]  # what handles stand for; 0 is null
        self.scratch = 0
        self.freed = 0
        self.asked_allocators = self.released_allocators = 0
        self.keep: list[Any] = []
        self.created: Callable[[], None] = lambda: None  # called between making a node and running it
        self.api = (c_void_p * 300)()
        self._fill()
        get_api = CFUNCTYPE(c_void_p, c_uint32)(lambda version: ctypes.addressof(self.api))
        version = CFUNCTYPE(c_void_p)(lambda: 0)
        self.base = (c_void_p * 2)(cast(get_api, c_void_p), cast(version, c_void_p))
        self.keep += [get_api, version]
        self.library.RegisterCustomOps.restype = c_void_p
        self.check(self.library.RegisterCustomOps(c_void_p(1), self.base))

    def run(
        self,
        op: contract.Op,
        inputs: Sequence[np.ndarray],
        dtypes: Sequence[int],
        *,
        wanted: tuple[bool, ...] = (True, True),
        constants: frozenset[int] = frozenset(),
        **given: int | str,
    ) -> list[np.ndarray | None]:
        """Makes a node on the CUDA provider, runs it and returns its outputs.

        `given` are attributes, `constants` the inputs that are known when the node is made.
        """
        attributes = {**op.attributes, **given}
        first = int(attributes["output_dtype"])
        outputs = (first, contract.UINT8) if op is contract.QUANTIZE else (first,)
        found, kernel = self.find(op.name, [*dtypes], outputs), c_void_p()
        tensors = [self.put(x, dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        node = Node(attributes, tensors, outputs, wanted, constants)
        handle = self.handle(node)
        try:
            self.check(self.call(found, CREATE_V2, c_void_p)(found, self.api, handle, ctypes.byref(kernel)))
            self.created()
            loaded = len(self.driver.loaded)
            try:
                self.check(self.call(found, COMPUTE_V2, c_void_p)(kernel, handle))
            finally:
                self.call(found, DESTROY, None)(kernel)
            assert len(self.driver.loaded) == loaded, "a kernel was loaded while the node ran"
            return [None if tensor is None else self.get(tensor) for tensor in node.outputs]
        finally:
            for tensor in (*tensors, *node.outputs):
                if tensor is not None and tensor.address:
                    self.driver.free(tensor.address)

    # --- memory ---

    def put(self, x: np.ndarray, dtype: int) -> Tensor:
        x = np.asarray(x, order="C")
        tensor = Tensor(dtype, x.shape, self.driver.allocate(x.nbytes) if x.nbytes else 0)
        self.driver.write(tensor.address, x.tobytes())
        return tensor

    def get(self, tensor: Tensor) -> np.ndarray:
        size = int(np.prod(tensor.shape)) * dtype_of(tensor.dtype).itemsize
        return np.frombuffer(self.driver.read(tensor.address, size), dtype_of(tensor.dtype)).reshape(tensor.shape)

    # --- handles and statuses ---

    def handle(self, thing: Any) -> c_void_p:
        self.things.append(thing)
        return c_void_p(len(self.things) - 1)

    def check(self, status: int | None) -> None:
        if status:
            raise NodeError(self.things[status])

    @staticmethod
    def call(op: int, index: int, result: Any) -> Callable[..., Any]:
        table = cast(op, POINTER(c_void_p))
        function = CFUNCTYPE(result, c_void_p, c_void_p, c_void_p, c_void_p)(table[index])
        return lambda *arguments: function(*arguments, *[None] * (4 - len(arguments)))

    def find(self, name: str, inputs: list[int], outputs: tuple[int, ...]) -> int:
        """Returns the CUDA provider's overload; an absent bias is the last input of every gemm."""

        def types(op: int, count: int, kind: int) -> list[int]:
            return [self.call(op, kind, c_int)(op, i) for i in range(self.call(op, count, c_size_t)(op))]

        for op in self.ops:
            provider = self.call(op, GET_PROVIDER, c_char_p)(op)
            fits = self.call(op, GET_NAME, c_char_p)(op) == name.encode() and provider == b"CUDAExecutionProvider"
            fits = fits and types(op, INPUT_COUNT, INPUT_TYPE)[: len(inputs)] == inputs
            if fits and types(op, OUTPUT_COUNT, OUTPUT_TYPE) == [*outputs]:
                return op
        raise AssertionError(f"no overload of {name} for {inputs} -> {outputs}")

    # --- the C API, by index ---

    def _fill(self) -> None:
        def entry(index: int, *types: Any, result: Any = c_void_p) -> Callable[[Any], Any]:
            def add(function: Any) -> Any:
                callback = CFUNCTYPE(result, *types)(function)
                self.keep.append(callback)
                self.api[index] = cast(callback, c_void_p)
                return function

            return add

        def gives(index: int, *types: Any) -> Callable[[Any], Any]:
            """Adds a function that always succeeds; what it returns goes where the last argument points."""

            def add(function: Any) -> Any:
                def call(*arguments: Any) -> int:
                    arguments[-1][0] = function(*arguments[:-1])
                    return 0

                return entry(index, *types)(call)

            return add

        @entry(0, c_int, c_char_p)
        def fail(code: int, message: bytes) -> int:
            return self.handle(message.decode()).value or 0

        def text(string: str, to: int, size: Any) -> int:
            size[0] = len(string) + 1
            if to:
                ctypes.memmove(to, string.encode() + b"\0", len(string) + 1)
            return 0

        def add_domain(name: bytes) -> int:
            self.domains.append([])
            return len(self.domains)

        gives(26, c_char_p, OUT)(add_domain)

        @entry(27, HANDLE, HANDLE)
        def add_op(domain: int, op: int) -> int:
            self.domains[domain - 1].append(op)
            return 0

        @entry(28, HANDLE, HANDLE)
        def use_domain(options: int, domain: int) -> int:
            self.ops = self.domains[domain - 1]
            return 0

        gives(237, HANDLE, c_char_p, POINTER(c_int))(lambda options, key: key in self.options)
        entry(238, HANDLE, c_char_p, HANDLE, SIZE)(lambda options, key, to, size: text(self.options[key], to, size))
        entry(244, HANDLE, HANDLE, SIZE)(lambda info, to, size: text("the node", to, size))

        def attribute(index: int, kind: type, result: Any) -> None:
            @entry(index, HANDLE, c_char_p, POINTER(result))
            def get(info: int, name: bytes, out: Any) -> int:
                value = self.things[info].attributes.get(name.decode())
                if not isinstance(value, kind):
                    return fail(2, b"no such attribute")
                out[0] = value
                return 0

        attribute(85, float, c_float)
        attribute(86, int, c_int64)

        @entry(87, HANDLE, c_char_p, HANDLE, SIZE)
        def string_attribute(info: int, name: bytes, out: int, size: Any) -> int:
            value = self.things[info].attributes.get(name.decode())
            return text(value, out, size) if isinstance(value, str) else fail(2, b"no such attribute")

        # No node with a kernel for a GPU has a list.
        no_list = entry(163, HANDLE, c_char_p, POINTER(c_int64), SIZE)
        no_list(lambda info, name, out, size: fail(2, b"no such attribute"))

        def handle_of(tensor: Tensor | None) -> c_void_p | None:
            return None if tensor is None else self.handle(tensor)

        gives(88, HANDLE, SIZE)(lambda context: len(self.things[context].inputs))
        gives(90, HANDLE, c_size_t, OUT)(lambda context, index: handle_of(self.things[context].inputs[index]))

        @entry(249, HANDLE, c_size_t, POINTER(c_int), OUT)
        def constant_input(info: int, index: int, constant: Any, out: Any) -> int:
            constant[0] = index in self.things[info].constants
            out[0] = self.handle(self.things[info].inputs[index]) if constant[0] else None
            return 0

        def output(context: int, index: int, dims: Any, rank: int) -> c_void_p | None:
            node = self.things[context]
            node.outputs += [None] * (index + 1 - len(node.outputs))
            if not node.wanted[index]:
                return None
            shape, dtype = tuple(dims[:rank]), node.output_dtypes[index]
            size = int(np.prod(shape)) * dtype_of(dtype).itemsize
            node.outputs[index] = Tensor(dtype, shape, self.driver.allocate(size) if size else 0)
            return self.handle(node.outputs[index])

        gives(91, HANDLE, c_size_t, POINTER(c_int64), c_size_t, OUT)(output)
        gives(51, HANDLE, OUT)(lambda value: self.things[value].address)
        gives(65, HANDLE, OUT)(lambda value: value)  # a tensor is its own type and shape
        gives(60, HANDLE, POINTER(c_int))(lambda shape: self.things[shape].dtype)
        gives(61, HANDLE, SIZE)(lambda shape: len(self.things[shape].shape))

        @entry(62, HANDLE, POINTER(c_int64), c_size_t)
        def dims(shape: int, out: Any, rank: int) -> int:
            for i, dim in enumerate(self.things[shape].shape):
                out[i] = dim
            return 0

        entry(93, HANDLE, result=None)(lambda status: None)
        entry(99, HANDLE, result=None)(lambda shape: None)

        def allocator(info: int, kind: int) -> int:
            assert kind == DEFAULT_MEMORY
            self.asked_allocators += 1
            return ALLOCATOR

        gives(278, HANDLE, c_int, OUT)(allocator)

        @entry(132, HANDLE, result=None)
        def release_allocator(allocator: int) -> None:
            assert allocator == ALLOCATOR
            self.released_allocators += 1

        gives(77, HANDLE, OUT)(lambda allocator: {ALLOCATOR: MEMORY_INFO}[allocator])
        gives(72, HANDLE, POINTER(c_int))(lambda info: {MEMORY_INFO: self.gpu}[info])

        def scratch(context: int, info: int, size: int) -> int:
            assert info == MEMORY_INFO
            self.scratch += size
            return self.driver.allocate(size)

        gives(277, HANDLE, HANDLE, c_size_t, OUT)(scratch)

        @entry(76, HANDLE, HANDLE)
        def free(allocator: int, address: int) -> int:
            assert allocator == ALLOCATOR
            self.freed += 1
            self.driver.free(address)
            return 0

        gives(193, HANDLE, OUT)(lambda context: self.stream)


def dtype_of(code: int) -> np.dtype:
    name = contract.VALUE_NAMES.get(code)
    return np.dtype(np.uint8) if name is None else np.dtype(numerics.value_dtype(name))
