"""Loading optimizers: their parameters and groups are matched by name with those of a checkpoint.

State is found by the names of parameters, so it moves between layouts. What is loaded for one
parameter is decided in `bind_parameter`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ckpt.errors import InvalidState
from ckpt.layout.plain import Ranks
from ckpt.state.bind_parameter import BoundOptimizer, ParameterBinding
from ckpt.state.describe import Described
from ckpt.state.names import Names
from ckpt.state.optimizer import (
    OWN_OPTIONS,
    USER_STATE,
    NamedParam,
    named_groups,
    options_of,
    refusals,
    user_state,
)
from ckpt.state.optimizer_kinds import (
    OPTION,
    SavedState,
    declared,
    resharded,
    saved_states,
    state_name,
)
from ckpt.state.trees import bind_tree
from ckpt.state.types import PerRank, ProblemKind
from ckpt.state.values import is_groups, join, join_tree, references, split_tree

GROUPS_SHOWN_MAX = 8


class Options(NamedTuple):
    """What a live group takes: options of the saved group `number`; None for nothing.

    `known` are the names of all that the saved group has.
    """

    number: int | None
    values: Mapping[str, Any]
    known: frozenset[str] = frozenset()


def bind_optimizer(
    path: str, optimizer: torch.optim.Optimizer, described: Described, names: Names, ranks: Ranks
) -> BoundOptimizer:
    """How to load the optimizer at `path`. Problems go to `names`; refusals raise InvalidState."""
    # Before `skip`: an optimizer that no save takes is wrong in a state, loaded or not.
    if problems := refusals(path, optimizer, described, ranks):
        raise InvalidState(problems)
    bound = BoundOptimizer(optimizer)
    if names.skip(path):
        return bound
    saved = names.value(f"{path}.param_groups")
    if saved is None:
        return bound
    # With `rename` the checkpoint may call the optimizer otherwise.
    saved_path, groups = saved[0].removesuffix(".param_groups"), saved[1]
    # Checkpoints of other libraries may have anything under this name.
    if not is_groups(groups):
        names.report(f"{path}.param_groups", "is not a list of groups of parameters")
        return bound
    own, per_rank = f"{saved[0]}{OWN_OPTIONS}", names.catalog.per_rank
    own_options = {rank: values[own] for rank, values in enumerate(per_rank) if own in values}
    if own_options:
        names.used.add(own)
    if not all(map(_is_of_groups, own_options.values())):
        names.report(own, "is not a list of options of groups")
        return bound
    names.loaded_values.append(f"{path}.param_groups")
    saved_names = {name for group in groups for name in group["params"]}
    states = saved_states(names, f"{saved_path}.state.", saved_names)
    live = named_groups(optimizer, described)
    where = path, saved_path, bound, names, ranks
    binding = _OptimizerBinder(*where, saved_names, states, optimizer, live, groups, own_options)
    binding.add()
    binding.add_user_state()
    return bound


def _is_of_groups(own: Any) -> bool:
    """Whether it is what `OWN_OPTIONS` describes."""
    return isinstance(own, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("options"), dict)
        and isinstance(group.get("first", 0), str | None)
        for group in own
    )


@dataclass(frozen=True, slots=True)
class _OptimizerBinder:
    """Matches parameters and groups of one optimizer with those that the checkpoint has.

    `saved_names` are the parameters that the saved groups list, `states` what was saved for them.
    `wanted` has, for each live group, the checkpoint's names of each parameter's members.
    `is_path_known` keeps the answers of `is_path`. `own_options` has what each rank that saved had
    for itself, by rank, as OWN_OPTIONS says.
    """

    path: str
    saved_path: str
    bound: BoundOptimizer
    names: Names
    ranks: Ranks
    saved_names: set[str]
    states: dict[str, SavedState]
    optimizer: torch.optim.Optimizer
    groups: list[list[NamedParam]]
    saved_groups: list[dict[str, Any]]
    own_options: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    wanted: list[list[list[str | None]]] = field(default_factory=list)
    is_path_known: dict[str, bool] = field(default_factory=dict)

    def add(self) -> None:
        said = declared(self.optimizer)
        binding = partial(ParameterBinding, self.path, self.bound, self.names, self.ranks, said)
        keeps_groups = self.names.skip(f"{self.path}.param_groups")
        for group in self.groups:
            self.wanted.append([self.saved_names_of(n, keeps_groups=keeps_groups) for n in group])
        self.leave_others(keeps_groups=keeps_groups)
        options = [Options(None, {}) for _ in self.groups] if keeps_groups else self.options()
        for index, group in enumerate(self.groups):
            live = self.optimizer.param_groups[index]
            if options[index].number is not None:
                self.add_group(live, options[index])
            hyper = {**live, **options[index].values}
            for named, saved in zip(group, self.wanted[index], strict=True):
                # One tensor holds the state of all members: without one of them it is left alone.
                if None not in saved:
                    states = [self.states.get(name) for name in saved if name is not None]
                    own: Any = self.optimizer.state.get(named.param, {})
                    # State under numbers has names in a checkpoint that say so.
                    if not {str}.issuperset(map(type, own)):
                        own = {name: one for key, one in own.items() if (name := state_name(key))}
                    binding(named, states, own, hyper).bind()

    def add_user_state(self) -> None:
        """State under keys that are no parameters: replaced by the checkpoint's, if it has any."""
        fqn = f"{self.saved_path}.{USER_STATE}"
        value = self.names.catalog.values.get(fqn)
        if value is None:
            return
        self.names.used.add(fqn)
        live = user_state(self.optimizer.state)
        tree = bind_tree(fqn, value, live, self.names, self.ranks)
        self.names.loaded_values.append(f"{self.path}.{USER_STATE}")
        self.bound.holdings.extend(tree.holdings)
        self.bound.user.append(tree)

    def saved_names_of(self, named: NamedParam, *, keeps_groups: bool) -> list[str | None]:
        saved = []
        for fqn, own in zip(named.source.fqns, named.names, strict=True):
            saved.append(name := self.saved_name_of(fqn, named.source.path))
            state = f"{self.path}.state.{own}"
            names = self.names
            # All are asked, so that each rule counts as matched.
            may_lack = [keeps_groups, names.is_skipped(fqn), names.is_new(fqn)]
            may_lack.append(names.is_skipped(state) if name else names.skip(state))
            if name is not None and names.is_new(state):
                names.report_not_new(state)
            elif name is None and not any(may_lack):
                names.report(
                    state,
                    f"the {names.call.source}'s optimizer has no parameter {fqn}"
                    + names.call.moves(
                        rename="pass rename=",
                        leave="leave the state of this parameter as it is",
                        is_missing=True,
                    ),
                    ProblemKind.MISSING,
                )
        return saved

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
        if path not in self.is_path_known:
            tensors, aliases = self.names.catalog.tensors, self.names.catalog.aliases
            full = (path + name for name in self.saved_names)
            self.is_path_known[path] = all(name in tensors or name in aliases for name in full)
        return self.is_path_known[path]

    def leave_others(self, *, keeps_groups: bool) -> None:
        """Note the parameters that the checkpoint's groups have and the state's have not."""
        names = self.names
        live = {name for group in self.wanted for saved in group for name in saved if name}
        paths = sorted({named.source.path for group in self.groups for named in group})
        extra = sorted(self.saved_names - live)
        for name in extra:  # covered by the one problem of all of them
            if name in self.states:
                names.used |= self.states[name].fqns
        skipped = [
            keeps_groups
            or any(names.is_skipped(join(path, name)) for path in ("", *paths))
            or names.is_skipped(f"{self.saved_path}.state.{name}")
            for name in extra
        ]
        left = [name for name, is_out in zip(extra, skipped, strict=True) if not is_out]
        fqn = f"{self.saved_path}.param_groups"
        known = names.extra_params.get(fqn, left)
        names.extra_params[fqn] = [name for name in left if name in known]

    def options(self) -> list[Options]:
        """What each live group takes from those saved groups that have its parameters.

        Groups need not be the same, for stages may have had theirs each for itself: an option is
        taken where each parameter then has what was saved for it, and no two live groups lose what
        they have differently. Else it is a problem, unless the caller says whose value holds.
        """
        numbers, live_groups = self.corresponding(), self.optimizer.param_groups
        conflicts: dict[str, str] = {}  # options, and what may be said of them
        result = []
        for index, mine in enumerate(numbers):
            saved = [options_of(self.saved_groups[number]) for number in mine]
            # Live groups that share a saved one: an option that they have differently would be
            # lost.
            together = [n for n, others in enumerate(numbers) if set(mine) & set(others)]
            values = {}
            for key in dict.fromkeys(key for options in saved for key in options):
                of_saved = [options.get(key, _ABSENT) for options in saved]
                policy = self.names.group_option(key)
                live = [live_groups[n].get(key, _ABSENT) for n in together]
                if policy == "live":
                    self.names.used.update(references(of_saved))
                elif not are_equal(of_saved):
                    conflicts[key] = "'live'"
                elif policy is None and not are_equal(live):
                    conflicts.setdefault(key, "'saved' or 'live'")
                else:
                    values[key] = of_saved[0]
            for key in live_groups[index]:
                self.names.group_option(key)
            if self.own_options:
                values |= self.own_values(index, mine)
            known = frozenset([*values, *(key for options in saved for key in options)])
            result.append(Options(mine[0] if mine else None, values, known))
        if conflicts:
            self.names.report(f"{self.path}.param_groups", self.difference(conflicts))
        return result

    def own_values(self, index: int, mine: Sequence[int]) -> dict[str, Any]:
        """What this rank takes of options that each rank had for itself, in the live group `index`
        that has parameters of the saved groups `mine`.
        """
        names, size, live = self.names, len(self.ranks.global_ranks), self.optimizer.param_groups
        params = {name for number in mine for name in self.saved_groups[number]["params"]}
        by_key: dict[str, dict[int, Any]] = {}
        for rank, groups in self.own_options.items():
            for place, group in enumerate(groups):
                if group["first"] in params or (group["first"] is None and place in mine):
                    for key, value in group["options"].items():
                        by_key.setdefault(key, {}).setdefault(rank, value)
        first = min(self.own_options)
        is_world = range(first, first + size) in names.catalog.worlds
        taken = {}
        for key, of_rank in by_key.items():
            fqn = f"{self.path}.{OPTION}{index}.{key}"
            said = declared(self.optimizer).get(OPTION + key)
            if names.group_option(key) == "live":
                continue
            all_values = list(of_rank.values())
            if is_world and len(self.own_options) == size and first + self.ranks.rank in of_rank:
                taken[key] = of_rank[first + self.ranks.rank]
            elif are_equal(all_values):
                taken[key] = all_values[0]
            elif isinstance(said, PerRank) and said.on_reshard is not None:
                like = live[index].get(key)
                every = [join_tree(value, str, like) for value in all_values]
                made = resharded(fqn, said.on_reshard, every, self.ranks.rank, size)
                taken[key] = split_tree(made, fqn, [])[0]
            else:
                names.report(
                    fqn,
                    f"was saved as its own by each of {len(self.own_options)} ranks, and {size} "
                    "load it; say what each gets with declare_optimizer_state(optimizer, "
                    f'{{"{OPTION}{key}": PerRank(None, on_reshard)}}), or keep the live value with '
                    f"group_options={{{key!r}: 'live'}}",
                    ProblemKind.PER_RANK,
                )
        return taken

    def corresponding(self) -> list[list[int]]:
        """For each live group the numbers of the saved groups that have its parameters. Of groups
        without any, here and there, the first belongs to the first.
        """
        saved_groups = list(enumerate(self.saved_groups))
        place = {name: number for number, group in saved_groups for name in group["params"]}
        numbers = [
            sorted({place[name] for saved in group for name in saved if name})
            for group in self.wanted
        ]
        used = {number for mine in numbers for number in mine}
        free = [number for number, _ in saved_groups if number not in used]
        for mine, group in zip(numbers, self.groups, strict=True):
            if not group and free:
                mine.append(free.pop(0))
        return numbers

    def difference(self, conflicts: Mapping[str, str]) -> str:
        """A text: the groups do not correspond, with both lists and what to do."""
        keys = list(conflicts)
        names = [[name for named in group for name in named.names] for group in self.groups]
        saved = _listed([(group["params"], group) for group in self.saved_groups], keys)
        live = _listed(list(zip(names, self.optimizer.param_groups, strict=True)), keys)
        call = self.names.call
        policy = ", ".join(f"{key!r}: {ways}" for key, ways in conflicts.items())
        advice = f", or say whose value holds: group_options={{{policy}}}" if call.new else ""
        return (
            f"the groups do not correspond, and {', '.join(keys)} would change for some "
            f"parameters; the {call.source} has {saved}; the state has {live}; build the optimizer "
            f"with the groups it was saved with{advice}"
        )

    def add_group(self, group: dict[str, Any], options: Options) -> None:
        hyper, live = options.values, options_of(group)
        base = f"{self.saved_path}.param_groups.{options.number}"
        gone = sorted((hyper.keys() - live.keys()) & _hyperparameters())
        new = sorted((live.keys() - options.known) & _hyperparameters())
        if gone and new:
            # A newer version of an optimizer only adds names, and schedulers add theirs; another
            # optimizer has names of its own on both sides.
            self.names.report(
                f"{self.path}.param_groups.{options.number}",
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


_ABSENT = object()


def are_equal(values: Sequence[Any]) -> bool:
    """Whether options of groups are all the same; tensors by their elements."""
    first = values[0] if values else None
    return all(one is first or _is_equal(one, first) for one in values[1:])


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.dtype is b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _listed(groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]], keys: Sequence[str]) -> str:
    """Groups in words: their parameters, and these of their options."""
    texts = []
    for number, (names, options) in enumerate(groups[:GROUPS_SHOWN_MAX]):
        shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        values = "".join(f", {key}={options[key]!r:.40}" for key in keys if key in options)
        texts.append(f"group {number} ({shown or 'no parameters'}{values})")
    more = len(groups) - GROUPS_SHOWN_MAX
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "") if texts else "no groups"


@cache
def _hyperparameters() -> frozenset[str]:
    """The names of all hyperparameters of torch's own optimizers: others may be a scheduler's."""
    kinds = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    optimizers = [c for c in kinds if issubclass(c, torch.optim.Optimizer)]
    return frozenset(name for c in optimizers for name in inspect.signature(c).parameters)
