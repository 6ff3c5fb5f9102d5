"""Mutants: small changes of the product's sources, each of which a test should notice.

A mutant's name has no line number, so that it means the same change after edits elsewhere in a file:
`mxfp8_graph/policy/plan.py::Plan.sites::Lt->LtE#0` is the first `<` of that function.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

_TRUTHS = (ast.Name, ast.Call, ast.Attribute)
"""Conditions that have no operator to change: they are negated."""

# clang-format puts a space on both sides of a binary operator, and on neither side of a template's bracket, a pointer's
# star or a reference.
_CPP_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+",
    "&&": "||", "||": "&&", "<<": ">>", ">>": "<<", "&": "|", "|": "&",
}  # fmt: skip
_CPP_OPERATOR = re.compile(r" (<=|>=|==|!=|&&|\|\||<<|>>|[-<>+*&|]) ")
_CPP_TEXT = re.compile(r'//.*|"(?:[^"\\]|\\.)*"|^\s*#.*|operator *\S+')

Change: TypeAlias = "tuple[str, Callable[[], None]]"
"""The kind of a change, and the function that makes it in the syntax tree."""


@dataclass(frozen=True)
class Mutant:
    """One change of one source file.

    Attributes:
        path: of the file, relative to the repository.
        place: the function's qualified name, or "cpp".
        kind: what replaces what, as `Lt->LtE`.
        index: which of the changes of this kind in this place, from 0.
        lines: the first and the last line of its statement, in the file as it is now.
    """

    path: str
    place: str
    kind: str
    index: int
    lines: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.path}::{self.place}::{self.kind}#{self.index}"


def mutants(root: Path, path: str) -> list[Mutant]:
    """Returns all mutants of a Python or C++ file."""
    source = (root / path).read_text()
    if not path.endswith(".py"):
        return [Mutant(path, "cpp", kind, index, (line, line)) for kind, index, line, _ in _cpp_points(source)]
    return [Mutant(path, place, kind, index, line) for place, kind, index, line, _ in _python_points(ast.parse(source))]


def mutated_tree(source: str, name: str) -> ast.Module:
    """Returns the syntax tree of a Python file with the named change.

    Raises:
        LookupError: the file has no such place.
    """
    tree = ast.parse(source)
    for place, kind, index, _, change in _python_points(tree):
        if name.endswith(f"::{place}::{kind}#{index}"):
            change()
            return ast.fix_missing_locations(tree)
    raise LookupError(name)


def mutated_cpp(source: str, name: str) -> str:
    """Returns a C++ file with the named change.

    Raises:
        LookupError: the file has no such place.
    """
    for kind, index, _, (start, end) in _cpp_points(source):
        if name.endswith(f"::cpp::{kind}#{index}"):
            return source[:start] + kind.partition("->")[2] + source[end:]
    raise LookupError(name)


def sample(candidates: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns `count` of the mutants: those with the lowest digests, so that one more file changes few of them."""
    digests = {mutant: hashlib.sha256(f"{seed}:{mutant.name}".encode()).digest() for mutant in candidates}
    return sorted(candidates, key=lambda mutant: digests[mutant])[:count]


def _python_points(tree: ast.Module) -> Iterator[tuple[str, str, int, tuple[int, int], Callable[[], None]]]:
    for place, function in _functions(tree, ""):
        counts: Counter[str] = Counter()
        for node, lines in _code_nodes(function):
            for kind, change in _changes(node):
                yield place, kind, counts[kind], lines, change
                counts[kind] += 1


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the outermost functions of a module and of its classes. What runs at import is tested by every test."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def _code_nodes(function: ast.FunctionDef) -> Iterator[tuple[ast.expr | ast.stmt, tuple[int, int]]]:
    """Yields the statements and expressions of a function with the lines of their statement, or of its header if it
    has a body; annotations, errors' texts and f-strings are left out.
    """
    todo: list[tuple[ast.AST, tuple[int, int]]] = [(node, (0, 0)) for node in function.body]
    while todo:
        node, lines = todo.pop(0)
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arg)):
            continue
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            lines = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node, lines
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.FunctionDef):
            children = list(node.body)
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # zip's: both are right for equal lengths
            children = []
        todo += [(child, lines) for child in children]


def _changes(node: ast.expr | ast.stmt) -> Iterator[Change]:
    """Yields the changes of one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _operator(node.ops[0], lambda new: node.ops.__setitem__(0, new))
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _OPERATORS:
        texts = isinstance(node, ast.BinOp) and any(map(_is_text, (node.left, node.right)))
        if not texts:  # they cannot be subtracted: every test would notice
            yield _operator(node.op, lambda new: setattr(node, "op", new))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "Not->", lambda: setattr(node, "op", ast.UAdd()) or setattr(node, "operand", _truth(node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value}->{not node.value}", lambda: setattr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "Int->Int+1", lambda: setattr(node, "value", node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and isinstance(node.test, _TRUTHS):
        yield "If->IfNot", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))


def _operator(old: ast.AST, put: Callable[[ast.AST], None]) -> Change:
    new = _OPERATORS[type(old)]
    return f"{type(old).__name__}->{new.__name__}", lambda: put(new())


def _truth(operand: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("bool", ast.Load()), [operand], [])


def _is_text(node: ast.expr) -> bool:
    literal = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return literal or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def _cpp_points(source: str) -> Iterator[tuple[str, int, int, tuple[int, int]]]:
    counts: Counter[str] = Counter()
    start = 0
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        code = _CPP_TEXT.sub(lambda text: "_" * len(text[0]), line)
        if "static_assert" not in code and "template" not in code:
            for match in _CPP_OPERATOR.finditer(code):
                kind = f"{match[1]}->{_CPP_OPERATORS[match[1]]}"
                yield kind, counts[kind], number, (start + match.start(1), start + match.end(1))
                counts[kind] += 1
        start += len(line)
