"""Loading the optimizer state of one parameter, into the state it has or into fresh memory.

Fresh memory has the dtype of the checkpoint and the layout of the parameter, and zeros where no
member of a flat parameter lies; it becomes the optimizer's when everything has been read. State
that the checkpoint lacks is removed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import Mismatch
from ckpt.layout.descriptions import descriptions, shown_type
from ckpt.layout.holdings import holdings_of, tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.likeness import Likeness, likeness, zeros_beside, zeros_like
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.plain import Ranks
from ckpt.layout.region import Shape
from ckpt.layout.tensor import local_tensor
from ckpt.state.names import Names
from ckpt.state.optimizer import NamedParam, scalar_piece
from ckpt.state.optimizer_kinds import (
    NUMBER_OF_SUFFIX,
    MemberState,
    SavedState,
    StateDeclaration,
    StateKind,
    kind_of,
    kind_of_saved,
    layout_of,
    number_suffix,
    resharded,
    state_key,
    why_not,
)
from ckpt.state.resize import with_rows
from ckpt.state.trees import BoundTree, bind_tree, fill_once, fits
from ckpt.state.types import PerRank, ProblemKind, TensorEntry
from ckpt.state.values import holds_objects, join_tree, references, split_tree, unknown_leaves

Make = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class BoundOptimizer:
    """Memory to fill; `install` then gives the optimizer its state, all of it at once."""

    optimizer: torch.optim.Optimizer
    holdings: list[Holding] = field(default_factory=list)
    states: list[tuple[torch.Tensor, dict[str, Make]]] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], BoundTree]] = field(default_factory=list)
    user: list[BoundTree] = field(default_factory=list)

    def install(self) -> None:
        """Replace state and hyperparameters. Raises Mismatch before it changes anything."""
        # All are made first: one that raises must leave every parameter with its old state.
        made = [
            (p, {state_key(name): make() for name, make in new.items()}) for p, new in self.states
        ]
        for param, state in made:
            if not state:
                self.optimizer.state.pop(param, None)
                continue
            # The same dict, emptied: optimizers and their users may hold on to it.
            live = self.optimizer.state[param]
            live.clear()
            live.update(state)
        for group, tree in self.groups:
            group.update(tree.build())
        for tree in self.user:
            self.optimizer.state.update(tree.build())


@dataclass(slots=True)
class ParameterBinding:
    """The state of one parameter of the optimizer at `path`, bound into `bound`.

    `states` are those of the checkpoint for each member, `live` is the state that the optimizer
    has, `hyper` are the options of its group; `new` makes each entry of the new state.
    """

    path: str
    bound: BoundOptimizer
    names: Names
    ranks: Ranks
    declarations: Mapping[Any, StateDeclaration]
    named: NamedParam
    states: Sequence[SavedState | None]
    live: Mapping[str, Any]
    hyper: Mapping[str, Any]
    new: dict[str, Make] = field(default_factory=dict)

    @property
    def owned(self) -> Owned:
        return self.named.owned

    def bind(self) -> None:
        """Bind all of it, or report why it cannot be loaded."""
        if self.names.has_resize:
            self.states = [self.resized(number, one) for number, one in enumerate(self.states)]
        # Used, whatever follows: a skipped state, or one of a parameter that lies elsewhere, is not
        # an unexpected name.
        for state in self.states:
            if state is not None:
                self.names.used |= state.fqns
        # Also without anything to load: what the checkpoint lacks is removed.
        self.bound.states.append((self.named.param, self.new))
        # Where the parameter lies on other ranks alone, this rank's optimizer never sees it. A
        # DTensor's optimizer keeps state for an empty shard too.
        owned = self.owned
        is_here = bool(owned.local.numel()) or owned.template is not None
        if not is_here and 0 not in owned.views[0].pieces[0].global_shape:
            return
        for name in dict.fromkeys(n for s in self.states if s for n in s.names):
            if not self.names.skip(self.fqn(name)):
                self.add(name)
            elif name in self.live:  # the state is replaced as a whole, so what stays is put back
                self.new[name] = _constant(self.live[name])

    def resized(self, number: int, state: SavedState | None) -> SavedState | None:
        """The state of a member with the rows that the member has, where `resize` says so."""
        names, source = self.names, self.named.source
        shape = source.members[number].global_shape
        rule_of_param = names.row_rule(source.fqns[number])
        rows = names.stored_rows(source.fqns[number]) if shape else None
        tensors: dict[str, tuple[str, TensorEntry]] = {}
        for name in state.names if state is not None else ():
            fqn = self.fqn(name, number)
            rule = names.row_rule(fqn) or rule_of_param
            if rule is None or state is None or name in state.own:
                continue
            saved, value = state.values.get(name, ("", None))
            inside = references(value) if saved else [state.tensors[name][0]]
            shapes = [tuple(described["shape"]) for described in descriptions(value)]
            if any(with_rows(each, shape, rows) != each for each in shapes):
                inside = []
                self.report_unclear(fqn, shown_type(value), shape)
            for one in inside:
                entry = names.catalog.tensors.get(one)
                wanted = with_rows(entry.shape, shape, rows) if entry else None
                if entry and wanted is None:
                    self.report_unclear(fqn, str(entry.shape), shape)
                elif wanted is not None:
                    names.resize(fqn, one, wanted, rule)
            if not saved:
                tensors[name] = inside[0], names.catalog.tensors[inside[0]]
        return state._replace(tensors=state.tensors | tensors) if state and tensors else state

    def report_unclear(self, fqn: str, what: str, shape: Shape) -> None:
        call = self.names.call
        text = f"{call.source} has {what}, the parameter {shape}: resize= changes plain tensors "
        text += f"with one row for each of the parameter{call.or_skip}"
        self.names.report(fqn, text, ProblemKind.SHAPE)

    def fqn(self, name: str, member: int = 0) -> str:
        """The live name of the state `name`."""
        return f"{self.path}.state.{self.named.names[member]}.{name}"

    def report(self, name: str, text: str, kind: ProblemKind = ProblemKind.VALUE) -> None:
        self.names.report(self.fqn(name), text, kind)

    def add(self, name: str) -> None:
        """Bind one entry, or report why it cannot be loaded."""
        members = [
            MemberState(member, *state.tensors[name])
            for member, state in zip(self.named.source.members, self.states, strict=True)
            if state and name in state.tensors
        ]
        kind = kind_of_saved(name, self.states, members, self.owned)
        dtypes = {member.entry.dtype for member in members}
        if kind is StateKind.OWN:
            self.add_own(name)
            return
        if kind is StateKind.VALUE:
            self.add_value(name, has_tensors=bool(members))
            return
        self.names.loaded_tensors.append(self.fqn(name))
        if len(dtypes) > 1:
            self.report(
                name,
                f"members of one flat parameter have {sorted(map(str, dtypes))}, one tensor has "
                "to hold them all; load into a model with use_orig_params=True or fully_shard",
                ProblemKind.DTYPE,
            )
        elif kind is StateKind.SHARD:
            self.add_shard(name, members)
        elif kind is StateKind.TENSOR:
            self.add_tensor(name, members[0])
        elif kind is StateKind.MISFIT:
            odd = next(member for member in members if not member.fits)
            self.names.report(
                self.fqn(name, self.named.source.members.index(odd.member)),
                f"{self.names.call.source} has shape {odd.entry.shape}, the parameter "
                f"{odd.member.global_shape}: state of another shape cannot be divided among flat "
                f"shards; load into fully_shard or an unsharded model{self.names.call.or_skip}",
                ProblemKind.SHAPE,
            )
        else:
            self.add_scalar(name, members)

    def add_value(self, name: str, *, has_tensors: bool) -> None:
        values = [s.values[name] for s in self.states if s and name in s.values]
        if has_tensors or any(value != values[0][1] for _, value in values):
            self.report(name, "differs between the members of one flat parameter")
            return
        if self.owned.is_flat_shard and (why := self.why_no_shard(values[0][1])):
            self.report(
                name,
                f"{why}: this cannot be divided among flat shards; load into fully_shard or an "
                f"unsharded model{self.names.call.or_skip}",
                ProblemKind.SHAPE,
            )
            return
        live = self.live.get(name)
        tree = bind_tree(*values[0], live, self.names, self.ranks, beside=self.owned)
        self.bound.holdings.extend(tree.holdings)
        self.names.loaded_values.append(self.fqn(name))
        self.new[name] = tree.build

    def why_no_shard(self, value: Any) -> str:
        """What in a value cannot lie next to flat shards; "" where all tensors are shaped like the
        one parameter.
        """
        if holds_objects(value):
            return "holds objects that know the shape of the whole parameter"
        members, tensors = self.named.source.members, self.names.catalog.tensors
        shape = members[0].global_shape
        for fqn in references(value):
            its_shape = tensors[fqn].shape if fqn in tensors else ()
            if its_shape and len(members) > 1:
                return f"holds the tensor {fqn} for one of {len(members)} members"
            if its_shape and its_shape != shape:
                return (
                    f"holds the tensor {fqn} of shape {its_shape}, and the parameter has shape "
                    f"{shape}"
                )
        return ""

    def add_own(self, name: str) -> None:
        """What each rank had for itself: this rank's, or what a function of the user's makes."""
        fqn, declaration = self.fqn(name), self.declarations.get(state_key(name))
        base, entries = next(s.own[name] for s in self.states if s and name in s.own)
        rank, size = self.ranks.rank, len(self.ranks.global_ranks)
        layout = layout_of(self.owned)
        mine = entries.get(rank)
        saved_size = next(iter(entries.values()))["world_size"]
        # The same layout here is enough: what lies elsewhere has no influence on this rank's state.
        if mine and (saved_size, mine["layout"]) == (size, layout):
            self.new[name] = self.bind_own(base, mine, self.live.get(name))
        elif isinstance(declaration, PerRank) and declaration.on_reshard is not None:
            # The user's function gets the state of all ranks: each rank reads all of it.
            makes = [self.bind_own(base, entries[one], None) for one in sorted(entries)]
            hook = declaration.on_reshard
            self.new[name] = lambda: resharded(fqn, hook, [make() for make in makes], rank, size)
        elif mine or not saved_size == size == len(self.names.catalog.per_rank):
            why = why_not(entries, mine, size, layout) + self.names.call.or_skip
            self.names.report(fqn, why, ProblemKind.PER_RANK)
            return
        # Else all ranks gave theirs, and this one had no such state: there is nothing to load.
        self.names.loaded_tensors.append(fqn)

    def bind_own(self, base: str, entry: Mapping[str, Any], live: Any) -> Make:
        """Memory for one rank's own state, the live one where it fits; what makes the state."""
        for text in unknown_leaves(entry["value"], live):
            self.names.report(base, text)
        suffix = f"~rank{entry['rank']}"
        there = {f"{inside}{suffix}": tensor for inside, tensor in split_tree(live, base, [])[1]}
        targets: dict[str, torch.Tensor] = {}
        for fqn in references(entry["value"]):
            known = self.names.catalog.tensors.get(fqn)
            if known is None:
                self.names.report(base, f"refers to {fqn}, which is not there")
                continue
            target = there.get(fqn)
            is_plain = target is not None and likeness(target, self.owned).is_plain
            if target is None or not is_plain or not fits(target, known):
                device = self.owned.local.device
                target = torch.zeros(known.shape, dtype=known.dtype, device=device)
            targets[fqn] = target
            self.bound.holdings.extend(tensor_holdings(fqn, target, Kind.OPTIMIZER, self.ranks))
        return lambda: join_tree(entry["value"], targets.__getitem__, live)

    def add_tensor(self, name: str, saved: MemberState) -> None:
        """State of another shape than its parameter: into the live tensor, or a whole one."""
        entry, live = saved.entry, self.live.get(name)
        if isinstance(live, torch.Tensor) and fits(live, entry):
            target = live
        else:
            target = zeros_beside(self.owned, entry.shape, entry.dtype)
        self.fill(name, saved, target)

    def fill(self, name: str, saved: MemberState, target: torch.Tensor) -> None:
        """Load one tensor into `target`, which is laid out as it says itself."""
        target, self.new[name] = fill_once(target, self.names)
        holdings = tensor_holdings(saved.fqn, target, Kind.OPTIMIZER, self.ranks)
        self.bound.holdings.extend(holdings)

    def add_scalar(self, name: str, members: Sequence[MemberState]) -> None:
        live = self.live.get(name)
        usable = None  # several members have a scalar each: they are compared before one is used
        if len(members) == 1 and isinstance(live, torch.Tensor):
            like = likeness(live, self.owned)
            if live.ndim == 0 and live.dtype is members[0].entry.dtype:
                if like.tells_layout:
                    self.fill(name, members[0], live)
                    return
                usable = live if like.is_plain else None
        # torch.optim keeps step counts on the host unless kernels read them.
        is_read = self.hyper.get("capturable") or self.hyper.get("fused")
        on_host = name == "step" and not is_read
        device = torch.device("cpu") if on_host else self.owned.local.device
        filled: list[tuple[str, Make]] = []
        for _, saved, entry in members:
            target = torch.zeros((), dtype=entry.dtype, device=device)
            make = _constant(target)
            if usable is not None:
                target, make = fill_once(usable, self.names)
            filled.append((saved, make))
            piece = scalar_piece(saved, entry.dtype, (self.ranks.rank,))
            self.bound.holdings.append(
                Holding(target.detach(), (piece,), Kind.OPTIMIZER, False, self.owned.owners)
            )
        suffix = number_suffix(name)
        if suffix is None:
            self.new[name] = lambda: _common(filled)
        else:
            number = NUMBER_OF_SUFFIX[suffix]
            self.new[name.removesuffix(suffix)] = lambda: number(_common(filled).item())

    def add_shard(self, name: str, members: Sequence[MemberState]) -> None:
        live = self.live.get(name)
        dtype = members[0].entry.dtype  # that of all members, see `add`
        # Whether it is per rank is decided by what was saved, not by what is declared now.
        declaration = self.declarations.get(state_key(name))
        shard: StateDeclaration | None = "shard" if declaration == "shard" else None
        if isinstance(live, torch.Tensor):
            like = likeness(live, self.owned)
            is_alone = len(members) == 1 and fits(live, members[0].entry)
            if like is Likeness.OTHER and is_alone:
                # A DTensor on another mesh or with other placements: it keeps its own layout.
                self.fill(name, members[0], live)
                return
        # The live tensor has values of the members that the checkpoint lacks: they become zeros.
        is_complete = len(members) == len(self.named.names)
        if (
            is_complete
            and isinstance(live, torch.Tensor)
            and live.dtype is dtype
            and kind_of(live, self.owned, self.ranks, shard) is StateKind.SHARD
        ):
            target = live
        else:
            target = zeros_like(self.owned, dtype, local=shard is not None)
        target, self.new[name] = fill_once(target, self.names)
        saved = {member.member.fqn: member.fqn for member in members}
        self.bound.holdings.extend(
            holdings_of(self.owned, local_tensor(target), saved.get, kind=Kind.OPTIMIZER)
        )


def _common(filled: Sequence[tuple[str, Make]]) -> torch.Tensor:
    """The one scalar that all members of a parameter have."""
    made: list[tuple[str, torch.Tensor]] = [(fqn, make()) for fqn, make in filled]
    (first_fqn, first), *others = made
    for fqn, scalar in others:
        if not torch.equal(scalar, first):
            raise Mismatch(
                f"{fqn}: is {scalar.item()}, and {first_fqn} is {first.item()}: parameters "
                "of one flat parameter share one scalar; load into a model with "
                "use_orig_params=True"
            )
    return first


def _constant(value: Any) -> Make:
    return lambda: value
