"""The rules of the house that a machine can keep. Every ban says what to use instead.

Method: parse every source file, collect what breaks a rule, and fail with the whole list. A planted
violation per rule shows that the rule bites.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest
from vulture import Vulture  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("storage", "ckpt", "sharding")


@dataclass
class Source:
    """One parsed file; `path` is relative to the repository, with forward slashes."""

    path: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return self.path.split("/")[0]


@functools.lru_cache(maxsize=2)
def sources(*folders: str) -> list[Source]:
    """Parsed once for all rules of this file; `_sources_are_forgotten` frees them."""
    return [
        Source(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.fixture(autouse=True, scope="module")
def _sources_are_forgotten() -> Iterator[None]:
    gc.disable()  # it would look through a million nodes, again and again
    yield
    sources.cache_clear()
    gc.enable()


# Imports -----------------------------------------------------------------------------------------

# What each package may import besides itself, the standard library and `ONE_FILE_EACH`.
ALLOWED = {
    "storage": {"numpy"},
    "ckpt": {"storage", "numpy", "torch"},
    "sharding": {"storage", "ckpt", "numpy", "torch"},
}

# Third-party packages that are used through the files named here, and nowhere else.
ONE_FILE_EACH = {
    "s3fs": ("storage/s3/client.py", "storage/s3/store.py"),
    "botocore": ("storage/s3/client.py", "storage/s3/answers.py"),
    "aiobotocore": ("storage/s3/client.py",),
    "urllib3": ("storage/s3/wire.py",),
    "fsspec": (
        "storage/generic.py",
        "storage/s3/client.py",
        "storage/clouds.py",
        "storage/url.py",
    ),
    "obstore": ("storage/obstore_objects.py", "storage/clouds.py"),
    "crc32c": (
        "ckpt/format/checksum.py",
        "storage/s3/requests.py",
        "storage/encoding/blocks.py",
        "storage/encoding/layout.py",
        "storage/peers/store.py",
    ),
    "blake3": ("ckpt/format/checksum.py",),
    "msgpack": (
        "ckpt/format/columns.py",
        "ckpt/commit/records.py",
        "ckpt/telemetry/record.py",  # messages between ranks
    ),
    "pydantic": (
        "ckpt/format/manifest.py",
        "ckpt/format/manifest_codec.py",
        "ckpt/format/datafile_index.py",
        "ckpt/telemetry/record.py",
    ),
    "rich": ("ckpt/screens/terminal.py", "ckpt/screens/watching.py"),
    "jinja2": ("ckpt/screens/pages.py",),
    "transformers": ("ckpt/integrations/huggingface.py",),
    "lightning": ("ckpt/integrations/lightning.py",),
    "torchtitan": ("ckpt/integrations/torchtitan.py",),
    "vllm": ("ckpt/integrations/vllm.py",),
    "prometheus_client": ("ckpt/integrations/prometheus.py",),
}


def imported_roots(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0] if not node.level else "(relative)"


def bad_imports(source: Source) -> list[str]:
    problems = []
    for line, name in imported_roots(source):
        where = f"{source.path}:{line}"
        if name == source.package or name in sys.stdlib_module_names:
            continue
        if name == "(relative)":
            problems.append(f"{where}: relative import; write the full name")
        elif name in ONE_FILE_EACH:
            if source.path not in ONE_FILE_EACH[name]:
                problems.append(
                    f"{where}: {name}; call what {ONE_FILE_EACH[name][0]} offers instead"
                )
        elif name not in ALLOWED[source.package]:
            problems.append(
                f"{where}: {source.package} may not import {name}; imports go downward only "
                "(storage <- ckpt <- sharding), so move the code up or pass the value in"
            )
    return problems


# Names -------------------------------------------------------------------------------------------

ADAPTERS = (
    "ckpt/layout/dtensor.py",
    "ckpt/layout/sharded_tensor.py",
    "ckpt/layout/torch_fsdp.py",
    "ckpt/layout/plain.py",
    "ckpt/layout/modules.py",
    "ckpt/saving/plan.py",
    "ckpt/layout/state_dict_hooks.py",
    "ckpt/layout/tensor.py",
    "ckpt/composites/torch_types.py",
    "sharding/engine/torch_seam.py",
    "sharding/dtensor/seam.py",
    "ckpt/world/job.py",
    "ckpt/world/torch_world.py",
    "ckpt/convert/targets/nesting.py",
)

COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv",
    "isend", "monitored_barrier", "new_group", "new_subgroups", "recv", "recv_object_list",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "split_group",
}  # fmt: skip


class Ban(NamedTuple):
    """Dotted names that only `allowed` files may use, and what everybody else uses."""

    matches: Callable[[str], bool]
    allowed: tuple[str, ...]
    instead: str


def is_torch_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(re.match(r"_[^_]", part) for part in rest)


def is_collective(name: str) -> bool:
    head, _, last = name.rpartition(".")
    functional = head.startswith("torch.distributed._functional_collectives")
    return functional or (head.startswith("torch.distributed") and last in COLLECTIVES)


def is_pickle(name: str) -> bool:
    roots = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
    torch_files = {
        "torch.load",
        "torch.save",
        "torch.serialization.load",
        "torch.serialization.save",
    }
    return name.split(".")[0] in roots or name in torch_files


BANS = (
    Ban(
        is_torch_private, ADAPTERS, "an adapter in ckpt/layout, the only place for torch's privates"
    ),
    # They write what torch reads: DCP's metadata, and trees of torch.save. Neither reads a pickle.
    Ban(
        lambda name: is_pickle(name) and name not in ("torch.save", "torch.load"),
        ("ckpt/convert/targets/nesting.py", "ckpt/convert/sources/torch_pickle.py"),
        "ckpt.format.codec for values, ckpt.format.datafile for tensors",
    ),
    # Planners of DCP take and give what torch.save wrote: bytes of this process, none of a store.
    Ban(
        lambda name: name in ("torch.save", "torch.load"),
        ("ckpt/integrations/dcp.py",),
        "ckpt.format.codec for values, ckpt.format.datafile for tensors",
    ),
    Ban(
        lambda name: name in ("threading.Thread", "_thread.start_new_thread", "threading.Timer"),
        (
            "ckpt/world/attendance.py",
            "ckpt/world/heart.py",
            "ckpt/world/torch_world.py",
            "storage/peers/server.py",
        ),
        "concurrent.futures, and read every result: a bare thread swallows its error",
    ),
    Ban(
        is_collective,
        ("ckpt/world/torch_world.py", "sharding/engine/collectives.py"),
        "a method of ckpt.world.base.World",
    ),
    Ban(
        lambda name: name in ("os.environ", "os.getenv", "os.putenv"),
        # sharding/fsdp.py: a public constructor that honours what torch's class of that name does.
        (
            "ckpt/world/job.py",
            "ckpt/world/torch_world.py",
            "ckpt/cli/__init__.py",
            "ckpt/__init__.py",  # whether this process is one of a rehearsal
            "ckpt/rehearse/runs.py",  # what its processes inherit
            "sharding/fsdp.py",
        ),
        "an argument: no environment switch below the public functions",
    ),
    Ban(
        lambda name: name in ("logging.basicConfig", "warnings.simplefilter"),
        (),
        "nothing: the application configures logging and warnings",
    ),
)


def dotted_names(source: Source) -> Iterator[tuple[int, str]]:
    """Every dotted name, imports resolved: `dist.barrier` gives `torch.distributed.barrier`."""
    known: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound = alias.asname or alias.name.split(".")[0]
                known[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            inner = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in known:
                yield node.lineno, ".".join([known[inner.id], *reversed(parts)])


def banned_names(source: Source) -> list[str]:
    problems = set()
    for line, name in dotted_names(source):
        for ban in BANS:
            if ban.matches(name) and source.path not in ban.allowed:
                problems.add(f"{source.path}:{line}: {name}; use {ban.instead}")
    return sorted(problems)


def foreign_privates(source: Source) -> list[str]:
    """Private attributes of objects whose class is not in this file: torch hides state in them."""
    own = {name for node in source.nodes for name in _defined_privates(node)}
    problems = []
    for node in source.nodes:
        if not isinstance(node, ast.Attribute) or not re.match(r"_[^_]", node.attr):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            continue
        if node.attr in own or node.attr in ("_replace", "_asdict", "_fields", "_make"):
            continue
        problems.append(f"{source.path}:{node.lineno}: .{node.attr}; call something public instead")
    return problems


def _defined_privates(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from (
            [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "self" else []
        )
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


# Rooms -------------------------------------------------------------------------------------------

# A room is a folder of `ckpt`, a file at its root, or one of the other packages. Each line is a
# floor, the ground first; an import goes to a lower floor or stays in its room.
LADDER = (
    ("storage", "ckpt/version.py"),
    ("ckpt/errors.py", "ckpt/short.py", "ckpt/wings.py"),
    ("ckpt/layout", "ckpt/world"),
    ("ckpt/state", "ckpt/format", "ckpt/composites"),
    ("ckpt/commit", "ckpt/stacks"),
    ("ckpt/telemetry",),
    ("ckpt/saving", "ckpt/loading"),
    ("ckpt/process.py",),
    ("ckpt/api.py", "ckpt/state_dict"),
    ("ckpt/convert", "ckpt/service"),
    ("ckpt/near",),
    ("ckpt/tools", "ckpt/rehearse", "sharding"),
    ("ckpt/operate", "ckpt/screens"),
    ("ckpt/integrations", "ckpt/cli", "ckpt/reports.py"),
    ("ckpt/__init__.py",),
    ("ckpt/__main__.py",),
)
FLOORS = {room: floor for floor, rooms in enumerate(LADDER) for room in rooms}


class Arrow(NamedTuple):
    """One file imports another, at any depth: at its top, inside a function, or for types only."""

    user: str
    used: str


def module_path(module: str, paths: frozenset[str]) -> str | None:
    stem = module.replace(".", "/")
    return next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in paths), None)


def arrows(all_sources: Sequence[Source]) -> list[Arrow]:
    paths = frozenset(source.path for source in all_sources)
    all_arrows = set()
    for source in all_sources:
        for node in source.nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = (f"{node.module}.{alias.name}" for alias in node.names)
                names = [name if module_path(name, paths) else node.module or "" for name in inner]
            used = {module_path(name, paths) for name in names} - {None, source.path}
            all_arrows |= {Arrow(source.path, path) for path in used if path is not None}
    return sorted(all_arrows)


def room_of(path: str) -> str:
    first, *rest = path.split("/")
    return "/".join([first, rest[0]]) if first == "ckpt" else first


def circles(all_arrows: Iterable[Arrow]) -> list[list[str]]:
    """Files that import each other in a loop, by Tarjan's algorithm without recursion."""
    uses: dict[str, list[str]] = {}
    for arrow in all_arrows:
        uses.setdefault(arrow.user, []).append(arrow.used)
    order = list(_postorder(uses))
    users: dict[str, list[str]] = {}
    for user, all_used in uses.items():
        for used in all_used:
            users.setdefault(used, []).append(user)
    seen: set[str] = set()
    groups = []
    for start in reversed(order):  # Kosaraju: the reversed graph, from the last that was finished
        group, todo = [], [start]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                group.append(node)
                todo += users.get(node, [])
        groups.append(sorted(group))
    return sorted(group for group in groups if len(group) > 1)


def _postorder(uses: Mapping[str, Sequence[str]]) -> Iterator[str]:
    seen: set[str] = set()
    for start in sorted(uses):
        todo = [(start, False)]
        while todo:
            node, is_done = todo.pop()
            if is_done:
                yield node
            elif node not in seen:
                seen.add(node)
                todo.append((node, True))
                todo += [(used, False) for used in uses.get(node, ())]


def climbing(all_arrows: Iterable[Arrow]) -> list[str]:
    problems = []
    for user, used in all_arrows:
        rooms = room_of(user), room_of(used)
        for room in rooms:
            if room not in FLOORS:
                problems.append(f"{room} has no floor; put it on the ladder in {__file__}")
        floors = [FLOORS.get(room, 0) for room in rooms]
        if FLOORS.keys() >= set(rooms) and rooms[0] != rooms[1] and floors[0] <= floors[1]:
            problems.append(
                f"{user} imports {used}, which is not below it; move the code down, "
                "or pass the value in"
            )
    return sorted(set(problems))


def long_functions(source: Source, lines_max: int = 60) -> list[str]:
    """Functions whose body has more lines; signature and docstring are for the caller."""
    problems = []
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > lines_max:
            problems.append(
                f"{source.path}:{node.lineno}: {node.name} has {lines} lines, "
                f"at most {lines_max}; split it"
            )
    return problems


def long_module(source: Source, lines_max: int = 600) -> list[str]:
    """A file that has more lines is two subjects."""
    lines = source.tree.body[-1].end_lineno or 0 if source.tree.body else 0
    if lines <= lines_max:
        return []
    return [f"{source.path}: {lines} lines, at most {lines_max}; split it where a seam has a name"]


def classes_of_one_name(all_sources: Iterable[Source]) -> list[str]:
    """Names of classes that stand for two things; a leading underscore makes no other name."""
    paths: dict[str, list[str]] = {}
    for source in all_sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                paths.setdefault(node.name.lstrip("_"), []).append(source.path)
    return [
        f"class {name} in {' and '.join(places)}; give each a name of its own"
        for name, places in sorted(paths.items())
        if len(places) > 1
    ]


# Words that were retired, and what replaced them (the glossary in ARCHITECTURE.md). They stand in
# no identifier, alone or as a part of one.
RETIRED = {
    "told": "reported, notified, or the name of what is sent",
    "telling": "history, report",
    "glance": "fingerprint",
    "council": "agreement",
    "wish": "proposal, request",
    "wishes": "proposals, requests",
    "twin": "duplicate; in tests, unsharded",
    "twins": "duplicates",
    "lead": "coordinator",
    "seat": "membership, or the name of what it holds",
    "weighing": "nbytes_of",
    "relaying": "relay",
}

# Words that say nothing alone (`found = f()`) and are fine as a part (`read_at`).
RETIRED_ALONE = {
    "found": "the name of the thing: problems, matches, copies, state_dict",
    "at": "the name of the position: index, offset, rank, path, nth",
}


def identifiers(source: Source) -> Iterator[tuple[int, str]]:
    """Every name that this file gives or uses: of classes, functions, arguments, variables."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr


def retired_words(source: Source) -> list[str]:
    """Identifiers that have a retired word in them."""
    problems = set()
    for line, name in identifiers(source):
        alone = name.strip("_").lower()
        words = {*re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")} & RETIRED.keys()
        for word in words | ({alone} & RETIRED_ALONE.keys()):
            instead = (RETIRED | RETIRED_ALONE)[word]
            problems.add(f"{source.path}:{line}: {name}: {word} is now {instead}")
    return sorted(problems)


def test_a_class_name_has_one_meaning() -> None:
    problems = classes_of_one_name(sources(*PACKAGES))
    assert not problems, "\n" + "\n".join(problems)


def test_planted_second_meaning_is_found() -> None:
    a = Source("ckpt/x.py", ast.parse("class A: ..."))
    b = Source("ckpt/y.py", ast.parse("class _A: ..."))
    assert classes_of_one_name([a, b]) == [
        "class A in ckpt/x.py and ckpt/y.py; give each a name of its own"
    ]


# Dead code ---------------------------------------------------------------------------------------

# What vulture cannot see the use of: file, names, and who uses them.
USED_FROM_OUTSIDE = (
    ("ckpt/__init__.py", "__dir__", "the interpreter"),
    ("ckpt/short.py", "_repr_html_", "notebooks"),
    ("ckpt/cli/", "*", "the table of commands names functions as strings"),
    ("ckpt/screens/serve_http.py", "*", "the servers of the standard library read these"),
    ("ckpt/screens/", "on_broken_pipe writable", "rich and print call these"),
    ("ckpt/screens/pages.py", "*", "templates read these"),
    ("ckpt/screens/rows.py", "charts_of", "templates call it"),
    (
        "ckpt/tools/",
        "reached_unix at_risk_near at_risk_durable made_unix",
        "`--json` prints all fields",
    ),
    ("ckpt/convert/", "persistent_id reducer_override", "a pickler calls these"),
    ("ckpt/integrations/dcp.py", "*", "torch calls planners and storages by these names"),
    ("ckpt/integrations/", "*", "trainers of other libraries call hooks by these names"),
    ("ckpt/service/checkpointer.py", "is_preempted costs", "training loops"),
    ("ckpt/format/manifest.py", "model_config", "pydantic"),
    ("ckpt/telemetry/record.py", "_check_shapes model_config", "pydantic"),
    ("ckpt/telemetry/record.py", "software restore_seconds", "`--json` prints all fields"),
    ("sharding/attributes.py", "*", "torch's functions and scripts read them off the wrapper"),
    ("sharding/fsdp_module.py", "set_*", "training scripts, as torch names them"),
    ("sharding/", "_load_from_state_dict local_metadata error_msgs", "torch's Module"),
    ("storage/peers/server.py", "*", "the servers of the standard library call and read these"),
    ("storage/testing.py", "check_store test_*", "who tests a back-end, by pytest or without"),
)


def dead_code(folders: Sequence[str], users: Sequence[str]) -> list[str]:
    """Functions, classes and names in `folders` that neither they nor `users` mention."""
    vulture = Vulture()
    vulture.scavenge([str(ROOT / folder) for folder in (*folders, *users)])
    problems = []
    for item in vulture.get_unused_code(min_confidence=60):
        path = Path(item.filename).relative_to(ROOT).as_posix()
        is_ours = path.split("/")[0] in folders and item.typ != "attribute"
        if is_ours and not _is_used_from_outside(path, item.name):
            problems.append(
                f"{path}:{item.first_lineno}: {item.typ} {item.name} has no user; delete it, or "
                f"name its user in {Path(__file__).name}"
            )
    return sorted(problems)


def _is_used_from_outside(path: str, name: str) -> bool:
    return any(
        path.startswith(place) and any(fnmatchcase(name, pattern) for pattern in names.split())
        for place, names, _ in USED_FROM_OUTSIDE
    )


def test_no_dead_code() -> None:
    problems = dead_code(PACKAGES, ("tests", "examples", "benchmarks"))
    assert not problems, "\n" + "\n".join(problems)


# Documentation -----------------------------------------------------------------------------------


def undocumented(source: Source) -> list[str]:
    problems = []
    if source.tree.body and ast.get_docstring(source.tree) is None:
        problems.append(f"{source.path}:1: the module says nothing; open it with one sentence")
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if not node.name.startswith("_") and ast.get_docstring(node) is None:
            problems.append(
                f"{source.path}:{node.lineno}: {node.name} is public; document or hide it"
            )
    return problems


def missing_paths(document: str, text: str) -> list[str]:
    """Paths that a document names in backticks or links to, and that are not in the repository."""
    folders = (*PACKAGES, "tests", "examples", "benchmarks", "docs", ".ci")
    quoted = re.findall(r"`([\w./-]+)`", text)
    named = [name for name in quoted if name.split("/")[0] in folders and "/" in name]
    named += [name for name in quoted if re.fullmatch(r"[A-Z]+\.md|[\w-]+\.(toml|txt)", name)]
    named += re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
    missing = {name for name in named if not (ROOT / name).exists()}
    return [f"{document}: names {name}, which is not there" for name in sorted(missing)]


# The tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        bad_imports,
        banned_names,
        foreign_privates,
        undocumented,
        long_functions,
        long_module,
        retired_words,
    ],
    ids=lambda rule: rule.__name__,
)
def test_sources_keep(rule: Callable[[Source], list[str]]) -> None:
    # Clients of stores offer some requests only under private names; one file per client uses them.
    exempt = (
        (*ADAPTERS, "storage/s3/client.py", "storage/generic.py")
        if rule is foreign_privates
        else ()
    )
    problems = [
        problem
        for source in sources(*PACKAGES)
        if source.path not in exempt
        for problem in rule(source)
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_retired_words_do_not_come_back_in_tests() -> None:
    folders = ("tests", "examples", "benchmarks")
    problems = [text for source in sources(*folders) for text in retired_words(source)]
    assert not problems, "\n" + "\n".join(problems)


def test_no_file_imports_itself_around_a_corner() -> None:
    assert circles(arrows(sources(*PACKAGES))) == []


def test_imports_go_down_the_ladder() -> None:
    problems = climbing(arrows(sources(*PACKAGES)))
    assert not problems, "\n" + "\n".join(problems)


def test_planted_circles_and_climbs_are_found() -> None:
    a = Source("ckpt/api.py", ast.parse("def f():\n    from ckpt.world import base"))
    b = Source("ckpt/world/base.py", ast.parse("from ckpt.process import x\nimport ckpt.errors"))
    c = Source("ckpt/process.py", ast.parse("import ckpt.api"))
    d = Source("ckpt/errors.py", ast.parse("from storage.url import y"))
    planted = arrows([a, b, c, d])
    assert circles(planted) == [["ckpt/api.py", "ckpt/process.py", "ckpt/world/base.py"]]
    assert [problem.split(",")[0] for problem in climbing(planted)] == [
        "ckpt/process.py imports ckpt/api.py",
        "ckpt/world/base.py imports ckpt/process.py",
    ]
    new = climbing([Arrow("ckpt/new/x.py", "ckpt/api.py")])
    assert new and "ckpt/new has no floor" in new[0]


def test_tests_and_examples_use_no_pickle() -> None:
    problems = [
        problem
        for source in sources("examples")
        for problem in banned_names(source)
        if "pickle" in problem or "torch.load" in problem or "torch.save" in problem
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_documents_name_no_missing_file() -> None:
    problems = [
        problem
        for path in sorted(ROOT.glob("*.md"))
        for problem in missing_paths(path.name, path.read_text(encoding="utf-8"))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_the_readme_has_the_numbers_of_the_page_about_performance() -> None:
    """One source: a figure changes in docs/performance.md, and a program writes it to README.md."""
    from docs.readme_numbers import filled

    readme, performance = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/performance.md")
    )
    assert filled(readme, performance) == readme, "run: python docs/readme_numbers.py"
    changed = performance.replace("| DCP: ", "| DCP: 9")
    assert filled(readme, changed) != readme
    with pytest.raises(ValueError, match="0 rows below 'Tools'"):
        filled(readme, performance.replace("`dcp_to_torch_save`", "`dcp`"))


def test_the_page_of_commands_is_that_of_the_command_line() -> None:
    """Here and not beside the tests of the documents, since who adds an option runs this file."""
    from docs.cli_page import page

    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m docs.cli_page"


def test_packages_say_that_they_are_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


@pytest.mark.parametrize(
    ("rule", "path", "code", "expected"),
    [
        (bad_imports, "storage/x.py", "import torch", "storage may not import torch"),
        (bad_imports, "storage/x.py", "from ckpt import save", "imports go downward only"),
        (bad_imports, "ckpt/x.py", "from sharding import wrap", "imports go downward only"),
        (bad_imports, "ckpt/x.py", "def f():\n    import msgpack", "ckpt/format/columns.py"),
        (bad_imports, "ckpt/x.py", "import requests", "may not import requests"),
        (banned_names, "ckpt/x.py", "import torch\ntorch.save(1, 'x')", "ckpt.format"),
        (banned_names, "ckpt/x.py", "from torch import load as l", "ckpt.format"),
        (banned_names, "storage/x.py", "import pickle", "ckpt.format.codec"),
        (banned_names, "ckpt/x.py", "from threading import Thread", "concurrent.futures"),
        (banned_names, "ckpt/x.py", "import threading as t\nt.Thread()", "concurrent.futures"),
        (banned_names, "ckpt/x.py", "import torch.distributed as d\nd.barrier()", "World"),
        (banned_names, "ckpt/x.py", "from torch.distributed import all_reduce", "World"),
        (banned_names, "ckpt/x.py", "import torch\ntorch.distributed.barrier()", "World"),
        (banned_names, "ckpt/x.py", "from torch.distributed._tensor import x", "adapter"),
        (banned_names, "ckpt/x.py", "import torch\ntorch._C.f()", "adapter"),
        (foreign_privates, "ckpt/x.py", "t._local_tensor", "_local_tensor"),
        (undocumented, "ckpt/x.py", '"""Doc."""\ndef f(): ...', "f is public"),
        (undocumented, "ckpt/x.py", "x = 1", "the module says nothing"),
        (long_module, "ckpt/x.py", "x = 1\n" * 601, "601 lines"),
        (retired_words, "ckpt/x.py", "def _gather_told(): ...", "told is now reported"),
        (retired_words, "ckpt/x.py", "class StepCouncil: ...", "council is now agreement"),
        (retired_words, "ckpt/x.py", "def f(at: int): ...", "at is now the name of"),
        (retired_words, "tests/x.py", "_found = f()", "found is now the name of"),
        (long_functions, "ckpt/x.py", "def f():\n" + "    x = 1\n" * 61, "f has 61 lines"),
    ],
)
def test_rule_finds_planted_violation(
    rule: Callable[[Source], list[str]], path: str, code: str, expected: str
) -> None:
    problems = rule(Source(path, ast.parse(code)))
    assert problems and expected in problems[0]


def test_rule_for_documents_finds_planted_violation() -> None:
    text = "See `ckpt/nowhere.py`, [this](docs/none.md) and `README.md` and `ckpt/errors.py`."
    problems = missing_paths("X.md", text)
    assert [problem for problem in problems if "README" not in problem] == [
        "X.md: names ckpt/nowhere.py, which is not there",
        "X.md: names docs/none.md, which is not there",
    ]
