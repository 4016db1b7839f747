"""One rank of a job that torchrun starts: `torchrun ... -m tests.cluster.elastic ORDER`.

ORDER is the JSON of the fields of a `Start` that all ranks share, with `folder` for the histories,
and `host`, the name of this one. A life is one round of the rendezvous.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.cluster.agent import NearStart, Start, live, noting


def main(order: dict[str, Any]) -> None:
    """Join the round, and train until the job is ended, or another rank or host comes or goes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["patience_seconds"]))
    rank, size = dist.get_rank(), dist.get_world_size()
    number = torch.tensor([time.monotonic_ns() // 1000])  # the clock that all hosts share
    dist.broadcast(number, 0)
    life, near = int(number), order.pop("near")
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, order.pop("host"))
    history = f"{order.pop('folder')}/life{life}-rank{rank}.history"
    note = noting(history, life=life, rank=rank)
    if rank == 0:
        names = sorted(set(hosts))
        note(event="started", rank=-1, ranks=size, hosts=names, ends="any", near=near["replicas"])
    note(event="began", clock=time.time())
    facts: dict[str, Any] = {"rank": rank, "size": size, "address": "", "port": 0, "life": life}
    try:
        live(Start(**order, **facts, history=history, near=NearStart(**near)), note)
    except Exception as error:  # torchrun begins anew; the checker looks at what it was
        note(event="ended", error=type(error).__name__, text=str(error)[:400])
        os._exit(1)  # the connections of gloo do not end by themselves
    note(event="ended", error="")
    dist.barrier()  # a rank that leaves first would break what the others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
