"""Loading optimizers: their parameters and groups are matched by name with those of a checkpoint.

State is found by the names of parameters, so it moves between layouts. What is loaded for one
parameter is decided in `bind_parameter`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from ckpt.errors import InvalidState
from ckpt.layout.plain import Ranks
from ckpt.state.bind_parameter import BoundOptimizer, ParameterBinder
from ckpt.state.describe import Described
from ckpt.state.names import Names
from ckpt.state.optimizer import (
    USER_STATE,
    NamedParam,
    named_groups,
    options_of,
    refusals,
    user_state,
)
from ckpt.state.optimizer_kinds import SavedState, saved_states
from ckpt.state.own import declared
from ckpt.state.trees import bind_tree
from ckpt.state.types import ProblemKind
from ckpt.state.values import references

__all__ = ["bind_optimizer"]


def bind_optimizer(
    path: str, optimizer: torch.optim.Optimizer, described: Described, names: Names, ranks: Ranks
) -> BoundOptimizer:
    """How to load the optimizer at `path`. Problems go to `names`; refusals raise InvalidState."""
    # Before `skip`: an optimizer that no save takes is wrong in a state, loaded or not.
    if problems := refusals(path, optimizer, described, ranks):
        raise InvalidState(problems)
    bound = BoundOptimizer()
    if names.skip(path):
        return bound
    saved = names.value(f"{path}.param_groups")
    if saved is None:
        return bound
    # With `rename` the checkpoint may call the optimizer otherwise.
    saved_path, groups = saved[0].removesuffix(".param_groups"), saved[1]
    saved_groups = _checked_groups(path, groups, names)
    if saved_groups is None:
        return bound
    names.loaded_values.append(f"{path}.param_groups")
    bound.optimizer.append(optimizer)
    saved_names = {name for group in saved_groups for name in group["params"]}
    states = saved_states(names, f"{saved_path}.state.", saved_names)
    binding = _OptimizerBinder(path, saved_path, bound, names, ranks, saved_names, states)
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


@dataclass(frozen=True, slots=True)
class _OptimizerBinder:
    """Matches parameters and groups of one optimizer with those that the checkpoint has.

    `saved_names` are the parameters that the saved groups list, `states` what was saved for them.
    `is_path_known` keeps the answers of `is_path`.
    """

    path: str
    saved_path: str
    bound: BoundOptimizer
    names: Names
    ranks: Ranks
    saved_names: set[str]
    states: dict[str, SavedState]
    is_path_known: dict[str, bool] = field(default_factory=dict)

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[NamedParam]],
        saved_groups: list[dict[str, Any]],
    ) -> None:
        binder = ParameterBinder(self.path, self.bound, self.names, self.ranks, declared(optimizer))
        wanted = [[self.saved_names_of(named) for named in group] for group in groups]
        matched = self.match(wanted, groups, saved_groups)
        for index, group in enumerate(groups):
            number = matched[index]
            live = optimizer.param_groups[index]
            hyper = live if number is None else saved_groups[number]
            if number is not None:
                self.add_group(live, number, hyper)
            for named, saved in zip(group, wanted[index], strict=True):
                # One tensor holds the state of all members: without one of them it is left alone.
                if None not in saved:
                    states = [self.states.get(name) for name in saved if name is not None]
                    binder.bind(named, states, optimizer.state.get(named.param, {}), hyper)

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

    def saved_names_of(self, named: NamedParam) -> list[str | None]:
        return [self.saved_name_of(fqn, named.source.path) for fqn in named.source.fqns]

    def saved_name_of(self, fqn: str, path: str) -> str | None:
        """What the checkpoint's optimizer calls the parameter `fqn` of the module at `path`."""
        # An optimizer of one module has names without its path, here and there, see `named_groups`.
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
            f"the {self.names.call.source}'s optimizer has no parameter {fqn}"
            + self.names.call.moves(
                rename="pass rename=", leave="leave the state of this parameter as it is"
            ),
        )
        return None

    def name_under_other_path(self, full: str) -> str | None:
        """`full` without the path that the module had in the checkpoint, if there is one.

        `rename` maps names, not modules. What is the module's path shows in that all parameters of
        the saved optimizer lie under it.
        """
        cut = full.find(".")
        while cut >= 0:
            path, name = full[: cut + 1], full[cut + 1 :]
            if name in self.saved_names and self.is_path(path):
                return name
            cut = full.find(".", cut + 1)
        return None

    def is_path(self, path: str) -> bool:
        """Whether the checkpoint has all parameters of its optimizer under `path`."""
        known = self.is_path_known.get(path)
        if known is None:
            catalog = self.names.catalog
            known = self.is_path_known[path] = all(
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
        # By parameters, not by position: groups may have been made in another order.
        live_sets = [{name for saved in group for name in saved if name} for group in wanted]
        live_names = set().union(*live_sets)
        extra = sorted(self.saved_names - live_names)
        self.names.leave_params(f"{self.saved_path}.param_groups", extra)
        for name in extra:  # covered by the one problem above
            if name in self.states:
                self.names.used |= self.states[name].fqns
        free = dict(enumerate(set(group["params"]) & live_names for group in saved_groups))
        matched: list[int | None] = []
        for index, live in enumerate(live_sets):
            number = next((n for n, saved in free.items() if saved == live), None)
            if number is not None:
                del free[number]
            elif (number := self.alike(live, saved_groups)) is not None:
                pass
            elif live or len(live_sets) == len(saved_groups):
                # Else it is an empty group that the checkpoint lacks: it keeps its options.
                self.names.report(
                    ProblemKind.VALUE, fqn, self.difference(index, live, len(groups), saved_groups)
                )
            matched.append(number)
        return matched

    def alike(self, live: set[str], saved_groups: Sequence[Mapping[str, Any]]) -> int | None:
        """The first of the saved groups that have the parameters of one live group, if all of these
        have the same options: groups that stages had each for itself, or as one.
        """
        having = [n for n, group in enumerate(saved_groups) if not live.isdisjoint(group["params"])]
        if not having or not live <= set().union(*(saved_groups[n]["params"] for n in having)):
            return None
        first = options_of(saved_groups[having[0]])
        is_same = all(options_of(saved_groups[n]) == first for n in having[1:])
        return having[0] if is_same else None

    def difference(
        self, index: int, live: set[str], count: int, saved_groups: list[dict[str, Any]]
    ) -> str:
        """How group `index` differs from the saved group that has most of its parameters."""
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
            f"group {index} of the state has other parameters than any of the checkpoint's "
            f"{len(saved_groups)} groups: against group {best} it differs in {len(odd)}, "
            f"{odd[:3]} the first; build the optimizer with the groups it was saved with"
        )

    def add_group(self, group: dict[str, Any], number: int, saved: Mapping[str, Any]) -> None:
        hyper, live = options_of(saved), options_of(group)
        base = f"{self.saved_path}.param_groups.{number}"
        gone = sorted((hyper.keys() - live.keys()) & _hyperparameters())
        new = sorted((live.keys() - hyper.keys()) & _hyperparameters())
        if gone and new:
            # A newer version of an optimizer only adds names, and schedulers add theirs; another
            # optimizer has names of its own on both sides.
            self.names.report(
                ProblemKind.VALUE,
                f"{self.path}.param_groups.{number}",
                f"is of another kind of optimizer: the {self.names.call.source} has {gone}, the "
                f"state's optimizer has {new}; build the optimizer that was saved"
                + (f", or skip={self.path!r}" if self.names.call.skip else ""),
            )
            return
        # Options in tensors (a learning rate) are filled where they are: schedulers hold them too.
        tree = bind_tree(base, hyper, live, self.names, self.ranks, in_place=True)
        self.names.loaded_tensors.extend(references(hyper))
        self.bound.holdings.extend(tree.holdings)
        self.bound.groups.append((group, tree))


@cache
def _hyperparameters() -> frozenset[str]:
    """The names of all hyperparameters of torch's own optimizers: others may be a scheduler's."""
    kinds = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    optimizers = [c for c in kinds if issubclass(c, torch.optim.Optimizer)]
    return frozenset(name for c in optimizers for name in inspect.signature(c).parameters)
