"""Runs a program whose library shards models on accelerators alone, with the CPU in their place.

python -m tests.judges.as_accelerator PROGRAM ARGUMENT ...
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from typing import Any

import torch


def have_accelerate_shard() -> None:
    """Accelerate decides for FSDP on ranks with accelerators; on CPUs it takes DDP."""
    from accelerate import state
    from accelerate.utils import DistributedType

    original = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        if named.get("fsdp_plugin") is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = named["fsdp_plugin"]
            self.device = torch.device("cpu")  # FSDP1 takes no number of a CPU

    state.AcceleratorState.__init__ = init


if __name__ == "__main__":
    if find_spec("accelerate"):
        have_accelerate_shard()
    if find_spec("torchtitan"):
        from tests.wild.titan import stand_in_for_a_gpu

        stand_in_for_a_gpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
