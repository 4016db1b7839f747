"""Loading optimizers: into the state they have, or into fresh state for those that have not
stepped.

State is found by the names of parameters, so it moves between layouts. Fresh memory has the dtype
of the checkpoint and the layout of the parameter, and zeros where no member of a flat parameter
lies; it becomes the optimizer's when everything has been read. State that the checkpoint lacks is
removed then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ckpt.errors import InvalidState, Mismatch
from ckpt.layout.dtensor import is_dtensor, local_tensor
from ckpt.layout.piece import Holding, Kind, Piece
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Box
from ckpt.state.describe import Described, Member, holdings_of
from ckpt.state.names import Names, split_state_name
from ckpt.state.optimizer import (
    NAME_KEYS,
    NUMBER_OF_SUFFIX,
    USER_STATE,
    NamedParam,
    is_held_whole,
    named_groups,
    refusals,
    user_state,
)
from ckpt.state.own import (
    OwnEntries,
    What,
    declared,
    layout_of,
    own_entries,
    resharded,
    tensors_of,
    why_not,
)
from ckpt.state.tensors import is_ordinary, same_layout, tensor_holdings
from ckpt.state.trees import BoundTree, bind_tree
from ckpt.state.types import PerRank, ProblemKind, TensorEntry
from ckpt.state.values import join_tree, references, split_tree

_SCALAR = Box((), ())
Make = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class BoundOptimizer:
    """Memory to fill; `install` then gives the optimizer its state, all of it at once."""

    holdings: list[Holding] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Make]]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], BoundTree]] = field(default_factory=list)
    optimizer: list[torch.optim.Optimizer] = field(default_factory=list)
    user: list[tuple[torch.optim.Optimizer, BoundTree]] = field(default_factory=list)

    def install(self) -> None:
        """Replace state and hyperparameters. Raises Mismatch before it changes anything."""
        made = [(p, {name: make() for name, make in new.items()}) for p, new in self.states]
        for optimizer in self.optimizer:
            for param, state in made:
                if not state:
                    optimizer.state.pop(param, None)
                    continue
                live = optimizer.state[param]
                live.clear()
                live.update(state)
        for group, tree in self.groups:
            group.update(tree.build())
        for optimizer, tree in self.user:
            optimizer.state.update(tree.build())


class SavedState(NamedTuple):
    """The state that the checkpoint has of one parameter, by state name.

    `own` has what each rank that saved had for itself, see `own_state`.
    """

    tensors: dict[str, tuple[str, TensorEntry]]
    values: dict[str, tuple[str, Any]]
    own: dict[str, tuple[str, OwnEntries]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the state, whatever kind it is of."""
        return (*self.tensors, *self.values, *self.own)


def bind_optimizer(
    path: str, optimizer: torch.optim.Optimizer, described: Described, names: Names, ranks: Ranks
) -> BoundOptimizer:
    """How to load the optimizer at `path`. Problems go to `names`; refusals raise InvalidState."""
    if problems := refusals(path, optimizer, described, ranks):
        raise InvalidState(problems)
    bound = BoundOptimizer()
    if names.skip(path):
        return bound
    found = names.value(f"{path}.param_groups")
    if found is None:
        return bound
    saved_groups = _checked_groups(path, found[1], names)
    if saved_groups is None:
        return bound
    names.loaded_values.append(f"{path}.param_groups")
    bound.optimizer.append(optimizer)
    binding = _Binding(path, found[0].removesuffix(".param_groups"), bound, names, ranks)
    binding.add(optimizer, named_groups(optimizer, described), saved_groups)
    binding.add_user_state(optimizer)
    return bound


def _checked_groups(path: str, value: Any, names: Names) -> list[dict[str, Any]] | None:
    if isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    ):
        return value
    names.report(ProblemKind.VALUE, f"{path}.param_groups", "is not a list of groups of parameters")
    return None


class _Binding:
    def __init__(
        self, path: str, saved_path: str, bound: BoundOptimizer, names: Names, ranks: Ranks
    ) -> None:
        self.path = path
        self.saved_path = saved_path
        self.bound = bound
        self.names = names
        self.ranks = ranks
        self.saved_names: set[str] = set()
        self.states: dict[str, SavedState] = {}
        self.hyper: Mapping[str, Any] = {}
        self.paths: dict[str, bool] = {}
        self.declared: Mapping[str, What] = {}

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[NamedParam]],
        saved_groups: list[dict[str, Any]],
    ) -> None:
        self.declared = declared(optimizer)
        self.saved_names = {name for group in saved_groups for name in group["params"]}
        self.states = self.read_states()
        wanted = [[self.saved_names_of(named) for named in group] for group in groups]
        matched = self.match(wanted, groups, saved_groups)
        for at, group in enumerate(groups):
            number = matched[at]
            self.hyper = optimizer.param_groups[at] if number is None else saved_groups[number]
            if number is not None:
                self.add_group(optimizer.param_groups[at], number, self.hyper)
            for named, saved in zip(group, wanted[at], strict=True):
                if None not in saved:
                    self.add_param(named, [name for name in saved if name is not None], optimizer)

    def add_user_state(self, optimizer: torch.optim.Optimizer) -> None:
        """State under keys that are no parameters: replaced by the checkpoint's, if it has any."""
        fqn = f"{self.saved_path}.{USER_STATE}"
        value = self.names.catalog.values.get(fqn)
        if value is None:
            return
        self.names.used.add(fqn)
        live = user_state(optimizer.state)
        tree = bind_tree(fqn, value, live, self.names, self.ranks)
        self.names.loaded_values.append(f"{self.path}.{USER_STATE}")
        self.bound.holdings.extend(tree.holdings)
        self.bound.user.append((optimizer, tree))

    def read_states(self) -> dict[str, SavedState]:
        """What the checkpoint has, by the names in its own param groups."""
        prefix = f"{self.saved_path}.state."
        states: dict[str, SavedState] = {}
        catalog = self.names.catalog
        own = own_entries(catalog.per_rank, prefix)
        inside = tensors_of(entry for entries in own.values() for entry in entries.values())
        for source in (catalog.tensors, catalog.values, own):
            for fqn, content in source.items():
                if not fqn.startswith(prefix) or fqn in inside:
                    continue
                parts = split_state_name(fqn[len(prefix) :], self.saved_names)
                if parts is None:
                    continue
                head, tail = parts
                state = states.setdefault(head, SavedState({}, {}, {}))
                if source is own:
                    state.own[tail] = (fqn, own[fqn])
                elif isinstance(content, TensorEntry):
                    state.tensors[tail] = (fqn, content)
                else:
                    state.values[tail] = (fqn, content)
        return states

    def saved_names_of(self, named: NamedParam) -> list[str | None]:
        return [self.saved_name_of(fqn, named.source.path) for fqn in named.source.fqns]

    def saved_name_of(self, fqn: str, path: str) -> str | None:
        """What the checkpoint's optimizer calls the parameter `fqn` of the module at `path`."""
        prefixes = (f"{path}.", f"{self.names.rename(path)}.")
        for full in self.names.equivalents(fqn):
            for prefix in prefixes:
                if full.startswith(prefix) and full[len(prefix) :] in self.saved_names:
                    return full[len(prefix) :]
            if full in self.saved_names:
                return full
            if (name := self.name_under_other_path(full)) is not None:
                return name
        self.names.report(
            ProblemKind.MISSING,
            f"{self.path}.param_groups",
            f"the {self.names.offers.source}'s optimizer has no parameter {fqn}"
            + self.names.offers.moves(
                rename="pass rename=", leave="leave the state of this parameter as it is"
            ),
        )
        return None

    def name_under_other_path(self, full: str) -> str | None:
        """`full` without the path that the module had in the checkpoint, if there is one."""
        at = full.find(".")
        while at >= 0:
            path, name = full[: at + 1], full[at + 1 :]
            if name in self.saved_names and self.is_path(path):
                return name
            at = full.find(".", at + 1)
        return None

    def is_path(self, path: str) -> bool:
        """Whether the checkpoint has all parameters of its optimizer under `path`."""
        known = self.paths.get(path)
        if known is None:
            catalog = self.names.catalog
            known = self.paths[path] = all(
                path + name in catalog.tensors or path + name in catalog.aliases
                for name in self.saved_names
            )
        return known

    def match(
        self,
        wanted: Sequence[Sequence[Sequence[str | None]]],
        groups: Sequence[Sequence[NamedParam]],
        saved_groups: list[dict[str, Any]],
    ) -> list[int | None]:
        """For each live group the saved group of the same parameters, whatever their order."""
        fqn = f"{self.path}.param_groups"
        live_sets = [{name for saved in group for name in saved if name} for group in wanted]
        live_names = set().union(*live_sets)
        if extra := sorted(self.saved_names - live_names):
            self.names.report(
                ProblemKind.UNEXPECTED,
                fqn,
                f"the {self.names.offers.source}'s optimizer has {len(extra)} parameters more, "
                f"{extra[0]} the first"
                + self.names.offers.moves(rename="pass rename=", leave="leave them out"),
            )
        for name in extra:  # told by this one problem
            self.use(self.states.get(name))
        free = dict(enumerate(set(group["params"]) & live_names for group in saved_groups))
        matched: list[int | None] = []
        for at, live in enumerate(live_sets):
            number = next((n for n, saved in free.items() if saved == live), None)
            if number is not None:
                del free[number]
            elif live or len(live_sets) == len(saved_groups):
                self.names.report(
                    ProblemKind.VALUE, fqn, self.difference(at, live, len(groups), saved_groups)
                )
            matched.append(number)
        return matched

    def difference(
        self, at: int, live: set[str], count: int, saved_groups: list[dict[str, Any]]
    ) -> str:
        best = max(
            range(len(saved_groups)),
            key=lambda n: len(live & set(saved_groups[n]["params"])),
            default=None,
        )
        if best is None:
            return f"checkpoint has no groups, state has {count}; build it as it was saved"
        saved = set(saved_groups[best]["params"])
        odd = sorted(live ^ saved)
        return (
            f"group {at} of the state has other parameters than any of the checkpoint's "
            f"{len(saved_groups)} groups: against group {best} it differs in {len(odd)}, "
            f"{odd[:3]} the first; build the optimizer with the groups it was saved with"
        )

    def add_group(self, group: dict[str, Any], number: int, saved: Mapping[str, Any]) -> None:
        hyper = {key: item for key, item in saved.items() if key not in NAME_KEYS}
        live = {key: item for key, item in group.items() if key not in NAME_KEYS}
        base = f"{self.saved_path}.param_groups.{number}"
        gone = sorted((hyper.keys() - live.keys()) & _hyperparameters())
        new = sorted((live.keys() - hyper.keys()) & _hyperparameters())
        if gone and new:
            # A newer version of an optimizer only adds names, and schedulers add theirs; another
            # optimizer has names of its own on both sides.
            self.names.report(
                ProblemKind.VALUE,
                f"{self.path}.param_groups.{number}",
                f"is of another kind of optimizer: the {self.names.offers.source} has {gone}, the "
                f"state's optimizer has {new}; build the optimizer that was saved"
                + (f", or skip={self.path!r}" if self.names.offers.skip else ""),
            )
            return
        tree = bind_tree(base, hyper, live, self.names, self.ranks, in_place=True)
        self.names.loaded_tensors.extend(references(hyper))
        self.bound.holdings.extend(tree.holdings)
        self.bound.groups.append((group, tree))

    def add_param(
        self, named: NamedParam, saved: Sequence[str], optimizer: torch.optim.Optimizer
    ) -> None:
        states = [self.states.get(name) for name in saved]
        for state in states:
            self.use(state)
        if _has_nothing_here(named):
            self.bound.states.append((named.param, {}))
            return
        live = optimizer.state.get(named.param, {})
        new: dict[str, Make] = {}
        for name in dict.fromkeys(n for s in states if s for n in s.names):
            fqn = f"{self.path}.state.{named.names[0]}.{name}"
            if self.names.skip(fqn):
                if name in live:
                    new[name] = _constant(live[name])
                continue
            self.add_state(new, named, name, states, live)
        self.bound.states.append((named.param, new))

    def use(self, state: SavedState | None) -> None:
        if state is not None:
            self.names.used.update(fqn for fqn, _ in state.tensors.values())
            self.names.used.update(fqn for fqn, _ in state.values.values())
            self.names.used.update(fqn for fqn, _ in state.own.values())
            for _, entries in state.own.values():
                self.names.used |= tensors_of(entries.values())

    def add_state(
        self,
        new: dict[str, Make],
        named: NamedParam,
        name: str,
        states: Sequence[SavedState | None],
        live: Mapping[str, Any],
    ) -> None:
        fqn = f"{self.path}.state.{named.names[0]}.{name}"
        own = [s.own[name] for s in states if s and name in s.own]
        if own:
            self.add_own(new, named, name, own[0], live.get(name))
            return
        values = [s.values[name] for s in states if s and name in s.values]
        if values:
            if not any(s and name in s.tensors for s in states) and all(
                value == values[0][1] for _, value in values
            ):
                tree = bind_tree(*values[0], live.get(name), self.names, self.ranks)
                self.bound.holdings.extend(tree.holdings)
                self.names.loaded_values.append(fqn)
                new[name] = tree.build
            else:
                self.names.report(
                    ProblemKind.VALUE, fqn, "differs between the members of one flat parameter"
                )
            return
        if name.partition(".")[0] != name and any(
            s and name.partition(".")[0] in s.values for s in states
        ):
            return  # a tensor inside a value, which bind_tree takes care of
        entries = {
            member.fqn: (member, *state.tensors[name])
            for member, state in zip(named.source.members, states, strict=True)
            if state and name in state.tensors
        }
        self.names.loaded_tensors.append(fqn)
        self.add_tensor(new, named, name, entries, live.get(name))

    def add_own(
        self,
        new: dict[str, Make],
        named: NamedParam,
        name: str,
        saved: tuple[str, OwnEntries],
        live: Any,
    ) -> None:
        """What each rank had for itself: this rank's, or what a function of the user's makes."""
        fqn = f"{self.path}.state.{named.names[0]}.{name}"
        said, (base, entries) = self.declared.get(name), saved
        rank, size = self.ranks.rank, len(self.ranks.global_ranks)
        layout = layout_of(named.owned)
        mine = entries.get(rank)
        saved_size = next(iter(entries.values()))["world_size"]
        if mine and (saved_size, mine["layout"]) == (size, layout):
            new[name] = self.bind_own(base, mine, live, named)
        elif isinstance(said, PerRank) and said.on_reshard is not None:
            makes = [self.bind_own(base, entries[at], None, named) for at in sorted(entries)]
            hook = said.on_reshard
            new[name] = lambda: resharded(fqn, hook, [make() for make in makes], rank, size)
        elif mine or not saved_size == size == len(self.names.catalog.per_rank):
            why = why_not(entries, mine, size, layout) + self.names.offers.or_skip
            self.names.report(ProblemKind.PER_RANK, fqn, why)
            return
        self.names.loaded_tensors.append(fqn)

    def bind_own(self, base: str, entry: Mapping[str, Any], live: Any, named: NamedParam) -> Make:
        """Memory for one rank's own state, the live one where it fits; what makes the state."""
        suffix = f"~rank{entry['rank']}"
        there = {f"{at}{suffix}": tensor for at, tensor in split_tree(live, base, [])[1]}
        targets: dict[str, torch.Tensor] = {}
        for fqn in references(entry["value"]):
            known = self.names.catalog.tensors.get(fqn)
            if known is None:
                self.names.report(ProblemKind.VALUE, base, f"refers to {fqn}, which is not there")
                continue
            target = there.get(fqn)
            if target is None or not is_ordinary(target) or known[:2] != _looks(target):
                device = named.owned.local.device
                target = torch.zeros(known.shape, dtype=known.dtype, device=device)
            targets[fqn] = target
            self.bound.holdings.extend(tensor_holdings(fqn, target, Kind.OPTIMIZER, self.ranks))
        return lambda: join_tree(entry["value"], targets.__getitem__, live)

    def add_tensor(
        self,
        new: dict[str, Make],
        named: NamedParam,
        name: str,
        entries: Mapping[str, tuple[Member, str, TensorEntry]],
        live: Any,
    ) -> None:
        fqn = f"{self.path}.state.{named.names[0]}.{name}"
        dtypes = {entry.dtype for _, _, entry in entries.values()}
        if len(dtypes) > 1:
            self.names.report(
                ProblemKind.DTYPE,
                fqn,
                f"members of one flat parameter have {sorted(map(str, dtypes))}, one tensor has "
                "to hold them all; load into a model with use_orig_params=True or fully_shard",
            )
        elif all(entry.shape == () for _, _, entry in entries.values()):
            self.add_scalar(new, named, name, entries, live)
        elif all(_fits(found) for found in entries.values()):
            self.add_like_param(new, named, name, entries, live)
        elif len(named.names) == 1 and (is_held_whole(named.source) or is_dtensor(named.param)):
            (_, saved, entry), *_ = entries.values()
            target = _own_layout(named, entry, live)
            self.bound.holdings.extend(tensor_holdings(saved, target, Kind.OPTIMIZER, self.ranks))
            new[name] = _constant(target)
        else:
            odd, _, entry = next(found for found in entries.values() if not _fits(found))
            at = named.source.members.index(odd)
            self.names.report(
                ProblemKind.SHAPE,
                f"{self.path}.state.{named.names[at]}.{name}",
                f"{self.names.offers.source} has shape {entry.shape}, the parameter "
                f"{odd.global_shape}: state of another shape cannot be divided among flat shards; "
                f"load into fully_shard or an unsharded model{self.names.offers.or_skip}",
            )

    def add_scalar(
        self,
        new: dict[str, Make],
        named: NamedParam,
        name: str,
        entries: Mapping[str, tuple[Member, str, TensorEntry]],
        live: Any,
    ) -> None:
        dtype = next(iter(entries.values()))[2].dtype
        if len(entries) == 1 and is_dtensor(live) and not live.ndim and live.dtype is dtype:
            ((_, saved, _),) = entries.values()
            self.bound.holdings.extend(tensor_holdings(saved, live, Kind.OPTIMIZER, self.ranks))
            new[name] = _constant(live)
            return
        device = _scalar_device(name, self.hyper, named)
        filled: list[tuple[str, torch.Tensor]] = []
        for _, saved, entry in entries.values():
            is_usable = (
                len(entries) == 1
                and isinstance(live, torch.Tensor)
                and is_ordinary(live)
                and live.ndim == 0
                and live.dtype is entry.dtype
            )
            target = live if is_usable else torch.zeros((), dtype=entry.dtype, device=device)
            filled.append((saved, target))
            piece = Piece(saved, (), entry.dtype, _SCALAR, _SCALAR, (self.ranks.rank,))
            self.bound.holdings.append(
                Holding(target.detach(), (piece,), Kind.OPTIMIZER, False, named.owned.owners)
            )
        suffix = next((s for s in NUMBER_OF_SUFFIX if name.endswith(s)), None)
        if suffix is None:
            new[name] = lambda: _common(filled)
        else:
            number = NUMBER_OF_SUFFIX[suffix]
            new[name.removesuffix(suffix)] = lambda: number(_common(filled).item())

    def add_like_param(
        self,
        new: dict[str, Make],
        named: NamedParam,
        name: str,
        entries: Mapping[str, tuple[Member, str, TensorEntry]],
        live: Any,
    ) -> None:
        owned = named.owned
        dtype = next(iter(entries.values()))[2].dtype
        is_complete = len(entries) == len(named.names)
        is_said = self.declared.get(name) == "shard"
        if is_dtensor(live) and not _is_like(live, named, dtype) and _has(live, entries):
            ((_, saved_as, _),) = entries.values()  # it says its own layout, and keeps it
            self.bound.holdings.extend(tensor_holdings(saved_as, live, Kind.OPTIMIZER, self.ranks))
            new[name] = _constant(live)
            return
        if is_complete and _is_like(live, named, dtype, is_said=is_said):
            target = live
        elif is_dtensor(named.param) and not is_said:
            target = torch.zeros_like(named.param, dtype=dtype, requires_grad=False)
        else:
            target = torch.zeros_like(owned.local, dtype=dtype)
        saved = {fqn: stored for fqn, (_, stored, _) in entries.items()}
        self.bound.holdings.extend(
            holdings_of(owned, local_tensor(target), saved.get, kind=Kind.OPTIMIZER)
        )
        new[name] = _constant(target)


@cache
def _hyperparameters() -> frozenset[str]:
    """The names of all hyperparameters that torch's own optimizers know."""
    kinds = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    optimizers = [c for c in kinds if issubclass(c, torch.optim.Optimizer)]
    return frozenset(name for c in optimizers for name in inspect.signature(c).parameters)


def _fits(found: tuple[Member, str, TensorEntry]) -> bool:
    """Whether the checkpoint's state is shaped like the parameter."""
    member, _, entry = found
    return entry.shape == member.global_shape


def _has_nothing_here(named: NamedParam) -> bool:
    """Whether the parameter lies on other ranks alone, so that this rank's optimizer never sees it.

    A DTensor's optimizer keeps state for an empty shard too.
    """
    return not named.owned.local.numel() and not (
        is_dtensor(named.param) or 0 in named.source.members[0].global_shape
    )


def _looks(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _has(live: torch.Tensor, entries: Mapping[str, tuple[Member, str, TensorEntry]]) -> bool:
    """Whether `live` has the dtype and shape of the one tensor that the checkpoint has for it."""
    return len(entries) == 1 and all(
        (entry.dtype, entry.shape) == _looks(live) for _, _, entry in entries.values()
    )


def _is_like(live: Any, named: NamedParam, dtype: torch.dtype, *, is_said: bool = False) -> bool:
    """Whether live state can be filled as it is: the parameter's dtype, layout, local shape.

    With `is_said`, plain state is the part of the parameter's local tensor.
    """
    if not isinstance(live, torch.Tensor) or live.dtype is not dtype:
        return False
    if is_dtensor(named.param) and not is_said:
        return is_dtensor(live) and same_layout(live, named.param)
    return is_ordinary(live) and live.shape == named.owned.local.shape


def _own_layout(named: NamedParam, entry: TensorEntry, live: Any) -> torch.Tensor:
    """Memory for state of another shape than its parameter: the live one, or a whole one."""
    if isinstance(live, torch.Tensor) and live.dtype is entry.dtype:
        usable: torch.Tensor = live
        if tuple(usable.shape) == entry.shape:
            return usable
    if is_dtensor(named.param):
        from torch.distributed.tensor import zeros

        mesh: Any = named.param.device_mesh  # type: ignore[attr-defined]
        replicated: torch.Tensor = zeros(*entry.shape, dtype=entry.dtype, device_mesh=mesh)
        return replicated
    return torch.zeros(entry.shape, dtype=entry.dtype, device=named.owned.local.device)


def _scalar_device(name: str, hyper: Mapping[str, Any], named: NamedParam) -> torch.device:
    """Where torch.optim keeps scalar state: step counts on the host unless kernels read them."""
    if name == "step" and not (hyper.get("capturable") or hyper.get("fused")):
        return torch.device("cpu")
    return named.owned.local.device


def _common(filled: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The one scalar that all members of a parameter have."""
    first_fqn, first = filled[0]
    for fqn, scalar in filled[1:]:
        if not torch.equal(scalar, first):
            raise Mismatch(
                [
                    f"{fqn}: is {scalar.item()}, and {first_fqn} is {first.item()}: parameters "
                    "of one flat parameter share one scalar; load into a model with "
                    "use_orig_params=True"
                ]
            )
    return first


def _constant(value: Any) -> Make:
    return lambda: value
