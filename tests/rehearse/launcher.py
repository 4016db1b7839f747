"""Starts ranks as torchrun does, in half of its time: they are forks of a process that has torch.

python tests/rehearse/launcher.py --nproc-per-node RANKS SCRIPT [argument ...]
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence

import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401  # the scripts need it


def main(ranks: int, script: str, arguments: Sequence[str]) -> int:
    """Run the script on `ranks` ranks; all end with the first that fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        children = [_rank(rank, ranks, port, [script, *arguments]) for rank in range(ranks)]
        # After the forks: it has a thread.
        store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=server.detach())
    failed = 0
    while children and not failed:
        pid, failed = os.wait()
        children.remove(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    del store
    return int(failed != 0)


def _rank(rank: int, ranks: int, port: int, argv: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in job.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the launcher's
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        os._exit(0)
    return pid


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
