"""Optimizers by the names of their parameters, as they are saved.

`<path>.state.<parameter>.<name>` is the state `name` of a parameter, a tensor or a value, and
`<path>.param_groups` one value: a list of dicts, in which "params" lists names. What the
optimizer's class adds to its state dict is `<path>.extra_state`. How a state is stored follows from
its kind, see `optimizer_kinds`. A scalar is written by the rank that holds the parameter's first
element. Each member of a flat parameter has state of its own. No tensor changes its dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckpt.errors import InvalidState
from ckpt.layout.dtensor import refuse_composite_shards
from ckpt.layout.holdings import holdings_of, tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.likeness import likeness
from ckpt.layout.piece import Holding, Owned, Piece
from ckpt.layout.plain import Held, Ranks, UnsupportedTensor
from ckpt.layout.region import Box, Span
from ckpt.layout.tensor import is_dtensor, is_plain, local_tensor
from ckpt.state.describe import Described, DescribedTensor, LogicalTensor
from ckpt.state.optimizer_kinds import (
    NUMBERED,
    NUMBERS,
    OPTION,
    PerRankState,
    StateDeclaration,
    StateKind,
    declared,
    is_shard_inside,
    kind_of,
    layout_of,
    own_state,
    state_key,
    state_name,
)
from ckpt.state.values import join, references, split_tree
from ckpt.state.walk import read_state

# Lists of names that belong to the live optimizer, not to the state that moves between models.
NAME_KEYS = ("params", "param_names")
# The name, below the optimizer's, of state under keys that are no parameters.
USER_STATE = "user_state"
# The same of what a class adds to its state dict.
EXTRA_STATE = "extra_state"
# Ends the name of what each rank has for itself of the options of groups, per-rank values: a list
# of `{"first": the group's first parameter, or None, "options": values}`.
OWN_OPTIONS = "~own"

# torch calls them around `state_dict()` and `load_state_dict()`, which saves and loads never call.
STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class NamedParam(NamedTuple):
    """A parameter object of an optimizer and the names of its members in the optimizer's state."""

    param: torch.Tensor
    source: DescribedTensor
    names: tuple[str, ...]

    @property
    def owned(self) -> Owned:
        return self.source.owned


@dataclass(frozen=True, slots=True)
class FlatOptimizer:
    """What one optimizer adds to a FlatState; `names` has every name once.

    `groups` are the names of the parameters of each of its groups, `own` is what this rank has for
    itself, by name, `own_options` that of each group, see `OWN_OPTIONS`. `witnesses` are scalars
    that another rank stores, as this one has them. `templates` are the DTensors that tensors of the
    state are laid out like, `shards` are those that say so themselves, both by name.
    """

    holdings: list[Holding] = field(default_factory=list)
    witnesses: list[Holding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    own: dict[str, PerRankState] = field(default_factory=dict)
    own_options: list[dict[str, Any]] = field(default_factory=list)
    templates: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, torch.Tensor] = field(default_factory=dict)


def flatten_optimizer(
    path: str,
    optimizer: torch.optim.Optimizer,
    described: Described,
    ranks: Ranks,
    *,
    splits_containers: bool = True,
) -> FlatOptimizer:
    """The state of an optimizer's parameters as this rank holds it; those without any are absent.

    `flatten_groups` gives the rest of the optimizer. Without `splits_containers`, each rank has its
    own containers of flat shards: for state dicts, whose values all ranks have to have.
    """
    flat = FlatOptimizer()
    flat.problems.extend(refusals(path, optimizer, described, ranks))
    if flat.problems:
        return flat
    groups = named_groups(optimizer, described)
    flat.groups.extend([[name for one in group for name in one.names] for group in groups])
    saving = _Saving(path, flat, ranks, declared(optimizer), splits_containers)
    # Several optimizers that are seen as one may share a parameter.
    for named in {id(n.param): n for group in groups for n in group}.values():
        # `get`: the state is a defaultdict, and reading it must not make entries.
        for name, content in (optimizer.state.get(named.param) or {}).items():
            known = name if type(name) is str and "~" not in name else state_name(name)
            if known is None:
                flat.problems.append(
                    f"{path}.state.{named.names[0]}: has state under {name!r}, a "
                    f"{type(name).__name__}; a key is an int, or a str that ends otherwise than in "
                    f"{NUMBERED!r}"
                )
            else:
                saving.add_state(named, known, content)
    return flat


def flatten_groups(
    path: str,
    optimizer: torch.optim.Optimizer,
    groups: list[list[str]],
    ranks: Ranks,
    kept: Sequence[Container[str]] | None = None,
    said: Mapping[Any, StateDeclaration] | None = None,
) -> FlatOptimizer:
    """What an optimizer has besides the state of parameters: its options by group, the user's own.

    `groups` are the names of the parameters of each group, `kept` the options of each that its
    class puts into a state dict, where it leaves some out. Options that `said` declares are this
    rank's own.
    """
    flat = FlatOptimizer()
    saving = _Saving(path, flat, ranks)
    fqn = f"{path}.param_groups"
    flat.names.append(fqn)
    flat.values[fqn] = values = []
    for index, (group, names) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own = options_of(group)
        if kept is not None and len(kept) == len(groups):
            own = {key: item for key, item in own.items() if key in kept[index]}
        options = saving.split(own, f"{fqn}.{index}")
        if said:
            mine = {key: options.pop(key) for key in list(options) if OPTION + key in said}
            flat.own_options.append({"first": names[0] if names else None, "options": mine})
            flat.problems.extend(
                f"{name}: a tensor in an option that each rank has for itself; make it a number"
                for name in references(mine)
            )
        values.append({"params": list(names), **options})
    if any(one["options"] for one in flat.own_options):
        flat.names.append(f"{fqn}{OWN_OPTIONS}")
    else:
        flat.own_options.clear()
    if user := user_state(optimizer.state):
        fqn = f"{path}.{USER_STATE}"
        flat.names.append(fqn)
        flat.values[fqn] = saving.split(user, fqn)
    return flat


def user_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """State under keys that are no parameters: the user's own."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def own_form(
    path: str, optimizer: torch.optim.Optimizer
) -> tuple[Sequence[Mapping[str, Any]] | None, dict[str, Any]]:
    """What its class makes of a state dict, by overriding `state_dict` or by hooks of its own: the
    groups, without what it leaves out (None: as they are), and counters, schedules of its own.

    Raises InvalidState where its state dict has a form of its own. It builds the whole dict, with a
    copy of some tensors perhaps: ask once.
    """
    # Built where there can be something alone: of a wrapper it is the inner one's, as it is here.
    own = getattr(type(optimizer), "state_dict", None)  # none of a view of several optimizers
    hooks = getattr(optimizer, STATE_DICT_HOOKS[1], {}).values()
    if own is None or (own is torch.optim.Optimizer.state_dict and not hooks):
        return None, {}
    if hasattr(optimizer, "distributed_state_dict"):  # of distributed Shampoo, by name
        raise InvalidState(
            f"{path}: {type(optimizer).__qualname__} has a state dict for checkpoints; put "
            "distributed_state_dict(model.named_parameters()) of it into the state, and give "
            "what is loaded to its load_distributed_state_dict()"
        )
    whole = read_state(path, optimizer.state_dict)
    extra = {key: item for key, item in whole.items() if key not in ("state", "param_groups")}
    if extra and "state" not in whole:
        raise InvalidState(
            f"{path}: {type(optimizer).__qualname__}.state_dict() has another form than "
            "torch.optim.Optimizer's, so it is unclear which parameters its parts belong to; "
            "put the optimizer that it wraps into the state"
        )
    # State is read where it lies, so hooks may add to it and may not change it.
    live = [list(optimizer.state.get(p) or ()) for p in (params_of(optimizer) if hooks else ())]
    if hooks and live != [list(whole["state"].get(n, ())) for n in range(len(live))]:
        raise InvalidState(
            f"{path}: the hooks of {type(optimizer).__qualname__} on state_dict change the "
            "state of parameters, which is read where it lies; remove them"
        )
    return whole.get("param_groups"), extra


def differing_pickle(saved: Any, live: Any, path: str = "") -> str | None:
    """Where `saved`, what a class has added, may have a pickle that the live one has not: that
    class would run it. Both as `split_tree` gives them.
    """
    inside, own = _items(saved), _items(live)
    for key, one in inside.items():
        if (place := differing_pickle(one, own.get(key), join(path, key))) is not None:
            return place
    # By the live one, which the class has made: any bytes may be a pickle, of an old protocol or
    # with something behind its end.
    is_raw = isinstance(live, bytes) and live[-1:] != b"."
    return path if isinstance(saved, bytes) and saved != live and not is_raw else None


def _items(value: Any) -> dict[Any, Any]:
    """What a container of a value holds, by key or number; nothing of what is none."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def set_extra_state(optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
    """Give `extra` to the optimizer's class, which takes it as a part of a whole state dict."""
    state, groups = dict(optimizer.state), list(optimizer.param_groups)
    packed = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    optimizer.load_state_dict({"state": {}, "param_groups": packed, **extra})
    # The rest is what it was, and the same objects: schedulers hold the groups.
    optimizer.state.update(state)
    optimizer.param_groups[:] = groups


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says besides which parameters are in it."""
    return {key: item for key, item in group.items() if key not in NAME_KEYS}


def refusals(
    path: str, optimizer: torch.optim.Optimizer, described: Described, ranks: Ranks
) -> list[str]:
    """Why the optimizer cannot be part of a state, in this state; nothing if it can."""
    problems = []
    for attribute in STATE_DICT_HOOKS:
        for hook in getattr(optimizer, attribute, {}).values():
            if not _is_of_own_form(optimizer, hook):
                problems.append(
                    f"{path}: the hook {getattr(hook, '__qualname__', hook)!s} on state_dict or "
                    "load_state_dict cannot be honoured, because the state is read where it lies; "
                    "remove it"
                )
    # By name: its package takes seconds to import and brings torch's RPC with it.
    if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        problems.append(
            f"{path}: ZeroRedundancyOptimizer keeps the state of each parameter on one rank and "
            "does not say which; shard the model with fully_shard, or use the optimizer that it "
            "wraps"
        )
    params = params_of(optimizer)
    strangers = [tuple(param.shape) for param in params if id(param) not in described.by_param]
    if strangers:
        problems.append(
            f"{path}: {len(strangers)} of its parameters are in no module of the state (the "
            f"first has shape {strangers[0]}); put the model into the state next to the "
            "optimizer, and make the optimizer after the model is wrapped or sharded"
        )
    elif isinstance(optimizer, torch.optim.LBFGS):
        owned = [described.by_param[id(param)].owned for param in params]
        if not all(one.is_whole_on(ranks.everyone) for one in owned):
            problems.append(
                f"{path}: LBFGS keeps vectors over all parameters joined together, which cannot "
                "be separated when parameters are sharded; use another optimizer or an "
                "unsharded model"
            )
    return problems


def _is_of_own_form(optimizer: torch.optim.Optimizer, hook: Any) -> bool:
    """Whether a hook is a function of the optimizer's own class, which adds to its state dict:
    `own_form` asks for that. A class with hooks for loads alone has another form, unknown to us.
    """
    posts = getattr(optimizer, STATE_DICT_HOOKS[1]).values()

    def is_of_class(hook: Any) -> bool:
        named = inspect.getattr_static(type(optimizer), getattr(hook, "__name__", ""), None)
        return named is not None and getattr(named, "__func__", named) is hook

    return is_of_class(hook) and any(map(is_of_class, posts))


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in the order of the ids that torch counts: group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_groups(optimizer: torch.optim.Optimizer, described: Described) -> list[list[NamedParam]]:
    """The parameters of each group by name: on the module that has them all, or with its path."""
    paths = {described.by_param[id(param)].path for param in params_of(optimizer)}
    # Two modules may have parameters of one name; those of one module are found under any path.
    is_joint = len(paths) > 1

    def named(param: torch.Tensor) -> NamedParam:
        source = described.by_param[id(param)]
        names = source.fqns if is_joint else tuple(member.fqn for member in source.members)
        return NamedParam(param, source, names)

    return [[named(param) for param in group["params"]] for group in optimizer.param_groups]


def scalar_piece(fqn: str, dtype: torch.dtype, holders: tuple[int, ...]) -> Piece:
    """A tensor without dims."""
    return Piece(fqn, (), dtype, Box((), ()), Box((), ()), holders)


@dataclass(frozen=True, slots=True)
class _Saving:
    """Adds the parts of the optimizer at `path` to `flat`."""

    path: str
    flat: FlatOptimizer
    ranks: Ranks
    declared: Mapping[Any, StateDeclaration] = field(default_factory=dict)
    splits_containers: bool = True

    def split(self, tree: Any, fqn: str, beside: NamedParam | None = None) -> Any:
        """`tree` as a value with references; the tensors that they refer to are added."""
        value, tensors = split_tree(tree, fqn, self.flat.problems)
        for name, tensor in tensors:
            if beside is None:
                self.add_whole(name, tensor, Kind.OTHER)
            elif is_shard_inside(tensor, beside.owned):
                self.flat.names.append(name)
                self.add_pieces(beside, tensor, dict.fromkeys(beside.owned.fqns, name))
            else:
                self.add_whole(name, tensor, Kind.OPTIMIZER, beside.owned)
        return value

    def add_state(self, named: NamedParam, name: str, content: Any) -> None:
        said = self.declared.get(name if "~" not in name else state_key(name))
        kind = kind_of(content, named.owned, self.ranks, said)
        if kind is StateKind.VALUE and named.owned.is_flat_shard and not self.splits_containers:
            kind = StateKind.OWN
        match kind:
            case StateKind.SHARD:
                self.add_shard(named, name, content)
            case StateKind.TENSOR:
                self.add_tensor(named, name, content)
            case StateKind.SCALAR:
                self.add_scalar(named, name, content)
            case StateKind.NUMBER:
                suffix, dtype = NUMBERS[type(content)]
                # None has no number; its suffix says all, and a load does not look at the 0.
                self.add_scalar(named, name + suffix, torch.tensor(content or 0, dtype=dtype))
            case StateKind.VALUE:
                self.add_value(named, name, content)
            case StateKind.OWN:
                self.add_own(named, name, content)
            case StateKind.MISFIT:
                self.flat.problems.append(
                    f"{self.path}.state.{named.names[0]}.{name}: is declared a shard and has shape "
                    f"{tuple(content.shape)}, the parameter's local tensor "
                    f"{tuple(named.owned.local.shape)}; declare it PerRank(None) to keep it for "
                    "each rank"
                )

    def add_shard(self, named: NamedParam, name: str, content: torch.Tensor) -> None:
        prefix = f"{self.path}.state."
        try:
            refuse_composite_shards(f"{prefix}{named.names[0]}.{name}", local_tensor(content))
        except UnsupportedTensor as refused:
            self.flat.problems.append(refused.problem)
            return
        names = {
            member.fqn: f"{prefix}{full}.{name}"
            for member, full in zip(named.source.members, named.names, strict=True)
        }
        self.flat.names.extend(names.values())
        self.add_pieces(named, local_tensor(content), names)

    def add_pieces(self, named: NamedParam, local: torch.Tensor, names: Mapping[str, str]) -> None:
        """Memory laid out like the parameter's; `names` are those of its members' state."""
        # Whether the state of a whole parameter was made of what the engine keeps equal, or is each
        # rank's own of the same shape, nothing tells but its bytes; and so it is on other meshes.
        must_agree = named.owned.is_whole or not self.ranks.copies.keys().isdisjoint(
            named.source.fqns
        )
        if (template := named.owned.template) is not None:
            self.flat.templates.update(dict.fromkeys(names.values(), template))
        placed = named.owned, local, names.__getitem__
        self.flat.holdings.extend(holdings_of(*placed, kind=Kind.OPTIMIZER, must_agree=must_agree))

    def add_scalar(self, named: NamedParam, name: str, tensor: torch.Tensor) -> None:
        for member, full in zip(named.source.members, named.names, strict=True):
            fqn = f"{self.path}.state.{full}.{name}"
            self.flat.names.append(fqn)
            holders = self.holders_of_scalars(named.owned, member)
            piece = scalar_piece(fqn, tensor.dtype, holders)
            owned = named.owned
            kept_equal = owned.synchronized, owned.owners
            # Optimizers do not step, and so do not count, where a rank has nothing of a parameter.
            pieces = (piece for view in owned.views for piece in view.pieces)
            own = (piece.region.numel for piece in pieces if piece.fqn == member.fqn)
            counts = bool(holders) or any(own)
            holding = Holding(tensor.detach(), (piece,), Kind.OPTIMIZER, *kept_equal, counts)
            (self.flat.holdings if holders else self.flat.witnesses).append(holding)

    def holders_of_scalars(self, owned: Owned, member: LogicalTensor) -> tuple[int, ...]:
        """The ranks that have a scalar of `member` for storing; none when this one is not among
        them.
        """
        for piece in (piece for view in owned.views for piece in view.pieces):
            region = piece.region
            start = region.start if isinstance(region, Span) else any(region.offset)
            if piece.fqn == member.fqn and not start and region.numel:
                return piece.holders
        # Nobody has the first element of an empty tensor.
        rank = (owned.owners or owned.views[0].pieces[0].holders)[0]
        return (rank,) if 0 in member.global_shape and self.ranks.rank == rank else ()

    def add_own(self, named: NamedParam, name: str, content: Any) -> None:
        """What this rank has for itself: kept with the parameter's layout."""
        fqn = f"{self.path}.state.{named.names[0]}.{name}"
        split = split_tree(content, fqn, self.flat.problems)
        odd = [inside for inside, tensor in split[1] if not likeness(tensor, named.owned).is_plain]
        if odd:
            self.flat.problems.append(
                f"{odd[0]}: is no plain strided tensor, and each rank has its own; keep plain "
                "tensors there, or DTensors next to it, one per name"
            )
            return
        own = own_state(named.names[0], name, split, self.ranks)
        own.entry["layout"] = layout_of(named.owned)
        self.flat.names.append(fqn)
        self.flat.own[fqn] = own

    def add_tensor(self, named: NamedParam, name: str, tensor: torch.Tensor) -> None:
        fqn = f"{self.path}.state.{named.names[0]}.{name}"
        if len(named.names) > 1:
            self.flat.problems.append(
                f"{fqn}: a {type(tensor).__name__} for a flat parameter of {len(named.names)} "
                "members cannot be distinguished; wrap with use_orig_params=True"
            )
            return
        self.add_whole(fqn, tensor, Kind.OPTIMIZER, named.owned)

    def add_whole(
        self, fqn: str, tensor: torch.Tensor, kind: Kind, like: Owned | None = None
    ) -> None:
        self.flat.names.append(fqn)
        if is_dtensor(tensor):
            self.flat.templates[fqn] = tensor
        elif hasattr(tensor, "global_shape"):
            self.flat.shards[fqn] = tensor
        held = None
        if like is not None and (like.is_whole or not is_plain(tensor)):
            held = Held.beside(like)
        elif like is not None:  # each owner has all of the counts next to DTensors in a container
            held = Held(like.owners or self.ranks.everyone, False, like.owners or ())
        try:
            self.flat.holdings.extend(
                tensor_holdings(fqn, tensor, kind, self.ranks, held=held, must_agree=True)
            )
        except UnsupportedTensor as refused:
            self.flat.problems.append(refused.problem)

    def add_value(self, named: NamedParam, name: str, content: Any) -> None:
        for full in named.names:
            fqn = f"{self.path}.state.{full}.{name}"
            self.flat.names.append(fqn)
            self.flat.values[fqn] = self.split(content, fqn, named)
