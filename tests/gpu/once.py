"""One scenario in this very process, on one rank: what a sanitizer can follow in a minute.

python -m tests.gpu.once plain [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.real import compared
from tests.gpu.setups import SETUPS, nothing_is_left_out
from tests.streams.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SCENARIOS)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    torch.manual_seed(0)
    setup = SETUPS["one"](given.device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            setup.backend, init_method=f"file://{Path(folder) / 'one'}", rank=0, world_size=1
        )
        nothing_is_left_out()
        scenario = SCENARIOS[given.name]
        problems = compared("ours", scenario.surfaces, given.name, given.device)
        dist.destroy_process_group()
    print("\n".join(problems) or f"{given.name}: as on the CPU")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
