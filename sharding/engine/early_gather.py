"""A gather that the user starts by hand, before the forward that needs it."""

from __future__ import annotations

from sharding.engine.store import State
from sharding.engine.unit import Unit
from sharding.torch_face import TorchHandle

__all__ = ["UnshardHandle", "start_early"]


class UnshardHandle(TorchHandle):
    """A gather by hand that is under way."""

    def __init__(self, unit: Unit, *, shows_views: bool) -> None:
        self._unit = unit
        self._shows_views = shows_views

    def wait(self) -> None:
        """Return when the parameters are there. Waiting twice is harmless.

        With `shows_views` the module shows them then; the wrapper shows its own in the forward.
        """
        store = self._unit.store
        # Resharded since, the unit has nothing to wait for: gathering again would be a surprise.
        if store is not None and store.state in (State.GATHERING, State.UNSHARDED):
            store.finish_unshard()
            if self._shows_views:
                store.show_views()


def start_early(unit: Unit, *, shows_views: bool) -> UnshardHandle:
    """Start to gather the unit's parameters; its next forward does not gather again."""
    store = unit.store
    if store is not None and unit.needs_gather:
        # An optimizer may just have stepped, and outside of a forward nothing else makes the
        # stream of gathers wait for it.
        store.streams.gathers_wait_for_compute()
        unit.was_requested = True
        unit.gather_early()
    return UnshardHandle(unit, shows_views=shows_views)
