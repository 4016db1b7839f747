"""What an engine offers so that its modules, tensors and optimizers can be saved and resharded.

An engine is whatever holds parameters in a way of its own. It imports nothing and inherits nothing:
a save, a load and a state dict look for methods of these names. One of them is enough
(`OffersPieces`); each of the others is for engines that need it. docs/howto/own_engine.md makes an
engine of 80 lines saveable. What an optimizer says of its state is
`ckpt.state_dict.declare_optimizer_state`.

The values that the methods return are offered here as well:

    from ckpt.layout.protocol import Box, Owned, Piece, View
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from ckpt.layout.piece import Owned, Piece, View, Window
from ckpt.layout.region import Box, Region, Shape, Span
from ckpt.layout.sharded_tensor import UnitSharding

__all__ = [
    "Box",
    "DropsGathered",
    "NamesAliases",
    "NeutralHook",
    "OffersPieces",
    "Owned",
    "Piece",
    "Region",
    "Shape",
    "Span",
    "TellsSharding",
    "UnitSharding",
    "View",
    "Window",
    "WrapsChild",
]


@runtime_checkable
class OffersPieces(Protocol):
    """A module, or a subclass of torch.Tensor, that says which regions this rank holds."""

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        """One `Owned` for each tensor or flat buffer that the engine manages on this rank.

        Of a module: for the parameters of its subtree. Names in the pieces are relative to the
        module, as `named_parameters` of the module without an engine has them. Parameters that no
        piece covers are described as plain tensors. A rank without any element of a tensor gives
        one empty piece for it. Of a tensor: exactly one `Owned`, whose pieces have the name "".

        `Piece.holders` and `Owned.owners` are global ranks (0 without a process group), the same
        on every rank for the same region; all pieces of a tensor together cover it. `Owned.local`
        is the live memory: saves read it and loads write to it, and optimizer state of its shape
        is taken to be cut like it. Called at every save, load and state dict, by each rank alone:
        it must not communicate, and not change anything.
        """


@runtime_checkable
class DropsGathered(Protocol):
    """A module that keeps copies of what it manages, such as gathered parameters."""

    def __ckpt_reshard__(self) -> None:
        """Drop the copies, so that the next use of the module makes them anew.

        Called by each rank before the memory behind `Owned.local` is written to; must not
        communicate.
        """


@runtime_checkable
class NamesAliases(Protocol):
    """A module with tied parameters, whose pieces have one of their names."""

    def __ckpt_aliases__(self) -> Mapping[str, str]:
        """The other names of tied parameters, each with the name that the pieces have. Both are
        relative to the module.
        """


@runtime_checkable
class TellsSharding(Protocol):
    """A module whose state dicts in sharded form are to be cut in a certain way."""

    def __ckpt_sharding__(self) -> UnitSharding:
        """The process group or the mesh over which sharded state dicts cut the module's tensors."""


@runtime_checkable
class WrapsChild(Protocol):
    """A module that stands around a model; the model's names do not show it.

    Read from the class: write it in the class body.
    """

    __ckpt_wraps__: str
    """The name of the only child, which names of parameters leave out: "module" turns
    "module.layer.weight" into "layer.weight"."""


@runtime_checkable
class NeutralHook(Protocol):
    """A hook for state dicts that an engine registers on modules, and that changes nothing in them.

    Other hooks are refused at a save, because nobody knows what they would have changed.
    """

    __ckpt_neutral__: bool
    """True, as an attribute of the function."""
