"""to_onnx(): writes a rewritten program as ONNX.

torch's exporter translates the program, op by op. Then the elements get their float8 types, the model gets its function
bodies and the record of how it was made, and the tensors go to the file one by one.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from mxfp8_graph import provenance
from mxfp8_graph.files import data_path_of, is_any_of
from mxfp8_graph.models import Kind, kind_of
from mxfp8_graph.naming import first_line
from mxfp8_graph.onnx_model import cpu_provider, record
from mxfp8_graph.onnx_model.check import validate_structure
from mxfp8_graph.onnx_model.graph import infer, put_graph, to_ir
from mxfp8_graph.onnx_model.open import INLINE_BYTES, OpenedModel
from mxfp8_graph.onnx_model.write import Target, open_target, wants_external
from mxfp8_graph.options import ExportOptions, Unpack, check_options
from mxfp8_graph.policy.recipe import recorded
from mxfp8_ops import contract
from mxfp8_ops.errors import BackendError, ContractError, Mxfp8Error

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.export import ExportedProgram


def check_opset(opset: object, where: str) -> None:
    """Raises ContractError unless `opset` is a version that function bodies can have and onnx knows."""
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not contract.MIN_OPSET <= opset <= newest:
        expected = f"{contract.MIN_OPSET} to {newest}, which onnx {onnx.__version__} knows"
        raise ContractError(where, f"opset {opset}", expected=expected, advice="pass another opset")


def to_onnx(
    program: Any,
    path: str | Path,
    *,
    opset: int = contract.MIN_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    **options: Unpack[ExportOptions],
) -> Path:
    """Returns `path`, having written a rewritten program there as ONNX; any ONNX Runtime from 1.20 on runs it.

    Of a program in bfloat16 that is not so on a CPU, and a warning says that, unless the recipe has runs_on: cpu.

    Args:
        program: a `torch.export.ExportedProgram` that `rewrite` packed, or the path of one that `save` wrote.
        path: file to write.
        opset: version of the default operator domain, at least 21. ONNX Runtime 1.20 reads 21, 1.23 also 23.
        input_names: what to call the inputs; by default as the program does.
        output_names: what to call the outputs.
        dynamic_shapes: names for dynamic axes, as `torch.onnx.export` takes them: `{"x": {0: "batch"}}`. Which axes
            are dynamic is the program's; this only names them. By default they have torch's names, such as "s77".
        **options: see `mxfp8_graph.options.ExportOptions`.

    Raises:
        ContractError: the program is not a packed one, an op has no ONNX form, or the file cannot be written.
        BackendError: torch or onnxscript is missing.
    """
    check_options("to_onnx", options, ExportOptions)
    path = Path(path)
    check_opset(opset, "to_onnx")
    for kind, wanted in (("input_names", input_names), ("output_names", output_names)):
        _check_names(kind, wanted)
    exported = _program(program)
    if isinstance(program, (str, Path)) and any(
        is_any_of(file, [Path(program)]) for file in (path, data_path_of(path))
    ):
        raise ContractError(path, "is the program", expected="another file", advice="pass another path")
    recipe = _recorded_recipe(exported)
    model = translate(exported, opset, {} if dynamic_shapes is None else {"dynamic_shapes": dynamic_shapes})
    # Not by torch.onnx.export: optimizing makes names that occur twice unique, instead of refusing them.
    for values, wanted in ((model.graph.inputs, input_names), (model.graph.outputs, output_names)):
        for value, name in zip(values, wanted or (), strict=False):
            value.name = name
    opened, tensors = _skeleton(model)
    _check_result(opened.proto, (*(input_names or ()), *(output_names or ())))
    record.complete(opened.proto, _unfused(recipe), bodies=options.get("bodies", "folded"))
    oldest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    opened.proto.ir_version = max(opened.proto.ir_version, oldest, 10)  # 10: the first with float8 in functions
    before = recorded(recipe)
    widened = ""
    if before is not None and before.runs_on:
        graph = infer(opened, to_ir(opened))
        widened = cpu_provider.widen(opened, graph)
        put_graph(opened, graph)
    for note in () if widened else cpu_provider.note(opened.proto):
        warnings.warn(note, stacklevel=2)
    external = wants_external(opened, opened.byte_size, path, options.get("external_data", "auto"))
    with open_target(opened, path, external=external, overwrite=options.get("overwrite", False)) as target:
        _store(opened, tensors, target)
    return path


def plain_to_onnx(program: Any, path: Path) -> Path:
    """Writes an original program as ONNX, and returns `path`; errors as `to_onnx`."""
    opened, tensors = _skeleton(translate(_program(program), contract.MIN_OPSET, {}))
    external = wants_external(opened, opened.byte_size, path, "auto")
    with open_target(opened, path, external=external, overwrite=False) as target:
        _store(opened, tensors, target)
    return path


def _store(opened: OpenedModel, tensors: dict[str, ir.TensorProtocol], target: Target) -> None:
    """Writes the large initializers, one by one, and the model."""
    for tensor in opened.proto.graph.initializer:
        if tensor.name in tensors:
            target.store(tensor, tensors.pop(tensor.name).numpy())
    target.finish(opened.proto)


def _program(program: Any) -> ExportedProgram:
    kind = kind_of(program)
    if not (kind.is_file or kind is Kind.PROGRAM):
        what = f"a {type(program).__name__}"
        expected = "a rewritten ExportedProgram or the path of one"
        raise ContractError("to_onnx", what, expected=expected, advice="pass what mxfp8_graph.rewrite gave back")
    try:
        import onnxscript  # noqa: F401
        import torch  # noqa: F401

        from mxfp8_graph.torch_pass.checked_program import check_values
        from mxfp8_graph.torch_pass.load import load
        from mxfp8_graph.torch_pass.training_mode import evaluated
        from mxfp8_ops import torch_ops  # noqa: F401
    except ImportError as error:
        advice = "pip install torch onnxscript"
        raise BackendError("to_onnx", str(error), expected="torch and onnxscript", advice=advice) from error
    # A program from a file has given out no modules yet.
    if not kind.is_file:
        check_values(program, "to_onnx")
    return evaluated(load(program) if kind.is_file else program)


def _check_names(kind: str, names: Sequence[str] | None) -> None:
    """Raises ContractError if `names` are not distinct texts that ONNX can store."""
    if names is None:
        return
    expected, advice = "a list of names, each once", f"correct {kind}"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ContractError("to_onnx", f"{kind} is {names!r}", expected=expected, advice=advice)
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name or not _is_text(name) or name in names[:index]:
            raise ContractError("to_onnx", f"{name!r} is among {kind}", expected=expected, advice=advice)


def _is_text(name: str) -> bool:
    """Whether UTF-8 can encode `name`; it cannot encode half of a surrogate pair."""
    return name.encode(errors="replace").decode() == name


def _check_result(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Raises ContractError if `names` for inputs and outputs are those of other values, or the model is damaged."""
    stored = {tensor.name for tensor in model.graph.initializer}
    if taken := sorted(stored.intersection(names)):
        raise ContractError(
            "to_onnx", f"{taken[0]!r} is the name of a weight", expected="another name", advice="pass other names"
        )
    validate_structure(model, "to_onnx")


def _recorded_recipe(program: ExportedProgram) -> str | None:
    """Returns the recipe that packed `program`, as JSON, or None if it is not recorded. Refuses what ONNX lacks."""
    import torch

    from mxfp8_graph.torch_pass import internals

    recipe, packed = None, False
    # Subgraphs too: a program may have mxfp8 ops in the branches of a cond alone.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            op = contract.TORCH_OPS.get(internals.op_name(node))
            if op is None:
                continue
            # ONNX has no gradients, so there are no training nodes in the contract.
            if op.trains:
                what = f"mxfp8.{op.name}, which is for training and has no ONNX form"
                advice = "rewrite the program again, without training"
                raise ContractError(
                    "to_onnx", f"node {node.name!r} is {what}", expected="packed weights", advice=advice
                )
            packed = packed or op.node is not None
            recipe = recipe or (node.meta.get("custom") or {}).get(provenance.RECIPE_KEY)
    if not packed:
        advice = "call mxfp8_graph.rewrite first, or torch.onnx.export for the program as it is"
        raise ContractError("to_onnx", "the program has no mxfp8 op", expected="a rewritten one", advice=advice)
    return recipe


def _unfused(text: str | None) -> str | None:
    """Returns a recorded recipe with `fuse` false: to_onnx does not fuse."""
    recipe = recorded(text)
    return text if recipe is None else recipe.without_fusion().to_record()


def translate(
    program: ExportedProgram,
    opset: int,
    names: Mapping[str, Any],
    *,
    before_optimizing: Callable[[ir.Model], None] | None = None,
) -> ir.Model:
    """Returns the program as an `onnx_ir` model with float8 elements.

    Args:
        program: rewritten or not.
        opset: see `to_onnx`.
        names: arguments for torch.onnx.export that give names.
        before_optimizing: called with the model before constants are folded; may change it.

    Raises:
        ContractError: torch cannot export it.
    """
    import torch

    from mxfp8_graph.onnx_export import experts, float8, translation
    from mxfp8_graph.torch_pass.checked_program import check_stored

    try:
        with quiet(), torch.no_grad():  # its decompositions run the ops, and quantize refuses to cut a gradient
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                verbose=False,
                custom_translation_table=translation.table(opset),
                optimize=False,
                **names,
            )
            assert exported is not None  # None is for exports that write a file themselves
            if before_optimizing is not None:
                before_optimizing(exported.model)
            _optimize(exported.model)
    except Exception as error:  # those of its translations, and of names that do not fit, have no common base
        reason = error.__cause__ or error
        if isinstance(reason, Mxfp8Error):  # one of our ops refused what the program gives it
            what, expected = f"the program is damaged: {reason.problem}", reason.expected or "what the op takes"
            raise ContractError("to_onnx", what, expected=expected, advice="rewrite the original again") from error
        check_stored(program, "to_onnx")  # torch says less, or nothing, of a tensor that is not what the graph says
        what = f"torch {torch.__version__} cannot export the program: {first_line(reason)}"
        advice = "change the model to do without this one"
        raise ContractError("to_onnx", what, expected="ops that have an ONNX form", advice=advice) from error
    model: ir.Model = exported.model
    version = model.opset_imports.get("", 0)
    if version != opset:
        what = f"onnxscript cannot bring the model from opset {version} to {opset}"
        raise ContractError("to_onnx", what, expected="ops that both have", advice="pass another opset")
    # Before `retype`: ONNX has no Gather of float8, so these Gathers must be gone when elements get their types.
    experts.pick_in_nodes(model)
    float8.retype(model)
    return model


def _optimize(model: ir.Model) -> None:
    """Optimizes a model as torch's exporter does, in place, but leaves GatherElements alone.

    onnx's reference evaluator fails on more than 64 values there, and onnxscript tells the user so.
    """
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    optimizer.optimize_ir(model, should_fold=lambda node: False if node.op_type == "GatherElements" else None)
    onnx_fusions.fuse(model)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of torch's exporter about other packages and about itself."""
    from mxfp8_graph.torch_pass import internals

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with internals.quiet():
            yield
    finally:
        logger.setLevel(level)


def _skeleton(model: ir.Model) -> tuple[OpenedModel, dict[str, ir.TensorProtocol]]:
    """Returns the model without the data of its large initializers, and that data by name."""
    import onnx_ir as ir

    size = 0
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None  # an initializer without data is no initializer
        # protobuf cannot serialize more than 2 GB, so large tensors never go through a proto.
        if tensor.nbytes > INLINE_BYTES:
            tensors[name] = tensor
            size += tensor.nbytes
            model.graph.initializers.pop(name)
    proto = ir.to_proto(model)
    for name, tensor in tensors.items():
        dims = tensor.shape.numpy()
        proto.graph.initializer.add(name=name, data_type=int(tensor.dtype), dims=dims)
    opened = OpenedModel(
        "program", proto, {}, None, size + proto.ByteSize(), uses_external_data=False, weights_are_inputs=False
    )
    return opened, tensors
