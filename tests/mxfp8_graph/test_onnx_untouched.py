"""What no decision names stays the same message; edges of replacing; graphs that are large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models as b
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from google.protobuf import text_format
from grids import looped
from models import chain_model, matmul_model, matmul_stack, node, steps, text_model, weight
from onnx import NodeDeviceConfigurationProto as DeviceConfiguration
from onnx import helper, numpy_helper
from oracle import GEMM, check_well_formed, computes, expect, initializers, kinds, normal, relu, rewrite, run

import mxfp8_graph
from mxfp8_graph import Recipe, Rule, load_recipe
from mxfp8_ops.errors import RecipeError

F32 = np.float32


GRAPH_FIELDS = (
    "name", "doc_string", "metadata_props", "quantization_annotation", "value_info", "input",
    "output",
)  # fmt: skip


def property_of(key: str, value: str) -> onnx.StringStringEntryProto:
    return onnx.StringStringEntryProto(key=key, value=value)


def documented(opset: int = 21) -> onnx.ModelProto:
    """Returns a model with a text in every field that has one, and with the fields that onnx_ir loses."""
    proto = b.language_model()
    proto.ir_version, proto.opset_import[0].version = 11, opset
    proto.producer_name, proto.producer_version, proto.domain, proto.model_version = "maker", "7", "org.test", 3
    proto.doc_string = "the model"
    proto.metadata_props.append(property_of("license", "CC0"))
    graph = proto.graph
    graph.doc_string = "the graph"
    graph.metadata_props.append(property_of("graph", "kept"))
    for n in graph.node:
        n.doc_string = f"about {n.name}"
        n.metadata_props.append(property_of("pkg.torch.onnx.fx_node", n.name))
    for item in (*graph.input, *graph.output, *graph.initializer):
        item.doc_string = f"about {item.name}"
        item.metadata_props.append(property_of("origin", item.name))
    graph.value_info.append(helper.make_tensor_value_info("x", 1, ["batch_size", "sequence_length", 64], "between"))
    graph.value_info.append(helper.make_tensor_value_info("of nothing", 1, [1]))
    for name in ("x", "of nothing"):
        annotation = graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.append(property_of("SCALE_TENSOR", "last"))
    proto.configuration.add(name="two", num_devices=2)
    graph.node[-1].device_configurations.add(configuration_id="two")
    proto.opset_import.append(helper.make_opsetid("org.custom", 4))
    graph.node.append(node("Probe", "h", "probed", domain="org.custom", doc_string="unknown op"))
    proto.training_info.add().algorithm.name = "step"
    branches = [b.subgraph(f"Neg k>t; {op} t>{op}", k=weight(64, 96)) for op in ("Abs", "Neg")]  # with equal names
    for branch in branches:
        branch.doc_string = branch.initializer[0].doc_string = branch.node[0].doc_string = "inside"
        branch.metadata_props.append(property_of("branch", "kept"))
        annotation = branch.quantization_annotation.add(tensor_name="t")
        annotation.quant_parameter_tensor_names.append(property_of("SCALE_TENSOR", "k"))
    graph.node.insert(-1, b.choose(*branches, "chosen"))
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    cases = onnx.AttributeProto(
        name="cases", type=onnx.AttributeProto.GRAPHS, graphs=[b.subgraph("Neg h>b"), b.subgraph("Abs h>c")]
    )
    graph.node[-1].attribute.append(cases)
    return proto


Pair = tuple[onnx.ModelProto, onnx.ModelProto]


@pytest.fixture(scope="module", params=["in memory", "converted", "a file"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    before = documented(18 if request.param == "converted" else 21)
    if request.param != "a file":
        return before, rewrite(before)[0]
    path = b.save(before, tmp_path_factory.mktemp("documented") / "m.onnx")
    return before, onnx.load(mxfp8_graph.rewrite(path, load_recipe("mxfp8").without_fusion())[0])


DEVICES = {
    "empty": "",
    "of no configuration of the model": "configuration_id: 'other'",
    "an empty sharding": "configuration_id: 'two' sharding_spec {}",
    "a stage": "configuration_id: 'two' pipeline_stage: 1",
    "a sharding": "sharding_spec {tensor_name: 'h' device: 0 sharded_dim {axis: 0 simple_sharding {num_shards: 2}}}",
    "groups": "sharding_spec {tensor_name: 'h' device: -1 index_to_device_group_map {key: -1 value: 1}}",
}


@looped("name", DEVICES)
def test_device_configurations_of_nodes_that_stay_are_the_same_messages(name: str) -> None:
    """Also those that onnx_ir cannot write, and of values that another node computes now."""
    proto = matmul_model()
    proto.ir_version = 11
    proto.configuration.add(name="two", num_devices=2)
    proto.graph.node[-1].device_configurations.append(text_format.Parse(DEVICES[name], DeviceConfiguration()))
    rewritten, _ = rewrite(proto)
    for result in (rewritten, mxfp8_graph.convert(rewritten, "standard")[0]):
        assert list(result.graph.node[-1].device_configurations) == list(proto.graph.node[-1].device_configurations)
        assert list(result.configuration) == list(proto.configuration)


def test_descriptions_of_what_is_replaced_go_with_a_note() -> None:
    proto = matmul_model(opset=18)
    proto.ir_version = 11
    proto.training_info.add()
    annotation = proto.graph.quantization_annotation.add(tensor_name="w")
    annotation.quant_parameter_tensor_names.append(property_of("SCALE_TENSOR", "s"))
    proto.graph.node[0].device_configurations.add(configuration_id="two")
    assert mxfp8_graph.rewrite(proto)[1].notes == (
        "converted opset 18 to 21",
        "training_info stays as it was, for opset 18",
        "quantization annotations of tensors that are replaced are removed: w",
        "device configurations of nodes that are replaced are removed: linear",
    )


def check_unrelated(before: onnx.ModelProto, after: onnx.ModelProto, replaced: set[str], but: Any = ()) -> None:
    """Fails unless fields, initializers and nodes are the same messages, except nodes and fields of these names."""
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        assert getattr(after, field) == getattr(before, field), field
    for field in ("training_info", "configuration"):
        assert list(getattr(after, field)) == list(getattr(before, field)), field
    for field in {*GRAPH_FIELDS} - {*but}:
        assert getattr(after.graph, field) == getattr(before.graph, field), field
    unrelated = [n for n in before.graph.node if n.name not in replaced]
    assert [n for n in after.graph.node if n.domain != "mxfp8"] == unrelated
    tensors = [t for t in before.graph.initializer if not t.name.startswith("ffn.")]
    assert list(after.graph.initializer)[: len(tensors)] == tensors


def test_fields_nodes_and_initializers_that_no_decision_names_are_the_same_messages(pair: Pair) -> None:
    before, after = pair
    check_unrelated(before, after, {"ffn.up", "ffn.down"})
    assert list(after.opset_import)[1:] == [*before.opset_import[1:], helper.make_opsetid("mxfp8", 1)]


def test_metadata_is_kept_and_the_rewrite_is_recorded_after_it(pair: Pair) -> None:
    before, after = pair
    known = {p.key.removeprefix("mxfp8_graph."): p.value for p in after.metadata_props}
    assert next(iter(known)) == "license"
    assert set(known) == {"license", "recipe", "version", "contract_version", "dialect"}
    assert Recipe.model_validate_json(known["recipe"]).name == "mxfp8"
    assert (known["version"], known["contract_version"]) == (mxfp8_graph.__version__, "1")
    assert list(before.metadata_props) == [property_of("license", "CC0")]


def test_the_gemm_takes_over_name_doc_string_and_metadata_of_the_matmul(pair: Pair) -> None:
    before, after = pair
    old = {n.name: n for n in before.graph.node}
    gemms = [n for n in after.graph.node if n.op_type == "MXFP8Gemm"]
    assert [n.name for n in gemms] == ["ffn.up", "ffn.down"]
    for gemm in gemms:
        assert gemm.doc_string == old[gemm.name].doc_string
        assert list(gemm.metadata_props) == list(old[gemm.name].metadata_props)
        assert list(gemm.output) == list(old[gemm.name].output)


def test_a_rewritten_graph_keeps_the_record_of_its_recipe() -> None:
    graph, _ = mxfp8_graph.rewrite(gs.import_onnx(chain_model()))
    again, report = mxfp8_graph.rewrite(graph)
    assert again is graph
    assert report.already_rewritten
    assert mxfp8_graph.rewrite(graph, dry_run=True)[0] is None
    with pytest.raises(RecipeError, match="packed with scale_rounding ceil, asked for floor"):
        mxfp8_graph.rewrite(graph, "ocp")
    proto = gs.export_onnx(graph)
    onnx.helper.set_model_props(proto, graph.metadata_props)
    assert mxfp8_graph.rewrite(proto)[1].already_rewritten


def test_the_callers_graph_is_not_modified_and_a_graph_comes_back() -> None:
    graph = gs.import_onnx(chain_model())
    before = gs.export_onnx(graph).SerializeToString(deterministic=True)
    rewritten, report = mxfp8_graph.rewrite(graph, Recipe(fuse=False))
    assert gs.export_onnx(graph).SerializeToString(deterministic=True) == before
    assert isinstance(rewritten, gs.Graph)
    assert [n.op for n in rewritten.nodes] == ["MXFP8Quantize", "MXFP8Gemm", "Relu"] * 2
    assert len(report.rewritten) == 2
    proto, feeds = gs.export_onnx(rewritten), {"x": normal(3, 64)}
    check_well_formed(proto)
    np.testing.assert_array_equal(run(proto, feeds)[0], run(rewrite(chain_model())[0], feeds)[0])


def test_names_that_are_taken_or_missing_get_no_collision() -> None:
    proto = text_model("w_mxfp8_scales:MatMul x w>w_mxfp8; x_mxfp8_quantize:Relu w_mxfp8>x_mxfp8; Neg x_mxfp8>y")
    proto.opset_import.append(helper.make_opsetid("mxfp8", 1))
    x = normal(3, 64)
    rewritten, _ = computes(proto, expect(x, weight(64, 96).T).then(relu).then(np.negative), x=x)
    assert len({n.name for n in rewritten.graph.node}) == len(rewritten.graph.node)
    assert [entry.domain for entry in rewritten.opset_import] == ["", "mxfp8"]
    proto = chain_model()
    for n in proto.graph.node:
        n.name = ""
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert [s.decision.site.name for s in report.sites] == ["MatMul_h0", "MatMul_h1"]
    assert [n.name for n in rewritten.graph.node if n.op_type == "MXFP8FusedGemm"] == ["", ""]


DTYPES = ["INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2", "FLOAT8E8M0", "FLOAT8E5M2", "BOOL", "COMPLEX64"]


def odd_tensors() -> list[onnx.TensorProto]:
    """Returns a tensor of each dtype that the installed onnx has."""
    tensors = [helper.make_tensor("STRING", onnx.TensorProto.STRING, [2000], [b"word"] * 2000)]
    for name in sorted({*DTYPES} & {*onnx.TensorProto.DataType.keys()}):
        bits = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "COMPLEX64": 64}.get(name, 8)
        data = np.random.default_rng(0).integers(0, 2, -(-40001 * bits // 8), np.uint8).tobytes()
        code = onnx.TensorProto.DataType.Value(name)
        tensors.append(onnx.TensorProto(name=name, data_type=code, dims=[40001], raw_data=data))
    return tensors


@pytest.mark.parametrize("source", ["inline", "external"])
@pytest.mark.parametrize("result", ["never", "always"])
def test_tensors_of_every_dtype_are_carried_over_bit_by_bit(tmp_path: Path, source: str, result: str) -> None:
    proto = matmul_model()
    proto.ir_version = 12
    values = np.arange(3000, dtype=F32)
    typed = [helper.make_tensor("typed", 1, [3000], values), helper.make_tensor("half", 10, [3000], values / 4)]
    for tensor in (*odd_tensors(), *typed):
        proto.graph.initializer.append(tensor)
        proto.graph.node.append(node("Identity", tensor.name, f"unused_{tensor.name}"))
    path, external = tmp_path / "m.onnx", source == "external"
    onnx.save(proto, path, save_as_external_data=external, location="m.data", size_threshold=0)
    mxfp8_graph.rewrite(tmp_path / "m.onnx", output=tmp_path / "out.onnx", external_data=result)
    written = {tensor.name: tensor for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer}
    for tensor in odd_tensors():
        after = written[tensor.name]
        assert (after.data_type, list(after.dims)) == (tensor.data_type, list(tensor.dims)), tensor.name
        assert after.raw_data == tensor.raw_data, tensor.name
        assert list(after.string_data) == list(tensor.string_data)
    np.testing.assert_array_equal(numpy_helper.to_array(written["typed"]), values)
    np.testing.assert_array_equal(numpy_helper.to_array(written["half"]), (values / 4).astype(np.float16))


def test_sequences_and_optionals_pass_through() -> None:
    nodes = "linear:MatMul x w>h; Neg h>n; SequenceConstruct n n>s; ConcatFromSequence s>y|axis=0"
    proto = text_model(nodes, y=("k", 96))
    sequence = helper.make_tensor_sequence_value_info("parts", 1, ["p", 64])
    optional = helper.make_value_info("maybe", helper.make_optional_type_proto(sequence.type))
    proto.graph.input.extend([sequence, optional])
    proto.graph.node.append(node("SequenceLength", "parts", "count"))
    proto.graph.output.append(helper.make_tensor_value_info("count", 7, []))
    onnx.checker.check_model(proto, full_check=True)
    rewritten, _ = mxfp8_graph.rewrite(proto)
    assert list(rewritten.graph.input) == list(proto.graph.input)
    kept = ("Neg", "SequenceConstruct", "ConcatFromSequence", "SequenceLength")
    assert kinds(rewritten) == {**GEMM, **dict.fromkeys(kept, 1)}


def test_inlining_a_function_leaves_the_rest_as_it_was() -> None:
    proto = documented()
    proto.graph.node.extend(steps("call:Linear h ffn.up.weight>called; Neg called>negated"))
    b.calling(proto, b.local_function("Linear", "a b", "MatMul a b>r"))
    after, report = rewrite(proto)
    assert report.notes == ("inlined local functions: Linear",)
    check_unrelated(proto, after, {"ffn.up", "ffn.down", "call"}, but=("value_info",))


# --- Edges of replacing: odd graphs, what is removed and what is not, and graphs that are large ---


@looped("reader", ["output", "branch"])
def test_a_weight_that_is_an_output_or_that_a_branch_reads_stays(reader: str) -> None:
    nodes = steps("MatMul x w>h; Neg h>y")
    nodes += [b.choose("Abs w>t", "Abs w>t", "z")] if reader == "branch" else []
    outputs = {"z" if reader == "branch" else "w": (F32, [64, 96])}
    stored = {"yes": np.array(True)} if reader == "branch" else {}
    rewritten, _ = rewrite(text_model(nodes, outputs=outputs, **stored))
    assert "w" in initializers(rewritten)
    expected = np.abs(weight(64, 96)) if reader == "branch" else weight(64, 96)
    np.testing.assert_array_equal(run(rewritten, {"x": normal(3, 64)})[1], expected)


def test_a_product_that_is_a_graph_output_keeps_its_name() -> None:
    heads = Recipe(name="r", output_projections=True)
    rewritten, _ = rewrite(text_model("head:MatMul x w>y"), heads)
    assert rewritten.graph.node[-1].output == ["y"]
    swapped, x = text_model("MatMul w x>y", (64, "m"), (96, "m"), w=weight(96, 64)), normal(64, 3)
    rewritten, _ = computes(swapped, expect(x.T, weight(96, 64)).then(np.transpose), recipe=heads, x=x)
    assert [(n.op_type, *n.output) for n in rewritten.graph.node][-1] == ("Transpose", "y")


def test_one_bias_of_two_matmuls_is_kept_once() -> None:
    nodes = "MatMul x wa>ha; Add ha bias>sa; Neg sa>y; MatMul x wb>hb; Add hb bias>sb; Neg sb>yb"
    weights = {"wa": weight(64, 96), "wb": weight(64, 96, seed=1), "bias": weight(96, seed=2)}
    rewritten, _ = rewrite(text_model(nodes, outputs={"yb": (F32, ["m", 96])}, **weights))
    assert initializers(rewritten).count("bias") == 1
    assert kinds(rewritten) == {"MXFP8Quantize": 1, "MXFP8Gemm": 2, "Neg": 2}
    x = normal(3, 64)
    for name, y in zip("ab", run(rewritten, {"x": x}), strict=True):
        expect(x, weights[f"w{name}"].T, weights["bias"]).then(np.negative).check(y)


def test_the_default_domain_may_have_its_long_name() -> None:
    proto = matmul_model(64, 96)
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"  # what onnx's checker does not know, but ONNX Runtime does
    rewritten, _ = mxfp8_graph.rewrite(proto)
    check_well_formed(rewritten)
    x = normal(2, 5, 64)
    expect(x, weight(64, 96).T).then(relu).check(run(rewritten, {"x": x})[0])


def test_a_matmul_of_another_domain_is_no_site() -> None:
    proto = chain_model((64, 64, 64))
    proto.graph.node[0].domain = "org.custom"
    proto.opset_import.append(helper.make_opsetid("org.custom", 1))
    _, report = mxfp8_graph.rewrite(proto)
    assert [s.decision.site.name for s in report.sites] == ["layers.1.linear"]


def test_a_long_chain_of_ops_does_not_exceed_pythons_stack() -> None:
    nodes = [*steps("MatMul x w>h0"), *(node("Mul", f"h{i} c", f"h{i + 1}") for i in range(1500))]
    proto = text_model([*nodes, *steps("Identity h1500>y")], c=np.array(1, F32))
    _, report = mxfp8_graph.rewrite(proto, Recipe(name="r", rules=(Rule(op="MatMul"),)), dry_run=True)
    assert report.sites[0].decision.site.role == "output_projection"


def test_a_long_chain_of_matmuls_does_not_exceed_pythons_stack() -> None:
    rewritten, report = mxfp8_graph.rewrite(matmul_stack(1100))
    assert len(report.rewritten) == 1100
    _, again = mxfp8_graph.rewrite(rewritten)
    assert again.already_rewritten


def test_a_constant_may_have_the_name_of_an_initializer(tmp_path: Path) -> None:
    """Both are large, so that neither is in the skeleton of a model in a file."""
    stored, constant = weight(64, 64), weight(64, 64)[::-1].copy()
    nodes = [node("Constant", "", "c", value=numpy_helper.from_array(constant, "w"))]
    nodes += steps("MatMul x w>h; MatMul h c>y")
    proto = text_model(nodes, y=("m", 64), w=stored)
    onnx.save(proto, tmp_path / "m.onnx")
    mxfp8_graph.rewrite(tmp_path / "m.onnx", Recipe(output_projections=True))
    packed = mxfp8_graph.unpack(tmp_path / "m.mxfp8.onnx")
    for name, values in (("w", stored), ("c", constant)):
        error = np.abs(packed[name].dequantize() - values.T)
        assert error.max() < 0.1 * np.abs(values).max(), f"{name}: {error.max()}"


def test_maps_and_opaque_types_stay_declared() -> None:
    """Classifiers of skl2onnx end with a ZipMap."""
    proto = matmul_stack(1)
    result = proto.graph.node[-1].output[0]
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    proto.graph.node.append(node("ZipMap", result, "chances", domain="ai.onnx.ml", classlabels_int64s=[*range(64)]))
    maps = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(1, []))
    proto.graph.output.append(helper.make_value_info("chances", helper.make_sequence_type_proto(maps)))
    proto.graph.node.append(node("Probe", result, "handle", domain="org.custom"))
    proto.opset_import.append(helper.make_opsetid("org.custom", 1))
    handle = onnx.ValueInfoProto(name="handle")
    handle.type.opaque_type.name = "Handle"
    proto.graph.value_info.append(handle)
    rewritten, report = mxfp8_graph.rewrite(proto)
    assert len(report.rewritten) == 1
    assert rewritten.graph.output[-1] == proto.graph.output[-1]
    assert [info for info in rewritten.graph.value_info if info.name == "handle"] == [handle]
