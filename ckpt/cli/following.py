"""`ckpt follow`: new versions of weights, for programs that are no Python."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from ckpt.api import line_of
from ckpt.convert.targets.files import write_safetensors
from ckpt.errors import CheckpointError
from ckpt.screens.visible import visible
from ckpt.service.follower import follow as follow_tensors
from ckpt.service.serving import Serving, peer_options
from storage import StoreLike, open_store


def follow(
    url: StoreLike,
    line: str,
    into: str,
    include: Sequence[str],
    execute: str,
    once: bool,
    interval: float,
    as_json: bool,
    serve: str,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Each version in turn; with `once` until there is none. Only passed on, with `serve` alone.

    Raises CheckpointError where the command fails: what it has taken over is not known then.
    """
    names, options = list(include), peer_options(url, storage_options)
    if serve and not (into or execute or once):
        with (
            closing(open_store(line_of(url, line), **(options or {}))) as store,
            closing(Serving(store, serve, line)) as serving,
        ):
            print(f"{visible(store.url)} is served at {serving.url}", flush=True)
            threading.Event().wait()
    how: dict[str, Any] = {"line": line, "serve": serve, "storage_options": options}
    with follow_tensors(names, url, **how) as follower:
        for update in follower.updates(timeout=0 if once else None, poll_seconds=interval):
            follower.swap()
            if into:
                write_safetensors(into, follower.tensors)
            read = f"{update.nbytes_read:,} of {update.nbytes_total:,} bytes read"
            text = f"step {update.step} ({update.attempt}): {read}"
            print(json.dumps(asdict(update)) if as_json else text, flush=True)
            path = os.path.abspath(into) if into else ""
            given = {"STEP": update.step, "ATTEMPT": update.attempt, "FILE": path}
            variables = (f"CKPT_{name}={value}" for name, value in given.items())
            if execute and (code := subprocess.call(["env", *variables, "sh", "-c", execute])):
                raise CheckpointError(f"--exec {visible(execute)} has failed: exit code {code}")
