"""Loading trees of values with tensors among them: the state of objects, extra state,
hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ckpt.layout.holdings import tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.likeness import zeros_beside, zeros_like
from ckpt.layout.piece import Holding, Owned
from ckpt.layout.plain import Ranks, UnsupportedTensor
from ckpt.state.composites import unknown_types
from ckpt.state.names import Names
from ckpt.state.types import Problem, ProblemKind, TensorEntry
from ckpt.state.values import join_tree, references, split_tree


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
    holdings: list[Holding] = []
    for text in unknown_types(value):
        names.report(ProblemKind.VALUE, saved, text)
    for fqn in references(value):
        entry = names.catalog.tensors.get(fqn)
        if entry is None:
            names.report(
                ProblemKind.VALUE, saved, f"refers to the tensor {fqn}, which the checkpoint lacks"
            )
            continue
        names.used.add(fqn)
        target = live_tensors.get(fqn)
        if target is None or tuple(target.shape) != entry.shape or target.dtype is not entry.dtype:
            device = None if target is None else target.device
            if target is None and beside is not None and beside.template is not None:
                target = _laid_out(beside, entry)
            else:
                target = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        elif not in_place:
            # The live one keeps its value until its owner gets the whole tree.
            target = torch.zeros_like(target)
        tensors[fqn] = target
        try:
            holdings += tensor_holdings(fqn, target, Kind.OTHER, ranks)
        except UnsupportedTensor as refused:
            names.problems.append(Problem(ProblemKind.UNSUPPORTED, fqn, refused.problem))
    return BoundTree(holdings, lambda: join_tree(value, tensors.__getitem__, live))


def _laid_out(beside: Owned, entry: TensorEntry) -> torch.Tensor:
    """Zeros for state in a container: like the parameter where it has its shape, else whole."""
    if not entry.shape:
        return torch.zeros((), dtype=entry.dtype, device=beside.local.device)
    if entry.shape == beside.views[0].pieces[0].global_shape:
        return zeros_like(beside, entry.dtype, local=False)
    return zeros_beside(beside, entry.shape, entry.dtype)
