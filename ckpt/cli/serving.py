"""`ckpt serve`: a local web page that follows runs. It needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.cli.ending import ended_by_signals
from ckpt.cli.following import Following
from ckpt.cli.serve_http import PageServer
from ckpt.service.retention import KeepRule
from storage import StoreLike


def serve(
    urls: Sequence[StoreLike],
    address: tuple[str, int],
    rule: KeepRule | None,
    names: Sequence[str],
    *,
    near: Sequence[str],
    interval: float,
    options: Mapping[str, Any] | None,
) -> None:
    """`ckpt serve`."""
    # Ctrl-C is how one ends it.
    with (
        contextlib.suppress(KeyboardInterrupt),
        ended_by_signals() as ending,
        Following(
            urls, options or {}, interval_seconds=interval, near=near, ending=ending
        ) as following,
        PageServer(following, address, rule=rule, names=names, ending=ending) as server,
    ):
        print(f"{server.url} follows {', '.join(s.run.url for s in following.states)}; ", end="")
        print("Ctrl-C ends it", flush=True)
        server.serve_forever()
