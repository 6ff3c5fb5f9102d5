"""gemm_fused and what tiles its x, on the emulation of CUDA threads and of wgmma, against `numpy_nodes`. No GPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare import heavy_tailed
from cuda_emulation import FORMATS, device, kernels, launch, plan_gemm, products, queue, route, sampled, source_of
from grids import looped
from test_cuda_emulated import DTYPES, placed
from test_cuda_gemms import X_KINDS, check_gemm

from mxfp8_ops import formats, numerics, numpy_nodes
from mxfp8_ops.cuda import build as cuda_build
from mxfp8_ops.cuda import dispatch, execution, planner
from mxfp8_ops.cuda.planner import CODES
from mxfp8_ops.errors import BackendError

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")


INSTANCES = (("plain", 1), ("plain", 2), ("paired", 1), ("paired", 2), ("two_blocks", 1))
"""Of the kernel: its variant, and how many 64 rows of the weight each of a thread block's two warpgroups takes."""
VARIANTS = ("plain", "paired", "two_blocks")


@contextlib.contextmanager
def instance(variant, blocks, splits=1):
    with dispatch.forced_variant("gemm_fused", variant), dispatch.fixed_cut(blocks=blocks, splits=splits):
        yield


@pytest.fixture(autouse=True)
def fused(request):
    """Takes the fused route, in the tests that ask for `flags`."""
    with dispatch.forced_route("fused") if "flags" in request.fixturenames else contextlib.nullcontext():
        yield


@pytest.fixture
def flags() -> list[int]:
    """Collects whether each product asked to be repaired."""
    return []


def taken(flags: list[int]) -> list[int]:
    """Returns what was collected since the last call."""
    found = [*flags]
    flags.clear()
    return found


def check_fused(flags, *product, **options):
    """`check_gemm`, which notes whether the product asked to be repaired."""
    names = check_gemm(*product, **options)
    flags += device().repairs
    return names


@sampled(
    "x_kind, fmt, instance_of",
    [("bfloat16", "e4m3", ("plain", 1)), ("e4m3", "e5m2", ("paired", 2)), ("e5m2", "e4m3", ("two_blocks", 1))],
    [(*kinds, instance_of) for kinds in products(X_KINDS) for instance_of in INSTANCES],
)
def test_fused_gemm(flags, x_kind, fmt, instance_of):
    """Tails of every dimension; fewer steps than are read ahead, and more than there are stages."""
    shapes = ((130, 300, 352), (5, 18, 32), (70, 40, 96), (129, 257, 1056), (1, 1, 64), (128, 256, 512))
    for (m, n, k), dtype in zip(shapes, itertools.cycle(DTYPES)):
        with instance(*instance_of):
            names = check_fused(flags, m, n, k, x_kind, fmt, dtype, bias=n != 40)
        assert names == ["tile", "gemm_fused", "gemm_float32"]
    assert taken(flags) == [0] * len(shapes)


@sampled("x_kind, fmt", [("e4m3", "e5m2"), ("int8", "int8")], products(X_KINDS))
def test_fused_gemm_with_k_in_splits(flags, x_kind, fmt):
    """Splits of several steps, of one, and one that has nothing to do."""
    for (blocks, splits), dtype, variant in zip(((1, 2), (2, 3), (1, 5)), DTYPES, VARIANTS, strict=True):
        for m, n, k in ((66, 130, 224), (3, 264, 1120)):
            with instance(variant, blocks, splits):
                names = check_fused(flags, m, n, k, x_kind, fmt, dtype, bias=m == 3)
            assert names == ["tile", "gemm_fused", "finish", "gemm_float32"]
    assert taken(flags) == [0] * 6


@looped("dtype", DTYPES)
def test_fused_gemm_into_unaligned_memory(flags, dtype):
    """n % 8 = 0 and y not aligned to 16, which a slice of a tensor may be."""
    x, b = (
        heavy_tailed((9, 64)).astype(numerics.value_dtype("bfloat16")),
        numpy_nodes.quantize(heavy_tailed((16, 64), 1)),
    )
    held, size = [placed(array) for array in (x, *b)], numerics.value_dtype(dtype).itemsize
    y = placed(np.zeros(9 * 16 * size, np.uint8), size)
    at = (t.ctypes.data for t in held[1:])
    product = planner.Gemm(
        CODES["bfloat16"], CODES["e4m3"], CODES[dtype], held[0].ctypes.data, 0, *at, 0, y.ctypes.data, 9, 16, 64
    )
    execution.run(planner.gemm(dispatch.place(device(), planner.CUBLAS), product), queue())
    assert device().launched[-2].startswith("gemm_fused")
    got = y.view(numerics.value_dtype(dtype)).reshape(9, 16).astype(np.float64)
    expected = numpy_nodes.weight_gemm(x, *b).astype(np.float64)
    bound = numpy_nodes.gemm_error_bound(x, numpy_nodes.dequantize(*b), dtype)
    assert (np.abs(got - expected) <= bound).all()


# --- what it cannot do -----------------------------------------------------------------------------------------------


@sampled(
    "fmt, instance_of",
    [("e4m3", ("plain", 1)), ("e5m2", ("two_blocks", 1)), ("int8", ("paired", 2))],
    [*itertools.product(FORMATS, INSTANCES)],
)
def test_a_scale_outside_the_fast_range_is_repaired(flags, fmt, instance_of):
    """Wherever in the weight it is; and the nearest scales inside the range are not."""
    outside, inside = {"e4m3": ((2, 135), (3, 134)), "e5m2": ((9, 143), (10, 142)), "int8": ((253,), (0, 252))}[fmt]
    for code, (row, block) in itertools.product((*outside, *inside), ((0, 0), (199, 4), (63, 10))):

        def change(x, x_scales, b, b_scales, at=(row, block), code=code):  # noqa: PLR0917 - check_gemm's and two more
            b[at[0], 32 * at[1]] = 1
            b_scales[at] = code
            if code > 200:
                x[:] = x.astype(np.float32) * 2.0**-60  # sums must not overflow

        with instance(*instance_of):
            check_fused(flags, 3, 200, 352, "bfloat16", fmt, "float32", change=change)
        assert flags.pop() == (code in outside)


@sampled("fmt, variant", [*zip(FORMATS, VARIANTS[::2], strict=False)], [*itertools.product(FORMATS, VARIANTS)])
def test_a_weight_that_is_nan_or_inf_is_repaired(flags, fmt, variant):
    """Every NaN and Inf, alone in its row, wherever in a word; the largest numbers are not repaired."""
    codes = [code | sign for code in (0x7A, 0x7B, 0x7C, 0x7D, 0x7E, 0x7F) for sign in (0, 0x80)]
    for at, code in zip(itertools.cycle(((0, 0), (17, 95), (5, 31), (9, 66), (3, 45))), codes):

        def change(x, x_scales, b, b_scales, at=at, code=code):  # noqa: PLR0917 - check_gemm's and two more
            b[at] = code

        with instance(variant, 1):
            check_fused(flags, 3, 18, 96, "bfloat16", fmt, "float32", change=change)
        assert flags.pop() == (code & 0x7F > formats.element_format(fmt).max_code), f"{code:#x}"


@looped("fmt, variant", [*zip(FORMATS, VARIANTS, strict=False), ("e4m3", "two_blocks")])
def test_blocks_of_zeros_are_not_repaired(flags, fmt, variant):
    """Their scale is 0, of weights and of x, and of padding there is much."""

    def change(x, x_scales, b, b_scales):
        for elements, scales in ((b, b_scales), (x, x_scales)):
            elements[1], scales[1] = 0, 0
            elements[2, :32], scales[2, 0] = 0x80, 0  # -0

    with instance(variant, 1):
        check_fused(flags, 5, 18, 96, fmt, fmt, "float32", change=change)
    assert taken(flags) == [0]


@sampled("x_kind, variant", [*zip(X_KINDS, VARIANTS, strict=False)], [*itertools.product(X_KINDS[:3], VARIANTS)])
def test_an_x_that_bfloat16_does_not_hold_is_repaired(flags, x_kind, variant):
    """NaN and Inf it holds, and every INT8."""

    def special(x, x_scales, b, b_scales):
        x[1, 7] = np.inf if x_scales is None else 0x7F
        x[2, 8] = np.nan if x_scales is None else 0x7C

    def tiny(x, x_scales, b, b_scales):
        x[0, 3], x_scales[0, 0], b_scales[:] = 3, 0, 130

    with instance(variant, 1):
        check_fused(flags, 5, 18, 96, x_kind, "e4m3", "float32", change=special)
        assert flags.pop() == 0
        if x_kind != "bfloat16":
            check_fused(flags, 5, 18, 96, x_kind, "e4m3", "float32", change=tiny)
            assert flags.pop() == 1


@looped("x_kind", X_KINDS[:3])
def test_variants_take_fewer_launches(x_kind):
    """tile clears the word for the check where it does not set it, and the check takes a multiprocessor a block."""

    def launches(variant):
        with dispatch.forced_route("fused"), instance(variant, 1):
            steps = plan_gemm((x_kind, "e4m3", "float32"), (1024, 8192, 512)).steps()
        return [step.what for step in steps], steps[-1].grid

    kinds, checks = [planner.CLEAR, *[planner.LAUNCH] * 3], 132
    assert launches("plain") == (kinds, 4 * checks)
    for variant in VARIANTS[1:]:
        assert launches(variant) == (kinds[x_kind == "bfloat16" :], checks)


# --- what the emulation sees -----------------------------------------------------------------------------------------

MISTAKES: dict[str, dict[str, str]] = {
    "no mistake": {},
    "registers decoded into too early": {
        "wgmma_wait<1>();\n      decode_half<F, PAIRED>(halves[1]": "decode_half<F, PAIRED>(halves[1]"
    },
    "sums read too early": {"wgmma_wait<0>();": ""},
    "x read too early": {"wait_barrier(landed + 8 * stage, odd);": ""},
    "a wrong phase": {"odd ^= stage == 0;": ""},
    "a tile overwritten while it is read": {
        "STAGES - 2": "STAGES - 1",
        "stage < 2 ? stage + STAGES - 1 : stage - 2": "stage < 1 ? STAGES - 1 : stage - 1",
    },
    "no fence": {"wgmma_fence();": ""},
    "nothing committed": {"wgmma_commit();": ""},
    "the wrong half": {"tile + 4": "tile + 2"},
    "the wrong swizzle": {"const u64 tile = ": "const u64 tile = (1ull << 63) ^ (1ull << 62) ^ "},
    "the wrong stride": {"const u64 tile = ": "const u64 tile = (3ull << 37) ^ "},
}

SCRIPT = """
import sys
from pathlib import Path
import cuda_emulation
from mxfp8_ops.cuda import build, dispatch
build.SOURCES = Path(sys.argv[1])
variant, kernel = sys.argv[2:]
on = cuda_emulation.EmulatedDevice([f"tile<BF16, {str(variant != 'plain').lower()}>", kernel])
launch = on.launch
on.launch = lambda work, stream: "gemm_float32" in work.kernel or launch(work, stream)
cuda_emulation.device = lambda: on
import test_cuda_gemms
test_cuda_gemms.device = cuda_emulation.device
with (
    dispatch.forced_route("fused"),
    dispatch.forced_variant("gemm_fused", variant),
    dispatch.fixed_cut(blocks=1, splits=1),
):
    test_cuda_gemms.check_gemm(130, 140, 1056, "bfloat16", "e4m3", "float32")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "kernel"), [("plain", "gemm_fused<E4M3, 1>"), ("two_blocks", "gemm_fused<E4M3, 1, true, 2>")]
)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulation_sees_mistakes(tmp_path, mistake, variant, kernel):
    """The kernel with one mistake in it gives wrong numbers or ends the process; without one it does not."""
    device()  # skips without a compiler
    shutil.copytree(cuda_build.SOURCES, tmp_path, dirs_exist_ok=True)
    source = tmp_path / "experimental" / "gemm_fused.cu"
    for right, wrong in MISTAKES[mistake].items():
        assert right in source.read_text()
        source.write_text(source.read_text().replace(right, wrong))
    command, folder = [sys.executable, "-c", SCRIPT, str(tmp_path), variant, kernel], Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder.parent), *sys.path])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (mistake == "no mistake"), done.stderr[-2000:]
    assert not done.returncode or "cuda emulation: " in done.stderr or ", expected " in done.stderr, done.stderr[-2000:]


# --- tiles -----------------------------------------------------------------------------------------------------------


@looped("kind, paired", [*itertools.product(X_KINDS, (False, True))])
def test_tiles_have_x_in_the_order_of_k_and_of_the_swizzle(kind, paired):
    """The t-th pair of part c of a row is k = 16 t + 2 c and the next, and part c is in place c ^ (row % 8).

    Paired: k = 16 t + 2 c and the second after it for even c, for odd ones what is between and after.
    """
    m, k, bfloat16 = 131, 96, numerics.value_dtype("bfloat16")
    values = heavy_tailed((m, k)).astype(bfloat16)
    held = [placed(values)]
    if kind in FORMATS:
        codes = numpy_nodes.quantize(values, element_format=kind)
        values, held = numpy_nodes.dequantize(*codes, element_format=kind, dtype="bfloat16"), [*map(placed, codes)]
    tiles, flag = placed(np.zeros(2 * 2 * 128 * 128, np.uint8)), placed(np.zeros(16, np.uint8))
    scales = held[1].ctypes.data if len(held) == 2 else 0
    name = {"bfloat16": "BF16"}.get(kind, kind.upper())
    flag[:] = 1 if kind == "bfloat16" else 0
    arguments = (held[0].ctypes.data, scales, tiles.ctypes.data, m, k, flag.ctypes.data, int(kind == "bfloat16"))
    launch(f"tile<{name}, {str(paired).lower()}>", -(-4 * m * 2 // 256), *arguments)
    got = tiles.view(bfloat16).reshape(2, 2, 128, 8, 4, 2)  # tile, step, row, place, t, of the pair
    padded = np.zeros((256, 128), bfloat16)
    padded[:m, :k] = values
    for row, c, t in itertools.product(range(m), range(8), range(4)):
        found = got[row // 128, :, row % 128, c ^ (row % 8), t]
        first = 16 * t + (4 * (c // 2) + c % 2 if paired else 2 * c)
        expected = padded[row].reshape(2, 64)[:, [first, first + (2 if paired else 1)]]
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
    assert not flag[:4].any()


# --- how it is cut, and when it is taken -----------------------------------------------------------------------------


def planned(m, n, k, variant="plain"):
    """Returns (blocks, splits) of gemm_fused, and its thread blocks."""
    with dispatch.forced_route("fused"), dispatch.forced_variant("gemm_fused", variant):
        steps = plan_gemm(("bfloat16", "e4m3", "float32"), (m, n, k)).steps()
    (step,) = [step for step in steps if source_of(planner.kernels()[step.kernel]) == "gemm_fused"]
    return (int(planner.kernels()[step.kernel].split(", ")[1].rstrip(">")), step.arguments[9]), step.grid


def test_cuts_leave_no_multiprocessor_idle():
    def cut(m, n, k):
        return planned(m, n, k)[0]

    assert cut(512, 8192, 8192) == cut(1024, 8192, 8192) == (2, 1)  # 128 and 256 thread blocks
    assert cut(256, 8192, 8192) == (1, 1)
    assert cut(128, 8192, 8192) == (1, 2)
    assert cut(100, 1024, 8192)[1] == 8
    assert cut(100, 1024, 512) == cut(1, 1, 32) == (1, 1)
    with dispatch.fixed_cut(blocks=2, splits=3):
        assert planned(129, 257, 512) == ((2, 3), 3 * 2 * 2)


def test_two_blocks_a_multiprocessor_have_room_for_twice_as_many():
    assert planned(512, 8192, 8192, "two_blocks") == ((1, 1), 256)
    assert planned(128, 8192, 8192, "two_blocks")[0] in {(1, 2), (1, 4)}
    with dispatch.fixed_cut(blocks=2, splits=1):  # there is no such instance
        assert planned(512, 8192, 8192, "two_blocks") == ((1, 1), 256)


def chosen(capability=(9, 0), kind="bfloat16", m=100, k=64, b_kind="e4m3", **options):
    return route((kind, b_kind), (m, 16, k), capability=capability, **options)


def test_the_fused_gemm_is_never_chosen_unasked_and_only_on_hopper():
    assert chosen() == "large"
    with dispatch.allowed("fused"):
        assert chosen() == chosen(m=2048) == chosen(kind="e5m2", b_kind="e5m2") == "fused"
        for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
            assert chosen(capability) == "large"
        assert chosen(m=64) == "skinny"
        assert chosen(m=2049) == chosen(k=40) == chosen(kept=True) == "large"
    with dispatch.forced_route("fused"):
        assert chosen(m=1, kept=True) == "fused"
        with pytest.raises(BackendError, match="forced route 'fused'"):
            chosen((10, 0))


def test_a_weight_that_is_kept_in_bfloat16_is_used():
    with dispatch.allowed("fused"):
        assert check_gemm(70, 40, 96, "bfloat16", "e4m3", "float32")[0] == "tile"
        assert check_gemm(70, 40, 96, "bfloat16", "e4m3", "float32", wide=True)[0].startswith("matmul_bf16")


def test_only_a_device_that_can_run_it_compiles_it():
    fused = {name for name in kernels() if source_of(name) == "gemm_fused"}
    assert len(fused) == len(FORMATS) * len(INSTANCES)
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert {*kernels()} - {*kernels(capability)} == fused


@pytest.mark.slow
def test_every_kernel_ran():
    """Each instance is launched by some shape above; this names the one that is not."""
    if not any(name.startswith("gemm_fused") for name in device().ever_launched):
        pytest.skip("needs the tests above in the same process")
    here = {name for name in kernels() if source_of(name) in {"tile", "gemm_fused"}}
    assert not here - device().ever_launched
