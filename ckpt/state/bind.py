"""From a state and a checkpoint's catalog to what a load fills, and what it installs afterwards.

Everything that can be known without tensor data is known when `bind_state` returns; until then, and
until `prepare()`, nothing of the state has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ckpt.errors import InvalidState
from ckpt.layout.composites import is_composite
from ckpt.layout.holdings import WholeTensors, holdings_of, tensor_holdings, whole_tensors
from ckpt.layout.kind import Kind
from ckpt.layout.memory import MemoryRanges, local_view, overlaps_itself
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.region import Shape
from ckpt.layout.tensor import is_dtensor
from ckpt.state.bind_optimizer import bind_optimizer
from ckpt.state.binding import Binding
from ckpt.state.describe import Described, DescribedTensor, adopt_parameters, describe_modules
from ckpt.state.names import GroupOptions, Names, Rename, Skip
from ckpt.state.optimizer import EXTRA_STATE, differing_pickle, own_form, set_extra_state
from ckpt.state.per_group import NOT_IN_GROUP, GroupValue, group_of, group_values, value_for
from ckpt.state.resize import NewRows, Resize, in_stored_rows
from ckpt.state.trees import bind_composite, bind_tree
from ckpt.state.typed_values import tensor_of, why_no_tensor
from ckpt.state.types import (
    CHECKPOINT,
    CallArguments,
    Catalog,
    Loaded,
    PerGroup,
    PerRank,
    Problem,
    ProblemKind,
    Strict,
    fatal_texts,
)
from ckpt.state.values import TENSOR_KEY, join_tree, references, split_tree, unknown_leaves
from ckpt.state.walk import (
    EXTRA_STATE_KEY,
    Leaves,
    LocatedValue,
    Location,
    Replaced,
    is_numbered,
    is_object,
    read_state,
    walk,
)


def bind_state(
    state: Any,
    catalog: Catalog,
    ranks: Ranks,
    *,
    strict: Strict = True,
    rename: Rename = None,
    skip: Skip = None,
    new: Skip = None,
    group_options: GroupOptions = None,
    resize: Resize = None,
    call: CallArguments = CHECKPOINT,
) -> Binding:
    """How `state` is to be filled from a checkpoint. Changes nothing; no rank waits for another.

    `rename` gives the checkpoint's name for a name of the state, or for a dotted prefix of names;
    `skip` says which names to leave alone, `new` which of those the checkpoint does not have,
    `group_options` of options of param groups whether the saved or the live value holds, and
    `resize` what rows are that the checkpoint lacks. With `strict=False`, missing and unexpected
    names are not fatal, with "state" the unexpected ones; what has another shape or dtype always
    is. Raises InvalidState when `state` itself is unusable.
    """
    leaves = walk(state)
    described = describe_modules(leaves, ranks, loading=True)
    if leaves.optimizers:
        adopt_parameters(described, leaves, ranks)
    # What is wrong with the state itself is no question of strictness, and comes first.
    if leaves.problems or described.problems:
        raise InvalidState(leaves.problems + described.problems)
    names = Names(
        catalog,
        rename,
        skip,
        aliases=described.aliases,
        call=call,
        new=new,
        group_options=group_options,
        resize=resize,
    )
    binding = _Binder(names, ranks)
    binding.add_tensors(leaves.tensors)
    binding.add_arrays(leaves.arrays)
    for source, kind in described.tensors():
        # Components follow their composite.
        if described.components.keys().isdisjoint(source.fqns):
            binding.add_source(source, kind)
    for fqn, tensor in described.composites.items():
        binding.add_composite(fqn, tensor, Kind.OTHER)
    for path, optimizer in leaves.optimizers:
        bound = bind_optimizer(path, optimizer, described, names, ranks)
        binding.holdings.extend(bound.holdings)
        binding.steps.append(bound.install)
        if extra := own_form(path, optimizer)[1]:
            binding.add_extra_state(f"{path}.{EXTRA_STATE}", optimizer, extra)
    for fqn, thing in leaves.objects:
        in_place = isinstance(thing, Replaced)
        if in_place and is_numbered(thing.node) and not names.is_skipped(fqn):
            binding.warnings.append(
                f"{fqn} is the state dict of an optimizer, which has nothing of it before you call "
                "optimizer.load_state_dict() with it; put the optimizer itself into the state"
            )
            if not thing.node["state"] and _is_sharded(leaves, described):
                names.report(
                    fqn,
                    "is the state dict of an optimizer that has no state yet, and parameters are "
                    "sharded, so that nothing says how its state would be; put the optimizer "
                    f"itself into the state{call.or_skip}",
                )
        binding.add_tree(fqn, thing.state_dict, thing.load_state_dict, in_place=in_place)
    for fqn, module in described.extra_states:
        binding.add_tree(fqn, module.get_extra_state, module.set_extra_state)
    binding.add_values(leaves)
    for refill, filled in leaves.refills:
        binding.steps.append(partial(refill, filled))
    binding.refuse_overlaps()
    return binding.result(state, described, strict)


@dataclass(frozen=True, slots=True)
class _Binder:
    """A Binding in the making. `new_items` has, by the id of a tuple, its new items by index.

    `strided` are those of `plain` that are not contiguous, by the checkpoint's names.
    """

    names: Names
    ranks: Ranks
    plain: list[WholeTensors] = field(default_factory=list)
    strided: dict[str, torch.Tensor] = field(default_factory=dict)
    holdings: list[Holding] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    new_items: dict[int, dict[Any, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        names = self.names
        bound: list[tuple[str, torch.Tensor]] = []
        loaded: list[str] = []
        strided = {}
        unchanged = {} if names.has_rename or names.has_skip else names.catalog.tensors
        # Thousands of tensors stand under their own names as they are: short ways for them.
        if all(
            [
                (entry := unchanged.get(fqn)) is not None
                and entry.dtype is tensor.dtype
                and entry.shape == tensor.shape
                and tensor.is_contiguous()
                for fqn, tensor in tensors
            ]
        ):
            bound, loaded, tensors = [*tensors], [fqn for fqn, _ in tensors], ()
        for fqn, tensor in tensors:
            entry = unchanged.get(fqn)
            if entry is not None and entry.dtype is tensor.dtype and entry.shape == tensor.shape:
                saved = fqn
            elif is_composite(tensor):
                self.add_composite(fqn, tensor, Kind.OTHER)
                continue
            elif (fitting := self.fitting(fqn, tensor)) is None:
                continue
            else:
                saved = fitting
            # Several elements of the checkpoint would be written to one place, the last one wins.
            is_strided = not tensor.is_contiguous()
            if is_strided and overlaps_itself(tensor):
                names.used.add(saved)
                names.report(
                    fqn,
                    "is an expanded tensor whose elements share memory; make it contiguous() first",
                    ProblemKind.UNSUPPORTED,
                )
                continue
            if is_strided:
                strided[saved] = tensor
            loaded.append(fqn)
            bound.append((saved, tensor))
        plain, tied, others = whole_tensors(bound, self.ranks)
        names.used.update([saved for saved, _ in bound])
        # Of one tensor of the state that the checkpoint has as two, it can have one only.
        if two := {saved for saved, first in tied.items() if saved != first}:
            names.used -= two
            loaded = [
                fqn for fqn, (saved, _) in zip(loaded, bound, strict=True) if saved not in two
            ]
            names.tied |= {saved: first for saved, first in tied.items() if saved in two}
        names.loaded_tensors += loaded
        self.plain.append(plain)
        if strided:
            self.strided.update((f, t) for f, t in strided.items() if f in set(plain.fqns))
        for saved, tensor in others:
            try:
                self.holdings.extend(tensor_holdings(saved, tensor, Kind.OTHER, self.ranks))
            except UnsupportedTensor as refused:
                names.problems.append(Problem(ProblemKind.UNSUPPORTED, saved, refused.problem))

    def add_arrays(self, arrays: Sequence[tuple[str, Any]]) -> None:
        tensors = []
        for fqn, array in arrays:
            tensor = tensor_of(array)
            if tensor is None:
                text = f"is {why_no_tensor(array)}"
            elif not array.flags.writeable:
                text = "is an array that cannot be written to; put a copy() of it into the state"
            else:
                tensors.append((fqn, tensor))
                continue
            if not self.names.skip(fqn):
                self.names.report(fqn, text, ProblemKind.UNSUPPORTED)
        self.add_tensors(tensors)

    def add_composite(self, fqn: str, tensor: torch.Tensor, kind: Kind) -> None:
        if self.names.skip(fqn):
            return
        bound = bind_composite(fqn, tensor, kind, self.names, self.ranks)
        if bound is not None:
            self.holdings.extend(bound[0])
            self.steps.extend(bound[1])

    def fitting(self, fqn: str, tensor: torch.Tensor) -> str | None:
        """The checkpoint's name of what fills `tensor`; None when nothing does."""
        if self.names.skip(fqn) or (saved := self.names.tensor(fqn)) is None:
            return None
        return saved if self.fits(fqn, saved, tensor.shape, tensor.dtype) else None

    def add_source(self, source: DescribedTensor, kind: Kind) -> None:
        stored: dict[str, str] = {}
        for member, fqn in zip(source.members, source.fqns, strict=True):
            # Members that this rank has nothing of count too: all ranks report the same names.
            if self.names.skip(fqn):
                continue
            saved = self.names.tensor(fqn)
            if saved is not None and self.fits(fqn, saved, member.global_shape, member.dtype):
                stored[member.fqn] = saved
                self.names.loaded_tensors.append(fqn)
        owned = source.owned
        self.holdings.extend(holdings_of(owned, owned.local, stored.get, kind=kind))

    def fits(self, fqn: str, saved: str, shape: Shape, dtype: torch.dtype) -> bool:
        """Whether what the checkpoint calls `saved` can fill `fqn`; a problem when not."""
        rule = self.names.row_rule(fqn) if self.names.has_resize else None
        if rule is not None:
            self.names.resize(fqn, saved, shape, rule)
        entry = self.names.catalog.tensors[saved]
        # Before the checks: what does not fit is one problem, and not an unexpected name as well.
        self.names.used.add(saved)
        call = self.names.call
        source = call.source
        otherwise = ", pass rename= or drop the entry with skip=" if call.skip else ""
        casting = ", or pass cast=True" if call.cast else f" (a load never casts){call.or_skip}"
        if entry.shape != shape:
            rows = f", or its rows with resize={{{fqn!r}: 'zeros'}}" if call.new else ""
            if entry.shape[1:] != shape[1:] or not shape or not entry.shape:
                rows = ", which resize= cannot change: dim 0 alone" if rule else ""
            self.names.report(
                fqn,
                f"{source} has shape {tuple(entry.shape)}, state has {tuple(shape)}{rows}; build "
                f"the state with the sizes it was saved with{otherwise}",
                ProblemKind.SHAPE,
            )
            return False
        if entry.dtype is not dtype:
            self.names.report(
                fqn,
                f"{source} has dtype {entry.dtype}, state has {dtype}; convert the state with "
                f".to({entry.dtype}) before loading and back after it{casting}",
                ProblemKind.DTYPE,
            )
            return False
        return True

    def add_extra_state(
        self, fqn: str, optimizer: torch.optim.Optimizer, extra: dict[str, Any]
    ) -> None:
        """What the optimizer's class adds to its state dict."""
        names = self.names
        live, _ = split_tree(extra, fqn, [])
        place = differing_pickle(names.catalog.values.get(names.rename(fqn)), live)
        if place is not None and not names.is_skipped(fqn):
            names.report(
                f"{fqn}.{place}",
                "may be a pickle, which the optimizer's class would run, and differs from the live "
                f"one's; build it with the options that it was saved with{names.call.or_skip}",
            )
        self.add_tree(fqn, extra.copy, partial(set_extra_state, optimizer))

    def add_tree(
        self,
        fqn: str,
        read: Callable[[], Any],
        install: Callable[[Any], Any],
        *,
        in_place: bool = False,
    ) -> None:
        names = self.names
        if names.skip(fqn):
            return
        saved: tuple[str, Any] | None = (name := names.rename(fqn), {TENSOR_KEY: name})
        # A state dict that a module gave, or an import, may have a tensor where a tree is expected.
        is_tensor = fqn.endswith(EXTRA_STATE_KEY) and name in names.catalog.tensors
        if name in names.catalog.values or not is_tensor:
            saved = names.value(fqn)
        if saved is None:
            return
        live = read_state(fqn, read)
        tree = bind_tree(*saved, live, names, self.ranks, in_place=in_place)
        names.loaded_values.append(fqn)
        if in_place:
            tensors = [holding.pieces[0].fqn for holding in tree.holdings]
            names.loaded_tensors += [fqn + name.removeprefix(saved[0]) for name in tensors]
        self.holdings.extend(tree.holdings)
        self.steps.append(lambda: install(tree.build()))

    def add_values(self, leaves: Leaves) -> None:
        names = self.names
        fixed = _fixed_tuples(leaves)
        for slot in leaves.values:
            if names.skip(slot.fqn) or (saved := names.value(slot.fqn)) is None:
                continue
            if references(saved[1]):
                names.report(
                    slot.fqn,
                    "has tensors in the checkpoint and is a value in the state; put an object with "
                    "load_state_dict() there, or skip= it",
                )
            elif self.is_replaceable(slot, fixed) and self.are_known(slot, saved[1], slot.value):
                names.loaded_values.append(slot.fqn)
                self.steps.append(self.value_step(slot, saved[1]))
        for slot in leaves.per_rank:
            if self.is_replaceable(slot, fixed):
                self.add_per_rank(slot)
        # The last of all steps: the others say which items of a tuple are new.
        if leaves.tuples:
            self.steps.append(lambda: self.rebuild(leaves.tuples))

    def is_replaceable(self, slot: LocatedValue, fixed: set[int]) -> bool:
        """Whether `slot` can be given a new value; a problem when not."""
        if id(slot.place.container) not in fixed:
            return True
        self.names.report(
            slot.fqn,
            "is in a tuple that nothing can replace; pass the state as a dict or list",
            ProblemKind.UNSUPPORTED,
        )
        return False

    def are_known(self, slot: LocatedValue, value: Any, live: Any) -> bool:
        """Whether all leaves of a value can be made here; problems when not."""
        problems = unknown_leaves(value, live)
        for text in problems:
            self.names.report(slot.fqn, text)
        return not problems

    def value_step(self, slot: LocatedValue, value: Any) -> Callable[[], None]:
        """Set one value. Containers keep their identity: others may hold on to them."""
        live = slot.value
        # Made now: what cannot be made has to fail before anything is written.
        loaded = join_tree(value, _no_tensor, live)

        def step() -> None:
            if any(isinstance(live, kind) and isinstance(loaded, kind) for kind in (dict, set)):
                live.clear()
                live.update(loaded)
            elif isinstance(live, list) and isinstance(loaded, list):
                live[:] = loaded
            elif isinstance(live, deque) and (live.maxlen == getattr(loaded, "maxlen", -1)):
                live.clear()
                live.extend(loaded)
            else:
                self.replace(slot.place, loaded)

        return step

    def add_per_rank(self, slot: LocatedValue) -> None:
        names, fqn, marked = self.names, slot.fqn, slot.value
        if names.skip(fqn):
            return
        name, catalog = names.rename(fqn), names.catalog
        groups = group_values(catalog.values, name) if isinstance(marked, PerGroup) else []
        saved_by = {rank: own[name] for rank, own in enumerate(catalog.per_rank) if name in own}
        own: tuple[Any] | None
        if groups:
            own = self.own_of_group(fqn, groups, marked)
        elif saved_by:
            names.used.add(name)
            own = self.own_of(fqn, saved_by, marked)
        else:  # saved without a mark: one value for all ranks
            saved = names.value(fqn)
            own = None if saved is None else (saved[1],)
        live = _live_of(marked)
        if own is None or not self.are_known(slot, own[0], live):
            return
        # Given to the slot once all is loaded.
        names.loaded_values.append(fqn)
        value = join_tree(own[0], _no_tensor, live)
        if is_object(marked.value):
            self.steps.append(lambda: marked.value.load_state_dict(value))
        else:
            self.steps.append(lambda: self.replace(slot.place, replace(marked, value=value)))

    def own_of_group(
        self, fqn: str, saved: Sequence[GroupValue], marked: PerGroup
    ) -> tuple[Any] | None:
        """This group's value of what groups saved; None, and a problem, when there is none."""
        names = self.names
        names.used.update(one.fqn for one in saved)
        group = group_of(marked, self.ranks)
        if group is None:
            names.report(fqn, NOT_IN_GROUP, ProblemKind.PER_RANK)
            return None
        value = value_for(saved, group, len(self.ranks.global_ranks))
        if value is None and marked.on_reshard is None:
            names.report(
                fqn,
                f"was saved by groups {[list(one.group) for one in saved]} with different values, "
                f"and is loaded by group {list(group)}; say what it gets with PerGroup(..., "
                "on_reshard=fn), or leave it alone with skip=",
                ProblemKind.PER_RANK,
            )
            return None
        return value or self.reshard_marked(fqn, marked, [one.value for one in saved], group[0])

    def replace(self, place: Location, value: Any) -> None:
        """Set the item at `place`; of a tuple, when the tuple is made anew."""
        if isinstance(place.container, tuple):
            # Collected: a tuple with several loaded items is made anew once.
            self.new_items.setdefault(id(place.container), {})[place.key] = value
        else:
            place.container[place.key] = value

    def rebuild(self, tuples: Sequence[LocatedValue]) -> None:
        """Put new tuples in the place of those in which something changed, the innermost first."""
        for slot in reversed(tuples):
            new = self.new_items.get(id(slot.value))
            if new:
                items = [new.get(index, item) for index, item in enumerate(slot.value)]
                # Named tuples take their fields one by one, `_make` takes a sequence.
                make = getattr(type(slot.value), "_make", tuple)
                self.replace(slot.place, make(items))

    def own_of(self, fqn: str, saved_by: Mapping[int, Any], marked: PerRank) -> tuple[Any] | None:
        """This rank's value of what was saved per rank; None, and a problem, when there is none."""
        all_values = list(saved_by.values())
        saved_size, size = len(all_values), len(self.ranks.global_ranks)
        # Some ranks alone may have saved this value; then their number says nothing about whose.
        saved = range(next(iter(saved_by)), next(iter(saved_by)) + size)
        if list(saved_by) == list(saved) and saved in self.names.catalog.worlds:
            return (all_values[self.ranks.rank],)
        if marked.on_reshard is None:
            self.names.report(
                fqn,
                f"was saved per rank by {saved_size} ranks and is loaded by {size}; say which "
                "rank gets what with PerRank(..., on_reshard=fn), or leave it alone with skip=",
                ProblemKind.PER_RANK,
            )
            return None
        return self.reshard_marked(fqn, marked, all_values, self.ranks.rank)

    def reshard_marked(
        self, fqn: str, marked: PerRank | PerGroup, values: Sequence[Any], rank: int
    ) -> tuple[Any] | None:
        """What the user's function makes of `values`; None, and a problem, when it raises."""
        assert marked.on_reshard is not None
        live = _live_of(marked)
        if problems := [text for value in values for text in unknown_leaves(value, live)]:
            self.names.report(fqn, problems[0])
            return None
        values = [join_tree(value, _no_tensor, live) for value in values]
        try:
            return (marked.on_reshard(values, rank, len(self.ranks.global_ranks)),)
        except Exception as error:  # the user's function: reported with all that does not fit
            self.names.report(fqn, f"on_reshard raised {error!r}", ProblemKind.PER_RANK)
            return None

    def refuse_overlaps(self) -> None:
        """Raise InvalidState where two tensors would be loaded into the same memory."""
        memory = MemoryRanges()
        for whole in self.plain:
            dense = whole
            if self.strided:
                # Strided ones are compared element by element, below.
                dense = whole.only([n for n, f in enumerate(whole.fqns) if f not in self.strided])
            memory.add_dense(dense.fqns, dense.tensors, dense.addresses)
        for fqn, tensor in self.strided.items():
            memory.add(fqn, tensor)
        for holding in self.holdings:
            for piece in holding.pieces:
                memory.add(piece.fqn, local_view(holding, piece))
        if two := memory.overlapping():
            names = self.names
            live = {names.rename(fqn): fqn for fqn in names.loaded_tensors}
            one, other = (live.get(fqn, fqn) for fqn in two)
            raise InvalidState(
                f"{other}: shares memory with {one}, so that a load would write one over the "
                "other; make one of them a clone(), or leave it out of the state"
                + names.call.or_skip
            )

    def result(self, state: Any, described: Described, strict: Strict) -> Binding:
        names = self.names
        entries = _entries(state, names)
        left, not_asked = names.left(entries)
        if strict and not entries:
            self.warnings.append(
                "the state is empty, so nothing is loaded; to read a checkpoint without a state, "
                "call ckpt.open(url)"
            )
        problems = (*names.problems, *left.problems(names.call))
        report = Loaded(
            tensors=tuple(names.loaded_tensors),
            values=tuple(names.loaded_values),
            missing=tuple(p.fqn for p in problems if p.kind is ProblemKind.MISSING),
            unexpected=tuple(left.names),
            skipped=tuple(names.skipped),
            not_asked=not_asked,
            new=tuple(names.new),
        )
        plain, holdings, new_rows = self.plain, self.holdings, list[NewRows]()
        if names.resized:
            plain, holdings, new_rows = in_stored_rows(plain, holdings, names.resized)
        return Binding(
            plain,
            holdings,
            problems,
            tuple(fatal_texts(problems, strict=strict)),
            described,
            self.steps,
            report,
            len(names.missing_tensors),
            left,
            self.warnings,
            names.unmatched(),
            new_rows,
        )


def _is_sharded(leaves: Leaves, described: Described) -> bool:
    """Whether tensors of a state are parts of larger ones on this rank."""
    return any(is_dtensor(tensor) for _, tensor in leaves.tensors) or any(
        not source.owned.is_whole for source in described.params
    )


def _live_of(marked: PerRank | PerGroup) -> Any:
    return None if is_object(marked.value) else marked.value


def _entries(state: Any, names: Names) -> set[str]:
    """The top-level names of `state`, as the checkpoint would call them; {""} for a bare module."""
    if isinstance(state, dict):
        return set(map(names.rename, map(str, state))) if names.has_rename else set(map(str, state))
    if isinstance(state, (list, tuple)):
        return {names.rename(str(index)) for index in range(len(state))}
    return {""}


def _fixed_tuples(leaves: Leaves) -> set[int]:
    """Ids of the tuples that nothing can replace: the state itself, and tuples directly in it."""
    fixed: set[int] = set()
    for slot in leaves.tuples:  # outermost first, so a tuple's container has been decided before it
        if slot.place.container is None or id(slot.place.container) in fixed:
            fixed.add(id(slot.value))
    return fixed


def _no_tensor(fqn: str) -> Any:
    raise AssertionError(f"a reference to the tensor {fqn} in a value that was checked for them")
