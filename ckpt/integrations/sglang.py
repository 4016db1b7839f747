"""An SGLang server with the weights that a training publishes.

    with SGLangUpdates("s3://bucket/run", "http://localhost:30000", "/dev/shm/served") as updates:
        while training:
            updates.step()  # the server has the newest version now

The folder has the model's configuration and tokenizer, as `ckpt export --format hf` makes it or as
they were downloaded, without shards; its weights are one file that each version replaces. The
server reads it by `update_weights_from_disk`, and names the version in its answers
(`weight_version`).
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from glob import iglob
from typing import Any

from ckpt.commit.names import PUBLISHED
from ckpt.convert.targets.files import write_safetensors
from ckpt.errors import CheckpointError
from ckpt.service.follower import follow
from storage import StoreLike

FILE = "model.safetensors"
SECONDS_MAX = 600.0  # for a server to load a file: a guess


class SGLangUpdates:
    """Follows a root for one server. `prefix` is in front of the names that the model's files have.

    `step` returns the step that the server has since, None where nothing is new. Raises like
    `Follower.poll`, and CheckpointError with the server's own words where that refuses: it keeps
    the weights that it had, and the next call tries again.
    """

    def __init__(
        self,
        url: StoreLike,
        server: str,
        folder: str | os.PathLike[str],
        *,
        line: str = PUBLISHED,
        prefix: str = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.follower = follow(["*"], url, line=line, storage_options=storage_options)
        weights = iglob("*.safetensors", root_dir=folder)
        index = iglob("*.safetensors.index.json", root_dir=folder)
        # Loaders read the files that an index names, and no other; without one, all of them.
        if others := sorted({*weights, *index} - {FILE}):
            raise CheckpointError(f"{folder} has {others[0]}; remove it: the weights are {FILE}")
        self._server, self._prefix = server.rstrip("/"), prefix
        self._folder, self._has = os.path.abspath(folder), ""

    def step(self) -> int | None:
        """Take the newest version over; see the class."""
        follower = self.follower
        if follower.poll() is not None:
            follower.swap()
        # By what the server has, not by what is new here: after a refusal the same one is due.
        if follower.attempt == self._has:
            return None
        named = follower.tensors.items()
        tensors = {name.removeprefix(self._prefix): one for name, one in named}
        write_safetensors(os.path.join(self._folder, FILE), tensors)
        body = {"model_path": self._folder, "weight_version": follower.attempt}
        url, kind = f"{self._server}/update_weights_from_disk", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), kind)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            # The server says why in the body; the error itself has a number.
            said = {"success": False, "message": error.read().decode(errors="replace")}
        except OSError as error:
            said = {"success": False, "message": str(error)}
        if not said.get("success"):
            raise CheckpointError(f"{self._server} has not taken step {follower.step}: {said}")
        self._has = follower.attempt
        return follower.step

    def __enter__(self) -> SGLangUpdates:
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.close()
