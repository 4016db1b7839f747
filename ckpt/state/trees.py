"""Loading trees of values with tensors among them: the state of objects, extra state,
hyperparameters; and composites that live in a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ckpt.errors import Mismatch
from ckpt.layout.composites import type_named, type_of, unknown_types, zeros
from ckpt.layout.descriptions import TYPE_KEY, descriptions, shown_type
from ckpt.layout.holdings import holdings_of, tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.likeness import zeros_beside, zeros_like
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.layout.tensor import global_shape, memory_of
from ckpt.state.names import Names
from ckpt.state.types import Problem, ProblemKind, TensorEntry
from ckpt.state.values import (
    TENSOR_KEY,
    is_reference,
    join_tree,
    references,
    renamed_tree,
    split_tree,
    unknown_leaves,
)


class BoundTree(NamedTuple):
    """Memory to fill, and the tree that it then belongs to."""

    holdings: list[Holding]
    build: Callable[[], Any]


def bind_tree(
    saved: str,
    value: Any,
    live: Any,
    names: Names,
    ranks: Ranks,
    *,
    in_place: bool = False,
    beside: Owned | None = None,
) -> BoundTree:
    """How to load the tree `value`, which the checkpoint calls `saved`, structure and all.

    Its tensors are fresh, laid out like those that the `live` tree has in the same places, or, with
    `in_place`, are those tensors where shape and dtype fit. Those that the live tree lacks are laid
    out as the state of the parameter `beside`.
    """
    # Problems of the live tree do not count here: it is replaced as a whole.
    live_tensors = dict(split_tree(live, saved, [])[1])
    tensors: dict[str, torch.Tensor] = {}
    again: dict[str, Callable[[], torch.Tensor]] = {}
    holdings: list[Holding] = []
    unknown = unknown_types(value)
    for text in (*unknown, *unknown_leaves(value, live)):
        names.report(saved, text)
    shards = {} if unknown else _shards(value, live_tensors, names, saved, beside)
    # Tensors shaped like the parameter of which this rank has a flat shard are shards too.
    flat = beside if beside is not None and beside.is_flat_shard else None
    for fqn in references(value):
        entry = names.catalog.tensors.get(fqn)
        if entry is None:
            names.report(saved, f"refers to the tensor {fqn}, which the checkpoint lacks")
            continue
        names.used.add(fqn)
        if flat is not None and entry.shape and entry.shape == flat.views[0].pieces[0].global_shape:
            tensors[fqn] = shard = zeros_like(flat, entry.dtype, local=True)
            of_member = dict.fromkeys(flat.fqns, fqn)
            holdings += holdings_of(flat, shard, of_member.get, kind=Kind.OPTIMIZER)
            continue
        target = live_tensors.get(fqn)
        if fqn in shards:
            target = shards[fqn]
        elif target is None or not fits(target, entry):
            device = None if target is None else target.device
            if target is None and beside is not None and beside.template is not None:
                target = _laid_out(beside, entry)
            else:
                target = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        elif in_place:
            target, again[fqn] = fill_once(target, names)
        else:
            # The live one keeps its value until its owner gets the whole tree.
            target = torch.zeros_like(target)
        tensors[fqn] = target
        try:
            holdings += tensor_holdings(fqn, target, Kind.OTHER, ranks)
        except UnsupportedTensor as refused:
            names.problems.append(Problem(ProblemKind.UNSUPPORTED, fqn, refused.problem))
    names.problems += [
        Problem(ProblemKind.VALUE, saved, text) for text in _not_made_of(value, tensors)
    ]

    def loaded(fqn: str) -> torch.Tensor:
        return again[fqn]() if fqn in again else tensors[fqn]

    return BoundTree(holdings, lambda: join_tree(value, loaded, live))


BoundComposite = tuple[list[Holding], list[Callable[[], None]]]
"""Memory to fill, and what is to be done afterwards."""


def bind_composite(
    fqn: str, tensor: torch.Tensor, kind: Kind, names: Names, ranks: Ranks
) -> BoundComposite | None:
    """How to load the composite `fqn` of the state; None, and a problem, when that is not
    possible.
    """
    saved = names.description(fqn)
    if saved is None:
        return None
    problems: list[str] = []
    live, components = split_tree(tensor, fqn, problems)
    if problems:
        names.problems += [Problem(ProblemKind.UNSUPPORTED, fqn, text) for text in problems]
        return None
    saved_name, described = saved
    blocks = "" if names.row_rule(fqn) is None else ", and resize= changes plain tensors alone"
    if any(described[key] != live[key] for key in (TYPE_KEY, "dtype", "shape")):
        names.report(
            fqn,
            f"{names.call.source} has a {shown_type(described)}, state has a {shown_type(live)}"
            f"{blocks}; build the state with the tensor that was saved{names.call.or_skip}",
            ProblemKind.SHAPE,
        )
        return None
    used = references(described)
    if absent := [name for name in used if name not in names.catalog.tensors]:
        names.report(
            fqn, f"its component {absent[0]} is not in the {names.call.source}, which is damaged"
        )
        return None
    names.loaded_tensors.append(fqn)
    entries = names.catalog.tensors
    if _unnamed(described) == _unnamed(live) and all(
        fits(component, entries[saved_fqn])
        for saved_fqn, (_, component) in zip(used, components, strict=True)
    ):
        holdings = [
            holding
            for saved_fqn, (_, component) in zip(used, components, strict=True)
            for holding in tensor_holdings(saved_fqn, component, kind, ranks)
        ]
        type_ = type_of(tensor)
        filled = None if type_ is None else type_.filled
        return holdings, [] if filled is None else [partial(filled, tensor)]
    return _replaced(fqn, tensor, (saved_name, described), live, names, ranks)


def _replaced(
    fqn: str,
    tensor: torch.Tensor,
    saved: tuple[str, dict[str, Any]],
    live: dict[str, Any],
    names: Names,
    ranks: Ranks,
) -> BoundComposite | None:
    saved_name, described = saved
    type_ = type_of(tensor)
    replace = None if type_ is None else type_.replace
    there, here = (list(one["components"]) for one in (described, live))
    if replace is None and there != here:
        names.report(
            fqn,
            f"consists of {there} in the {names.call.source} and of {here} in the state: the class "
            f"of {live[TYPE_KEY]} has changed; load with the version that saved it"
            f"{names.call.or_skip}",
        )
        return None
    if replace is None:
        names.report(
            fqn,
            f"its components have other sizes in the {names.call.source}, or its context differs: "
            f"{described['context']!r:.200} there, {live['context']!r:.200} in the state; build "
            f"the state with the tensor that was saved{names.call.or_skip}",
            ProblemKind.SHAPE,
        )
        return None
    tree = bind_tree(saved_name, described, None, names, ranks)

    def step() -> None:
        # Without a live tree its components were made on the default device.
        new = tree.build().to(tensor.device)
        with torch.no_grad():
            replace(tensor, new)

    return tree.holdings, [step]


def _unnamed(described: dict[str, Any]) -> Any:
    """A description without the names of its components."""
    return renamed_tree(described, lambda _: "")


def fill_once(live: torch.Tensor, names: Names) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """What to fill for a live tensor, and what then takes its place: itself, but for one that is
    filled under another name already. That one gets memory of its own, unless both are equal.
    """
    memory = memory_of(live)
    place = (memory.device, memory.data_ptr())
    # Empty tensors may all be at address 0, and share nothing.
    if place not in names.filled or not memory.numel():
        names.filled.add(place)
        return live, lambda: live
    fresh = torch.zeros_like(live)
    return fresh, lambda: live if torch.equal(memory, memory_of(fresh)) else fresh


def _not_made_of(value: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with composites in `value` whose class, of another version than that which was
    saved, consists of other components: found before anything is read.
    """
    problems: dict[str, None] = {}
    for described in descriptions(value):
        kind = type_named(str(described[TYPE_KEY]))
        if kind is None or not kind.is_wrapper or not tensors.keys() >= {*references(described)}:
            continue
        try:
            join_tree(described, tensors.__getitem__)
        except Mismatch as refused:
            # Not its other checks, which may be about numbers, and those are not read yet.
            if isinstance(refused.__cause__, (KeyError, TypeError, IndexError)):
                problems |= dict.fromkeys(refused.problems)
    return list(problems)


def fits(target: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether `target` has the dtype and shape of a tensor of the checkpoint, as far as it knows:
    -1 is a size that a rank without elements cannot tell.
    """
    shape = global_shape(target)
    is_alike = len(shape) == len(entry.shape) and all(
        size in (-1, saved) for size, saved in zip(shape, entry.shape, strict=True)
    )
    return is_alike and target.dtype is entry.dtype


def _shards(
    value: Any, live: Mapping[str, torch.Tensor], names: Names, saved: str, beside: Owned | None
) -> dict[str, torch.Tensor]:
    """Fresh parts, by name, of the components of those composites in `value` that are to be sharded
    like the parameter `beside`, and of which the live tree has none that fit.
    """
    template = None if beside is None else beside.template
    made: dict[str, torch.Tensor] = {}
    if template is None:
        return made
    for described in descriptions(value):
        entries = {fqn: names.catalog.tensors.get(fqn) for fqn in references(described)}
        fit = [e and fqn in live and fits(live[fqn], e) for fqn, e in entries.items()]
        # What has another shape is no shard of the parameter; `bind_tree` reports what is absent.
        if tuple(described["shape"]) != tuple(template.shape) or None in entries.values():
            continue
        if not all(fit):
            try:
                made |= _sharded_like(template, described, names)
            except UnsupportedTensor as refused:
                names.report(
                    saved,
                    f"is a {shown_type(described)}, which cannot be cut like its parameter on this "
                    f"rank: {refused.problem}; load on a number of ranks whose shards end where "
                    f"blocks end{names.call.or_skip}",
                )
    return made


def _sharded_like(
    template: torch.Tensor, described: Mapping[str, Any], names: Names
) -> dict[str, torch.Tensor]:
    fqns = {}
    for name, item in described["components"].items():
        if not is_reference(item):
            raise UnsupportedTensor(f"its component {name} consists of others")
        fqns[name] = item[TENSOR_KEY]
    entries = {name: names.catalog.tensors[fqn] for name, fqn in fqns.items()}
    shapes = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    parts = zeros(described, shapes, template)
    return {fqns[name]: part for name, part in parts.items()}


def _laid_out(beside: Owned, entry: TensorEntry) -> torch.Tensor:
    """Zeros for state in a container: like the parameter where it has its shape, else whole."""
    if not entry.shape:
        return torch.zeros((), dtype=entry.dtype, device=beside.local.device)
    if entry.shape == beside.views[0].pieces[0].global_shape:
        return zeros_like(beside, entry.dtype, local=False)
    return zeros_beside(beside, entry.shape, entry.dtype)
