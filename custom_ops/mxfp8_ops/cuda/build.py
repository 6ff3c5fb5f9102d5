"""Compiles the kernels of src/cuda: CUDA C++ -> machine code (a cubin) for one architecture, cached on disk.

CuPy could compile them, but it passes -ftz=true, which flushes the subnormals that scale codes 0 and 254 need, and it
has no architecture-specific targets (sm_90a). This module needs NVRTC alone: no GPU, driver, CUDA toolkit or CuPy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mxfp8_ops.cuda import system
from mxfp8_ops.errors import BackendError

SOURCES: Final = Path(__file__).parents[1] / "src" / "cuda"

OPTIONS: Final = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false")
"""The options of all kernels. Subnormals stay. The compiler fuses no multiplication with an addition unless the source
does, because the error bounds count roundings."""

TARGETS: Final = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""The targets for which the tests compile. `target` derives any other from the compute capability."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel."""

    code: bytes
    log: str
    """The output of the compiler; with --ptxas-options=-v, registers and spills."""


def target(capability: tuple[int, int]) -> str:
    """Returns the compile target of a compute capability: (8, 6) -> "sm_86", (9, 0) -> "sm_90a".

    From 9.0 on, a target has an `a`: its code may use all features of this capability, and runs on no other.

    Raises:
        BackendError: the capability is below 8.0, and has no bfloat16 tensor cores.
    """
    major, minor = capability
    if capability < (8, 0):
        raise BackendError(
            "cuda",
            f"the GPU has compute capability {major}.{minor}",
            expected="8.0 (Ampere) or later",
            advice="use the CPU kernels",
        )
    # Kernels are compiled on the machine that runs them, so their code need not run on other capabilities.
    return f"sm_{major}{minor}{'a' if capability >= (9, 0) else ''}"


def cache_folder() -> Path:
    """Returns the folder of the cached cubins: mxfp8-graph/cuda in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mxfp8-graph" / "cuda"


def cubin(source: str, kernel: str, arch: str) -> bytes:
    """Returns the machine code of one kernel, from the cache on disk or from `compile_kernel`."""
    # The file name has a digest of everything that the code depends on, so a cached file is never out of date.
    path = cache_folder() / f"{source}-{arch}-{_key(source, kernel, arch)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = compile_kernel(source, kernel, arch).code
    _write(path, code)
    return code


def compile_kernel(source: str, kernel: str, arch: str, extra: tuple[str, ...] = ()) -> Cubin:
    """Returns the machine code of one kernel, compiled now.

    Args:
        source: name of the file in src/cuda, without .cu.
        kernel: the instance, as C++ writes it: "quantize_rows<F32, E4M3, false>".
        arch: the target, such as "sm_90a"; "compute_90a" gives PTX instead of machine code.
        extra: further options for NVRTC.

    Raises:
        BackendError: NVRTC is missing, or refuses the source.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    path = SOURCES / f"{source}.cu"
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), path.name.encode(), 0, None, None))
    # A name expression makes NVRTC instantiate and compile one instance of the template only.
    try:
        _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, kernel.encode()))
        # Only our include path: the kernels need no header of the CUDA toolkit.
        options = [option.encode() for option in (f"--gpu-architecture={arch}", f"-I{SOURCES}", *OPTIONS, *extra)]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status:
            raise BackendError(
                f"cuda: {path.name}, {kernel}, does not compile for {arch}:\n{log}\nexpected code for this target; "
                "install an NVRTC that knows it (pip install --upgrade nvidia-cuda-nvrtc)"
            )
        return Cubin(_text(nvrtc, program, "PTX" if arch.startswith("compute") else "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc_version() -> tuple[int, int]:
    """Returns the version of the NVRTC in use.

    Raises:
        BackendError: NVRTC is missing.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc = _nvrtc()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def sections(code: bytes) -> dict[str, bytes]:
    """Returns the sections of a cubin, which is a 64-bit little-endian ELF file, by name."""
    # ELF64 header: e_shoff at 40, then e_shentsize, e_shnum and e_shstrndx. No dependency of ours reads ELF files.
    table, size, count, names = struct.unpack_from("<Q10xHHH", code, 40)
    headers = [struct.unpack_from("<II16xQQ", code, table + i * size) for i in range(count)]
    start = headers[names][2]
    contents = {}
    for name, kind, offset, length in headers:
        text = code[start + name : code.index(b"\0", start + name)].decode()
        contents[text] = b"" if kind == 8 else code[offset : offset + length]  # SHT_NOBITS has no bytes
    return contents


def entry(code: bytes) -> str:
    """Returns the linker name of the one kernel in a cubin.

    Raises:
        BackendError: the cubin has no kernel, or several.
    """
    names = [name.removeprefix(".text.") for name in sections(code) if name.startswith(".text.")]
    if len(names) != 1:
        raise BackendError(
            "cuda", f"a cubin has the kernels {names}", expected="one kernel", advice=f"delete {cache_folder()}"
        )
    return names[0]


def _key(source: str, kernel: str, arch: str) -> str:
    """Returns a name that changes with anything that changes the machine code."""
    # All headers count, also those that the source does not include: some kernels are compiled again without need, but
    # none is out of date.
    digest = hashlib.sha256(repr((source, kernel, arch, OPTIONS, nvrtc_version())).encode())
    for path in sorted(SOURCES.glob("*.cu*")):
        if path.suffix == ".cuh" or path.stem == source:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _write(path: Path, data: bytes) -> None:
    """Writes a file of the cache; prints a warning if that fails, because a cache is not needed for correct results."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A rename, so that no other process reads half a file. It is atomic only within one file system.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)
    except OSError as error:
        print(f"mxfp8: cannot keep {path} ({error}); this kernel is compiled again next time", file=sys.stderr)


@functools.cache
def _nvrtc() -> Any:
    """Returns NVRTC, from the pip packages if they are installed, otherwise from the system's loader."""
    # The pip packages come first: they belong to this environment, and the system's toolkit may be older.
    tried = []
    for path in system.candidates("libnvrtc", "cuda_nvrtc"):
        try:
            _load_builtins(path)
            library = ctypes.CDLL(path)
        except OSError:
            tried.append(path)
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        library.nvrtcAddNameExpression.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        return library
    raise BackendError(
        "cuda",
        f"no NVRTC that this machine can use (tried {', '.join(tried) or 'none: the driver is too old'})",
        expected="NVIDIA's run-time compiler, of no newer CUDA than the driver's",
        advice="pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12 (CUDA 12)",
    )


def _load_builtins(nvrtc: str) -> None:
    """Loads the library of built-ins beside an NVRTC of the pip packages.

    NVRTC opens it by name when it compiles. NVRTC of CUDA 13.0 has no RPATH, so its loader does not look in its folder,
    but it takes a library of this name that is already loaded.
    """
    if Path(nvrtc).is_absolute():
        for path in sorted(Path(nvrtc).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(path))


def _check(nvrtc: Any, status: int) -> None:
    if status:
        message: bytes = nvrtc.nvrtcGetErrorString(status)
        raise BackendError("cuda", f"NVRTC: {message.decode()}", expected="success", advice="report this as a bug")


def _text(nvrtc: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw
