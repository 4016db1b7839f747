"""What older versions of torch cannot do themselves, as marks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

needs_uneven_strided_shards = pytest.mark.skipif(
    TORCH < (2, 7),
    reason="torch 2.6 refuses FSDP2 over tensor parallel of uneven sizes, and on CPU",
)


ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
"""For `dcp.save` and `dcp.load` of one process; torch 2.6 sees itself that there is no group."""


def torch_shards_on_cpu() -> bool:
    """Whether torch's own `fully_shard` runs on the CPU: torch 2.6's asks streams for events."""
    return hasattr(torch.cpu.Stream, "record_event")


def cut_here(full: torch.Tensor, mesh: Any, placements: Any) -> Any:
    """`distribute_tensor` of a tensor that each rank has: nothing is sent."""
    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, starts = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    part = full.new_empty(0)  # of a rank outside of the mesh
    if mesh.get_coordinate() is not None:
        ends = map(sum, zip(starts, shape, strict=True))
        part = full[tuple(map(slice, starts, ends))]
    options: Any = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    return DTensor.from_local(part.contiguous(), mesh, placements, **options)


def skip_what_torch_cannot() -> None:
    """In a rank: tests that call torch's own `fully_shard` are skipped where it does not run."""

    @functools.wraps(torch.distributed.fsdp.fully_shard)
    def skips(*args: Any, **kwargs: Any) -> None:
        pytest.skip("torch's own fully_shard does not run on the CPU here")

    if not torch_shards_on_cpu():
        setattr(torch.distributed.fsdp, "fully_shard", skips)  # noqa: B010, it is overloaded
