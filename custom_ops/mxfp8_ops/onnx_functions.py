"""The nodes of `contract.py` as ONNX model-local functions made of standard ops.

A model that carries them runs in any ONNX Runtime, with no library: the runtime inlines the body. Where our library
is registered, its kernel of the same name wins. The gemms accumulate in float32 and stay within `gemm_error_bound`; the
others give the bytes of the reference. `body` of a row writes its body.

Weights that are initializers are decoded once, when the session is made: from then on they take the memory, and the
time, of float32; a table of MXFP8Embedding, those of float16.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import FunctionProto, helper

from mxfp8_ops import contract
from mxfp8_ops.errors import ContractError
from mxfp8_ops.function_body import Body
from mxfp8_ops.node import Op


def functions(opset: int, ops: Iterable[str] = tuple(contract.OPS)) -> list[FunctionProto]:
    """Returns the function bodies of `ops`, in the order given, each behind those of the nodes in it.

    They are for a model whose default domain is at `opset`: ONNX Runtime resolves an inlined body at the opset of the
    model and ignores the function's own import, so generate the bodies for the opset the model has. Attach them with
    `model.functions.extend(...)`, and import the domain `contract.DOMAIN` at `contract.VERSION`.

    Args:
        opset: version of the default domain the model imports, at least `contract.MIN_OPSET`.
        ops: names of nodes in `contract.OPS`.

    Raises:
        ContractError: the opset is too low, or there is no such node.
    """
    if opset < contract.MIN_OPSET:
        raise ContractError(
            "functions",
            f"opset {opset}",
            expected=f"at least {contract.MIN_OPSET}",
            advice="convert the model up with onnx.version_converter",
        )
    made: dict[str, FunctionProto] = {}

    def make(name: str) -> None:
        if name not in made:
            function, called = _function(name, opset)
            for op in called:
                make(op.name)
            made[name] = function

    for name in ops:
        make(name)
    return [*made.values()]


def _function(name: str, opset: int) -> tuple[FunctionProto, list[Op]]:
    """Returns the body of a node, and the nodes in it."""
    if name not in contract.OPS:
        raise ContractError(
            "functions", f"no node {name!r}", expected=f"one of {', '.join(contract.OPS)}", advice="correct the name"
        )
    op = contract.OPS[name]
    body = Body(op, opset)
    op.body(body)
    imports = [helper.make_opsetid("", opset)]
    if body.called:
        imports.append(helper.make_opsetid(contract.DOMAIN, contract.VERSION))
    function = helper.make_function(
        contract.DOMAIN,
        op.name,
        [port.name for port in op.inputs],
        [port.name for port in op.outputs],
        body.nodes,
        imports,
        attribute_protos=[helper.make_attribute(key, default) for key, default in op.attributes.items()],
    )
    return function, body.called
