"""The engine with one wait, record or event less.

A mutant is one call of the stream seam that is not made: inside the seam, of a stream or an event;
in the rest of the engine, of the seam. The function is compiled again without it, from the source
as it is, so that calls that are added are mutated too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tests.streams.device import Stream, using

__all__ = [
    "GATE",
    "SAVES",
    "SEAM",
    "USERS",
    "CopyMutant",
    "Mutant",
    "applied",
    "copy_mutants",
    "mutants",
]

SEAM = "sharding.engine.streams"
SAVES = "ckpt.layout.memory"
GATE = {"ckpt.saving.step_gate": {"set", "wait", "wait_for"}, "ckpt.saving.staging": {"hold"}}
"""What holds a step back until its memory has been copied: by module, the calls of interest."""
USERS = (
    "sharding.engine.store",
    "sharding.engine.runtime",
    "sharding.engine.reduction",
    "sharding.flat.values",
    "sharding.dtensor.store",
    "sharding.fsdp_module",
)
_INSIDE = {"wait_stream", "wait_event", "record", "record_stream", "synchronize"}
_OUTSIDE = {
    "gathers_wait_for_compute",
    "gathers_wait_once_for",
    "gathers_wait_for",
    "compute_waits_for_gathers",
    "reductions_wait_for_compute",
    "compute_waits_for_reductions",
    "reductions_wait_for",
    "reductions_have_read",
    "will_free",
    "give_back",
    "take_back",
    "release_all",
    "finish",
    "follow",
}


class Mutant(NamedTuple):
    """One call that is not made: in which function, the how manyth there, and as it is written."""

    module: str
    function: tuple[str, ...]
    number: int
    call: str

    def __str__(self) -> str:
        return f"{self.module}.{'.'.join(self.function)}: {self.call}"

    def change(self) -> ast.NodeTransformer:
        """What makes the mutant of the module's tree."""
        return _Without(self)


class CopyMutant(NamedTuple):
    """One copy that is in no order: "unordered", on a stream that waits for nothing, or
    "unwaited", only started where the host would wait for it.
    """

    module: str
    function: tuple[str, ...]
    number: int
    call: str
    how: str

    def __str__(self) -> str:
        return f"{self.module}.{'.'.join(self.function)}: {self.call} {self.how}"

    def change(self) -> ast.NodeTransformer:
        """What makes the mutant of the module's tree."""
        return _InNoOrder(self)


def mutants(*modules: str) -> list[Mutant]:
    """All mutants of these modules of the engine."""
    return [one for module in modules for one in _mutants_of(module)]


def copy_mutants(*functions: str) -> list[CopyMutant]:
    """All mutants of the copies in these functions, named with their modules: "a.b:Class.f"."""
    made = []
    for one in functions:
        module, _, name = one.partition(":")
        path = tuple(name.split("."))
        (node,) = [node for where, node in _functions(_tree(module)) if where == path]
        made += [
            CopyMutant(module, path, number, ast.unparse(call), how)
            for number, call in enumerate(_copies(node))
            for how in ("unordered", "unwaited")
        ]
    return made


@contextmanager
def applied(mutant: Mutant | CopyMutant) -> Iterator[None]:
    """The engine is the mutant inside."""
    function = _function(mutant)
    tree = _tree(mutant.module)
    (node,) = [node for path, node in _functions(tree) if path == mutant.function]
    mutant.change().visit(node)
    code = compile(ast.fix_missing_locations(tree), f"<{mutant}>", "exec")
    before = function.__code__
    function.__code__ = _code_of(code, mutant.function)
    function.__globals__.update(copied_unordered=copied_unordered, copied_unwaited=copied_unwaited)
    try:
        yield
    finally:
        function.__code__ = before


def _mutants_of(module: str) -> Iterator[Mutant]:
    for path, node in _functions(_tree(module)):
        for number, call in enumerate(_calls(module, node)):
            yield Mutant(module, path, number, ast.unparse(call))


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _functions(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield (node.name,), node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield (node.name, inner.name), inner


def _calls(module: str, function: ast.FunctionDef) -> list[ast.Call]:
    """Calls in the order in which a visitor meets them; only those whose result nobody uses."""
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and _is_of_seam(module, node.value.func)
    ]


def _is_of_seam(module: str, called: ast.Attribute) -> bool:
    if module in GATE:
        return called.attr in GATE[module]
    if module in (SEAM, SAVES):
        return called.attr in _INSIDE
    return called.attr in _OUTSIDE and "streams" in ast.unparse(called.value)


class _Without(ast.NodeTransformer):
    """Leaves out the call, and evaluates what it is called with."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._target: ast.Call | None = None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self._target is None:
            self._target = _calls(self._mutant.module, node)[self._mutant.number]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if node is not self._target:
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        return ast.Tuple([node.func.value, *node.args], ast.Load())


def _copies(function: ast.FunctionDef) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("copy_", "cpu")
    ]


class _InNoOrder(ast.NodeTransformer):
    """Hands the copy, as a function, to one of the functions below."""

    def __init__(self, mutant: CopyMutant) -> None:
        self._mutant = mutant
        self._target: ast.Call | None = None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self._target is None:
            self._target = _copies(node)[self._mutant.number]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if node is not self._target:
            return self.generic_visit(node)
        nothing = ast.arguments([], [], None, [], [], None, [])
        name = ast.Name(f"copied_{self._mutant.how}", ast.Load())
        return ast.Call(name, [ast.Lambda(nothing, node)], [])


def copied_unordered(copy: Callable[[], Any]) -> Any:
    """The copy goes to a stream that waits for nothing."""
    with Stream(name="a stream that waits for nothing"):
        return copy()


def copied_unwaited(copy: Callable[[], Any]) -> Any:
    """The host goes on while the copy is under way."""
    using().skips_waits = True
    try:
        return copy()
    finally:
        using().skips_waits = False


def _function(mutant: Mutant | CopyMutant) -> FunctionType:
    target: Any = importlib.import_module(mutant.module)
    for name in mutant.function:
        target = inspect.getattr_static(target, name)
    if isinstance(target, property):
        target = target.fget
    target = inspect.unwrap(target)
    assert isinstance(target, FunctionType), mutant
    return target


def _code_of(code: CodeType, path: tuple[str, ...]) -> CodeType:
    for name in path:
        (code,) = [
            one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name
        ]
    return code
