"""Loading composites that live in a state: in place where their components fit, else replaced.

What is in trees of values (the state of optimizers and of objects) is made anew instead, see
`trees`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt.layout.composites import type_of
from ckpt.layout.descriptions import TYPE_KEY, shown_type
from ckpt.layout.holdings import tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.piece import Holding
from ckpt.layout.plain import Ranks
from ckpt.layout.tensor import global_shape
from ckpt.state.names import Names
from ckpt.state.trees import bind_tree
from ckpt.state.types import Problem, ProblemKind
from ckpt.state.values import references, renamed_tree, split_tree


class BoundComposite(NamedTuple):
    """Memory to fill, and what is to be done afterwards."""

    holdings: list[Holding]
    steps: list[Callable[[], None]]


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
    if any(described[key] != live[key] for key in (TYPE_KEY, "dtype", "shape")):
        names.report(
            ProblemKind.SHAPE,
            fqn,
            f"{names.call.source} has a {shown_type(described)}, state has a {shown_type(live)}; "
            f"build the state with the tensor that was saved{names.call.or_skip}",
        )
        return None
    used = references(described)
    if absent := [name for name in used if name not in names.catalog.tensors]:
        names.report(
            ProblemKind.VALUE,
            fqn,
            f"its component {absent[0]} is not in the {names.call.source}, which is damaged",
        )
        return None
    names.loaded_tensors.append(fqn)
    entries = names.catalog.tensors
    if _unnamed(described) == _unnamed(live) and all(
        entries[saved_fqn].dtype is component.dtype
        and entries[saved_fqn].shape == global_shape(component)
        for saved_fqn, (_, component) in zip(used, components, strict=True)
    ):
        holdings = [
            holding
            for saved_fqn, (_, component) in zip(used, components, strict=True)
            for holding in tensor_holdings(saved_fqn, component, kind, ranks)
        ]
        return BoundComposite(holdings, [])
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
    there, here = (list(one["components"]) for one in (described, live))
    if (type_ is None or type_.replace is None) and there != here:
        names.report(
            ProblemKind.VALUE,
            fqn,
            f"consists of {there} in the {names.call.source} and of {here} in the state: the class "
            f"of {live[TYPE_KEY]} has changed; load with the version that saved it"
            f"{names.call.or_skip}",
        )
        return None
    if type_ is None or type_.replace is None:
        names.report(
            ProblemKind.SHAPE,
            fqn,
            f"its components have other sizes in the {names.call.source}, or its context differs: "
            f"{described['context']!r:.200} there, {live['context']!r:.200} in the state; build "
            f"the state with the tensor that was saved{names.call.or_skip}",
        )
        return None
    replace = type_.replace
    tree = bind_tree(saved_name, described, None, names, ranks)

    def step() -> None:
        new = tree.build().to(tensor.device)
        with torch.no_grad():
            replace(tensor, new)

    return BoundComposite(tree.holdings, [step])


def _unnamed(described: dict[str, Any]) -> Any:
    """A description without the names of its components."""
    return renamed_tree(described, lambda _: "")
