"""Walking a state: which leaves it has, under which names, and where in its containers they stand.

Saving and loading walk alike, so that the same state gives the same names. A container without
tensors, modules, optimizers, objects and marks is one value; any other is walked into, child by
child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import CheckpointError, InvalidState
from ckpt.layout.state_dict_hooks import load_changes, save_changes
from ckpt.state.typed_values import is_array, is_scalar, typed_of
from ckpt.state.types import PerGroup, PerRank, Stages, StagesHere
from ckpt.state.values import DEPTH_MAX, SCALARS, is_groups, why_not_storable

# The key in a module's state dict of what its `get_extra_state()` returns.
EXTRA_STATE_KEY = "_extra_state"


class Location(NamedTuple):
    """Where a leaf stands: `container[key]`. For the state itself `container` is None."""

    container: Any
    key: Any


class LocatedValue(NamedTuple):
    """A value of the state, its name and its place."""

    fqn: str
    value: Any
    place: Location


class Replaced(NamedTuple):
    """A part of the state that a load replaces as a whole: what may have another size, or other
    entries, at another time. It counts as an object with a state.
    """

    node: Any
    place: Location

    def state_dict(self) -> Any:
        """What is there now."""
        return self.node

    def load_state_dict(self, loaded: Any) -> None:
        """Put `loaded` there. A dict stays the same object: others may hold on to it."""
        if isinstance(self.node, dict) and isinstance(loaded, dict):
            self.node.clear()
            self.node.update(loaded)
        else:
            self.place.container[self.place.key] = loaded


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a state in walking order; `tuples` are those walked into, outermost first.

    `owners` have parameters that optimizers of the state know; `refills` are to be called with the
    dicts next to them once these are loaded.
    """

    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    arrays: list[tuple[str, Any]] = field(default_factory=list)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, torch.optim.Optimizer]] = field(default_factory=list)
    objects: list[tuple[str, Any]] = field(default_factory=list)
    per_rank: list[LocatedValue] = field(default_factory=list)
    values: list[LocatedValue] = field(default_factory=list)
    tuples: list[LocatedValue] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stages: list[StagesHere] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    refills: list[tuple[Callable[[Any], None], dict[str, Any]]] = field(default_factory=list)


def walk(state: Any) -> Leaves:
    """All leaves of `state`. What cannot be part of a state is listed in `problems`."""
    leaves = Leaves()
    kind = type(state)
    if kind in SCALARS:
        leaves.problems.append(f"the state is a {kind.__name__}; pass a dict with named entries")
    elif isinstance(state, (dict, list, tuple)):
        _walk_container(state, "", Location(None, None), leaves, 0)
    else:
        _visit(state, "", Location(None, None), leaves, 0)
    return leaves


def is_object(leaf: Any) -> bool:
    """Whether `leaf` keeps its state by `state_dict()` and takes it by `load_state_dict()`."""
    if isinstance(leaf, type):  # a class has the functions, and no state
        return False
    return callable(getattr(leaf, "state_dict", None)) and callable(
        getattr(leaf, "load_state_dict", None)
    )


def is_numbered(node: Any) -> bool:
    """Whether this is what `torch.optim.Optimizer.state_dict()` returns: parameters by number."""
    if not isinstance(node, dict) or not isinstance(node.get("state"), dict):
        return False
    groups = node.get("param_groups")
    if not groups or not is_groups(groups):
        return False
    return all(type(number) is int for group in groups for number in group["params"])


def refuse_snapshots(state: Any) -> None:
    """Raise InvalidState where a state that is to be saved again and again has the state dict of an
    optimizer, which stays as it is.
    """
    problems = [
        f"{fqn}: is the state dict that an optimizer had when it was asked, which every save would "
        "store again; pass the optimizer itself"
        for fqn, thing in walk(state).objects
        if isinstance(thing, Replaced) and is_numbered(thing.node)
    ]
    if problems:
        raise InvalidState(problems)


def read_state(fqn: str, read: Callable[[], Any]) -> Any:
    """What `read`, the `state_dict` of an object at `fqn`, returns.

    Raises InvalidState where the object has the function and no state: wrappers pass the call on to
    what they wrap, whatever that is.
    """
    try:
        return read()
    except CheckpointError:
        raise
    except Exception as error:
        # Not with the other problems of the state: its traceback is worth more than completeness.
        name = getattr(read, "__qualname__", repr(read))
        raise InvalidState(
            f"{fqn}: {name}() raised {type(error).__name__}: {error}; leave it out of the "
            "state, or put in what has a state (a DataLoader of Accelerate has one with "
            "use_stateful_dataloader=True)"
        ) from error


def _walk_container(node: Any, path: str, place: Location, leaves: Leaves, depth: int) -> None:
    if depth >= DEPTH_MAX:
        leaves.problems.append(f"{path[:200]}: nested deeper than {DEPTH_MAX} levels, or in itself")
        return
    keys: Sequence[Any] = range(len(node))
    children: Sequence[Any] = node
    if isinstance(node, dict):
        keys, children = list(node), list(node.values())
        # Names of parts that are walked into come from the keys, so only keys that make a name do.
        if not {str, int}.issuperset(map(type, keys)):
            bad = next(key for key in keys if type(key) is not str and type(key) is not int)
            leaves.problems.append(
                f"{path or 'the state'}: key {bad!r:.100} of type {type(bad).__name__} "
                "cannot name a part of the state; use str or int"
            )
            return
    elif isinstance(node, tuple):
        leaves.tuples.append(LocatedValue(path, node, place))
    prefix = f"{path}." if path else ""
    names = [prefix + str(key) for key in keys]
    # Short ways: states of tensors have thousands.
    if {torch.Tensor}.issuperset(map(type, children)) and EXTRA_STATE_KEY not in "".join(names):
        leaves.tensors.extend(zip(names, children, strict=True))
        return
    for fqn, key, child in zip(names, keys, children, strict=True):
        if type(child) is torch.Tensor and not fqn.endswith(EXTRA_STATE_KEY):
            leaves.tensors.append((fqn, child))
        else:
            _visit(child, fqn, Location(node, key), leaves, depth + 1)


def _visit(node: Any, fqn: str, place: Location, leaves: Leaves, depth: int) -> None:
    # Extra state of a module's state dict: its sizes may differ from those that were saved.
    if (
        fqn.endswith(EXTRA_STATE_KEY)
        and isinstance(place.container, dict)
        and isinstance(node, (torch.Tensor, dict, list, tuple))
        and (isinstance(node, torch.Tensor) or not _is_pure(node, 0))
    ):
        leaves.objects.append((fqn, Replaced(node, place)))
    elif type(node) in SCALARS or is_scalar(node):
        leaves.values.append(LocatedValue(fqn, node, place))
    elif is_array(node):
        leaves.arrays.append((fqn, node))
    elif hasattr(type(node), "local_shards"):
        # Before tensors, of which torch's ShardedTensor is one.
        leaves.problems.append(
            f"{fqn}: a {type(node).__qualname__} does not say where its memory lies; put the "
            "module it is from into the state, or convert it to a DTensor"
        )
    elif isinstance(node, torch.Tensor):
        leaves.tensors.append((fqn, node))
    elif isinstance(node, torch.jit.ScriptModule):
        leaves.problems.append(
            f"{fqn}: is a TorchScript module, whose tensors are other objects each time they are "
            "looked at; put the module there that it was made from"
        )
    elif isinstance(node, nn.Module):
        leaves.modules.append((fqn, node))
    elif not _OF_TITAN.isdisjoint(getattr(node, "__dict__", ())) and (titan := _titan_kind(node)):
        _visit_titan(titan, node, fqn, place, leaves, depth)
    elif isinstance(node, torch.optim.Optimizer):
        leaves.optimizers.append((fqn, node))
    elif isinstance(node, Stages):
        if node.count is not None:
            leaves.stages.append(StagesHere(fqn, node.count, node.numbers))
        for part in node.parts:  # all under one name, as parts of one
            _visit(part, fqn, place, leaves, depth)
    elif isinstance(node, PerRank | PerGroup):
        leaves.per_rank.append(LocatedValue(fqn, node, place))
    elif is_numbered(node):
        leaves.objects.append((fqn, Replaced(node, place)))
    elif isinstance(node, (dict, list, tuple)):
        if _is_pure(node, 0):
            leaves.values.append(LocatedValue(fqn, node, place))
        else:
            _walk_container(node, fqn, place, leaves, depth)
    elif is_object(node):
        leaves.objects.append((fqn, node))
    elif typed_of(node) is not None and _is_pure([node], 0):
        leaves.values.append(LocatedValue(fqn, node, place))
    elif typed_of(node) is not None:
        kind = f"{type(node).__module__}.{type(node).__qualname__}"
        leaves.problems.append(
            f"{fqn or 'the state'}: a {kind} with tensors or objects in it cannot be stored here; "
            "use a list or a dict"
        )
    else:
        leaves.problems.append(f"{fqn or 'the state'}: {why_not_storable(node)}")


# Attributes of torchtitan's containers.
_OF_TITAN = frozenset(("model", "model_parts"))


def _titan_kind(node: Any) -> str | None:
    """What torchtitan calls a container of its own; None where its state dict is another's, which
    may have more.
    """
    own = getattr(getattr(type(node), "state_dict", None), "__module__", None) or ""
    if not own.startswith("torchtitan."):
        return None
    kinds = {kind.__name__ for kind in type(node).__mro__}
    return next((one for one in ("OptimizersContainer", "ModelWrapper") if one in kinds), None)


def _visit_titan(
    kind: str, node: Any, fqn: str, place: Location, leaves: Leaves, depth: int
) -> None:
    """The parts of torchtitan's containers are parts of one, as in `Stages`."""
    if kind == "OptimizersContainer":
        leaves.owners.extend(node.model_parts)
        parts = node.optimizers
    else:
        parts = node.model
        modules = [module for part in parts for module in part.modules()]
        if any(save_changes(module) or load_changes(module) for module in modules):
            # What is fused in memory has other names, and memory, in its state dict.
            parts = [node.state_dict()]
            leaves.refills.append((node.load_state_dict, parts[0]))
    for part in parts:
        _visit(part, fqn, place, leaves, depth)


def _is_pure(node: Any, depth: int) -> bool:
    """Whether a container is to be stored as one value: nothing in it is more than a value.

    Leaves that cannot be stored count as values here; they are refused, with their place, when the
    value is made.
    """
    if depth >= DEPTH_MAX:
        return True  # making the value reports it
    children = node.values() if isinstance(node, dict) else node
    for child in children:
        if type(child) in SCALARS:
            continue
        if isinstance(child, (dict, list, tuple)):
            if not _is_pure(child, depth + 1):
                return False
        elif (
            isinstance(child, (torch.Tensor, PerRank, PerGroup, Stages))
            or is_array(child)
            or is_object(child)
        ):
            return False  # modules and optimizers are objects by this test
        elif (
            (typed := typed_of(child)) is not None
            and typed.may_hold_tensors
            and not _is_pure(typed.content, depth + 1)
        ):
            return False
    return True
