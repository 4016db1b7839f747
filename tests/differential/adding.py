"""Sums over ranks in the order of ranks, on both sides.

gloo adds up in an order that depends on what else is in the buffer, and so on how an engine packs
its gradients. With sums that depend on their terms alone both sides compute the same bits, and
values can be compared without a tolerance for noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

__all__ = ["sums_in_order"]


class _Done:
    """The work of a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _reduced(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """Every rank's tensor, added up from the first rank on; for an average divided by the ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total if op == dist.ReduceOp.SUM else total / len(parts)


@contextmanager
def sums_in_order() -> Iterator[None]:
    """Inside, torch.distributed's all-reduce and reduce-scatter add up from the first rank of the
    group on. Other operations are as they were.
    """
    names = [
        one for one in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, one)
    ]
    all_reduce, reduce_scatter = dist.all_reduce, getattr(dist, names[0])

    def reduced(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return all_reduce(tensor, op, group, async_op)
        with torch.no_grad():
            tensor.copy_(_reduced(tensor, op, group))
        return _Done() if async_op else None

    def scattered(
        output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return reduce_scatter(output, input, op, group, async_op)
        parts = _reduced(input, op, group).view(-1).split(output.numel())
        with torch.no_grad():
            output.copy_(parts[dist.get_rank(group)].view_as(output))
        return _Done() if async_op else None

    with ExitStack() as patches:
        for name, function in (("all_reduce", reduced), *((one, scattered) for one in names)):
            patches.enter_context(mock.patch.object(dist, name, function))
        yield
