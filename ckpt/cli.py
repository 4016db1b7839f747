"""The command `ckpt`: look at checkpoints, check them, export, salvage and prune.

Exit codes: 0 all is well, 1 a problem was found or the command failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ckpt.errors import CheckpointError, NoCheckpoint
from ckpt.exporting import Selection, export, parse_nbytes
from ckpt.layout.region import Box, Region
from ckpt.locate import live_entries
from ckpt.log import MANIFEST_NAME, STEPS_PREFIX, LiveEntry, parse_step_key
from ckpt.reader import Checkpoint, TensorInfo, open_checkpoint
from ckpt.salvage import salvage, write_manifest
from ckpt.session import Maintenance, NotRetired
from ckpt.verifying import VerifyReport, summary, verify
from storage import InvalidUrlError, KeyNotFoundError, StorageError, Store, open_store

OK, PROBLEM, USAGE = 0, 1, 2
WIDTH_WITHOUT_TERMINAL = 200
DAMAGE_SHOWN_MAX = 50

Command: TypeAlias = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; for the entry point `ckpt`."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except InvalidUrlError as error:
        return _failed(error, USAGE)
    except (CheckpointError, StorageError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output (head, less) has seen enough; python would complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        return _failed(error, PROBLEM)
    except KeyboardInterrupt:
        return _failed(CheckpointError("interrupted; nothing half-done was published"), 130)


def _failed(error: BaseException, code: int) -> int:
    print(f"ckpt: error: {error}", file=sys.stderr)
    return code


# The command line -----------------------------------------------------------------------------

EXAMPLES = """\
examples:
  ckpt ls s3://bucket/run                          which checkpoints are there
  ckpt show runs/7b --step 1200                    names, shapes, dtypes, and who stored what
  ckpt show runs/7b 'model.layers.0.*' --json
  ckpt verify s3://bucket/run -o endpoint_url=http://localhost:9000
  ckpt export runs/7b model.safetensors --dtype bfloat16
  ckpt export runs/7b out/model.safetensors --shard-size 5GB --entry ema
  ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef
  ckpt prune runs/7b --keep-last 3 --dry-run
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Look at sharded checkpoints, check them, export, salvage and prune.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_ls(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_export(commands)
    _add_salvage(commands)
    _add_prune(commands)
    return parser


def _add(commands: Any, name: str, command: Command, text: str, example: str) -> Any:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=command)
    parser.add_argument("url", help="a path, s3://bucket/prefix, or any url that fsspec knows")
    parser.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_key_value,
        help="an option of the store, such as endpoint_url=http://localhost:9000; repeatable",
    )
    return parser


def _add_ls(commands: Any) -> None:
    parser = _add(commands, "ls", _ls, "list the checkpoints of a root", "ckpt ls s3://bucket/run")
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_show(commands: Any) -> None:
    parser = _add(
        commands,
        "show",
        _show,
        "show the tensors of a checkpoint and who stored them",
        "ckpt show runs/7b 'model.*.weight' --step 1200",
    )
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern of names")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--json", action="store_true", help="for programs: every stored part")


def _add_verify(commands: Any) -> None:
    parser = _add(
        commands,
        "verify",
        _verify,
        "read a whole checkpoint and report every changed byte",
        "ckpt verify s3://bucket/run --step 1200",
    )
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--mark", action="store_true", help="note success in the log")
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_export(commands: Any) -> None:
    parser = _add(
        commands,
        "export",
        _export,
        "write a model as safetensors",
        "ckpt export runs/7b out/model.safetensors --dtype bfloat16 --shard-size 5GB",
    )
    parser.add_argument("target", help="the file to write, on a disk or in an object store")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--entry", help="which module of the state; default: the only one")
    parser.add_argument("--dtype", help="for floating-point tensors, e.g. bfloat16")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="REGEX=TEXT",
        type=_substitution,
        help=r"replace in names, such as '^backbone\.=' ; repeatable, in order",
    )
    parser.add_argument(
        "--shard-size",
        type=_nbytes,
        metavar="SIZE",
        help="cut into files of at most this size, e.g. 5GB, with an index",
    )
    parser.add_argument("--keep-tied", action="store_true", help="write every tied name")
    parser.add_argument(
        "--target-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_key_value,
        help="an option of the target's store; default: those of the source if both are alike",
    )


def _add_salvage(commands: Any) -> None:
    parser = _add(
        commands,
        "salvage",
        _salvage,
        "rebuild a lost MANIFEST from the data files, reading and checking all of them",
        "ckpt salvage runs/7b/steps/00001200-e000001-0123456789abcdef",
    )
    parser.add_argument("--step", type=int, help="of a root; default: all without a MANIFEST")
    parser.add_argument("--dry-run", action="store_true", help="check only, write no MANIFEST")


def _add_prune(commands: Any) -> None:
    parser = _add(
        commands,
        "prune",
        _prune,
        "retire and delete old checkpoints; a running training is not disturbed",
        "ckpt prune runs/7b --keep-last 3 --dry-run",
    )
    parser.add_argument("--keep-last", type=_count, required=True, metavar="N")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)  # numbers, true, {"nested": "options"}
    except ValueError:
        return key, value


def _substitution(text: str) -> tuple[re.Pattern[str], str]:
    # The last "=", so that the expression may hold some; the replacement is a name and holds none.
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TEXT")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{pattern!r} is no regular expression: {error}"
        ) from error


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _options(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


# ls --------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.url, **_options(arguments.option))
    try:
        live = live_entries(store)
        rows = [(entry, _committed_unix(store, entry)) for entry in live]
    finally:
        store.close()
    if arguments.json:
        print(json.dumps([_entry_json(entry, unix) for entry, unix in rows], indent=2))
        return OK
    print(f"{store.url}: {len(live)} checkpoints")
    table = _table()
    for title in ("step", "committed", "attempt", "notes"):
        table.add_column(title, justify="right" if title == "step" else "left")
    for entry, unix in rows:
        notes = [word for word in ("pinned", "verified") if getattr(entry, word)]
        notes += ["latest"] if entry is live[-1] else []
        notes += [f"metric {entry.metric:g}"] if entry.metric is not None else []
        table.add_row(f"{entry.step}", _date(unix), entry.attempt, ", ".join(notes))
    _print(table)
    return OK


def _committed_unix(store: Store, entry: LiveEntry) -> float | None:
    try:
        return store.info(entry.prefix + MANIFEST_NAME).modified_unix
    except KeyNotFoundError:
        return None


def _entry_json(entry: LiveEntry, unix: float | None) -> dict[str, Any]:
    return {
        "step": entry.step,
        "attempt": entry.attempt,
        "directory": entry.prefix.rstrip("/"),
        "committed_unix": unix,
        "pinned": entry.pinned,
        "verified": entry.verified,
        "metric": entry.metric,
    }


# show ------------------------------------------------------------------------------------------


def _show(arguments: argparse.Namespace) -> int:
    with open_checkpoint(
        arguments.url, arguments.step, storage_options=_options(arguments.option)
    ) as checkpoint:
        names = fnmatch.filter(checkpoint.keys(), arguments.pattern)
        infos = [checkpoint.info(name) for name in names]
        if not infos and len(checkpoint):
            raise CheckpointError(
                f"no name matches {arguments.pattern!r}; quote patterns, as in 'model.*'; "
                f"the first name is {checkpoint.keys()[0]!r}"
            )
        if arguments.json:
            print(json.dumps(_checkpoint_json(checkpoint, infos), indent=2))
        else:
            _show_tables(checkpoint, infos)
    return OK


def _show_tables(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> None:
    header = checkpoint.manifest.header
    print(checkpoint.url)
    print(f"step {header.step}, {header.world_size} ranks, {_date(header.created_unix)}\n")
    table = _table()
    for title, right in (
        ("name", False),
        ("kind", False),
        ("dtype", False),
        ("shape", False),
        ("size", True),
        ("stored by", False),
    ):
        # Names are what people copy: folded in a narrow terminal, never cut.
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for info in infos:
        kind = f"= {info.alias_of}" if info.alias_of else info.kind.name.lower()
        shape = " x ".join(map(str, info.shape)) or "scalar"
        dtype = str(info.dtype).removeprefix("torch.")
        table.add_row(Text(info.fqn), kind, dtype, shape, _size(info.nbytes), _writers(info))
    _print(table)
    print()
    _print(_rank_table(checkpoint))
    if checkpoint.values:
        print()
        values = _table()
        values.add_column("value of", overflow="fold")
        values.add_column("", overflow="fold")
        for name, value in checkpoint.values.items():
            text = repr(value)
            values.add_row(Text(name), Text(text if len(text) <= 100 else f"{text[:97]}..."))
        _print(values)


def _rank_table(checkpoint: Checkpoint) -> Table:
    """Who stored how much: bytes and files by rank."""
    manifest = checkpoint.manifest
    nbytes: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, size in zip(manifest.files, manifest.file_nbytes.tolist(), strict=True):
        nbytes[_rank_of(name)] += size
        files[_rank_of(name)] += 1
    table = _table()
    for title in ("stored by rank", "files", "size"):
        table.add_column(title, justify="right")
    for rank in sorted(nbytes, key=lambda rank: (len(rank), rank)):
        table.add_row(rank, f"{files[rank]}", _size(nbytes[rank]))
    table.add_row("all", f"{sum(files.values())}", _size(sum(nbytes.values())))
    return table


def _rank_of(file: str) -> str:
    """The rank that a data file's name tells, or the name itself."""
    match = re.match(r"rank0*(\d+)-", file)
    return match[1] if match else file


def _writers(info: TensorInfo) -> str:
    """The ranks that stored parts, and how many parts: `0, 1, 2 (3 parts)`."""
    ranks = sorted({_rank_of(part.file) for part in info.parts}, key=lambda r: (len(r), r))
    if not ranks:
        return "nobody (empty)"
    shown = ", ".join(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"{shown} ({len(info.parts)} parts)" if len(info.parts) > 1 else shown


def _checkpoint_json(checkpoint: Checkpoint, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    header = checkpoint.manifest.header
    return {
        "url": checkpoint.url,
        "step": header.step,
        "attempt": header.attempt,
        "world_size": header.world_size,
        "created_unix": header.created_unix,
        "user": dict(header.user),
        "tensors": {info.fqn: _tensor_json(info) for info in infos},
        "files": dict(
            zip(checkpoint.manifest.files, checkpoint.manifest.file_nbytes.tolist(), strict=True)
        ),
        "values": {name: _value_json(value) for name, value in checkpoint.values.items()},
    }


def _tensor_json(info: TensorInfo) -> dict[str, Any]:
    return {
        "dtype": str(info.dtype).removeprefix("torch."),
        "shape": list(info.shape),
        "kind": info.kind.name.lower(),
        "nbytes": info.nbytes,
        "alias_of": info.alias_of,
        "parts": [
            {
                "file": part.file,
                "byte_start": part.byte_start,
                "nbytes": part.nbytes,
                **_region_json(part.region),
            }
            for part in info.parts
        ],
    }


def _region_json(region: Region) -> dict[str, Any]:
    if isinstance(region, Box):
        return {"box": {"offset": list(region.offset), "shape": list(region.shape)}}
    return {"span": [region.start, region.stop]}


def _value_json(value: Any) -> Any:
    """JSON knows fewer types: what it lacks is shown as text."""
    if isinstance(value, dict):
        return {str(key): _value_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


# verify ----------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    options = _options(arguments.option)
    with _progress("verifying") as progress:
        report = verify(arguments.url, arguments.step, progress=progress, storage_options=options)
    if arguments.mark and report.ok:
        store = open_store(arguments.url, **options)
        try:
            Maintenance.open(store).verified(report.attempt)
        finally:
            store.close()
    if arguments.json:
        print(json.dumps(_report_json(report), indent=2))
    else:
        _show_report(report)
    return OK if report.ok else PROBLEM


def _show_report(report: VerifyReport) -> None:
    what = (
        f"step {report.step}: {report.files} files, {report.blocks} blocks, {_size(report.nbytes)}"
    )
    if report.ok:
        print(f"{report.url}\n{what}: every byte is as it was written")
        return
    print(f"{report.url}\n{what}: {summary(report.damage)}")
    for damage in report.damage[:DAMAGE_SHOWN_MAX]:
        print(f"  {damage.text}")
    if len(report.damage) > DAMAGE_SHOWN_MAX:
        print(f"  ... and {len(report.damage) - DAMAGE_SHOWN_MAX} more; --json lists all")


def _report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "step": report.step,
        "attempt": report.attempt,
        "ok": report.ok,
        "files": report.files,
        "blocks": report.blocks,
        "nbytes": report.nbytes,
        "damage": [damage._asdict() for damage in report.damage],
    }


# export ----------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    substitutions: list[tuple[re.Pattern[str], str]] = arguments.rename

    def rename(name: str) -> str:
        for pattern, replacement in substitutions:
            name = pattern.sub(replacement, name)
        return name

    started = time.monotonic()
    with _progress("exporting") as progress:
        report = export(
            arguments.url,
            arguments.target,
            step=arguments.step,
            selection=Selection(
                entry=arguments.entry,
                include=arguments.include,
                exclude=arguments.exclude,
                rename=rename if substitutions else None,
                dtype=arguments.dtype,
                keep_tied=arguments.keep_tied,
            ),
            shard_nbytes_max=arguments.shard_size,
            progress=progress,
            storage_options=_options(arguments.option),
            target_options=_options(arguments.target_option) or None,
        )
    seconds = max(time.monotonic() - started, 1e-9)
    for file in report.files:
        print(file)
    what = f"step {report.step}: {len(report.tensors)} tensors"
    print(f"{what}, {_size(report.nbytes)} in {seconds:.1f} s")
    for left_out, held in report.tied.items():
        print(f"tied: {left_out} is {held}, which is in the file")
    return OK


# salvage ---------------------------------------------------------------------------------------


def _salvage(arguments: argparse.Namespace) -> int:
    url, _, name = arguments.url.rstrip("/").rpartition("/")
    is_directory = parse_step_key(f"steps/{name}/{MANIFEST_NAME}") is not None
    store = open_store(url or "." if is_directory else arguments.url, **_options(arguments.option))
    try:
        prefixes = [name] if is_directory else _directories_without(store, arguments.step)
        codes = [_salvage_one(store, prefix, arguments.dry_run) for prefix in prefixes]
    finally:
        store.close()
    if not codes:
        print(f"{store.url}: every checkpoint has its MANIFEST; say --step to rebuild one anyway")
    return max(codes, default=OK)


def _directories_without(store: Store, step: int | None) -> list[str]:
    """The step directories of a root that have no MANIFEST, or all those of `step`."""
    files: dict[str, set[str]] = {}
    for info in store.list(STEPS_PREFIX):
        parsed = parse_step_key(info.key)
        if parsed is not None and step in (None, parsed[0]):
            folder, _, name = info.key.rpartition("/")
            files.setdefault(folder, set()).add(name)
    if not files:
        wanted = "no step directories" if step is None else f"nothing of step {step}"
        raise NoCheckpoint(f"{store.url}: {wanted} below {STEPS_PREFIX}")
    return [name for name in files if step is not None or MANIFEST_NAME not in files[name]]


def _salvage_one(store: Store, prefix: str, dry_run: bool) -> int:
    report = salvage(store, prefix)
    print(
        f"{store.url}/{prefix}: {len(report.files)} files, {_size(report.nbytes_checked)} checked"
    )
    for name in report.missing:
        print(f"  missing: {name}")
    for problem in report.problems:
        print(f"  {problem}")
    if report.manifest is None:
        print("  the checkpoint is not whole; no MANIFEST was written")
        return PROBLEM
    tensors = f"{len(report.manifest.fqns)} tensors of step {report.manifest.header.step}"
    if dry_run:
        print(f"  whole: {tensors}; nothing was written")
        return OK
    write_manifest(store, report)
    print(f"  whole: {tensors}; MANIFEST written, open it by its own path")
    return OK


# prune -----------------------------------------------------------------------------------------


def _prune(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.url, **_options(arguments.option))
    try:
        victims = to_retire(live_entries(store), keep_last=arguments.keep_last)
        if arguments.dry_run:
            for entry in victims:
                nbytes = sum(info.nbytes for info in store.list(entry.prefix))
                print(f"would delete step {entry.step} ({entry.attempt}), {_size(nbytes)}")
            print(f"{len(victims)} checkpoints would go; nothing was changed")
            return OK
        refused = _retire(store, victims)
    finally:
        store.close()
    print(f"{len(victims) - refused} checkpoints deleted")
    return PROBLEM if refused else OK


def to_retire(live: Sequence[LiveEntry], *, keep_last: int) -> list[LiveEntry]:
    """Which checkpoints go when the newest `keep_last` and all pinned ones stay. Oldest first.

    What a kept checkpoint references stays too.
    """
    kept = {entry.attempt for entry in live[-keep_last:]} if keep_last else set()
    kept |= {entry.attempt for entry in live if entry.pinned}
    kept |= {name for entry in live if entry.attempt in kept for name in entry.references}
    return [entry for entry in live if entry.attempt not in kept]


def _retire(store: Store, victims: Sequence[LiveEntry]) -> int:
    """Retire and delete; returns how many were refused meanwhile, each with its reason printed."""
    if not victims:
        return 0
    maintenance = Maintenance.open(store)
    refused = 0
    for entry in victims:
        try:
            maintenance.retire(entry.attempt)
            print(f"deleted step {entry.step} ({entry.attempt})")
        except NotRetired as error:
            refused += 1
            print(f"kept step {entry.step}: {error}", file=sys.stderr)
    return refused


# Showing ---------------------------------------------------------------------------------------


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal's stderr; None where nobody would see it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _print(table: Table) -> None:
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    Console(width=width).print(table)


def _size(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def _date(unix: float | None) -> str:
    return "" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


if __name__ == "__main__":
    sys.exit(main())
