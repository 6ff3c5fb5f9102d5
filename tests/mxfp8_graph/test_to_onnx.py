"""to_onnx: the file holds the nodes, bytes and types that the ONNX pass would have written, and computes the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from oracle import Expected, check_well_formed, expect, normal

import mxfp8_graph
from mxfp8_graph.checking.sessions import Session
from mxfp8_graph.onnx_export import export
from mxfp8_graph.recipe import Recipe
from mxfp8_ops import contract, numerics, torch_ops  # noqa: F401 - registers torch.ops.mxfp8
from mxfp8_ops.contract import FLOAT, FLOAT8E4M3FN, FLOAT8E5M2, FLOAT16, UINT8
from mxfp8_ops.errors import ContractError, RecipeError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Linear(torch.nn.Module):
    """relu(x @ w.T + b), so that the linear is no output projection."""

    def __init__(self, k: int = 64, n: int = 96, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(k, n, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x))


class Packed(torch.nn.Module):
    """Holds weights as the pass leaves them, for programs that it would not make."""

    def __init__(self, *weights: Any, formats: tuple[str, ...] = ()) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            element_format = formats[index] if formats else "e4m3"
            elements, scales = torch.ops.mxfp8.quantize(weight, element_format=element_format)
            self.register_buffer(f"w{index}_mxfp8", elements)
            self.register_buffer(f"w{index}_mxfp8_scales", scales)

    def gemm(self, x: Any, index: int, b_format: str = "e4m3") -> Any:
        codes = torch.ops.mxfp8.quantize(x)
        weight = getattr(self, f"w{index}_mxfp8"), getattr(self, f"w{index}_mxfp8_scales")
        return torch.ops.mxfp8.gemm(*codes, *weight, b_format=b_format)


def program(module: Any, *inputs: Any, batch: bool = True) -> Any:
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if batch else None
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, dynamic_shapes=shapes)


def packed(module: Any, *inputs: Any, recipe: Any = "mxfp8", batch: bool = True) -> Any:
    return mxfp8_graph.rewrite(program(module, *inputs, batch=batch), recipe)[0]


def exported(ep: Any, path: Path, **options: Any) -> onnx.ModelProto:
    return onnx.load(mxfp8_graph.to_onnx(ep, path, **options))


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for node in model.graph.node:
        for attribute in node.attribute:
            yield from attribute.g.node
        yield node


def ours(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in nodes(model) if node.domain == contract.DOMAIN]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def data(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    return {t.name: (t.data_type, tuple(t.dims), t.raw_data) for t in model.graph.initializer}


def run(path: Path | onnx.ModelProto, x: np.ndarray, *, kernels: bool) -> np.ndarray:
    model = onnx.load(path) if isinstance(path, Path) else path
    session = Session(path, kernels=kernels)
    return next(iter(session.run({model.graph.input[0].name: x}).values()))


# --- The same file as the ONNX pass ------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two linears on one activation, a residual, a linear in float16's place: what a block has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-weight-only"])
def test_it_writes_the_nodes_and_bytes_of_the_onnx_pass(recipe: str, tmp_path: Path) -> None:
    block, x = Block(), torch.randn(2, 5, 64)
    ours_first = exported(packed(block, x, recipe=recipe), tmp_path / "a.onnx")
    plain = torch.onnx.export(program(block, x), dynamo=True, opset_version=21, verbose=False).model_proto
    theirs, _ = mxfp8_graph.rewrite(plain, recipe)

    def described(model: onnx.ModelProto) -> list[tuple[Any, ...]]:
        stored = data(model)
        return sorted(
            (node.op_type, sorted(attributes(node).items()), [stored[i] for i in node.input if i in stored])
            for node in ours(model)
        )

    assert described(ours_first) == described(theirs)
    assert [f.SerializeToString() for f in ours_first.functions] == [f.SerializeToString() for f in theirs.functions]
    assert ours_first.ir_version == theirs.ir_version
    assert {p.key: p.value for p in ours_first.metadata_props} == {p.key: p.value for p in theirs.metadata_props}


def test_every_attribute_is_written_and_none_is_left_over(tmp_path: Path) -> None:
    for node in ours(exported(packed(Block(), torch.randn(2, 5, 64)), tmp_path / "a.onnx")):
        assert set(attributes(node)) == set(contract.OPS[node.op_type].attributes)


def test_the_recipe_is_recorded_so_that_rewriting_again_is_noticed(tmp_path: Path) -> None:
    path = mxfp8_graph.to_onnx(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")
    assert mxfp8_graph.rewrite(path, "mxfp8", output=tmp_path / "b.onnx")[1].already_rewritten
    with pytest.raises(RecipeError, match=r"Recipe mismatch for 'node_.*': packed with 'mxfp8', asked for 'ocp'"):
        mxfp8_graph.rewrite(path, "ocp", output=tmp_path / "b.onnx")


# --- What it computes --------------------------------------------------------------------------------------------


def check_both_ways(path: Path, x: np.ndarray, result: Expected) -> None:
    """Fails unless the file gives `result` in stock ONNX Runtime and with our kernels."""
    for kernels in (False, True):
        result.check(run(path, x, kernels=kernels))


def expected(linear: Any, x: np.ndarray, **options: Any) -> Expected:
    weight, bias = (tensor.detach().float().numpy() for tensor in (linear.weight, linear.bias))
    return expect(x, weight, bias, **options).then(lambda y: np.maximum(y, 0))


@pytest.mark.parametrize("opset", [21, 23, 25])
def test_it_runs_in_onnx_runtime_within_the_accumulation_bound(opset: int, tmp_path: Path) -> None:
    module, x = Linear(), normal(3, 64)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x)), tmp_path / "a.onnx", opset=opset)
    model = onnx.load(path)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": opset, contract.DOMAIN: 1}
    check_well_formed(model)
    check_both_ways(path, x, expected(module.linear, x))


@pytest.mark.parametrize("k", [32, 80, 1])
def test_any_k(k: int, tmp_path: Path) -> None:
    module, x = Linear(k), normal(3, k)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe=Recipe(min_dim=1)), tmp_path / "a.onnx")
    check_both_ways(path, x, expected(module.linear, x))


def test_e5m2(tmp_path: Path) -> None:
    module, x = Linear(), normal(3, 64)
    recipe = Recipe(activation_format="e5m2", weight_format="e4m3")
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe=recipe), tmp_path / "a.onnx")
    quantize = next(node for node in ours(onnx.load(path)) if node.op_type == "MXFP8Quantize")
    assert attributes(quantize)["output_dtype"] == FLOAT8E5M2
    check_both_ways(path, x, expected(module.linear, x, formats=("e5m2", "e4m3")))


@pytest.mark.parametrize(("name", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_16_bit_programs(name: str, dtype: Any, tmp_path: Path) -> None:
    class Bare(torch.nn.Module):  # ONNX Runtime's CPU has no bfloat16 Relu
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 96, dtype=dtype)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    module, x = Bare(), normal(3, 64).astype(numerics.value_dtype(name))
    example = torch.from_numpy(x.astype(np.float32)).to(dtype)
    recipe = Recipe(output_projections=True)
    path = mxfp8_graph.to_onnx(packed(module, example, recipe=recipe), tmp_path / "a.onnx")
    weight, bias = (tensor.detach().float().numpy() for tensor in (module.linear.weight, module.linear.bias))
    y = run(path, x, kernels=True)
    assert y.dtype == x.dtype
    expect(x, weight, bias, dtype=name).check(y)


def test_float16_between_ops_that_onnx_runtime_has_in_float32_only(tmp_path: Path) -> None:
    """It runs such a node in float32 too, whatever its output_dtype says."""

    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 96, bias=False, dtype=torch.float16)

        def forward(self, x: Any) -> Any:
            return -self.linear(torch.abs(x))

    module, x = Between(), normal(3, 64).astype(np.float16)
    path = mxfp8_graph.to_onnx(packed(module, torch.from_numpy(x), recipe="mxfp8-weight-only"), tmp_path / "a.onnx")
    expect(np.abs(x), -module.linear.weight.detach().numpy(), weight_only=True, dtype="float16").check(
        run(path, x, kernels=True)
    )


def test_a_dtype_left_open_is_the_ops_default(tmp_path: Path) -> None:
    class Open(Packed):
        def forward(self, x: Any) -> Any:
            codes, weight = torch.ops.mxfp8.quantize(x), (self.w0_mxfp8, self.w0_mxfp8_scales)
            gemm = torch.ops.mxfp8.gemm(*codes, *weight, dtype=None)
            return gemm, torch.ops.mxfp8.weight_gemm(x, *weight), torch.ops.mxfp8.dequantize(*codes, dtype=None)

    ep = program(Open(torch.randn(8, 32)), torch.randn(2, 32, dtype=torch.float16))
    outputs = exported(ep, tmp_path / "a.onnx").graph.output
    assert [output.type.tensor_type.elem_type for output in outputs] == [FLOAT, FLOAT16, FLOAT]


def test_kernels_give_the_bytes_of_the_program_where_only_gemms_round(tmp_path: Path) -> None:
    ep, x = packed(Linear(), torch.randn(3, 64)), torch.from_numpy(normal(3, 64))
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    np.testing.assert_array_equal(run(path, x.numpy(), kernels=True), ep.module()(x).detach().numpy())


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_inside_a_cond(sign: int, tmp_path: Path) -> None:
    class Choice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.yes(x) + 1, lambda x: self.no(x) - 1, (x,))

    module = Choice()
    ep = packed(module, torch.randn(2, 64), recipe=Recipe(output_projections=True))
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    assert len(ours(onnx.load(path))) == 4
    x = sign * np.abs(normal(3, 64))
    chosen = module.yes if sign > 0 else module.no
    weight, bias = (tensor.detach().numpy() for tensor in (chosen.weight, chosen.bias))
    result = expect(x, weight, bias)
    Expected(result.y + sign, result.bound).check(run(path, x, kernels=True), roundings=1)


# --- Types of elements -------------------------------------------------------------------------------------------


def test_elements_are_float8_and_scales_uint8_with_the_bytes_of_the_buffers(tmp_path: Path) -> None:
    ep = packed(Linear(), torch.randn(2, 64))
    stored = data(exported(ep, tmp_path / "a.onnx"))
    for name, dtype in (("linear.weight_mxfp8", FLOAT8E4M3FN), ("linear.weight_mxfp8_scales", UINT8)):
        buffer = ep.state_dict[name]
        assert stored[name] == (dtype, tuple(buffer.shape), buffer.numpy().tobytes())


def test_weights_of_equal_bytes_may_be_merged_by_the_exporter(tmp_path: Path) -> None:
    class Twice(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0) + self.gemm(x, 1)

    weight, x = torch.randn(8, 32), normal(2, 32)
    path = mxfp8_graph.to_onnx(program(Twice(weight, weight), torch.from_numpy(x)), tmp_path / "a.onnx")
    check_well_formed(onnx.load(path))
    once = expect(x, weight.numpy())
    Expected(2 * once.y, 2 * once.bound).check(run(path, x, kernels=True), roundings=1)


def test_equal_bytes_of_both_formats_become_two_tensors(tmp_path: Path) -> None:
    class Both(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0) + self.gemm(x, 1, b_format="e5m2")

    zeros = torch.zeros(8, 32)
    ep = program(Both(zeros, zeros, formats=("e4m3", "e5m2")), torch.randn(2, 32))
    model = exported(ep, tmp_path / "a.onnx")
    check_well_formed(model)
    stored = data(model)
    gemms = [node for node in ours(model) if node.op_type == "MXFP8Gemm"]
    assert {stored[node.input[2]][0] for node in gemms} == {FLOAT8E4M3FN, FLOAT8E5M2}


def test_elements_that_equal_their_scales_become_two_tensors(tmp_path: Path) -> None:
    class Zero(Packed):
        def forward(self, x: Any) -> Any:
            return self.gemm(x, 0)

    path = mxfp8_graph.to_onnx(program(Zero(torch.zeros(8, 1)), torch.randn(2, 1)), tmp_path / "a.onnx")
    model = onnx.load(path)
    check_well_formed(model)
    gemm = next(node for node in ours(model) if node.op_type == "MXFP8Gemm")
    assert [data(model)[name][0] for name in gemm.input[2:4]] == [FLOAT8E4M3FN, UINT8]
    assert not run(path, np.ones((2, 1), np.float32), kernels=True).any()


def test_elements_may_pass_through_views(tmp_path: Path) -> None:
    class Viewed(Packed):
        def forward(self, x: Any) -> Any:
            elements, scales = torch.ops.mxfp8.quantize(x)
            codes = elements.reshape(-1, 8, 64), scales.reshape(-1, 8, 2)
            return torch.ops.mxfp8.gemm(*codes, self.w0_mxfp8, self.w0_mxfp8_scales)

    weight, x = torch.randn(8, 64), normal(3, 4, 2, 64)
    path = mxfp8_graph.to_onnx(program(Viewed(weight), torch.from_numpy(x)), tmp_path / "a.onnx")
    check_well_formed(onnx.load(path))
    expect(x.reshape(3, 8, 64), weight.numpy()).check(run(path, x, kernels=False))


def test_a_program_may_return_elements_and_dequantized_values(tmp_path: Path) -> None:
    class Codes(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            elements, scales = torch.ops.mxfp8.quantize(x, 0, "e5m2", "floor")
            return torch.ops.mxfp8.dequantize(elements, scales, 0, "e5m2"), elements, scales

    x = normal(40, 3)
    model = exported(program(Codes(), torch.from_numpy(x), batch=False), tmp_path / "a.onnx")
    check_well_formed(model)
    assert [output.type.tensor_type.elem_type for output in model.graph.output] == [1, FLOAT8E5M2, UINT8]
    codes = numerics.quantize(x, axis=0, element_format="e5m2", scale_rounding="floor")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    y = session.run([model.graph.output[0].name], {model.graph.input[0].name: x})[0]
    np.testing.assert_array_equal(y, numerics.dequantize(*codes, axis=0, element_format="e5m2"))


def test_elements_that_another_op_reads_are_refused(tmp_path: Path) -> None:
    class Meddling(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            elements, scales = torch.ops.mxfp8.quantize(x)
            return torch.ops.mxfp8.dequantize(elements, scales), elements + 1

    with pytest.raises(ContractError, match=r"elements 'getitem' are also read by 'node_add\w*' \(Add\)"):
        mxfp8_graph.to_onnx(program(Meddling(), torch.randn(2, 64)), tmp_path / "a.onnx")


def test_elements_that_another_op_makes_are_refused(tmp_path: Path) -> None:
    class Meddling(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            elements, scales = torch.ops.mxfp8.quantize(x)
            return torch.ops.mxfp8.dequantize(elements ^ 128, scales)

    with pytest.raises(ContractError, match="which come from 'node_bitwise_xor"):
        mxfp8_graph.to_onnx(program(Meddling(), torch.randn(2, 64)), tmp_path / "a.onnx")


# --- Names, files ------------------------------------------------------------------------------------------------


def test_dynamic_axes_stay_dynamic_and_can_be_named(tmp_path: Path) -> None:
    ep = packed(Linear(), torch.randn(2, 64))
    names = {"input_names": ["tokens"], "output_names": ["hidden"], "dynamic_shapes": ({0: "batch"},)}
    model = exported(ep, tmp_path / "a.onnx", **names)
    for value, name in ((model.graph.input[0], "tokens"), (model.graph.output[0], "hidden")):
        assert value.name == name
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    for rows in (1, 7):
        assert run(tmp_path / "a.onnx", np.ones((rows, 64), np.float32), kernels=True).shape == (rows, 96)


def test_external_data_goes_next_to_the_file(tmp_path: Path) -> None:
    module, x = Linear(256, 256), normal(3, 256)
    ep = packed(module, torch.from_numpy(x))
    path = mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx", external_data="always")
    assert {file.name for file in tmp_path.iterdir()} == {"a.onnx", "a.onnx.data"}
    onnx.checker.check_model(str(path), full_check=True)
    expected(module.linear, x).check(run(path, x, kernels=True))


def test_data_goes_external_by_itself_near_the_limit_of_protobuf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "INLINE_LIMIT", 1000)
    mxfp8_graph.to_onnx(packed(Linear(256, 256), torch.randn(2, 256)), tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx.data").stat().st_size >= 256 * 256


def test_an_existing_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_text("mine")
    ep = packed(Linear(), torch.randn(2, 64))
    with pytest.raises(ContractError, match="exists already; expected a new file"):
        mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_text() == "mine"
    mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx", overwrite=True)
    assert ours(onnx.load(tmp_path / "a.onnx"))


def test_a_saved_program_is_read_from_its_path(tmp_path: Path) -> None:
    saved = mxfp8_graph.save(packed(Linear(), torch.randn(2, 64)), tmp_path / "a.pt2")
    assert len(ours(exported(saved, tmp_path / "a.onnx"))) == 2


def test_the_program_is_not_changed(tmp_path: Path) -> None:
    ep = packed(Linear(), torch.randn(2, 64))
    before = str(ep), {name: tensor.clone() for name, tensor in ep.state_dict.items()}
    mxfp8_graph.to_onnx(ep, tmp_path / "a.onnx")
    assert str(ep) == before[0]
    assert all(torch.equal(ep.state_dict[name], tensor) for name, tensor in before[1].items())


# --- Refusals ----------------------------------------------------------------------------------------------------


def test_a_program_in_training_form_is_refused(tmp_path: Path) -> None:
    class Train(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 64))

        def forward(self, x: Any) -> Any:
            return torch.ops.mxfp8.linear_train(x, self.weight)

    with pytest.raises(ContractError, match=r"node 'linear_train' is mxfp8.linear_train.*rewrite the program again"):
        mxfp8_graph.to_onnx(program(Train(), torch.randn(2, 64)), tmp_path / "a.onnx")


def test_a_program_that_was_not_rewritten_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="no mxfp8 op; expected a rewritten one"):
        mxfp8_graph.to_onnx(program(Linear(), torch.randn(2, 64)), tmp_path / "a.onnx")


def test_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="to_onnx: a Linear; expected a rewritten ExportedProgram"):
        mxfp8_graph.to_onnx(Linear(), tmp_path / "a.onnx")


@pytest.mark.parametrize("opset", [20, 99])
def test_an_opset_out_of_range_is_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=f"opset {opset}; expected 21 to"):
        mxfp8_graph.to_onnx(None, tmp_path / "a.onnx", opset=opset)


def test_an_op_without_an_onnx_form_is_named(tmp_path: Path) -> None:
    class Strange(Packed):
        def forward(self, x: Any) -> Any:
            return torch.special.bessel_j0(self.gemm(x, 0))

    with pytest.raises(ContractError, match=r"cannot export the program: .*bessel_j0"):
        mxfp8_graph.to_onnx(program(Strange(torch.randn(8, 32)), torch.randn(2, 32)), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
