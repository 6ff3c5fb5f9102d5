"""to_onnx: exports a packed program in high precision, and quantizes the same nodes again by the ONNX pass.

    gemm(quantize(x), w)           ->  matmul(x, W^T)
    gemm(quantize(q), quantize(k)) ->  matmul(q, k^T)
    weight_gemm(x, w)              ->  matmul(x, W^T)
    gemm(quantize(x), w[ids])      ->  matmul(x, W[ids]^T)
    grouped_gemm(x, w, offs)       ->  matmul(x, W[group of each row]^T)
    embedding(ids, w)              ->  embedding(W, ids)
    conv(x, w)                     ->  convolution(x, W)
    conv2d(x, dequantize(w))       ->  conv2d(x, W)

The ONNX pass packs the nodes of these ops with the same settings, and takes the bytes of w by name. It never reads the
values of W, so W is zeros, which take no memory.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_export import exporter
from mxfp8_graph.onnx_pass.graph import INLINE_BYTES
from mxfp8_graph.onnx_pass.run import cpu_note, rewrite_model
from mxfp8_graph.options import Options
from mxfp8_graph.policy.checkpoint_weights import CheckpointWeights
from mxfp8_graph.policy.recipe import Recipe, Rule, recorded
from mxfp8_graph.torch_pass import internals, record
from mxfp8_graph.torch_pass.build import Builder
from mxfp8_graph.torch_pass.checked_program import check_values
from mxfp8_graph.torch_pass.load import load
from mxfp8_graph.torch_pass.operands import GATHERS
from mxfp8_graph.torch_pass.program import Program, flattened
from mxfp8_graph.torch_pass.training_mode import evaluated
from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError, Mxfp8Error

_ATEN: Final = torch.ops.aten
_CONV: Final = "mxfp8::conv"
_DEQUANTIZE: Final = "mxfp8::dequantize"
_SITE: Final = "mxfp8_graph.site"
"""Key in the metadata of an ONNX node that multiplies or picks rows: activations, scale rounding, weight format and
weight, as text."""


# An op and not metadata of the fx node: torch's exporter decomposes ops first, and keeps neither their names nor a
# documented way from an ONNX node back to its op.
@torch.library.custom_op("mxfp8_graph::site", mutates_args=())
def _site(y: torch.Tensor, text: str) -> torch.Tensor:
    """Returns a copy of `y`, the result of a product or lookup; `text` is as for `_SITE`."""
    return y.clone()


@_site.register_fake
def _(y: torch.Tensor, text: str) -> torch.Tensor:
    return torch.empty_like(y)


def _marked(y: Any, text: str) -> Any:
    """Writes `text` into the metadata of the ONNX node that computes `y`; adds no node."""
    y.producer().metadata_props[_SITE] = text
    return y


class _Decided(Recipe):
    """A recipe whose rules name the nodes to quantize. The file records the recipe that packed the program instead."""

    record: str

    def to_record(self) -> str:
        """Returns the recipe that packed the program, as JSON."""
        return self.record


def write(program: ExportedProgram | Path, path: Path, opset: int, names: Mapping[str, Any], options: Any) -> Path:
    """Writes a packed program as ONNX, and returns `path`; `mxfp8_graph.to_onnx` has the arguments."""
    source = _opened(program)
    plain = _Plain(source)

    def before_optimizing(exported: torch.onnx.ONNXProgram) -> None:
        _rename(exported.model.graph, names)
        plain.lift(exported)

    shapes = {} if names["dynamic_shapes"] is None else {"dynamic_shapes": names["dynamic_shapes"]}
    translations = {torch.ops.mxfp8_graph.site.default: _marked}
    model = exporter.export(plain.finish(), opset, shapes, before_optimizing, translations)
    zeros = _store(model.graph, plain.values)
    nodes = {str(node.name) for node in model.graph}
    wanted = nodes & {name for names in plain.sites.values() for name in names}
    if not wanted:
        expected, advice = "one that an output needs", "call torch.onnx.export for the program before rewrite"
        raise ContractError("to_onnx", "no output needs an mxfp8 op of the program", expected=expected, advice=advice)
    # By the name of the node, so that nothing is guessed, and a tied table stays for the nodes that keep it.
    own = {node: site.split(" ", 3)[3] for site, names in plain.sites.items() for node in nodes.intersection(names)}
    own = {node: weight for node, weight in own.items() if weight}
    # A weight of which only zeros are left must be used, or the file would multiply with zeros.
    packed = {name: plain.weights[name] for name in plain.weights if name in zeros or name in own.values()}
    weights = CheckpointWeights(where="to_onnx", weights=packed, names=own, replaces_all=True)
    # The check for NaN and Inf ran when the program was packed.
    whole = Options(name="to_onnx", output=path, weights=weights, allow_nonfinite=True, **options)
    size = sum(tensor.nbytes for tensor in source.state_dict.values())
    _, report = rewrite_model(model, _decided(source, plain.sites), whole, size)
    # The pass raises for a weight that it does not take. A product without a weight may stay, so this looks for one.
    if lost := wanted - {site.decision.site.name for site in report.rewritten}:
        what, advice = f"holds {min(lost)!r} in high precision", "report this as a bug"
        raise ContractError(path, what, expected="MXFP8, as in the program", advice=advice)
    for note in cpu_note(model):
        warnings.warn(note, stacklevel=3)  # the caller of mxfp8_graph.to_onnx
    return path


def plain_to_onnx(program: ExportedProgram | Path, path: Path) -> Path:
    """Writes an original program as ONNX, with external data, and returns `path`; raises as `mxfp8_graph.to_onnx`."""
    model = exporter.export(_opened(program), contract.MIN_OPSET, {})
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=INLINE_BYTES)
    return path


def _opened(program: ExportedProgram | Path) -> ExportedProgram:
    if isinstance(program, Path):
        return evaluated(load(program))
    check_values(program, "to_onnx")  # a program from a file has given out no modules yet
    return evaluated(flattened(program))


def _rename(graph: ir.Graph, names: Mapping[str, Any]) -> None:
    """Gives inputs and outputs the names that the user passed.

    torch.onnx.export gets no names: its optimizer would rename duplicates instead of refusing them.
    """
    inputs, outputs = (names[key] or () for key in ("input_names", "output_names"))
    wanted = [*zip(graph.inputs, inputs, strict=False), *zip(graph.outputs, outputs, strict=False)]
    values = {*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)}
    taken = {value.name for value in values.difference(value for value, _ in wanted)}
    for value, name in wanted:
        if name in taken:
            what = f"{name!r} is the name of another value"
            raise ContractError("to_onnx", what, expected="another name", advice="pass other names")
        value.name = name
        taken.add(name)


def _decided(source: ExportedProgram, sites: Mapping[str, Sequence[str]]) -> Recipe:
    """Returns the recipe that packed a program, with rules that quantize the nodes of each setting and nothing else."""
    rewrite_record = record.find(source)
    text = (rewrite_record and rewrite_record.recipe) or ""
    known = recorded(text)
    rules, settings = [], dict[tuple[str, ...], list[str]]()
    for site, nodes in sites.items():
        settings.setdefault(tuple(site.split(" ", 3)[:3]), []).extend(nodes)
    for setting, nodes in settings.items():
        keys: dict[str, Any] = dict(zip(("activations", "scale_rounding", "weight_format"), setting, strict=True))
        rules.append(Rule(name=f"^({'|'.join(map(re.escape, nodes))})$", **keys))
    fields = {**dict(known or Recipe(fuse=False)), "include": (), "exclude": (), "rules": tuple(rules)}
    fields |= dict.fromkeys(("fp8_dpa", "attention_scores", "attention_values"), False)
    return _Decided(**fields, record=text)


def _store(graph: ir.Graph, weights: Mapping[str, Any]) -> set[str]:
    """Turns the inputs in `weights` into initializers if a node uses them; returns the names of those with zeros.

    None in `weights` stands for zeros, which are computed only if read.
    """
    names = set()
    for value in [value for value in graph.inputs if value.name in weights]:
        shape, dtype = ir.Shape(value.shape or ()), value.dtype or ir.DataType.UNDEFINED
        kept = weights[str(value.name)]
        graph.inputs.remove(value)
        if not value.uses() and not value.is_graph_output():
            continue  # the optimizer removed the last node that used it
        zeros = partial(_zeros, shape, dtype)
        value.const_value = ir.LazyTensor(zeros, dtype, shape, name=value.name) if kept is None else kept
        graph.register_initializer(value)
        if kept is None:
            names.add(str(value.name))
    for value in set(graph.initializers.values()).difference(graph.outputs):
        value.type = value.shape = None  # else the file declares the type of each twice
    return names


def _zeros(shape: ir.Shape, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.Tensor(np.zeros(shape.numpy(), dtype.numpy()), dtype=dtype)


class _Plain:
    """Turns a packed program into the plain one, which has the same matmuls in high precision."""

    def __init__(self, source: ExportedProgram) -> None:
        self.weights: dict[str, Any] = {}
        """The packed weights, as `options.StoredWeight`, by the names of the plain ones."""
        self.sites: dict[str, list[str]] = {}
        """Names of the ONNX nodes of products and lookups, by the text under `_SITE`; filled by `lift`."""
        self.values: dict[str, Any] = {}
        """The values of plain weights, by name: None for zeros; filled by `lift`."""
        self._program = Program(source)
        self._names: dict[tuple[object, ...], str] = {}
        self._kept: dict[str, Node] = {}
        """Weights that the program has in high precision too, for other nodes: their names and placeholders."""

    def finish(self) -> ExportedProgram:
        """Returns the plain program.

        Raises:
            ContractError: the source has no mxfp8 op, or one that `rewrite` does not make for inference.
        """
        graph, count = self._program.module.graph, 0
        for node in list(graph.nodes):
            packed = internals.op_name(node) in contract.PACKED_OPS - contract.TRAINING_OPS
            if not packed and _dequantized(node) is None:
                continue
            build = Builder(self._program, node)
            try:
                build.evaluate(node.target, node.args, node.kwargs)  # refuses operands that do not fit
                result = self._result(node, build)
            except (Mxfp8Error, RuntimeError) as error:
                what, advice = f"the program is damaged: {first_line(error)}", "rewrite the original again"
                raise ContractError("to_onnx", what, expected="operands that fit", advice=advice) from error
            if result is not None:
                # In place: users, metadata and the program's signature refer to the node.
                node.target, node.args, node.kwargs = result.target, result.args, result.kwargs
                graph.erase_node(result)
                count += 1
        graph.eliminate_dead_code()
        for _, _, inner in internals.graphs(self._program.module):
            for node in inner.nodes:
                if op := contract.TORCH_OPS.get(internals.op_name(node)):
                    what = f"node {node.name!r} is mxfp8.{op.name}"
                    what += ", which is for training and has no ONNX form" if op.trains else ", not as rewrite makes it"
                    advice = "rewrite the program again, without training" if op.trains else "rewrite the original"
                    expected = "products with packed weights, and lookups in them"
                    raise ContractError("to_onnx", what, expected=expected, advice=advice)
        if not count:
            advice = "call mxfp8_graph.rewrite first, or torch.onnx.export for the program as it is"
            raise ContractError("to_onnx", "the program has no mxfp8 op", expected="a rewritten one", advice=advice)
        return self._program.finish()

    def lift(self, exported: torch.onnx.ONNXProgram) -> None:
        """Turns the weights of the exported program into inputs, in place, and adds its nodes to `sites`."""
        graph = exported.model.graph
        # The optimizer folds and merges initializers, but not inputs.
        for name in self.weights:
            # torch's exporter drops a weight that no output needs.
            if (value := graph.initializers.pop(name, None)) is None:
                continue
            self.values[name] = value.const_value if name in self._kept else None
            value.const_value = None
            graph.inputs.append(value)
        for node in graph:
            if text := node.metadata_props.pop(_SITE, None):
                self.sites.setdefault(text, []).append(str(node.name))

    def _result(self, node: Node, build: Builder) -> Node | None:
        """Returns a new node with the plain result of `node`; None if its operands are not as `rewrite` makes them."""
        if internals.op_name(node) == _CONV or _dequantized(node) is not None:
            return self._convolution(node, build)
        argument, dtype = partial(internals.argument, node), node.meta["val"].dtype
        x, left, right = argument("a") or argument("x"), _quantize(node, "a"), _quantize(node, "b")
        activations, rounding = str(argument("activation_dtype") or "unchanged").removeprefix("torch."), "ceil"
        if left is not None:
            x, activations, rounding = left.args[0], argument("a_format"), internals.argument(left, "scale_rounding")
        as_made = (left is None) == (argument("a_scales") is None)
        if right is not None:  # nothing is packed, so both operands are rounded at run time, alike
            as_made = as_made and left is not None and internals.argument(right, "scale_rounding") == rounding
        if not as_made:
            return None
        # In the wider dtype of activation and result, so that no value is rounded that the op does not round.
        wide = dtype if x is None else torch.promote_types(x.meta["val"].dtype, dtype)
        operand = (build.cast(right.all_input_nodes[0], wide), "") if right else self._weight(node, wide, build)
        if operand is None:
            return None
        w, name = operand
        if x is None:  # ids pick rows of a table
            product = build.add("rows", _ATEN.embedding.default, w, argument("indices"))
        else:
            product = _product(build, build.cast(x, wide), w, argument("offs"))
        text = f"{activations} {rounding} {argument('b_format')} {name}"
        result = build.add("site", torch.ops.mxfp8_graph.site.default, product, text)
        if argument("offs") is not None:
            result = build.add("result", _ATEN.squeeze.dim, result, 1)
        if argument("bias") is not None:
            result = build.add("sum", _ATEN.add.Tensor, result, build.cast(argument("bias"), wide))
        return build.cast(result, dtype)

    def _convolution(self, node: Node, build: Builder) -> Node | None:
        """Returns a new node with the plain result of a convolution; None if it is not as `rewrite` makes it."""
        values, dtype = _dequantized(node), node.meta["val"].dtype
        call = internals.arguments(node)
        if values is not None:
            if (operand := self._weight(values, dtype, build)) is None:
                return None
            arguments = {**call, "weight": operand[0]}
            element_format = internals.argument(values, "element_format")
            plain, text = build.add("conv", node.target, *arguments.values()), f"unchanged ceil {element_format}"
            return build.add("site", torch.ops.mxfp8_graph.site.default, plain, f"{text} {operand[1]}")
        if call["residual"] is not None or call["epilogue"] != "none":
            return None
        x, bias, axes = call["x"], call["bias"], call["b"].meta["val"].dim() - 2
        # A bias of float32 may have bits that the dtype of the convolution has not.
        wide = torch.promote_types(x.meta["val"].dtype, dtype) if bias is None else torch.float32
        if (operand := self._weight(node, wide, build)) is None:
            return None
        lists = {name: call[name] * (axes if len(call[name]) == 1 else 1) for name in ("strides", "dilations")}
        pads = call["pads"] * (2 * axes if len(call["pads"]) == 1 else 1)
        x, begins, ends = build.cast(x, wide), pads[:axes], pads[axes:]
        if begins != ends:  # torch's convolution has one number for both; its pads begin at the last axis
            both = [size for pair in zip(begins[::-1], ends[::-1], strict=True) for size in pair]
            x, begins = build.add("padded", _ATEN.constant_pad_nd.default, x, both), [0] * axes
        plain = build.add(
            "conv", _ATEN.convolution.default, x, operand[0], bias,
            lists["strides"], begins, lists["dilations"], False, [0] * axes, call["group"],
        )  # fmt: skip
        text = f"{call['x_format']} {call['scale_rounding']} {call['b_format']} {operand[1]}"
        return build.cast(build.add("site", torch.ops.mxfp8_graph.site.default, plain, text), dtype)

    def _weight(self, node: Node, dtype: torch.dtype, build: Builder) -> tuple[Node, str] | None:
        """Returns (the plain weight of an op, or the node that picks from it; its name); None without packed buffer."""
        names = contract.TORCH_OPS[internals.op_name(node)].weight or ()
        elements, scales, element_format = (internals.argument(node, name) for name in names)
        convolves = internals.op_name(node) in {_CONV, _DEQUANTIZE}
        gather = elements if internals.op_name(elements) in GATHERS else None
        if gather is not None and (scales.target, scales.args[1:]) == (gather.target, gather.args[1:]):
            elements, scales = gather.args[0], scales.args[0]
        stored = [self._program.stored_name(each) for each in (elements, scales)]
        if None in stored:
            return None
        key = (*stored, element_format, dtype)
        if key not in self._names:
            packed = [self._program.tensor(str(each)) for each in stored]
            for name, tensor in zip(stored, packed, strict=True):
                if not internals.has_values(tensor):
                    what, advice = f"tensor {name!r} is on {tensor.device}", "load its values"
                    raise ContractError("to_onnx", what, expected="a tensor with values", advice=advice)
            shape = packed[0].movedim(-1, 1) if convolves else packed[0]  # torch has channels second
            name = self._names[key] = self._new(re.sub(r"_mxfp8(?=(_\d+)?$)", "", str(stored[0])), shape, dtype)
            codes = (internals.to_numpy(tensor.contiguous()) for tensor in packed)
            fields = dict(zip(("elements", "scales"), codes, strict=True), shape=tuple(packed[0].shape))
            self.weights[name] = SimpleNamespace(name=name, element_format=key[2], **fields)
        name = self._names[key]
        plain = self._kept.get(name) or self._program.weight(name)
        if gather is not None:
            plain = build.add("picked", gather.target, plain, *gather.args[1:], **gather.kwargs)
        return plain, name

    def _new(self, original: str, elements: torch.Tensor, dtype: torch.dtype) -> str:
        """Returns the name of a plain weight: of one that the program keeps, or of a new buffer of zeros."""
        kept = self._program.state.get(original)
        if kept is not None and original not in self.weights and (kept.shape, kept.dtype) == (elements.shape, dtype):
            inputs = self._program.scopes[0].placeholders
            self._kept[original] = next(each for each in inputs if self._program.stored_name(each) == original)
            return original
        name = self._program.fresh(original)
        self._program.state[name] = torch.zeros((), dtype=dtype, device=elements.device).expand(elements.shape)
        return name


def _dequantized(node: Node) -> Node | None:
    """Returns the node that dequantizes the packed weight of a convolution, or None."""
    moved = internals.argument(node, "weight") if "conv" in internals.op_name(node) else None
    if not isinstance(moved, Node) or moved.target is not _ATEN.permute.default:
        return None
    values = moved.args[0]
    return values if isinstance(values, Node) and internals.op_name(values) == _DEQUANTIZE else None


def _quantize(node: Node, operand: str) -> Node | None:
    """Returns the node that quantizes an operand of a product along K, in the format that is multiplied, or None."""
    elements, scales = (internals.argument(node, name) for name in (operand, f"{operand}_scales"))
    if scales is None or not elements.target is scales.target is operator.getitem:
        return None
    source, expected = elements.args[0], (-1, internals.argument(node, f"{operand}_format"))
    if (elements.args[1], scales.args) != (0, (source, 1)) or internals.op_name(source) != "mxfp8::quantize":
        return None
    is_alike = (internals.argument(source, "axis"), internals.argument(source, "element_format")) == expected
    return source if is_alike else None


def _product(build: Builder, x: Node, w: Node, offs: Node | None) -> Node:
    """Returns the node that multiplies; with `offs`, its result has an axis of size 1 behind the rows."""
    if offs is not None:
        # ONNX has no product of groups of rows, so each row picks its matrix. A row after the last group picks none,
        # and the node gives 0 for it.
        ends = build.add("ends", _ATEN.unsqueeze.default, offs, 0)
        rows = build.add("rows", _ATEN.arange.default, build.size(x, 0), device=x.meta["val"].device)
        ended = build.add("ended", _ATEN.le.Tensor, ends, build.add("row", _ATEN.unsqueeze.default, rows, 1))
        group = build.add("group", _ATEN.sum.dim_IntList, ended, [1])
        w = build.add("picked", _ATEN.index_select.default, w, 0, group)
        x = build.add("matrices", _ATEN.unsqueeze.default, x, 1)
    transposed = build.add("transposed", _ATEN.transpose.int, w, -2, -1)
    return build.add("product", _ATEN.matmul.default, x, transposed)
