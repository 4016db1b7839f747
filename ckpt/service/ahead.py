"""The memory of the first save is made while the first steps run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt.service.training import Training

logger = logging.getLogger(__name__)


class Ahead:
    """After the first step a state has all that a save copies, so its size is known then.

    Copies into fresh memory take ten times as long, and the training would stand still for it.
    Nothing is made where saves are rare (`is_regular` False): there may never be one.
    """

    def __init__(self, training: Training, *, is_regular: bool) -> None:
        self._training = training
        self._is_wanted = is_regular
        self._stop: Callable[[], object] = lambda: None

    def stepped(self, *, has_saved: bool) -> None:
        """A step is done; `has_saved` when a save was begun, in it or before it."""
        if not self._is_wanted:
            return
        self._is_wanted = False
        if has_saved:
            return
        try:
            self._stop = self._training.target.make_ready(self._training.state)
        except Exception as error:
            # The save will fail in the same way, and has somebody who is told.
            logger.info("no memory was made ahead of the first save: %s", error)

    def stop(self) -> None:
        """Make no more of it, and give it back unless a save has used it."""
        self._stop()
