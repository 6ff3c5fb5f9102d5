"""The conformance kit: its vectors are the reference's, correct quantizers pass, and reports show the differences."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from releases import release

from mxfp8_ops import conformance, cpu, numpy_nodes
from mxfp8_ops.errors import ContractError

ROOT = Path(__file__).parents[2]


def floor_of_ml_dtypes(x, *, axis, element_format, scale_rounding):
    """OCP's floor rule for finite values, from ml_dtypes alone; E4M3, blocks along rows."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    _, exponent = np.frexp(np.abs(blocks).max(-1))
    exponent = np.where(np.abs(blocks).max(-1) > 0, np.maximum(exponent - 1 - 8, -127), -127)
    scaled = np.clip(np.ldexp(blocks.astype(np.float64), -exponent[..., None]), -448, 448)
    elements = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return elements.reshape(len(x), -1)[:, : x.shape[1]], (exponent + 127).astype(np.uint8)


def _bytes_of(array: np.ndarray) -> bytes:
    """Returns the values' bits; those of every NaN alike with a NumPy that gives products of NaN another sign."""
    if release("numpy") < (2, 4) and array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def test_the_file_is_what_the_reference_gives():
    spec = importlib.util.spec_from_file_location("conformance_vectors", ROOT / "custom_ops/conformance_vectors.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    expected = script.vectors()
    with np.load(conformance.PATH) as file:
        assert sorted(file.files) == sorted(expected)
        for name, array in expected.items():
            assert file[name].dtype == array.dtype, name
            assert _bytes_of(file[name]) == _bytes_of(array), name
    assert conformance.PATH.stat().st_size < 360_000


def test_exact_products_are_exact_in_float32_in_any_order():
    for case in conformance.cases("gemm"):
        y = case.expected["y"]
        if case.name.startswith("gemm/long/"):
            assert (case.bound > 0).all()
            continue
        assert not case.bound[np.isfinite(y)].any()
        a, a_scales, b, b_scales, *bias = case.inputs
        x = numpy_nodes.dequantize(a, a_scales, element_format=case.options["a_format"])
        w = numpy_nodes.dequantize(b, b_scales, element_format=case.options["b_format"])
        for order in (slice(None), slice(None, None, -1)):
            with np.errstate(invalid="ignore"):
                products = (x[:, None, order] * w[None, :, order]).astype(np.float32)
            total = np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1] + (bias[0] if bias else 0)
            np.testing.assert_array_equal(total, y, err_msg=case.name)


@pytest.mark.parametrize("node", ["quantize", "dequantize", "gemm"])
def test_the_kernels_conform(node):
    result = conformance.check(node, getattr(cpu, node))
    assert result.passed, str(result)


def test_a_dequantizer_that_loses_the_sign_of_zero_does_not_conform():
    assert not conformance.check("dequantize", lambda *codes, **o: numpy_nodes.dequantize(*codes, **o) + 0).passed


def test_options_that_no_case_has_are_an_error():
    with pytest.raises(ContractError, match="no such case; expected options that the vectors have"):
        conformance.check("quantize", cpu.quantize, element_format=["e4m4"])


def test_an_independent_quantizer_differs_in_nan_and_infinity_alone():
    with np.errstate(invalid="ignore"):
        result = conformance.check(
            "quantize", floor_of_ml_dtypes, element_format=["e4m3"], scale_rounding=["floor"], axis=[-1]
        )
    failed = {outcome.case.split("/")[1]: outcome.total - outcome.passed for outcome in result.outcomes}
    assert 256 <= failed["patterns"] <= 2 * 256, str(result)  # those of NaN and infinities, in element or scale
    assert [group for group, count in failed.items() if count and group not in ("patterns", "binades", "special")] == []
    assert not result.passed


def test_a_difference_names_the_place_and_both_bytes():
    def off_by_one(x, **options):
        elements, scales = numpy_nodes.quantize(x, **options)
        if x.shape == (6, 47):
            scales[4, 1] += 1
        return elements, scales

    result = conformance.check("quantize", off_by_one, element_format=["e4m3"], scale_rounding=["ceil"])
    (outcome,) = (o for o in result.outcomes if o.passed < o.total)
    total = 6 * (47 + 2)
    assert (outcome.case, outcome.passed, outcome.total) == ("quantize/partial/e4m3-ceil", total - 1, total)
    (case,) = (c for c in conformance.cases("quantize") if c.name == outcome.case)
    scale = int(case.expected["scales"][4, 1])
    assert outcome.told == (f"scales[4, 1]: {scale + 1:02x}, expected {scale:02x}",)
    assert outcome.told[0] in str(result)


def test_what_a_function_raises_or_gives_wrong_is_told():
    def broken(elements, scales, *, element_format):
        if scales.shape[1] == 2:
            raise RuntimeError("no partial blocks\nand more")
        return np.zeros(3, np.float32)

    result = conformance.check("dequantize", broken, element_format=["e5m2"])
    assert [outcome.told for outcome in result.outcomes] == [
        ("gave shapes [(3,)] instead of [(50, 256)]",),
        ("raised RuntimeError: no partial blocks",),
    ]
    assert not result.passed


def test_a_gemm_beyond_the_bound_fails_and_one_within_passes():
    def nudged(by):
        def gemm(*operands, **options):
            y = numpy_nodes.gemm(*operands, **options)
            if operands[0].shape != (3, 2080):
                return y
            return y + np.float32(by) * next(c.bound for c in conformance.cases("gemm") if "/long/" in c.name)

        return gemm

    assert conformance.check("gemm", nudged(0.5)).passed
    result = conformance.check("gemm", nudged(1.5))
    assert [o.case for o in result.outcomes if o.passed < o.total] == ["gemm/long/e4m3-e4m3"]


def test_files_that_a_program_wrote_are_judged(tmp_path):
    """It reads the archive as any language can: a header of 128 bytes, then the array."""

    def judged() -> tuple[int, str]:
        words = [sys.executable, "-m", "mxfp8_ops.conformance", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, told = judged()
    assert (code, "has no answer; expected folders such as gemm/" in told) == (2, True)
    with zipfile.ZipFile(conformance.PATH) as archive:
        for case in conformance.cases("quantize"):
            x = archive.read(f"quantize/{case.name.split('/')[1]}/x.npy")
            values = np.frombuffer(x, "<f4", offset=128).reshape(case.inputs[0].shape)
            (tmp_path / case.name).mkdir(parents=True)
            for name, codes in zip(("elements", "scales"), cpu.quantize(values, **case.options), strict=True):
                codes.tofile(tmp_path / case.name / f"{name}.bin")
    code, told = judged()
    assert (code, told.splitlines()[-1]) == (0, "72 of 72 cases passed")
    wrong = tmp_path / "quantize/random/e4m3-ceil/scales.bin"
    wrong.write_bytes(b"\0" + wrong.read_bytes()[1:])
    (tmp_path / "quantize/ties/e4m3-ceil/elements.bin").write_bytes(b"123")
    (tmp_path / "quantize/partial/e4m3-ceil/elements.bin").unlink()
    code, told = judged()
    assert code == 1
    for words in ("scales[0, 0]: 00, ", "elements.bin: cannot reshape", "No such file", "69 of 72 cases"):
        assert words in told


def test_whole_blocks_pad_what_a_quantizer_of_whole_blocks_gets():
    def whole(x, *, axis, **options):
        assert x.shape[axis] % 32 == 0
        return numpy_nodes.quantize(x, axis=axis, **options)

    assert conformance.check("quantize", whole, whole_blocks=True, element_format=["e4m3"]).passed
