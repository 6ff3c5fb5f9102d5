"""Refuses a serialized program that could run code when torch reads it, or when the program it becomes runs.

Wherever torch turns text of the file into Python, only what torch.export itself writes passes:

    names of nodes, arguments   stand in generated code as they are: identifiers
    other names and keys        stand between quotes there: no quotes, backslashes, control characters
    ops                         looked up by attribute from `torch` on: registered ops, and a few functions by name
    expressions of sizes        sympy evaluates them: constructors of arithmetic
    guards                      compiled when the program is made callable: comparisons of sizes
    trees of containers         import what makes a default or an enum: no imports

Written against torch 2.10 to 2.15. What a later torch writes and this does not know is refused, never passed.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from mxfp8_graph.torch_program.containers import unknown_classes
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

_RUN_GRAPHS: Final = frozenset(
    [
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "autograd_function_apply",
        "cond",
        "dynamo_bypassing_wrapper",
        "flex_attention",
        "flex_attention_backward",
        "foreach_map",
        "graphsafe_run_with_rng_state",
        "hints_wrapper",
        "invoke_quant",
        "invoke_quant_packed",
        "invoke_subgraph",
        "map_impl",
        "out_dtype",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "scan",
        "strict_mode",
        "tag_activation_checkpoint",
        "while_loop",
        "while_loop_stack_output",
        "with_effects",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
"""Higher-order ops that run graphs and ops of the file; others run Python objects, libraries or format strings."""

_FUNCTIONS: Final = frozenset(
    [
        *(
            f"_operator.{name}"
            for name in [
                "getitem",
                "add",
                "mul",
                "sub",
                "truediv",
                "ge",
                "le",
                "gt",
                "lt",
                "eq",
                "ne",
                "floordiv",
                "mod",
                "and_",
                "or_",
            ]
        ),
        *(f"_operator.{name}" for name in ["not_", "pow", "neg", "pos", "abs", "lshift", "rshift"]),
        *(f"math.{name}" for name in ("ceil", "floor", "trunc")),
        *(f"torch.sym_{name}" for name in ["int", "float", "ite", "max", "min", "not", "sqrt", "sum"]),
        "torch._C._set_grad_enabled",
        "torch.autograd.grad_mode.set_grad_enabled",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
        "torch.fx.experimental.symbolic_shapes.cast_symbool_to_symint_guardless",
        *(f"torch._functorch.predispatch.{name}" for name in ["_add_batch_dim", "_remove_batch_dim", "_make_dual"]),
        *(f"torch._functorch.predispatch._{name}_nesting" for name in ("vmap_increment", "vmap_decrement")),
        *(f"torch._functorch.predispatch._{name}_nesting" for name in ("jvp_increment", "jvp_decrement")),
        *(f"torch._functorch.predispatch.{name}" for name in ["_unpack_dual", "_unwrap_for_grad"]),
        *(f"torch._functorch.predispatch.{name}" for name in ["_enter_dual_level", "_exit_dual_level"]),
        "torch._functorch.predispatch.lazy_load_decompositions",
    ]
)
"""What else a program may call: torch's verifier allows it too."""


def refuse_code(program: Any, where: object) -> None:
    """Passes a program, in torch's serialization schema, if neither reading nor running it runs other code.

    Raises:
        ContractError: it could; says which text, and how to read the file nevertheless.
    """
    stack: list[Any] = [program]
    while stack:
        value = stack.pop()
        if dataclasses.is_dataclass(value):
            stack += _checked_fields(value, where)
        elif isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list):
            stack += value
        elif isinstance(value, str):
            _check(_check_literal, value, where)


def _checked_fields(value: Any, where: object) -> Iterator[Any]:
    """Checks what is special among the fields of a schema object, and yields the others."""
    for name in (field.name for field in dataclasses.fields(value)):
        item = vars(value).get(name)
        if item is None or name == "metadata" or (name == "arg" and _is_text_argument(value)):
            continue  # what tools say about nodes, and texts passed to ops: their repr stands in generated code
        if name == "range_constraints":
            for symbol in item:
                _check(_check_counter, symbol, where)
        if name in _CHECKS:
            for text in item if isinstance(item, list) and name in _LISTS else (item,):
                _check(_CHECKS[name], text, where)
        else:
            yield item


def _is_text_argument(value: Any) -> bool:
    argument = value.arg
    return type(value).__name__ == "NamedArgument" and getattr(argument, "type", "") in ("as_string", "as_strings")


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
    """Torch counts up to the number of an unbacked symbol, one by one."""
    number = re.fullmatch(r"\D*(\d+)", symbol)
    return (
        None if number is None or len(number[1]) <= 6 else "has too large a number: torch counts up to it, one by one"
    )


def _check_op(target: str) -> str | None:
    if target in _FUNCTIONS:
        return None
    match = _OP.fullmatch(target)
    if match is None:
        return "is no op"
    namespace, name, overload = match.groups()
    if namespace == "higher_order":
        return None if name in _RUN_GRAPHS and overload is None else "is a higher-order op that may run other code"
    found: Any = getattr(torch.ops, namespace)
    for part in (name, overload or "default"):
        found = getattr(found, part, None)
    if found is None:
        return None  # torch says that it is not registered
    if not isinstance(found, torch._ops.OpOverload):
        return "is no op"
    arguments = {argument.name for argument in found._schema.arguments if "str" in str(argument.type)}
    return "reads or writes files" if namespace in _FILE_OPS or arguments & _FILE_ARGUMENTS else None


_LONGEST_EXPRESSION: Final = 20_000
_CONSTRUCTORS: Final = frozenset(
    [
        "Add",
        "Mul",
        "Pow",
        "Integer",
        "Rational",
        "Float",
        "Symbol",
        "Max",
        "Min",
        "Mod",
        "Abs",
        "Eq",
        "Equality",
        "Ne",
        "Unequality",
        "Ge",
        "GreaterThan",
        "Gt",
        "StrictGreaterThan",
        "Le",
        "LessThan",
        "Lt",
        "StrictLessThan",
        "And",
        "Or",
        "Not",
        "Piecewise",
        "ExprCondPair",
        "Tuple",
        "floor",
        "ceiling",
        "IntInfinity",
        "NegativeIntInfinity",
        "FloorDiv",
        "ModularIndexing",
        "Where",
        "PythonMod",
        "CleanDiv",
        "CeilToInt",
        "FloorToInt",
        "CeilDiv",
        "RShift",
        "FloatTrueDiv",
        "IntTrueDiv",
        "IsNonOverlappingAndDenseIndicator",
        "TruncToFloat",
        "TruncToInt",
        "RoundToInt",
        "RoundDecimal",
        "ToFloat",
        "Identity",
    ]
)
_POWERS: Final = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_SYMBOL: Final = re.compile(r"[a-z]{1,3}\d{1,9}|oo|int_oo|zoo|nan|true|false")
_LARGEST_POWER: Final = 4096
"""Largest product of all exponents in an expression: sympy computes powers of numbers to the last digit."""


def _check_expression(text: str) -> str | None:
    try:
        tree = ast.parse(text, mode="eval").body if len(text) <= _LONGEST_EXPRESSION else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        return "is not a size of a tensor"
    power = 1.0
    for node in ast.walk(tree):
        if not _is_arithmetic(node):
            return "is more than arithmetic"
        exponent = _exponent(node)
        power *= max(1, exponent if exponent is not None else _LARGEST_POWER + 1)
    return None if power <= _LARGEST_POWER else "is too expensive to evaluate"


_ARITHMETIC: Final = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _CONSTRUCTORS | _POWERS
        return known and all(keyword.arg is not None for keyword in node.keywords)
    if isinstance(node, ast.Name):
        return bool(node.id in _CONSTRUCTORS | _POWERS or _SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, str):  # Symbol('s0'), Float('0.5', precision=53)
            return value.isidentifier() or re.fullmatch(r"-?[\d.]{1,40}(e[+-]?\d{1,3})?", value) is not None
        return isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
    return isinstance(node, (*_ARITHMETIC, ast.keyword, ast.Load, ast.Tuple))


def _exponent(node: ast.AST) -> float | None:
    """Returns the size of the exponent if `node` is a power, 1 if it is none, None if the exponent is no number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        return _number(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _POWERS:
        return _number(node.args[1]) if len(node.args) == 2 else None
    return 1


def _number(node: ast.AST) -> float | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Integer", "Rational"}:
        sizes = [_number(argument) for argument in node.args]
        return max((size for size in sizes if size is not None), default=None) if None not in sizes else None
    if isinstance(node, ast.UnaryOp):
        return _number(node.operand)
    return abs(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) else None


_GUARD_FUNCTIONS: Final = frozenset({"IsNonOverlappingAndDenseIndicator", "cast_symbool_to_symint_guardless"})
_GUARD_METHODS: Final = frozenset({"size", "stride", "storage_offset", "item"})
_MATH: Final = frozenset(["isnan", "inf", "floor", "ceil", "trunc", "sqrt", "pow", "log2", "fabs"])
_SYMBOLIC: Final = frozenset(f"sym_{name}" for name in ["int", "float", "ite", "max", "min", "not", "sqrt", "sum"])


def _check_guard(text: str) -> str | None:
    try:
        tree = ast.parse(text, mode="eval").body if len(text) <= _LONGEST_EXPRESSION else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or '"' in text or "\\" in text or not text.isprintable():
        return "is no guard"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    harmless = all(_is_of_guards(node, called=id(node) in called) for node in ast.walk(tree))
    return None if harmless else "is more than a guard of sizes"


def _is_of_guards(node: ast.AST, *, called: bool) -> bool:
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in {"math", "torch"}:
            return node.attr in (_MATH if node.value.id == "math" else _SYMBOLIC)
        return called and node.attr in _GUARD_METHODS
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _GUARD_FUNCTIONS | {"max", "min", "abs", "int"}
        return (known or isinstance(node.func, ast.Attribute)) and not node.keywords
    if isinstance(node, ast.Name):
        return node.id in _GUARD_FUNCTIONS | {"L", "math", "torch", "inf", "max", "min", "abs", "int"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        return (_number(node.right) or _LARGEST_POWER) < 64
    return isinstance(node, (*_ARITHMETIC, ast.Subscript, ast.Constant, ast.Load, ast.IfExp))


def _check_tree(text: str) -> str | None:
    try:
        _, tree = json.loads(text)
        keywords = [*_keyword_names(tree)]
        return next(filter(None, map(_check_name, keywords)), None) or _check_nodes(tree)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "is not a tree of containers"


def _keyword_names(tree: Any) -> Iterator[str]:
    """Yields the names of keyword arguments, if the tree is that of a call's arguments."""
    children = tree["children_spec"]
    if len(children) == 2 and children[1]["type"] == "builtins.dict":
        yield from json.loads(children[1]["context"])


def _check_nodes(tree: Any) -> str | None:
    stack = [tree]
    while stack:
        node = stack.pop()
        context = node["context"]
        unknown = next(unknown_classes(context), None)
        if unknown is not None:
            return f"makes a {unknown}"
        if isinstance(context, dict):  # a defaultdict, whose factory is looked up by name
            factory = (context.get("default_factory_module", "builtins"), context.get("default_factory_name", "list"))
            if factory[0] != "builtins" or factory[1] not in {"list", "dict", "set", "int", "float", "str", "tuple"}:
                return f"makes defaults with {factory[0]}.{factory[1]}"
        elif isinstance(context, str) and "__enum__" in context:
            problem = _check_enums(json.loads(context))
            if problem is not None:
                return problem
        elif isinstance(context, str) and node["type"] == "builtins.dict":
            problem = next(filter(None, (_check_literal(str(key)) for key in json.loads(context))), None)
            if problem is not None:
                return problem
        stack += node["children_spec"]
    return None


def _check_enums(context: Any) -> str | None:
    """Passes the enums of a context that are defined by now: torch imports the module of an enum."""
    stack = [context]
    while stack:
        value = stack.pop()
        if isinstance(value, dict) and "__enum__" in value:
            module, _, path = str(value["fqn"]).partition(":")
            found: Any = sys.modules.get(module)
            for part in path.split("."):
                found = vars(found).get(part) if found is not None else None
            if not (isinstance(found, type) and issubclass(found, enum.Enum)):
                return f"names the enum {value['fqn']}, which is not imported"
        stack += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return None


_CHECKS: Final[dict[str, Callable[[str], str | None]]] = {
    "target": _check_op,
    "as_operator": _check_op,
    "name": _check_name,
    "as_name": _check_name,
    "forward_arg_names": _check_name,
    "expr_str": _check_expression,
    "guards_code": _check_guard,
    "in_spec": _check_tree,
    "out_spec": _check_tree,
}
"""How to check the text in a field of torch's schema; every other text by `_check_literal`."""
_LISTS: Final = frozenset({"forward_arg_names", "guards_code"})
"""Those of them that hold lists of texts."""
