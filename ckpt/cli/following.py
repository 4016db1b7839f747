"""`ckpt follow`: new versions of weights, for programs that are no Python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckpt.convert.targets.files import write_safetensors
from ckpt.errors import CheckpointError
from ckpt.screens.visible import visible
from ckpt.service.follower import follow as follow_tensors
from storage import StoreLike


def follow(
    url: StoreLike,
    line: str,
    into: str,
    include: Sequence[str],
    execute: str,
    once: bool,
    interval: float,
    as_json: bool,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Each version in turn; with `once` until there is none.

    Raises CheckpointError where the command fails: what it has taken over is not known then.
    """
    names = list(include)
    with follow_tensors(names, url, line=line, storage_options=storage_options) as follower:
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
