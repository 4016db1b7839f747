"""`ckpt serve`: a local web page that follows runs. It needs no torch."""

from __future__ import annotations

import argparse
import contextlib

from ckpt.cli.commandline import OK
from ckpt.cli.ending import ended_by_signals
from ckpt.cli.following import Following
from ckpt.cli.rules import rule_of
from ckpt.cli.serve_http import PageServer


def serve(arguments: argparse.Namespace) -> int:
    """`ckpt serve`."""
    # Ctrl-C is how one ends it.
    with (
        contextlib.suppress(KeyboardInterrupt),
        ended_by_signals() as ending,
        Following(
            arguments.urls,
            dict(arguments.option),
            interval_seconds=arguments.interval,
            near=arguments.near,
            ending=ending,
        ) as following,
        PageServer(
            following,
            (arguments.host, arguments.port),
            rule=rule_of(arguments),
            names=arguments.allow_host,
            ending=ending,
        ) as server,
    ):
        print(f"{server.url} follows {', '.join(s.run.url for s in following.states)}; ", end="")
        print("Ctrl-C ends it", flush=True)
        server.serve_forever()
    return OK
