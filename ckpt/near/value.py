"""What a caller of a Checkpointer says of near checkpoints: where, how often, how many copies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, SupportsIndex

from ckpt.commit.names import plain_int
from ckpt.service.policies import EverySteps, SavePolicy
from ckpt.service.tiers import TierSaves, TierValue
from ckpt.wings import wing

REPLICAS_MAX = 8
PARITY_MAX = 16
EVERY_DEFAULT: SavePolicy = EverySteps(20)


@dataclass(frozen=True)
class Near(TierValue):
    """Newer checkpoints, on the hosts themselves: in memory, or on a local disk.

    `path` is a directory of each host, such as one in /dev/shm, which outlives the process and not
    the host; ranks of a host share it, and so may several jobs. `every` says how often, by the step
    alone. A host keeps two states of its ranks there, which must fit: into `bytes_max` as well.

    A Checkpointer takes one of these, or a list of tiers, each with its own period: such as memory
    every 5 steps and a disk every 50.

    Copies of them lie on `replicas` other hosts, two states each, so that as many hosts may be
    lost at once; a near checkpoint counts when all copies are whole. That takes `replicas + 1`
    hosts; a training that continues with fewer makes as many copies as it can. With `rack`, a name
    that hosts of one rack have in common, copies go to different racks.

    With `parity=4` instead, hosts keep the XOR of others' files: a quarter of a state in place of
    one, so that of each group of 5 hosts one may be lost. That takes `parity + 1` hosts.

    Each host serves its directory to the others, at `address` or at the address that the job uses,
    to those who have a token that only its ranks know. With `certificate`, the path of a PEM file
    with a key and its certificate, the same on all hosts, what is sent is encrypted.

    Where the root is encrypted, so are the files in `path` and their copies, with the root's key.
    """

    path: str | os.PathLike[str]
    every: SavePolicy = EVERY_DEFAULT
    bytes_max: SupportsIndex | None = None
    replicas: SupportsIndex = 0
    rack: str = ""
    address: str = ""
    certificate: str | os.PathLike[str] = ""
    parity: SupportsIndex = 0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise TypeError(f"Near({self.path!r}): expected the path of a directory")
        if not isinstance(self.every, SavePolicy) or self.every.needs_clock:
            raise ValueError(
                f"Near(every={self.every!r}): expected a policy by the step alone, such as "
                "ckpt.EverySteps(20): near saves are too frequent for ranks to agree on each"
            )
        object.__setattr__(self, "bytes_max", plain_int(self.bytes_max))
        object.__setattr__(self, "replicas", replicas := plain_int(self.replicas))
        if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
            raise ValueError(
                f"Near(replicas={self.replicas!r}): expected the number of other hosts that keep "
                f"copies, 0 to {REPLICAS_MAX}"
            )
        object.__setattr__(self, "parity", parity := plain_int(self.parity))
        if type(parity) is not int or not (parity == 0 or 2 <= parity <= PARITY_MAX):
            raise ValueError(
                f"Near(parity={self.parity!r}): expected 0, or 2 to {PARITY_MAX} for groups of 3 "
                f"to {PARITY_MAX + 1} hosts; for groups of two, replicas=1 is the same"
            )
        if parity and replicas:
            raise ValueError(
                f"Near(replicas={replicas}, parity={parity}): expected one of them; parity=4 "
                "survives one lost host of 5 for a quarter of a state, replicas=1 one for a state"
            )
        for name in ("rack", "address"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"Near({name}={value!r}): expected a string")
        if not isinstance(self.certificate, str | os.PathLike):
            raise TypeError(f"Near(certificate={self.certificate!r}): expected the path of a file")

    def saves(self, *how: Any) -> TierSaves:
        made: TierSaves = wing("near.training").NearTraining(self, *how)
        return made
