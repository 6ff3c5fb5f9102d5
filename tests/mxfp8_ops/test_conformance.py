"""The conformance kit: its vectors are the reference's, correct quantizers pass, and reports show the differences."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from grids import looped
from releases import release
from test_backends import Onnx

from mxfp8_ops import conformance, cpu, numpy_nodes
from mxfp8_ops.conformance import __main__ as cli
from mxfp8_ops.conformance import folder, vectors
from mxfp8_ops.conformance.rules import RULES
from mxfp8_ops.errors import ContractError
from mxfp8_ops.formats import ELEMENT_FORMATS
from mxfp8_ops.node import FLOAT, UINT8

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
    with np.load(vectors.PATH) as file:
        assert sorted(file.files) == sorted(expected)
        for name, array in expected.items():
            assert file[name].dtype == array.dtype, name
            assert _bytes_of(file[name]) == _bytes_of(array), name
    assert vectors.PATH.stat().st_size < 360_000


def test_every_upper_pattern_is_a_block():
    (case,) = (c for c in conformance.cases("quantize") if c.name == "quantize/patterns/e4m3-ceil")
    assert sorted(case.inputs[0].view(np.uint32)[:, 0] >> 16) == list(range(1 << 16))


def test_exact_products_are_exact_in_float32_in_any_order():
    for case in conformance.cases("gemm"):
        y, bound = case.expected
        if case.group == "long":
            assert (bound > 0).all()
            continue
        assert not bound[np.isfinite(y)].any()
        a, a_scales, b, b_scales, *bias = case.inputs
        x = numpy_nodes.dequantize(a, a_scales, element_format=case.options["a_format"])
        w = numpy_nodes.dequantize(b, b_scales, element_format=case.options["b_format"])
        for order in (slice(None), slice(None, None, -1)):
            with np.errstate(invalid="ignore"):
                products = (x[:, None, order] * w[None, :, order]).astype(np.float32)
            total = np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1] + (bias[0] if bias else 0)
            np.testing.assert_array_equal(total, y, err_msg=case.name)


def test_the_kernels_conform():
    for result in (
        conformance.check_quantizer(cpu.quantize),
        conformance.check_dequantizer(cpu.dequantize),
        conformance.check_gemm(cpu.gemm),
    ):
        assert result.passed, str(result)


@pytest.mark.parametrize("opset", [21, 23, 26])
def test_the_function_bodies_conform(opset):
    bodies = Onnx(opset)

    def gemm(a, a_scales, b, b_scales, bias=None, *, a_format, b_format):
        dtypes = [ELEMENT_FORMATS[name].onnx_dtype for name in (a_format, b_format)]
        inputs = {
            "A": (a, dtypes[0]),
            "A_scales": (a_scales, UINT8),
            "B": (b, dtypes[1]),
            "B_scales": (b_scales, UINT8),
        }
        inputs |= {} if bias is None else {"bias": (bias, FLOAT)}
        return bodies.run("MXFP8Gemm", inputs, {"Y": FLOAT})[0]

    def dequantize(elements, scales, *, element_format):
        return bodies.dequantize(elements, scales, element_format=element_format, dtype="float32")

    checks = conformance.check_quantizer(bodies.quantize), conformance.check_dequantizer(dequantize)
    for result in (*checks, conformance.check_gemm(gemm)):
        assert result.passed, str(result)


def test_an_independent_quantizer_differs_in_nan_and_infinity_alone():
    with np.errstate(invalid="ignore"):
        result = conformance.check_quantizer(
            floor_of_ml_dtypes, element_formats=["e4m3"], scale_roundings=["floor"], axes=[-1]
        )
    failed = {outcome.group: outcome.total - outcome.passed for outcome in result.outcomes}
    assert failed["patterns"] == 256, str(result)  # the patterns of NaN and infinities
    assert [group for group, count in failed.items() if count and group not in ("patterns", "binades", "special")] == []
    assert not result.passed


def test_a_difference_names_the_block_and_both_bytes():
    def off_by_one(x, **options):
        elements, scales = numpy_nodes.quantize(x, **options)
        if x.shape == (6, 47):
            scales[4, 1] += 1
        return elements, scales

    result = conformance.check_quantizer(off_by_one, element_formats=["e4m3"], scale_roundings=["ceil"])
    (outcome,) = (o for o in result.outcomes if o.passed < o.total)
    assert (outcome.group, outcome.passed, outcome.total) == ("partial", 11, 12)
    (case,) = (c for c in conformance.cases("quantize") if c.name == "quantize/partial/e4m3-ceil")
    scale = int(case.expected[1][4, 1])
    assert outcome.differences[0].startswith("block [4, 1]: ")
    assert f"scale {scale + 1:02x}, expected {scale:02x}" in outcome.differences[0]
    assert outcome.differences[0] in str(result)


@looped("rule", RULES)
def test_the_answers_of_a_known_rule_are_recognized(rule):
    def quantize(x, *, axis, element_format, scale_rounding):
        return rule.quantize(x, element_format=element_format, axis=axis)

    for element_format in rule.element_formats:
        result = conformance.check_quantizer(quantize, element_formats=[element_format], scale_roundings=["ceil"])
        assert result.agrees == {f"{element_format}-ceil": f"the rule of {rule.name}"}, str(result)


@pytest.mark.slow
@looped("mode", ["FLOOR", "EVEN", "CEIL", "RCEIL"])
def test_the_rules_of_torchao_are_torchao(mode):
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    torch = pytest.importorskip("torch")
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    if release("torchao") < (0, 18) and mode == "RCEIL":
        pytest.skip("torchao 0.17 gives blocks with a NaN elements of zero")

    def quantize(x, *, axis, element_format, scale_rounding):
        dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element_format]
        scales, elements = to_mx(torch.from_numpy(x), dtype, 32, config.ScaleCalculationMode[mode])
        return elements.view(torch.uint8), scales.view(torch.uint8)

    result = conformance.check_quantizer(quantize, scale_roundings=["ceil"], axes=[-1], partial_blocks=False)
    for told in result.agrees.values():
        assert told.startswith(f"the rule of torchao 0.18 {mode}"), str(result)
    assert len(result.agrees) == 2


def test_what_a_function_raises_or_gives_wrong_is_told():
    def broken(elements, scales, *, element_format):
        if scales.shape[1] == 2:
            raise RuntimeError("no partial blocks\nand more")
        return np.zeros(3, np.float32)

    result = conformance.check_dequantizer(broken, element_formats=["e5m2"])
    assert [outcome.error for outcome in result.outcomes] == [
        "gave shape (3,) instead of (50, 256)",
        "raised RuntimeError: no partial blocks",
    ]
    assert not result.passed


def test_a_gemm_beyond_the_bound_fails_and_one_within_passes():
    def nudged(by):
        def gemm(*operands, **options):
            y = numpy_nodes.gemm(*operands, **options)
            case = next(c for c in conformance.cases("gemm") if c.inputs[0].shape == operands[0].shape)
            return y + np.float32(by) * case.expected[1] if case.group == "long" else y

        return gemm

    assert conformance.check_gemm(nudged(0.5)).passed
    result = conformance.check_gemm(nudged(1.5))
    assert [o.group for o in result.outcomes if o.passed < o.total] == ["long"]


def test_minus_zero_is_not_zero():
    def without_signs(elements, scales, **options):
        return numpy_nodes.dequantize(elements, scales, **options) + np.float32(0)

    assert not conformance.check_dequantizer(without_signs).passed


def answered(path: Path) -> None:
    """Answers the exported cases, from cases.txt and the raw files alone, as a program in another language would."""
    for line in (path / "cases.txt").read_text().splitlines():
        if not line.startswith("quantize "):
            continue
        _, group, element_format, rounding, rows, k, axis = line.split()
        x = np.fromfile(path / "quantize" / group / "x.bin", "<f4").reshape(int(rows), int(k))
        codes = cpu.quantize(x, axis=int(axis), element_format=element_format, scale_rounding=rounding)
        for name, array in zip(("elements", "scales"), codes, strict=True):
            array.tofile(path / "quantize" / group / f"{element_format}-{rounding}" / f"{name}.bin")


def test_files_that_a_program_wrote_are_judged(tmp_path, capsys):
    path = tmp_path / "vectors"
    assert cli.main(["export", str(path)]) == 0
    assert cli.main(["check", str(path)]) == 2
    assert "has no answer" in capsys.readouterr().err
    answered(path)
    assert cli.main(["check", str(path)]) == 0
    assert "72 of 72 cases passed" in capsys.readouterr().out
    wrong = path / "quantize/random/e4m3-ceil/scales.bin"
    wrong.write_bytes(b"\0" + wrong.read_bytes()[1:])
    (path / "quantize/ties/e4m3-ceil/elements.bin").write_bytes(b"123")
    (path / "quantize/partial/e4m3-ceil/elements.bin").unlink()
    assert cli.main(["check", str(path)]) == 1
    told = capsys.readouterr().out
    for words in ("block [0, 0]: ", "elements.bin has 3 bytes instead of 1952", "No such file", "69 of 72 cases"):
        assert words in told


def test_a_folder_that_exists_is_not_written_to(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ContractError, match="mine: it exists"):
        folder.export(tmp_path / "mine")
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["quantizer", "mxfp8_ops.cpu:quantize", "--formats", "e4m3", "--roundings", "ceil"], 0),
        (["quantizer", "mxfp8_ops.cpu:quantize", "--formats", "e5m2", "--rows-only", "--whole-blocks"], 0),
        (["dequantizer", "mxfp8_ops.cpu:dequantize"], 0),
        (["gemm", "mxfp8_ops.cpu:gemm"], 0),
        (["gemm", "mxfp8_ops.cpu:quantize"], 1),
        (["gemm", "nonsense"], 2),
        (["gemm", "no_such_module:gemm"], 2),
        (["gemm", "mxfp8_ops.cpu:no_such_function"], 2),
        (["check", "/no/such/folder"], 2),
    ],
)
def test_the_exit_code_says_whether_all_passed(arguments, code, capsys):
    assert cli.main(arguments) == code
    told = capsys.readouterr()
    assert ("error: " in told.err) == (code == 2)


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "mxfp8_ops.conformance", "dequantizer", "mxfp8_ops.numpy_nodes:dequantize"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "6 of 6 cases passed"


def test_outcomes_are_data():
    (first, *_) = conformance.check_dequantizer(numpy_nodes.dequantize).outcomes
    assert dataclasses.asdict(first)["total"] == 50 * 256
