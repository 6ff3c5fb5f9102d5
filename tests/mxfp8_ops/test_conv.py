"""MXFP8Conv: the reference against torch, the kernels on every instruction set against the reference, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compare import assert_within, heavy_tailed
from grids import looped
from one_node import one_node_model, run
from ort_models import FLOAT, model, node

from mxfp8_ops import contract, cpu, native, numpy_nodes, ort
from mxfp8_ops.errors import ContractError, Mxfp8Error, ShapeError
from mxfp8_ops.nodes.conv import EPILOGUES, Settings, Window, conv_error_bound, epilogue_function

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow):RuntimeWarning")

FORMATS, DTYPES = ("int8", "e4m3", "e5m2"), ("float32", "float16", "bfloat16")


def weight(*shape: int, fmt: str = "int8", seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return numpy_nodes.quantize(heavy_tailed(shape, seed), element_format=fmt)


def quantized(x: np.ndarray, s: Settings) -> np.ndarray:
    """Returns the values of x that a convolution multiplies."""
    codes = numpy_nodes.quantize(x, axis=1, element_format=s.x_format, scale_rounding=s.scale_rounding)
    return numpy_nodes.dequantize(*codes, axis=1, element_format=s.x_format)


def check(x: np.ndarray, b: tuple[np.ndarray, np.ndarray], s: Settings, *, threads: int = 0, **optional: Any) -> None:
    """Fails unless the kernels are within the bound of the reference."""
    expected = numpy_nodes.conv(x, *b, **optional, settings=replace(s, dtype="float32"))
    w = numpy_nodes.dequantize(*b, element_format=s.b_format)
    bound = conv_error_bound(np.nan_to_num(quantized(x, s)), w, **optional, settings=s)
    got = cpu.conv(x, *b, **optional, settings=s, threads=threads)
    assert got.dtype.name == s.dtype
    assert_within(got, expected, bound, str(s))


# --- The reference ---------------------------------------------------------------------------------------------------


@looped("axes, group", [(1, 1), (2, 1), (2, 2)])
def test_the_reference_is_the_convolution_of_torch_with_quantized_operands(axes: int, group: int) -> None:
    torch = pytest.importorskip("torch")
    x, b = heavy_tailed((2, 64, *(9, 8)[:axes])), weight(10, *(3, 2)[:axes], 64 // group)
    s = Settings(strides=(2, 1)[:axes], pads=(1, 2) * axes, dilations=(1, 2)[:axes], group=group)
    pads = [size for begin, end in zip(s.pads[:axes], s.pads[axes:], strict=True) for size in (begin, end)]
    padded = np.pad(quantized(x, s), [(0, 0), (0, 0), *zip(pads[::2], pads[1::2], strict=True)])
    w = np.moveaxis(numpy_nodes.dequantize(*b, element_format="int8"), -1, 1)
    operands = (torch.from_numpy(np.ascontiguousarray(t)).double() for t in (padded, w))
    conv = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv1d
    expected = conv(*operands, stride=s.strides, dilation=s.dilations, groups=group).numpy()
    np.testing.assert_array_equal(numpy_nodes.conv(x, *b, settings=s), expected.astype(np.float32))


@looped("name, alpha, beta", [
    ("clip", -0.5, 6.0), ("clip", 1.0, 2.0), ("leaky_relu", 0.1, 0.0), ("leaky_relu", -3.0, 0.0),
    ("hard_swish", 1 / 6, 0.5), ("hard_swish", 0.2, 0.4),
])  # fmt: skip
def test_no_epilogue_is_steeper_than_it_says(name: str, alpha: float, beta: float) -> None:
    x = np.linspace(-20, 20, 1_000_001)
    row = epilogue_function(name, alpha, beta)
    steepest = np.abs(np.diff(row.function(x)) / np.diff(x)).max()
    assert steepest <= row.steepest * (1 + 1e-6)


def test_a_nan_reaches_the_windows_of_its_pixel_alone() -> None:
    x = heavy_tailed((1, 40, 9))
    x[0, 35, 4] = np.nan
    y = numpy_nodes.conv(x, *weight(3, 3, 40), settings=Settings(pads=(1, 1)))
    assert np.isnan(y[0]).all(0).tolist() == [3 <= pixel <= 5 for pixel in range(9)]


# --- The kernels -----------------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], Settings, dict[str, Any]]:
    """Returns operands and settings of a convolution with an output."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    axes, group = pick(1, 2, 2), pick(1, 1, 1, 2, 3)
    c = pick(32, 64) * group if group > 1 else pick(1, 16, 31, 32, 40, 64, 100, 288)
    o, kernel = group * int(rng.integers(1, 40)), tuple(int(k) for k in rng.integers(1, 5, axes))
    strides, dilations = (tuple(int(v) for v in rng.integers(1, most, axes)) for most in (4, 3))
    pads = tuple(int(v) for v in rng.integers(0, 4, 2 * axes))
    sizes = [int(rng.integers(d * (k - 1) + 1, 24)) for k, d in zip(kernel, dilations, strict=True)]
    x = (heavy_tailed((pick(1, 1, 2, 3), c, *sizes), seed) / 16).astype(pick("float32", "float32", "float16"))
    x_format = pick("int8", "int8", "e4m3", "e5m2")
    s = Settings(
        strides, pads, dilations, group, x_format, pick("int8", "int8", "e4m3"), pick("ceil", "floor", "even"),
        pick(*EPILOGUES), 0.25, 0.75, pick("before", "after"), pick("float32", "float32", "float16", "bfloat16"),
    )  # fmt: skip
    b = weight(o, *kernel, c // group, fmt=s.b_format, seed=seed + 1)
    optional: dict[str, Any] = {}
    if pick(True, False):
        optional["bias"] = heavy_tailed((o,), seed + 2)
    if pick(True, False):
        result = Window.from_shapes("test", x.shape, b[0].shape, s).result
        optional["residual"] = (heavy_tailed(result, seed + 3) / 16).astype(pick("float32", "float16"))
    return x, b, s, optional


@looped("seed", range(60))
def test_random_convolutions_are_within_the_bound(isa: str, seed: int) -> None:
    x, b, s, optional = random_case(seed)
    check(x, b, s, threads=seed % 4, **optional)


@looped("shape, o, kernel, group", [
    ((1, 64, 40, 40), 64, (3, 3), 1), ((1, 512, 7, 7), 96, (3, 3), 1), ((3, 96, 20, 20), 70, (1, 1), 1),
    ((2, 40, 900), 33, (7,), 1), ((1, 128, 14, 14), 64, (3, 3), 2),
])  # fmt: skip
def test_whole_layers_give_the_same_bits_for_any_number_of_threads(isa: str, shape, o, kernel, group) -> None:
    x, b, s = heavy_tailed(shape), weight(o, *kernel, shape[1] // group), Settings(pads=(kernel[0] // 2,), group=group)
    check(x, b, s, threads=1)
    np.testing.assert_array_equal(*(cpu.conv(x, *b, settings=s, threads=threads) for threads in (1, 3)))


@pytest.mark.parametrize("of_x", [False, True])
@pytest.mark.parametrize(("c", "group"), [(96, 1), (72, 1), (128, 2)])
def test_scales_at_the_ends_of_their_range_are_exact(isa: str, c: int, group: int, of_x: bool) -> None:
    x, b = heavy_tailed((1, c, 6, 6)), weight(20, 3, 3, c // group)
    b[1][3, 0, 0, 0], b[1][4, 1, 1, 1], b[1][5, 2, 2, 0] = 0, 180, 255
    if of_x:  # kernels that read packed pixels then gather
        x[0, :32, 2, 2] *= np.float32(2.0**-140)
        x[0, 32:64, 3, 3], x[0, 5, 0, 0], x[0, 70, 5, 1] = 0, np.inf, np.nan
    s = Settings(pads=(1,), group=group)
    check(x, b, s)
    constant, fed = native.ConstantWeight(), cpu.conv(x, *b, settings=s)
    np.testing.assert_array_equal(cpu.conv(x, *b, settings=s, weight=constant), fed)


# --- The node --------------------------------------------------------------------------------------------------------


@looped("prepack, c, group", [("auto", 40, 1), ("never", 40, 1), ("auto", 64, 2)])
def test_the_node_is_the_kernel_with_constant_and_with_fed_weights(prepack: str, c: int, group: int) -> None:
    x, b = heavy_tailed((2, c, 9, 8)), weight(24, 3, 3, c // group)
    s = Settings((2, 1), (1,), group=group, epilogue="leaky_relu", alpha=0.125, residual_at="after")
    result = Window.from_shapes("test", x.shape, b[0].shape, s).result
    bias, residual = heavy_tailed((24,), 2), heavy_tailed(result, 3)
    attributes = {"strides": s.strides, "pads": s.pads, "group": group, "epilogue": s.epilogue, "alpha": s.alpha}
    nodes = [node("MXFP8Conv", "x b s bias r", "y", residual_at="after", **attributes)]
    shapes = {"x": x, "r": residual, "b": b[0].view(np.int8), "s": b[1], "bias": bias}
    kinds = {"x": FLOAT, "r": FLOAT, "b": 3, "s": contract.UINT8, "bias": FLOAT}
    expected = cpu.conv(x, *b, bias, residual, settings=s)
    for stored in ((), ("b", "s", "bias")):
        fed = {name: array for name, array in shapes.items() if name not in stored}
        inputs = {name: (kinds[name], array.shape) for name, array in fed.items()}
        kept = {name: shapes[name] for name in stored}
        session = ort.session(model(nodes, inputs, {"y": (FLOAT, None)}, **kept), prepack=prepack)
        for _ in range(2):
            np.testing.assert_array_equal(session.run(None, fed)[0], expected)


@looped("kernels", [True, False])
def test_a_residual_of_0_stands_for_none(kernels: bool) -> None:
    x, b = heavy_tailed((1, 40, 9)), weight(8, 3, 40)
    inputs = {"X": (x, FLOAT), "B": (b[0], 3), "B_scales": (b[1], contract.UINT8)}
    inputs |= {"bias": (np.zeros(8, np.float32), FLOAT), "residual": (np.zeros(1, np.float32), FLOAT)}
    got = run(one_node_model("MXFP8Conv", inputs, {"Y": FLOAT}, 21, {}), inputs, kernels=kernels)[0]
    w = numpy_nodes.dequantize(*b, element_format="int8")
    assert_within(got, numpy_nodes.conv(x, *b), conv_error_bound(quantized(x, Settings()), w, settings=Settings()))


@looped("kernels", [True, False])
def test_a_single_number_stands_for_all_axes(kernels: bool) -> None:
    x, b, s = heavy_tailed((1, 32, 9, 7)), weight(8, 3, 3, 32), Settings((2,), (1,), (2,))
    inputs = {"X": (x, FLOAT), "B": (b[0], 3), "B_scales": (b[1], contract.UINT8)}
    attributes = {"strides": [2], "pads": [1], "dilations": [2]}
    got = run(one_node_model("MXFP8Conv", inputs, {"Y": FLOAT}, 21, attributes), inputs, kernels=kernels)[0]
    w = numpy_nodes.dequantize(*b, element_format="int8")
    assert_within(got, numpy_nodes.conv(x, *b, settings=s), conv_error_bound(quantized(x, s), w, settings=s))


# --- The C ABI -------------------------------------------------------------------------------------------------------

AXES = ((6, 3, 1, 1, 1, 1), (5, 2, 2, 1, 0, 1))
"""In, kernel, stride, dilation and both pads, of each axis: results are 6 x 3."""
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("x_dtype", "y_dtype", "residual_dtype"), (3, 0, -1)),
    **dict.fromkeys(("x_format", "b_format"), (1, 0, -1)),
    **dict.fromkeys(("n", "c", "o"), (-1, 2**62)),
    **dict.fromkeys(("x", "b", "b_scales", "y"), (None,)),
    **{
        "group": (0, -1, 5, 32),
        "scale_rounding": (3, -1),
        "epilogue": (len(EPILOGUES), -1),
        "threads": (-1,),
        "axes": (None,),
    },
    "weight": (-1, 2**62),
}
FIELDS = [(at, wrong) for at in range(6) for wrong in (-1, 2**62, *([0] if 1 <= at <= 3 else []))]
"""Field of an axis, and a value that is refused."""


def c_call(**changes: Any) -> int:
    """Calls mxfp8_conv of x [2, 40, 6, 5] with b [7, 3, 2, 40]; returns its status."""
    arrays = {"x": np.zeros(2 * 40 * 30, np.float32), "y": np.ones(2 * 7 * 18, np.float32)}
    arrays |= {"b": np.zeros(7 * 6 * 40, np.uint8), "b_scales": np.zeros(7 * 6 * 2, np.uint8)}
    axes = changes.pop("axes", AXES)
    arrays |= {} if axes is None else {"axes": np.array(axes, np.int64)}
    arguments = {
        "x_dtype": 1, "x": None, "n": 2, "c": 40, "o": 7, "group": 1, "axes": None, "x_format": 3, "scale_rounding": 0,
        "b_format": 3, "b": None, "b_scales": None, "bias": None, "residual_dtype": 1, "residual": None,
        "residual_after": 0, "epilogue": 0, "alpha": 0.0, "beta": 0.0, "y_dtype": 1, "y": None, "weight": 0,
        "threads": 2,
        **{name: array.ctypes.data for name, array in arrays.items()}, **changes,
    }  # fmt: skip
    status: int = native.load().mxfp8_conv(*arguments.values())
    assert (arrays["y"] == (0 if status == 0 and arguments["n"] and arguments["o"] else 1)).all()
    return status


@looped("name", [*WRONG])
def test_every_wrong_argument_is_refused_with_its_name(name: str) -> None:
    assert c_call() == 0
    for wrong in WRONG[name]:
        assert c_call(**{name: wrong}) == -1, wrong
        assert "; expected " in native.load().mxfp8_last_error(0).decode()


@looped("at, wrong", FIELDS)
def test_every_wrong_field_of_an_axis_is_refused(at: int, wrong: int) -> None:
    assert c_call(axes=(AXES[0], (*AXES[1][:at], wrong, *AXES[1][at + 1 :]))) == -1
    assert "; expected " in native.load().mxfp8_last_error(0).decode()


def test_nothing_and_no_channels_need_no_arrays() -> None:
    most = 2**31 - 1
    assert c_call(n=0, x=None) == 0
    assert c_call(o=0, b=None, b_scales=None) == 0
    assert c_call(c=0, x=None, b=None, b_scales=None) == 0
    assert c_call(n=0, c=0, axes=((most, most, 1, 1, most, most), AXES[1]), x=None, b=None, b_scales=None) == 0
    wide = ((1, most, 1, 1, most - 1, 5), (3, most, 1, 1, most - 1, 0))
    assert c_call(c=0, axes=wide, x=None, b=None, b_scales=None) == 0


# --- Errors ----------------------------------------------------------------------------------------------------------


@looped("change, kind, message", [
    ({"strides": (2, 1, 1)}, ShapeError, r"strides \[2, 1, 1\]; expected 2 integers of at least 1, or one for all"),
    ({"pads": (-1,)}, ShapeError, r"pads \[-1\]; expected 4 integers of at least 0"),
    ({"group": 2}, ShapeError, r"with group 2; expected C = 64 x group = 128 channels"),
    ({"dilations": (9, 1)}, ShapeError, r"6 padded pixels; expected at least 19, a kernel of 3 with dilation 9"),
    ({"epilogue": "tanh"}, ContractError, "epilogue: 'tanh'; expected one of none"),
    ({"residual_at": "within"}, ContractError, "residual_at: 'within'; expected one of before, after"),
    ({"x_format": "e3m4"}, ContractError, "e3m4"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(change: dict[str, Any], kind: type[Mxfp8Error], message: str) -> None:
    for conv in (numpy_nodes.conv, cpu.conv):
        with pytest.raises(kind, match=message):
            conv(heavy_tailed((1, 64, 6, 6)), *weight(8, 3, 3, 64), settings=replace(Settings(), **change))


@looped("optional, message", [
    ({"bias": (7,)}, r"bias has shape \(7,\); expected \(8,\)"),
    ({"residual": (1, 8, 4, 1)}, r"residual has shape \(1, 8, 4, 1\); expected \(1, 8, 4, 4\)"),
])  # fmt: skip
def test_operands_that_do_not_fit_are_refused(optional: dict[str, tuple[int, ...]], message: str) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in optional.items()}
    for conv in (numpy_nodes.conv, cpu.conv):
        with pytest.raises(ShapeError, match=message):
            conv(heavy_tailed((1, 64, 6, 6)), *weight(8, 3, 3, 64), **arrays)


def test_groups_of_partial_blocks_are_refused() -> None:
    with pytest.raises(ShapeError, match="20 channels in a group; expected a multiple of 32"):
        numpy_nodes.conv(heavy_tailed((1, 40, 6)), *weight(8, 3, 20), settings=Settings(group=2))


@looped("attributes, message", [
    ({"x_dtype": 1}, "x_dtype 1; expected an element format"),
    ({"epilogue": "tanh"}, "epilogue 'tanh'"),
    ({"residual_at": "within"}, "residual_at 'within'; expected one of before, after"),
    ({"strides": (1, 2, 3)}, r"strides \(1, 2, 3\); expected 2 integers of at least 1"),
    ({"group": 3}, "with group 3"),
])  # fmt: skip
def test_a_node_names_what_is_wrong(attributes: dict[str, Any], message: str) -> None:
    b = weight(8, 3, 3, 64)
    built = model([node("MXFP8Conv", "x b s", "y", **attributes)], {"x": (FLOAT, (1, 64, 6, 6))}, {"y": (FLOAT, None)},
                  b=b[0].view(np.int8), s=b[1])  # fmt: skip
    with pytest.raises(Exception, match=f"the_y.*{message}"):
        ort.session(built).run(None, {"x": heavy_tailed((1, 64, 6, 6))})


def test_cupy_arrays_have_no_convolution() -> None:
    from mxfp8_ops import cuda

    with pytest.raises(AttributeError, match=r"has no conv; expected one of dequantize, .*; torch\.ops\.mxfp8"):
        cuda.conv  # noqa: B018
