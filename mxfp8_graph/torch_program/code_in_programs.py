"""Refuses a serialized program that could run code when torch reads it, or when the program it becomes runs.

Wherever torch turns text of the file into Python, only what torch.export itself writes passes:

    names of nodes, arguments   stand in generated code as they are: identifiers
    other names and keys        stand between quotes there: no quotes, backslashes, control characters
    ops                         looked up by attribute from `torch` on: registered ops, and a few functions by name
    sizes and guards            evaluated by sympy, compiled by torch: arithmetic
    trees of containers         import what makes a default or an enum: no imports

Written against torch 2.10 to 2.15. What a later torch writes and this does not know is refused, never passed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final

import torch

from mxfp8_graph.torch_program.containers import is_harmless
from mxfp8_graph.torch_program.internals import op_names
from mxfp8_ops.errors import ContractError, Option

TRUST: Final = (
    "do not use the file; or, if you trust whoever made it, pass ",
    Option("trust_pickle", True),
    ", which lets it run code",
)
"""What to do about a file that could run code."""

_OP: Final = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
_FILE_ARGUMENTS: Final = frozenset({"filename", "file", "path"})
"""Names of text arguments by which an op (aten::from_file, aten::save) reads or writes files."""
_FILE_OPS: Final = frozenset({"debugprims"})
"""Namespaces of ops that do so by arguments with other names."""

_RUN_GRAPHS: Final = op_names(
    """associative_scan auto_functionalized auto_functionalized_v2 autograd_function_apply cond
    dynamo_bypassing_wrapper flex_attention flex_attention_backward foreach_map graphsafe_run_with_rng_state
    hints_wrapper invoke_quant invoke_quant_packed invoke_subgraph map_impl out_dtype run_and_save_rng_state
    run_with_rng_state scan strict_mode tag_activation_checkpoint while_loop while_loop_stack_output with_effects wrap
    wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled"""
)
"""Higher-order ops that run graphs and ops of the file; others run Python objects, libraries or format strings."""

_FUNCTIONS: Final = frozenset(
    prefix + name
    for prefix, names in {
        "_operator.": """getitem add mul sub truediv ge le gt lt eq ne floordiv mod and_ or_ not_ pow neg pos abs lshift
            rshift""",
        "math.": "ceil floor trunc",
        "torch.": "_C._set_grad_enabled autograd.grad_mode.set_grad_enabled",
        "torch.sym_": "int float ite max min not sqrt sum",
        "torch.amp.autocast_mode._": "enter_autocast exit_autocast",
        "torch.fx.experimental.symbolic_shapes.": "cast_symbool_to_symint_guardless",
        "torch._functorch.predispatch.": """_add_batch_dim _remove_batch_dim _make_dual _unpack_dual _unwrap_for_grad
            _vmap_increment_nesting _vmap_decrement_nesting _jvp_increment_nesting _jvp_decrement_nesting
            _enter_dual_level _exit_dual_level lazy_load_decompositions""",
    }.items()
    for name in names.split()
)
"""What else a program may call: torch's verifier allows it too, but reads it from `torch` on before it checks."""

_POWERS: Final = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_NAMES: Final = _POWERS | op_names(
    """Add Mul Integer Rational Float Symbol Max Min Mod Abs Eq Equality Ne Unequality Ge GreaterThan Gt
    StrictGreaterThan Le LessThan Lt StrictLessThan And Or Not Piecewise ExprCondPair floor ceiling IntInfinity
    NegativeIntInfinity FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv RShift
    FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat
    Identity L math torch inf max min abs int cast_symbool_to_symint_guardless"""
)
"""Constructors of sympy and torch in sizes; the inputs (L), modules and functions of guards."""
_ATTRIBUTES: Final = op_names(
    """size stride storage_offset item isnan inf floor ceil trunc sqrt pow log2 fabs
    sym_int sym_float sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"""
)
"""Of tensors, `math` and `torch`, in guards."""
_SYMBOL: Final = re.compile(r"[a-z]{1,3}\d{1,9}|oo|int_oo|zoo|nan|true|false")
_TEXT: Final = re.compile(r"[^\W\d]\w*|-?[\d.]{1,40}(e[+-]?\d{1,3})?")
"""Symbol('s0'), Float('0.5', precision=53). Other text is a key: sympy would evaluate it anywhere else."""
_OF_TEXT: Final = frozenset({"Symbol", "Float"})
_SYNTAX: Final = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
    *(ast.Load, ast.Subscript, ast.IfExp),
)
_LONGEST_EXPRESSION: Final = 20_000
_LARGEST_POWER: Final = 4096
"""Largest product of all exponents in an expression: sympy computes powers of numbers to the last digit."""

_FACTORIES: Final = frozenset({"list", "dict", "set", "int", "float", "str", "tuple"})
"""Builtins that make the defaults of a defaultdict."""


def refuse_code(program: Any, where: object) -> None:
    """Passes a program, in torch's serialization schema, if neither reading nor running it runs other code.

    Raises:
        ContractError: it could; says which text, and how to read the file nevertheless.
    """
    stack: list[Any] = [program]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, str):
            _check(_check_literal, value, where)
        elif dataclasses.is_dataclass(value):
            for name, item in vars(value).items():
                if item is None or name == "metadata" or (name == "arg" and _is_text_argument(value)):
                    continue  # what tools say about nodes, and texts passed to ops: their repr is in generated code
                if name == "range_constraints":
                    for symbol in item:
                        _check(_check_counter, symbol, where)
                if name in _CHECKS:
                    for text in item if isinstance(item, list) else [item]:
                        _check(_CHECKS[name], text, where)
                else:
                    stack.append(item)


def _is_text_argument(value: Any) -> bool:
    return type(value).__name__ == "NamedArgument" and getattr(value.arg, "type", "") in ("as_string", "as_strings")


def refuse_code_in_keys(inputs: Any, where: object) -> None:
    """Passes sample inputs unless a key of theirs could break out of the quotes it gets in generated code."""
    stack = [inputs]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for key in value:
                _check(_check_literal, str(key), where)
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)


def _check(check: Callable[[str], str | None], text: Any, where: object) -> None:
    problem = check(text) if isinstance(text, str) else "is no text"
    if problem is not None:
        shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:80]}..."
        raise ContractError(
            where, f"{shown} in its program {problem}", expected="what torch.export writes", advice=TRUST
        )


def _check_literal(text: str) -> str | None:
    harmless = text.isprintable() and not set(text) & {"'", '"', "\\"}
    return None if harmless else "could end a string in generated code"


def _check_name(text: str) -> str | None:
    return None if text.isidentifier() or not text else "is a name and could be code"


def _check_counter(symbol: str) -> str | None:
    number = re.fullmatch(r"\D*(\d+)", symbol)
    too_large = number is not None and len(number[1]) > 6
    return "has too large a number: torch counts up to it, one by one" if too_large else None


def _check_op(target: str) -> str | None:
    match = _OP.fullmatch(target)
    if match is None:
        return None if target in _FUNCTIONS else "is no op"
    namespace, name, overload = match.groups()
    if namespace == "higher_order":
        return None if name in _RUN_GRAPHS and overload is None else "is a higher-order op that may run other code"
    op: Any = torch.ops
    kinds = torch._ops._OpNamespace, torch._ops.OpOverloadPacket, torch._ops.OpOverload
    for part, kind in zip((namespace, name, overload or "default"), kinds, strict=True):
        op = getattr(op, part, None)
        if op is None:
            return None  # torch says that it is not registered
        if not isinstance(op, kind):
            return "is no op"  # but a method of torch.ops, such as load_library
    arguments = {argument.name for argument in op._schema.arguments if "str" in str(argument.type)}
    return "reads or writes files" if namespace in _FILE_OPS or arguments & _FILE_ARGUMENTS else None


def _check_arithmetic(text: str) -> str | None:
    """Passes the size of a tensor, or a guard of sizes."""
    try:
        tree = ast.parse(text, mode="eval").body if len(text) <= _LONGEST_EXPRESSION else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    # A guard stands between double quotes in generated code, too.
    if tree is None or not text.isprintable() or set(text) & {'"', "\\"}:
        return "is neither a size of a tensor nor a guard"
    nodes = list(ast.walk(tree))
    places = {id(node.slice): "[]" for node in nodes if isinstance(node, ast.Subscript)}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            places |= {id(argument): node.func.id for argument in node.args}
    if not all(_is_arithmetic(node, places.get(id(node), "")) for node in nodes):
        return "is more than arithmetic"
    return None if math.prod(map(_exponent, nodes)) <= _LARGEST_POWER else "is too expensive to evaluate"


def _is_arithmetic(node: ast.AST, place: str) -> bool:
    """Whether torch computes with a node as it stands; `place` names the function of an argument, or is "[]"."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "ExprCondPair":
            return place == "Piecewise"
        if isinstance(node.func, ast.Name) and node.func.id == "Float" and len(node.args) != 1:
            return False  # a precision that is no keyword
        return isinstance(node.func, ast.Attribute) or (isinstance(node.func, ast.Name) and node.func.id in _NAMES)
    if isinstance(node, ast.Tuple):
        return place == "Piecewise"  # anywhere else it could be multiplied, which repeats it
    if isinstance(node, ast.keyword):  # positive=True, precision=53
        value = getattr(node.value, "value", None)
        return node.arg is not None and isinstance(value, int) and value <= _LARGEST_POWER
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES
    if isinstance(node, ast.Name):
        return node.id in _NAMES or _SYMBOL.fullmatch(node.id) is not None
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, str) and place == "[]":
            return _check_literal(value) is None  # torch writes it into messages, in quotes of its choice
        if isinstance(value, str):
            return place in _OF_TEXT and _TEXT.fullmatch(value) is not None
        return value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
    return isinstance(node, _SYNTAX)


def _exponent(node: ast.AST) -> float:
    """Returns the largest number in the exponent if `node` is a power, else 1; infinity if that is no number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        exponent: ast.AST = node.right
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _POWERS:
        if len(node.args) != 2:
            return math.inf
        exponent = node.args[1]
    else:
        return 1
    sizes = [1.0]
    for part in ast.walk(exponent):
        if isinstance(part, ast.Constant) and isinstance(part.value, (int, float)):
            sizes.append(abs(part.value))
            sizes.append(1 / abs(part.value) if part.value else 0)  # Rational(1, 1e-9)
        elif not isinstance(part, (ast.Call, ast.Load, ast.UnaryOp, ast.unaryop)) and not (
            isinstance(part, ast.Name) and part.id in {"Integer", "Rational"}
        ):
            return math.inf
    return max(sizes)


def _check_tree(text: str) -> str | None:
    """Passes a tree of containers, which is JSON."""
    try:
        _, root = json.loads(text)
        children = root["children_spec"]
        if len(children) == 2 and children[1]["type"] == "builtins.dict":  # a call's arguments: names of keywords
            for name in json.loads(children[1]["context"]):
                if problem := _check_name(name):
                    return problem
        nodes = [root]
        while nodes:
            node = nodes.pop()
            if problem := _check_context(node["context"], is_dict=node["type"] == "builtins.dict"):
                return problem
            nodes += node["children_spec"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "is not a tree of containers"
    return None


def _check_context(context: Any, *, is_dict: bool) -> str | None:
    """Passes what a container is made of besides its children: keys, names of classes, plain values."""
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return None  # the class of a namedtuple; torch evaluates no context that is not JSON
    stack = [context]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if "__enum__" in value:
                return "imports an enum"
            if not is_harmless(value):
                return f"makes a {value['p']}"
            factory = value.get("default_factory_module", "builtins"), value.get("default_factory_name", "list")
            if factory[0] != "builtins" or factory[1] not in _FACTORIES:
                return f"makes defaults with {factory[0]}.{factory[1]}"
            stack += value.values()
        elif isinstance(value, list):
            stack += value
        elif is_dict and (problem := _check_literal(str(value))):
            return problem
    return None


_CHECKS: Final[dict[str, Callable[[str], str | None]]] = {
    "target": _check_op,
    "as_operator": _check_op,
    "name": _check_name,
    "as_name": _check_name,
    "forward_arg_names": _check_name,
    "expr_str": _check_arithmetic,
    "guards_code": _check_arithmetic,
    "in_spec": _check_tree,
    "out_spec": _check_tree,
}
"""How to check the text, or the list of texts, in a field of torch's schema; every other text by `_check_literal`."""
