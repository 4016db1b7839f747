"""Commands that print for themselves, and have no function in `ckpt.operate`.

What they do is imported when they run: `ckpt --help` does without.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from fnmatch import filter as filter_names
from importlib import import_module
from json import dumps
from typing import TYPE_CHECKING, Annotated, Literal

from ckpt.operate import arguments as given
from ckpt.operate.arguments import Argument

if TYPE_CHECKING:
    from storage import StoreLike

_FutureRoot = Annotated[
    "StoreLike", Argument("a root, which need not exist yet: a path, s3://bucket/prefix, ...")
]
Interval = Annotated[
    float,
    Argument(
        "between looks after something has happened, then up to 8 times as long; default: 2s",
        given.seconds,
        "TIME",
    ),
]


def show(
    url: given.Url,
    pattern: Annotated[str, Argument("shell pattern of names")] = "*",
    *,
    step: given.Step = None,
    attempt: given.Attempt = "",
    map: Annotated[bool, Argument("a picture: tensors x ranks x files")] = False,
    output: Annotated[
        str, Argument("with --map: write one self-contained HTML page", metavar="FILE")
    ] = "",
    unfold: given.Unfold = False,
    metadata_bytes_max: given.MetadataMax = None,
    json: Annotated[bool, Argument("print JSON, with every stored part")] = False,
    storage_options: given.Options = None,
) -> None:
    """Show the tensors of a checkpoint and who stored them."""
    from ckpt.cli.showing import print_json, show_map, show_tables
    from ckpt.commit.names import plain_int
    from ckpt.errors import CheckpointError, InvalidArgument
    from ckpt.format.manifest import MetadataBudget
    from ckpt.loading.contents import open_contents

    if output and not map:
        raise InvalidArgument("output= is for map=; send other output to a file with >")
    budget = MetadataBudget(plain_int(metadata_bytes_max))
    opened = open_contents(url, step, storage_options, attempt=attempt, budget=budget)
    with opened as checkpoint:
        names: Sequence[str] = checkpoint.keys()
        if pattern != "*":
            names = filter_names(names, pattern)
        if not names and len(checkpoint):
            raise CheckpointError(
                f"no name matches {pattern!r}; quote patterns, as in 'model.*'; "
                f"the first name is {checkpoint.keys()[0]!r}"
            )
        if json:
            print_json(checkpoint, names, budget)
        elif map:
            show_map(checkpoint, names, output, budget)
        else:
            show_tables(checkpoint, names, budget, unfold)


def watch(
    url: _FutureRoot,
    *,
    once: Annotated[bool, Argument("print one frame and end")] = False,
    near: given.Near = (),
    interval: Interval = 2.0,
    gib_month: given.StoragePrice = None,
    thousand_writes: given.WritesPrice = None,
    json: Annotated[bool, Argument("print a line of JSON for each thing that happens")] = False,
    storage_options: given.Options = None,
) -> None:
    """Follow a run in the terminal: saves as they come, slow ranks, failures."""
    from ckpt.screens.following import Following, ended_by_signals
    from ckpt.screens.watching import draw_frames, print_lines, watch_once
    from ckpt.tools.cost import Prices

    prices, options = Prices(gib_month, thousand_writes), dict(storage_options or {})
    if once:
        watch_once(url, near, options, as_json=json, prices=prices)
        return
    with (
        suppress(KeyboardInterrupt),  # Ctrl-C is how one leaves it
        ended_by_signals() as ending,
        Following([url], options, interval_seconds=interval, near=near, ending=ending) as run,
    ):
        if json or not sys.stdout.isatty():
            print_lines(run, ending, as_json=json)
        else:
            draw_frames(run, ending, prices)


def follow(
    url: _FutureRoot,
    *,
    line: Annotated[str, Argument("published: publications", metavar="NAME")] = "",
    into: Annotated[str, Argument("safetensors, replaced by each version", metavar="FILE")] = "",
    include: given.Include = ("*",),
    execute: Annotated[
        str,
        Argument(
            "for the shell, at each version; gets CKPT_STEP, CKPT_ATTEMPT, CKPT_FILE",
            metavar="COMMAND",
            flag="--exec",
        ),
    ] = "",
    once: Annotated[bool, Argument("end without news")] = False,
    interval: Annotated[float, Argument("between looks", given.seconds, "TIME")] = 5.0,
    json: Annotated[bool, Argument("print a line of JSON for each version")] = False,
    serve: Annotated[str, Argument("pass on; alone, only that", metavar="HOST:PORT")] = "",
    storage_options: given.Options = None,
) -> None:
    """Read each new version of the weights, and run a command for it."""
    from ckpt.api import line_of
    from ckpt.convert.targets.files import write_safetensors
    from ckpt.errors import CheckpointError
    from ckpt.screens.visible import visible
    from ckpt.service.follower import follow
    from ckpt.service.serving import Serving, peer_options
    from storage import open_store

    names, options = list(include), peer_options(url, storage_options)
    if serve and not (into or execute or once):
        with (
            closing(open_store(line_of(url, line), **(options or {}))) as store,
            closing(Serving(store, serve, line)) as serving,
        ):
            print(f"{visible(store.url)} is served at {serving.url}", flush=True)
            threading.Event().wait()
    with follow(names, url, line=line, serve=serve, storage_options=options) as follower:
        for update in follower.updates(timeout=0 if once else None, poll_seconds=interval):
            follower.swap()
            if into:
                write_safetensors(into, follower.tensors)
            read = f"{update.nbytes_read:,} of {update.nbytes_total:,} bytes read"
            text = f"step {update.step} ({update.attempt}): {read}"
            print(dumps(asdict(update)) if json else text, flush=True)
            path = os.path.abspath(into) if into else ""
            facts = {"STEP": update.step, "ATTEMPT": update.attempt, "FILE": path}
            variables = (f"CKPT_{name}={value}" for name, value in facts.items())
            if execute and (code := subprocess.call(["env", *variables, "sh", "-c", execute])):
                # What the command has taken over is not known now.
                raise CheckpointError(f"--exec {visible(execute)} has failed: exit code {code}")


def serve(
    url: Annotated[
        "Sequence[StoreLike]",
        Argument(
            "a root, which need not exist yet: a path, s3://bucket/prefix, ...; several are "
            "compared",
            collect=list,
        ),
    ],
    *,
    port: Annotated[int, Argument("0 takes a free one", given.port)] = 8642,
    host: Annotated[str, Argument("where to listen; by default this machine only")] = "127.0.0.1",
    allow_host: Annotated[
        Sequence[str],
        Argument(
            "a name by which browsers may call it besides localhost; repeatable",
            metavar="NAME",
            collect=list,
        ),
    ] = (),
    near: given.Near = (),
    interval: Interval = 2.0,
    keep_last: given.KeepLast = None,
    keep_every: given.KeepEveryStep = None,
    keep_best: given.KeepBestOf = None,
    keep_younger: given.KeepAge = None,
    retire_unmeasured: given.RetireUnmeasured = False,
    gib_month: given.StoragePrice = None,
    thousand_writes: given.WritesPrice = None,
    storage_options: given.Options = None,
) -> None:
    """Follow runs in a local web page: timeline, slow ranks, sizes, retention, failures."""
    from ckpt.screens.following import Following, ended_by_signals
    from ckpt.screens.serve_http import PageServer
    from ckpt.service.removing import rule_of
    from ckpt.tools.cost import Prices

    rules = keep_last, keep_every, keep_best, keep_younger
    has_rule = retire_unmeasured or any(one is not None for one in rules)
    rule = rule_of(*rules, retire_unmeasured) if has_rule else None
    prices, options = Prices(gib_month, thousand_writes), dict(storage_options or {})
    with (
        suppress(KeyboardInterrupt),  # Ctrl-C is how one ends it
        ended_by_signals() as ending,
        Following(url, options, interval_seconds=interval, near=near, ending=ending) as runs,
        PageServer(
            runs, (host, port), rule=rule, names=allow_host, ending=ending, prices=prices
        ) as server,
    ):
        print(f"{server.url} follows {', '.join(s.run.url for s in runs.states)}; ", end="")
        print("Ctrl-C ends it", flush=True)
        server.serve_forever()


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Argument("the shell that you use")],
    typed: Annotated[
        Sequence[str], Argument("words that were typed: print what may follow", collect=list)
    ] = (),
) -> None:
    """Print a script that completes commands and options in a shell."""
    # By its name: it imports the table of commands, which this is a part of.
    import_module("ckpt.cli.completing").completion(shell, typed)
