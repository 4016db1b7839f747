"""Every block of code in README.md and docs/ runs, and says what exists.

Method: a page is a program. Its `python` blocks share one namespace and run in order, in a folder
that holds a small training (`runs/7b`, also on a real S3 server) and files of other formats, in a
process of their own. Between them run the `ckpt` lines of its `sh` blocks; of other lines the
command, the file or the target must exist. Blocks marked `text` are shown only. What blocks use
without making it is in `tests/docs/given.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ckpt.cli.commandline import build_parser
from tests.docs import given
from tests.ranks import run_ranks
from tests.servers import moto_server

ROOT = Path(__file__).resolve().parents[2]
MIGRATIONS = "docs/howto/migrate.md"  # tests/docs/test_migrations.py runs it
WHOLE_FILES = {"format.md", "architecture.md", "decisions.md", "changes.md"}  # shown by inclusion
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name not in WHOLE_FILES and path.parent.name != "history"
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)

pytestmark = [pytest.mark.ranks, pytest.mark.server]


class Block(NamedTuple):
    """One fenced block; `line` is where its text begins."""

    line: int
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for match in FENCE.finditer(text)
    ]


class Prepared(NamedTuple):
    """A folder as the pages assume it, and the environment of an S3 server that has the same."""

    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """What a reader has done before, by our own means."""
    import ckpt

    folder = tmp_path_factory.mktemp("given")
    with moto_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket("bucket")
        patch.chdir(folder)
        run_ranks(1, make_runs, str(folder), group=False)
        ckpt.copy("runs/7b", "s3://bucket/run", root=True)
        yield Prepared(folder, dict(server.environment))


def make_runs(folder: str) -> None:
    """`runs/7b`, a DCP directory, a safetensors file and a torch file of the same training, and
    `base`, the folder of a model's config.
    """
    import ckpt

    os.chdir(folder)
    names = given.names()
    state = {name: names[name] for name in ("model", "optimizer", "schedule")}
    state |= {"rng": ckpt.rng_state(), "step": 0}
    for step in (400, 800, 1200):
        names["train_one_step"]()
        state["step"] = step
        ckpt.save(state, "runs/7b", step=step, metric=1 / step)
    Path("dcp").mkdir()
    ckpt.export("runs/7b", "dcp/checkpoint", format="dcp", optimizer=True)
    ckpt.export("runs/7b", "pretrained.safetensors")
    torch.save({"model": names["model"].state_dict()}, "weights.pt")
    Path("base").mkdir()
    Path("base/config.json").write_text('{"model_type": "tiny"}', encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page) and page != MIGRATIONS])
def test_page_runs(page: str, prepared: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(prepared.folder, folder)
    printed = (page, str(folder), prepared.environment)
    run_ranks(1, run_page, *printed, group=False, timeout_seconds=150)


def test_the_readmes_program_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Pasted into a file, it runs on two ranks and, again, on three."""
    import ckpt

    program = next(block.text for block in blocks_of("README.md") if block.language == "python")
    assert len(program.splitlines()) <= 20
    url, torchrun = tmp_path / "runs" / "first", [sys.executable, "-m", "torch.distributed.run"]
    for ranks, last in ((2, 150), (3, 300)):
        (tmp_path / "train.py").write_text(program.replace("steps(300)", f"steps({last})"))
        command = [*torchrun, "--standalone", "--nproc-per-node", str(ranks), "train.py"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    ranks_of = {}
    for info in ckpt.list_steps(url):
        with ckpt.open(url, step=info.step) as checkpoint:
            ranks_of[info.step] = checkpoint.world_size
    assert ranks_of == {100: 2, 150: 2, 200: 3, 300: 3}


def run_page(page: str, folder: str, environment: dict[str, str]) -> None:
    """In a process of its own: all blocks of a page, in order."""
    os.chdir(folder)
    os.environ.update(environment)  # processes are forked from a server that may be older than it
    namespace = {**given.names(), "__name__": "__page__"}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    for block in blocks_of(page):
        if block.language == "python":
            # With as many empty lines in front, a traceback has the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec")
            exec(code, namespace)
        elif block.language == "sh":
            for line in commands_of(block.text):
                run_command(line, f"{page}:{block.line}")


def commands_of(text: str) -> Iterator[str]:
    """Commands of a shell block: comments dropped, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).strip()
        if command:
            yield command


def run_command(line: str, where: str) -> None:
    inner = re.fullmatch(r'eval "\$\((.*)\)"', line)
    words = shlex.split(inner[1] if inner else line)
    if words[0] == "torchrun":
        program = [
            n for n, word in enumerate(words) if word == "-m" or word.startswith("examples/")
        ]
        assert_exists(words[program[0] :] if program else words, where)
    elif words[:2] == ["ckpt", "rehearse"]:
        build_parser().parse_args(words[1:])  # tests/rehearse run it
    elif words[0] == "ckpt":
        run_ckpt(words[1:], where)
    else:
        assert_exists(words, where)


def run_ckpt(words: list[str], where: str) -> None:
    """0 is well; 3 says no, which is an answer too."""
    from ckpt.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    assert code in (0, 3), (
        f"{where}: ckpt {' '.join(words)}: exit code {code}\n{printed.getvalue()}"
    )


def assert_exists(words: list[str], where: str) -> None:
    """What is not run here names targets, files, modules and extras that there are."""
    line = " ".join(words)
    first, *rest = words
    if first == "export":
        assert re.match(r"[A-Z_]+=", rest[0]), where
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest[0] in targets, f"{where}: no target {rest[0]}: {line}"
    elif first == "pip":
        extras = re.findall(r"\[([a-z,]+)\]", line)
        project = (ROOT / "pyproject.toml").read_text()
        for extra in ",".join(extras).split(",") if extras else []:
            assert re.search(rf"^{extra} = \[", project, re.M), f"{where}: no extra {extra}: {line}"
    elif first.endswith("python") and rest[:1] == ["-m"]:
        module = rest[1].replace(".", "/")
        there = (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists()
        assert there, f"{where}: no module {rest[1]}"
    elif first == "-m" and rest[:1] == ["ckpt"]:
        pass  # the same command without torchrun is on the page, or in tests/tools
    elif first.startswith("examples/") or (first.endswith("python") and rest):
        name = Path(first if first.startswith("examples/") else rest[0]).name
        run_by = ("examples/run_all.py", "tests/near/test_near_torchrun.py")
        run = any(f'{name}"' in (ROOT / file).read_text() for file in run_by)
        assert run, f"{where}: {name} is in none of {run_by}"
    else:
        raise AssertionError(f"{where}: {line!r}: nothing checks this; mark the block as text")


def test_the_picture_of_the_readme_is_drawn_from_a_run() -> None:
    from examples.demo.timeline import Story, timeline

    story = Story.from_json((ROOT / "docs" / "timeline.json").read_text())
    assert all(story.whole[step] == loss for step, loss in story.on_4.items())
    assert (ROOT / "docs" / "timeline.svg").read_text() == timeline(story), (
        "run: python -m examples.demo.timeline docs/timeline.json docs/timeline.svg"
    )


def test_pages_begin_with_their_purpose_and_guides_with_code() -> None:
    """A sentence after the heading; in a guide a block that runs, before the second section."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").partition("\n")[2].lstrip()
        assert re.match(r"[\w`*\[]", text) and not text.startswith("```"), f"{page}: no purpose"
        if "/howto/" in page:
            shown = re.search(r"^```(?:python|sh)$", text, re.M)
            assert shown and text.count("\n## ", 0, shown.start()) < 2, f"{page}: no code at first"


def test_every_block_says_what_it_is() -> None:
    """An unmarked block would be neither run nor shown as what it is."""
    unknown = [
        f"{page}:{block.line}: {block.language!r}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in ("python", "sh", "text")
    ]
    assert not unknown


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "DECISIONS.md", "CHANGELOG.md"])
def test_files_that_are_linked_or_named_are_there(page: str) -> None:
    """The site's own links are checked where it is built (`make docs`)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = {target for target in LINK.findall(text) if "://" not in target}
    linked |= set(re.findall(r"`((?:tests|docs|examples|benchmarks)/[\w/]+\.\w+)`", text))
    assert not [target for target in linked if not (ROOT / target).exists()]


def test_tests_that_the_documents_name_are_there() -> None:
    missing = [
        f"{page}: {name}"
        for page in PAGES
        for name in re.findall(
            r"\b((?:tests|benchmarks|examples)/[\w/]+\.py)\b", (ROOT / page).read_text()
        )
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_the_reference_has_every_public_name() -> None:
    import ckpt
    import sharding
    import storage

    reference = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)", reference, re.M))
    own = [f"ckpt.{name}" for name in ckpt.__all__] + [
        f"storage.{name}" for name in storage.__all__
    ]
    own += [
        f"sharding.{name}"
        for name in sharding.__all__
        if getattr(getattr(sharding, name), "__module__", "").startswith("sharding")
    ]
    assert not [name for name in own if name not in listed]
