"""What the modules of a state own: parameters by the objects that optimizers know, buffers, ties.

Saving and loading start from the same description, made by the adapters in `ckpt.layout` from the
sharded memory itself; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import torch
from torch import nn

from ckpt.layout.holdings import holdings_of
from ckpt.layout.kind import Kind
from ckpt.layout.modules import ModuleLayout, describe_module, describe_tensor
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.plain import Ranks, UnsupportedTensor, with_copies
from ckpt.layout.region import Shape
from ckpt.state.values import join
from ckpt.state.walk import Leaves


class LogicalTensor(NamedTuple):
    """A logical tensor that a parameter object stands for; a flat parameter stands for several."""

    fqn: str
    global_shape: Shape
    dtype: torch.dtype


class DescribedTensor(NamedTuple):
    """A parameter object and the module of the state, at `path`, that holds it.

    `members` are named as on that module, also those that this rank holds nothing of.
    """

    path: str
    owned: Owned
    members: tuple[LogicalTensor, ...]

    @property
    def fqns(self) -> tuple[str, ...]:
        """Full names of the members."""
        return tuple(join(self.path, member.fqn) for member in self.members)

    def holdings(self, kind: Kind) -> Iterator[Holding]:
        """What this rank has of it, under full names; live memory."""
        names = self.owned, self.owned.local, lambda fqn: join(self.path, fqn)
        return holdings_of(*names, kind=kind)


@dataclass(frozen=True, slots=True)
class Described:
    """All modules of a state. `by_param` is keyed by the id of an object that optimizers know.

    `composites` are by name; `components` has, by the names that `params` and `buffers` have, the
    composite that each belongs to.
    """

    params: list[DescribedTensor] = field(default_factory=list)
    by_param: dict[int, DescribedTensor] = field(default_factory=dict)
    buffers: list[DescribedTensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_states: list[tuple[str, nn.Module]] = field(default_factory=list)
    layouts: list[ModuleLayout] = field(default_factory=list)
    composites: dict[str, torch.Tensor] = field(default_factory=dict)
    components: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def tied(self) -> dict[str, str]:
        """The aliases, and further names of composites, of which `aliases` has the components."""
        return self.aliases | {
            alias.removesuffix(stored.removeprefix(fqn)): fqn
            for alias, stored in self.aliases.items()
            if (fqn := self.components.get(stored)) is not None
        }

    def tensors(self) -> Iterator[tuple[DescribedTensor, Kind]]:
        """Parameters, then buffers, each with what it is."""
        yield from zip(self.params, repeat(Kind.PARAMETER))
        yield from zip(self.buffers, repeat(Kind.BUFFER))


def describe_modules(leaves: Leaves, ranks: Ranks, *, loading: bool) -> Described:
    """The modules of a state, each tensor under one name; more names for one tensor are aliases."""
    described = Described()
    for path, module in leaves.modules:
        layout = describe_module(module, ranks.below(path))
        described.layouts.append(layout)
        hooks = layout.load_hooks if loading else layout.save_hooks
        described.problems.extend(_below(path, problem) for problem in (*layout.problems, *hooks))
        _add_module(described, path, layout, ranks)
    return described


def _add_module(described: Described, path: str, layout: ModuleLayout, ranks: Ranks) -> None:
    sources = {id(owned): _source(path, owned, ranks) for owned in layout.params}
    for source in sources.values():
        _add_once(described, described.params, source)
    # An optimizer may know a parameter by another object than the one that is stored.
    for key, owned in layout.owned_by_param.items():
        described.by_param.setdefault(key, sources.get(id(owned)) or _source(path, owned, ranks))
    for owned in layout.buffers:
        _add_once(described, described.buffers, _source(path, owned, ranks))
    for tied, stored in layout.aliases.items():
        # What this module stores may itself be tied to a module described before it.
        full = join(path, stored)
        described.aliases[join(path, tied)] = described.aliases.get(full, full)
    for composite in layout.composites.values():
        fqn = join(path, composite.fqn)
        described.composites[fqn] = composite.tensor
        described.components.update({join(path, name): fqn for name in composite.components})
    known = {id(module): fqn for fqn, module in described.extra_states}
    for fqn, module in layout.extra_states.items():
        first = known.setdefault(id(module), join(path, fqn))
        if first == join(path, fqn):
            described.extra_states.append((first, module))
        else:
            described.aliases[join(path, fqn)] = first


def _add_once(
    described: Described, tensors: list[DescribedTensor], source: DescribedTensor
) -> None:
    """Add `source` if it is new; of a tensor that an earlier module has, the names are aliases."""
    known = described.by_param.setdefault(id(source.owned.param), source)
    if known is source:
        tensors.append(source)
        return
    for again, first in zip(source.fqns, known.fqns, strict=True):
        if again != first:
            described.aliases[again] = first


def adopt_parameters(described: Described, leaves: Leaves, ranks: Ranks) -> None:
    """Let bare parameters of the state be known to its optimizers under their own names, and those
    of modules that only an optimizer brings. A plain tensor is one if an optimizer has it.
    """
    for module in leaves.owners:
        for key, owned in describe_module(module, ranks).owned_by_param.items():
            described.by_param.setdefault(key, _source("", owned, ranks))
    groups = [group for _, one in leaves.optimizers for group in one.param_groups]
    known = {id(param) for group in groups for param in group["params"]} if leaves.tensors else ()
    for fqn, tensor in leaves.tensors:
        is_param = isinstance(tensor, nn.Parameter) or id(tensor) in known
        if is_param and id(tensor) not in described.by_param:
            try:
                owned = describe_tensor(fqn, tensor, ranks)
            except UnsupportedTensor:
                continue  # reported when the tensor itself is described
            described.by_param[id(tensor)] = _source("", owned, ranks)


def _source(path: str, owned: Owned, ranks: Ranks) -> DescribedTensor:
    owned = with_copies(owned, lambda fqn: join(path, fqn), ranks)
    return DescribedTensor(path, owned, members_of(owned))


def members_of(owned: Owned) -> tuple[LogicalTensor, ...]:
    """The logical tensors that `owned` has parts of, in the order in which they lie in memory."""
    pieces = [piece for view in owned.views for piece in view.pieces]
    # A member that lies in several pieces is one logical tensor.
    return tuple(dict.fromkeys([LogicalTensor(p.fqn, p.global_shape, p.dtype) for p in pieces]))


def _below(path: str, problem: str) -> str:
    """A problem of the module at `path`, which calls itself "the module", under full names."""
    if not path:
        return problem
    own = problem.removeprefix("the module")
    return f"{path}.{problem}" if own == problem else f"{path}{own}"
