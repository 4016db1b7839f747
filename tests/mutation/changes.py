"""Small wrong changes of one source file, for mutation testing: what they are, and code with one.

A mutant is one change of one node in the body of a function. Positions stay as they are, so that
the code of a mutant has the names and first lines of the code that it replaces. Left alone: what
runs at import (defaults, decorators, constants of a module), annotations, asserts, and the texts of
errors and log messages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

# Functions of one file differ by the names of their code objects and by their first lines.
FunctionKey = tuple[str, int]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
LOGGERS = ("logger", "warnings")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """One change. `number` counts the changes of the file; `first` and `last` are the lines of the
    statement, without its body, that runs the changed node.
    """

    path: str
    number: int
    kind: str
    function: FunctionKey
    first: int
    last: int
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.first} #{self.number} in {self.function[0]}: {self.kind}\n"
            f"  - {self.before}\n  + {self.after}"
        )


class _Change(NamedTuple):
    kind: str
    parent: Any
    field: str
    index: int | None
    new: ast.AST

    def swap(self, new: Any) -> Any:
        """Put `new` in the place of the changed node; returns what was there."""
        if self.index is None:
            old = getattr(self.parent, self.field)
            setattr(self.parent, self.field, new)
        else:
            nodes = getattr(self.parent, self.field)
            old, nodes[self.index] = nodes[self.index], new
        return old


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """All changes of one file, in a fixed order. `path` is relative to `root`."""
    tree = ast.parse((root / path).read_text())
    mutants = []
    for number, (function, statement, change) in enumerate(_changes(tree)):
        before = _one_line(statement)
        old = change.swap(change.new)
        after = _one_line(change.new if old is statement else statement)
        change.swap(old)
        first, last = _lines(statement)
        key = _key(function)
        mutants.append(Mutant(path, number, change.kind, key, first, last, before, after))
    return mutants


def code_of(root: Path, mutant: Mutant) -> CodeType:
    """The code of the function that has this change. Raises SyntaxError where it is no Python."""
    tree = ast.parse((root / mutant.path).read_text())
    for number, (_, _, change) in enumerate(_changes(tree)):
        if number == mutant.number:
            change.swap(change.new)
            break
    whole = compile(ast.fix_missing_locations(tree), str(root / mutant.path), "exec")
    return next(code for code in codes_in(whole) if _code_key(code) == mutant.function)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """`code` and all code inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_in(const)


def _code_key(code: CodeType) -> FunctionKey:
    return code.co_name, code.co_firstlineno


def _key(function: FUNCTIONS) -> FunctionKey:
    lines = [function.lineno, *(node.lineno for node in function.decorator_list)]
    return function.name, min(lines)


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else last


def _one_line(node: ast.AST) -> str:
    """The source of a statement, of one with a body its head."""
    text = ast.unparse(node)
    return text.split("\n")[0] if getattr(node, "body", None) else " ".join(text.split())


def _changes(tree: ast.Module) -> Iterator[tuple[Any, ast.stmt, _Change]]:
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in members:
            if isinstance(function, FUNCTIONS):
                for index, statement in enumerate(function.body):
                    if not _is_left_alone(function, "body", statement):
                        for where, change in _below(function, "body", index, statement, statement):
                            yield function, where, change


def _below(
    parent: ast.AST, field: str, index: int | None, node: ast.AST, statement: ast.stmt
) -> Iterator[tuple[ast.stmt, _Change]]:
    """The changes of `node` and of what is in it."""
    if isinstance(node, ast.stmt):
        statement = node
    for kind, new in _replacements(parent, node):
        yield statement, _Change(kind, parent, field, index, ast.copy_location(new, node))
    for name, value in ast.iter_fields(node):
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST) and not _is_left_alone(node, name, child):
                yield from _below(node, name, place, child, statement)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_left_alone(parent: ast.AST, field: str, child: ast.AST) -> bool:
    if isinstance(child, ast.JoinedStr | ast.Assert | ast.FormattedValue) or _is_text(child):
        return True
    if field in ("annotation", "returns", "decorator_list"):
        return True
    if isinstance(parent, ast.keyword) and parent.arg == "strict":
        return True  # of zip: an assert
    return isinstance(parent, ast.Raise) or (_is_logging(parent) and field == "args")


def _is_logging(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
    )


def _replacements(parent: ast.AST, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
        if isinstance(parent, ast.If | ast.While | ast.IfExp) and node is parent.test:
            yield from _of_test(node, is_loop=isinstance(parent, ast.While))
        if isinstance(parent, ast.comprehension) and node in parent.ifs:
            yield "a filter that lets all pass", ast.Constant(True)
        if isinstance(parent, ast.Slice):
            yield "a slice without this end", ast.Constant(None)
    elif isinstance(node, ast.ExceptHandler):
        yield (
            "an error that is not caught",
            ast.ExceptHandler(type=node.type, name=node.name, body=[ast.Raise()]),
        )


def _of_test(node: ast.expr, *, is_loop: bool) -> Iterator[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Compare | ast.UnaryOp):
        yield "a condition negated", ast.UnaryOp(ast.Not(), node)
    if not is_loop:
        yield "a condition always true", ast.Constant(True)
    yield "a condition never true", ast.Constant(False)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    dropped = "a statement dropped"
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield dropped, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield dropped, ast.Pass()
        case ast.Raise():
            yield "a raise dropped", ast.Pass()
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "None returned", ast.Return(ast.Constant(None))
        case ast.Continue():
            yield "continue to break", ast.Break()
        case ast.Break():
            yield "break to continue", ast.Continue()


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARISONS:
            yield "a comparison swapped", ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and to or, or to and", ast.BoolOp(other, values)
            for index in range(len(values)):
                rest = [*values[:index], *values[index + 1 :]]
                yield "an operand dropped", rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "a not removed", operand
        case ast.Constant(value=bool(value)):
            yield "a constant flipped", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "a constant one higher", ast.Constant(value + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            if not any(isinstance(side, ast.JoinedStr) for side in (left, right)):
                yield "an operator swapped", ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.Call():
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    first = node.args[:2]
    if len(first) == 2 and not any(isinstance(arg, ast.Starred) for arg in first):
        swapped = [first[1], first[0], *node.args[2:]]
        if not _is_logging(node) and len({ast.dump(arg) for arg in first}) == 2:
            yield "arguments swapped", ast.Call(node.func, swapped, node.keywords)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if (name or getattr(node.func, "id", "")) in ("get", "pop", "next", "getattr"):
        place = 2 if not name and node.func.id == "getattr" else 1  # type: ignore[attr-defined]
        if len(node.args) == place + 1:
            yield "a default removed", ast.Call(node.func, node.args[:place], node.keywords)
    for keyword in node.keywords:
        if keyword.arg in ("key", "default", "reverse"):
            rest = [other for other in node.keywords if other is not keyword]
            yield f"{keyword.arg}= removed", ast.Call(node.func, node.args, rest)
