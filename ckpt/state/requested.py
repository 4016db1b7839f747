"""What a load shall do, and which arguments the call has that its errors may advise.

Errors advise the next move in the words of the call that raises them; a call that lacks an argument
must not be advised to pass it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Unshared(enum.Enum):
    """Who owns what no engine shares between ranks in an optimizer's state dict: the state of
    parameters that stand beside the units, and the options of groups.

    COMPARED: all ranks have the same, or the call refuses. OWN: each rank has its own, whatever the
    others have, and a dict to load may lack what the optimizer has. OWN_BY_FIRST: like OWN, but a
    dict that is taken has state only of parameters of which the first rank has state.
    """

    COMPARED = enum.auto()
    OWN = enum.auto()
    OWN_BY_FIRST = enum.auto()


class CallArguments(NamedTuple):
    """Which arguments a call has. `source` says what it loads, in the words of its errors."""

    source: str = "checkpoint"
    rename: bool = True
    skip: bool = True
    strict: bool = True
    rank0_only: bool = False
    cast: bool = False
    new: bool = True

    def moves(self, rename: str, leave: str, *, is_missing: bool = False) -> str:
        """The end of a message about a name that one side lacks: what to pass to this call to give
        it its other name, or to leave it be.
        """
        names = (
            ("new=", self.new and is_missing),
            ("skip=", self.skip),
            ("strict=False", self.strict),
        )
        given = [name for name, has in names if has]
        ways = " or ".join([", ".join(given[:-1]), given[-1]] if len(given) > 2 else given)
        moves = [rename] if self.rename else []
        moves += [f"{ways} to {leave}"] if ways else []
        return f"; {', '.join(moves)}" if moves else "; take it from a state with the same names"

    @property
    def or_skip(self) -> str:
        """The end of a list of moves."""
        return ", or skip= it" if self.skip else ""


CHECKPOINT = CallArguments()
STATE_DICT = CallArguments("dict", rename=False, skip=False, rank0_only=True, cast=True, new=False)


class LoadRequest(NamedTuple):
    """How a state dict is to be loaded.

    `rank0_only`: only the first rank's dict counts. `cast`: to the dtypes of the state, as `copy_`
    does. `every_name`: a tied tensor is found by any of its names, and missing under those that the
    dict lacks. `call` has the arguments that errors may advise, `beside` says what is a rank's own.
    """

    strict: bool = True
    rank0_only: bool = False
    cast: bool = False
    every_name: bool = False
    call: CallArguments = STATE_DICT
    beside: Unshared = Unshared.COMPARED
