"""vLLM's workers with the weights that a training publishes.

    WeightTransferEngineFactory.register_engine("ckpt", "ckpt.integrations.vllm", "FollowingEngine")

`init_weight_transfer_engine` takes `{"url": ..., "line": "published"}`, and between
`start_weight_update` and `finish_weight_update` one `update_weights` takes `{"step": 120}`, the
step that is waited for; without it the newest is taken. All workers have the same version. The
model's own `load_weights` gets all tensors, so it may be sharded, fused and quantized in any way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ckpt.commit.names import PUBLISHED
from ckpt.errors import NoCheckpoint
from ckpt.service.follower import follow

POLL_SECONDS = 0.5


@dataclass
class FollowedRoot(WeightTransferInitInfo):
    """What is followed. `prefix` is in front of the names that the model's files have."""

    url: str = ""
    line: str = PUBLISHED
    prefix: str = ""
    storage_options: Mapping[str, Any] | None = None


@dataclass
class WantedVersion(WeightTransferUpdateInfo):
    """The step to wait for, or a later one that comes, -1 for what is there; and how long."""

    step: int = -1
    seconds_max: float = 600.0


class FollowingEngine(WeightTransferEngine):
    """The weights of a root; `version` names those that the model has."""

    init_info_cls, update_info_cls = FollowedRoot, WantedVersion
    version = ""

    def init_transfer_engine(self, init_info: FollowedRoot) -> None:
        """Begin to follow; nothing is read yet."""
        options, self._prefix = init_info.storage_options, init_info.prefix
        self._follower = follow(["*"], init_info.url, line=init_info.line, storage_options=options)

    def start_weight_update(self, *scope: Any) -> None:
        """The model's layers take weights in the form of files again."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WantedVersion) -> None:
        """Wait for the version, and load it. Raises NoCheckpoint when it does not come in time."""
        follower, wanted = self._follower, update_info.step
        has = -1 if follower.step is None else follower.step
        # A later step that is there may be of a training that went back since.
        seconds = update_info.seconds_max if wanted >= 0 and has != wanted else 0.0
        is_new = wanted < 0 or has == wanted
        for update in follower.updates(timeout=seconds, poll_seconds=POLL_SECONDS):
            follower.swap()
            has, is_new = update.step, True
            if has >= wanted >= 0:
                break
        if has < max(wanted, 0) or not is_new:
            raise NoCheckpoint(f"step {wanted} was not published in time; the newest is {has}")
        named = follower.tensors.items()
        self.model.load_weights((name.removeprefix(self._prefix), one) for name, one in named)
        # Last: it names a version only once the model has all of it.
        self.version = follower.attempt

    def finish_weight_update(self) -> None:
        """The layers are as the engine uses them."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Follow no more."""
        self._follower.close()

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """Nothing: `ckpt.publish` is what a training calls."""
