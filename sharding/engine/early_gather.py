"""A gather that the user starts by hand, before the forward that needs it."""

from __future__ import annotations

from collections.abc import Sequence

from sharding.engine.store import State
from sharding.engine.unit import Unit
from sharding.torch_face import TorchHandle

__all__ = ["UnshardHandle", "start_early"]


class UnshardHandle(TorchHandle):
    """A gather by hand that is under way."""

    def __init__(self, units: Sequence[Unit], *, shows_views: bool) -> None:
        self._units = tuple(units)
        self._shows_views = shows_views

    def wait(self) -> None:
        """Return when the parameters are there. Waiting twice is harmless.

        With `shows_views` the module shows them then; the wrapper shows its own in the forward.
        """
        for unit in self._units:
            store = unit.store
            # Resharded since, it has nothing to wait for: gathering again would be a surprise.
            if store is not None and store.state in (State.GATHERING, State.UNSHARDED):
                store.finish_unshard()
                if self._shows_views:
                    store.show_views()


def start_early(*units: Unit, shows_views: bool) -> UnshardHandle:
    """Start to gather the units' parameters; their next forward does not gather again."""
    for unit in units:
        store = unit.store
        if store is not None and unit.needs_gather:
            # An optimizer may just have stepped, and outside of a forward nothing else makes the
            # stream of gathers wait for it.
            store.streams.gathers_wait_for_compute()
            unit.was_requested = True
            unit.gather_early()
    return UnshardHandle(units, shows_views=shows_views)
