"""What a load was requested to do, and which arguments the caller has.

Errors advise the next move in the words of the call that raises them; a call that lacks an argument
must not be advised to pass it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["CHECKPOINT", "STATE_DICT", "CallArguments", "LoadRequest", "Unshared"]


class Unshared(enum.Enum):
    """Whose are, in an optimizer's state dict, the parameters that no engine shares with another
    rank, and the options of the groups.

    COMPARED: the same on all ranks, or they are refused. OWN: each rank's own, whatever the others
    have; and a dict may lack what the optimizer has. OWN_BY_FIRST: the same, but a dict that is
    taken has state of those parameters alone of which the first rank has state.
    """

    COMPARED = enum.auto()
    OWN = enum.auto()
    OWN_BY_FIRST = enum.auto()


class CallArguments(NamedTuple):
    """The arguments that a call has. `source` says what it loads."""

    source: str = "checkpoint"
    rename: bool = True
    skip: bool = True
    strict: bool = True
    rank0_only: bool = False
    cast: bool = False

    def moves(self, rename: str, leave: str) -> str:
        """The end of a message about a name of one side only: how to call it otherwise, and how to
        leave it be, as far as the call has that.
        """
        names = (("skip=", self.skip), ("strict=False", self.strict))
        ways = " or ".join(name for name, has in names if has)
        moves = [rename] if self.rename else []
        moves += [f"{ways} to {leave}"] if ways else []
        return f"; {', '.join(moves)}" if moves else "; take it from a state with the same names"

    @property
    def or_skip(self) -> str:
        """The end of a list of moves."""
        return ", or skip= it" if self.skip else ""


CHECKPOINT = CallArguments()
STATE_DICT = CallArguments("dict", rename=False, skip=False, rank0_only=True, cast=True)


class LoadRequest(NamedTuple):
    """How a state dict is to be loaded.

    `cast`: to the dtypes of the state, as `copy_` does. `every_name`: a tied tensor is found by any
    of its names, and missing under those that the dict lacks.
    """

    strict: bool = True
    rank0_only: bool = False
    cast: bool = False
    every_name: bool = False
    call: CallArguments = STATE_DICT
    beside: Unshared = Unshared.COMPARED
