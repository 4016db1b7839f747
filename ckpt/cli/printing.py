"""Commands that print for themselves, and have no function in `ckpt.operate`.

Their signatures, which import nothing; what they do is imported when they run.
"""

from collections.abc import Sequence
from importlib import import_module
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
    from ckpt.cli.showing import show

    of_store = (metadata_bytes_max, storage_options)
    show(url, pattern, step, attempt, *of_store, map, output, json, unfold)


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
    from ckpt.screens.watching import watch, watch_once
    from ckpt.tools.cost import Prices

    prices = Prices(gib_month, thousand_writes)
    if once:
        watch_once(url, near, storage_options, as_json=json, prices=prices)
    else:
        watch(url, near, interval, storage_options, as_json=json, prices=prices)


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
    how = line, into, include, execute, once, interval, json, serve, storage_options
    import_module("ckpt.cli.following").follow(url, *how)


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
    from ckpt.screens.serve_http import serve
    from ckpt.service.removing import rule_of
    from ckpt.tools.cost import Prices

    rules = keep_last, keep_every, keep_best, keep_younger
    has_rule = retire_unmeasured or any(one is not None for one in rules)
    rule = rule_of(*rules, retire_unmeasured) if has_rule else None
    prices = Prices(gib_month, thousand_writes)
    how = {"near": near, "interval": interval, "options": storage_options, "prices": prices}
    serve(url, (host, port), rule, allow_host, **how)  # type: ignore[arg-type]


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Argument("the shell that you use")],
    typed: Annotated[
        Sequence[str], Argument("words that were typed: print what may follow", collect=list)
    ] = (),
) -> None:
    """Print a script that completes commands and options in a shell."""
    # By its name: it imports the table of commands, which this is a part of.
    import_module("ckpt.cli.completing").completion(shell, typed)
