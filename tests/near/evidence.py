"""What hosts can prove, judged from their folders alone: the model that schedules are checked by.

Nothing of `ckpt.near` is used here. A record is the head that stands in it as JSON, a file is whole
when nobody has damaged it, and the rules are those of FORMAT.md, "Near tiers".
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

_HEAD = re.compile(rb'\{"after_slot".*?\}')
# By attempt and number: what a record says, and the hosts that have it.
Heads = dict[tuple[str, int], tuple[dict[str, int | str], set[int]]]
_FILE = re.compile(r"rank(\d{5})-\d{3}\.safetensors")


_PARITY = re.compile(r"rank\d{5}-parity\.safetensors")


class Member(NamedTuple):
    """A host of a parity group, -1 for one that is gone, and the ranks whose files it had.

    `is_whole`: these files and its parity are there.
    """

    host: int
    ranks: frozenset[int]
    is_whole: bool


Groups = tuple[tuple[Member, ...], ...]


def rebuilds(groups: Groups, rank: int, hosts: Collection[int]) -> bool:
    """Whether `hosts` can make the files of a rank from those of all other hosts of its group."""
    return any(
        rank in lost.ranks
        and all(one.is_whole and one.host in hosts for one in group if one is not lost)
        for group in groups
        for lost in group
    )


class Proof(NamedTuple):
    """A near checkpoint that all its files prove: those of each rank are on some host.

    `homes[rank]` are hosts with the files of a rank, `recorded` those that have the record.
    `is_damaged` where that takes a file whose bytes were changed by somebody.
    """

    epoch: int
    number: int
    step: int
    attempt: str
    after_slot: int
    homes: tuple[frozenset[int], ...]
    recorded: frozenset[int]
    is_damaged: bool = False
    groups: Groups = ()

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.number


@dataclass(frozen=True)
class Promise:
    """A near checkpoint that was acknowledged, and where it lay then, as far as nothing has
    happened to these places since.
    """

    epoch: int
    number: int
    attempt: str
    homes: tuple[frozenset[int], ...]
    recorded: frozenset[int]
    has_lost: bool = False  # some of its files somewhere, since then
    groups: Groups = ()

    def is_due(self, hosts: Collection[int]) -> bool:
        """Whether these hosts must be able to prove it."""
        return bool(self.recorded & {*hosts}) and all(
            home & {*hosts} or rebuilds(self.groups, rank, hosts)
            for rank, home in enumerate(self.homes)
        )

    def without(self, host: int, rank: int | None = None) -> Promise:
        """After all of a host, or there only the files of `rank`, may be gone."""
        has_lost = self.has_lost or any(
            host in home and rank in (None, number) for number, home in enumerate(self.homes)
        )
        homes = tuple(
            home - {host} if rank in (None, number) else home
            for number, home in enumerate(self.homes)
        )
        return replace(self.without_parity(host), homes=homes, has_lost=has_lost)

    def without_parity(self, host: int) -> Promise:
        """After parity of a host was damaged, or files of it."""
        groups = tuple(
            tuple(one._replace(is_whole=one.is_whole and one.host != host) for one in group)
            for group in self.groups
        )
        return replace(self, groups=groups)

    def without_record(self, host: int) -> Promise:
        return replace(self, recorded=self.recorded - {host})


@dataclass
class Hosts:
    """The folders of all hosts, and what was damaged in them: host and path below it."""

    top: Path
    damaged: set[tuple[int, str]] = field(default_factory=set)
    _kept: dict[int, tuple[Path, set[tuple[int, str]]]] = field(default_factory=dict)

    def proofs(self, root: str, epoch: int, hosts: Collection[int]) -> list[Proof]:
        """What `hosts` prove of an epoch of a root, newest first."""
        heads = self._heads(root, epoch, hosts)
        proofs = [self._proof(head, where, root, hosts) for head, where in heads.values()]
        whole = [proof for proof in proofs if proof is not None]
        return sorted(whole, key=lambda proof: proof.order, reverse=True)

    def has_records(self, root: str, epoch: int, hosts: Collection[int]) -> bool:
        """Whether `hosts` have a record of an epoch of a root, whatever became of its files."""
        return bool(self._heads(root, epoch, hosts))

    def _heads(self, root: str, epoch: int, hosts: Collection[int]) -> Heads:
        heads: Heads = {}
        for host in sorted(set(hosts)):
            for path in self._below(host, root, "records"):
                try:
                    match = _HEAD.search(path.read_bytes())
                except FileNotFoundError:
                    continue  # another rank drops an older one
                if match is None or (host, self._name(host, path)) in self.damaged:
                    continue
                head = json.loads(match[0])
                if head["epoch"] == epoch:
                    key = (head["attempt"], head["number"])
                    heads.setdefault(key, (head, set()))[1].add(host)
        return heads

    def _proof(
        self, head: Mapping[str, int | str], where: set[int], root: str, hosts: Collection[int]
    ) -> Proof | None:
        step, size = int(head["step"]), int(head["world_size"])
        homes: list[set[int]] = [set() for _ in range(size)]
        changed: list[set[int]] = [set() for _ in range(size)]
        for host in sorted(set(hosts)):
            for path in self._below(host, root, f"steps/{step:08d}-{head['attempt']}"):
                match = _FILE.fullmatch(path.name)
                if match is not None and int(match[1]) < size:
                    is_damaged = (host, self._name(host, path)) in self.damaged
                    (changed if is_damaged else homes)[int(match[1])].add(host)
        both = [good | bad for good, bad in zip(homes, changed, strict=True)]
        folder = f"steps/{step:08d}-{head['attempt']}"
        sound = self._groups(root, folder, hosts, homes, with_damaged=False)
        perhaps = self._groups(root, folder, hosts, both, with_damaged=True)
        if not all(any_ or rebuilds(perhaps, rank, hosts) for rank, any_ in enumerate(both)):
            return None
        return Proof(
            int(head["epoch"]),
            int(head["number"]),
            step,
            str(head["attempt"]),
            int(head["after_slot"]),
            tuple(map(frozenset, homes)),
            frozenset(where),
            not all(home or rebuilds(sound, rank, hosts) for rank, home in enumerate(homes)),
            sound,
        )

    def _groups(
        self,
        root: str,
        folder: str,
        hosts: Collection[int],
        homes: Sequence[Collection[int]],
        *,
        with_damaged: bool,
    ) -> Groups:
        """The parity groups of an attempt, as their files describe them."""
        names: dict[str, int] = {}
        kept: dict[str, dict[str, int]] = {}  # by group: how many bytes each of its hosts keeps
        for host in sorted(set(hosts)):
            with suppress(FileNotFoundError):
                names[(self.top / f"host{host}" / "near" / root / "HOST").read_text()] = host
            for path in self._below(host, root, folder):
                is_damaged = (host, self._name(host, path)) in self.damaged
                if not _PARITY.fullmatch(path.name) or (is_damaged and not with_damaged):
                    continue
                try:
                    data = path.read_bytes()
                    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                    said = json.loads(head["__metadata__"]["parity"])
                    group = json.dumps([said["hosts"], said["files"]])
                    of_group = kept.setdefault(group, {})
                    of_group[said["keeper"]] = (
                        of_group.get(said["keeper"], 0) + said["stop"] - said["start"]
                    )
                except (ValueError, KeyError, TypeError, FileNotFoundError):
                    continue
        groups = []
        for group, keepers in kept.items():
            members = []
            for name, files in zip(*json.loads(group), strict=True):
                ranks = frozenset(int(file[4:9]) for file, _ in files)
                host = names.get(name, -1)
                others = [
                    sum(n for _, n in those)
                    for other, those in zip(*json.loads(group), strict=True)
                    if other != name
                ]
                share = max(-(-one // len(others)) for one in others)
                is_whole = keepers.get(name, 0) == share and all(host in homes[r] for r in ranks)
                members.append(Member(host, ranks, is_whole))
            groups.append(tuple(members))
        return tuple(groups)

    def _below(self, host: int, root: str, folder: str) -> Iterator[Path]:
        path = self.top / f"host{host}" / "near" / root / folder
        with suppress(FileNotFoundError):  # or a job that runs removes it just now
            yield from sorted(path.iterdir())

    def _name(self, host: int, path: Path) -> str:
        return path.relative_to(self.top / f"host{host}").as_posix()

    # what happens to hosts while no process runs there

    def lose(self, host: int) -> None:
        """A host is exchanged: what it had is gone."""
        shutil.rmtree(self.top / f"host{host}", ignore_errors=True)
        self.damaged = {one for one in self.damaged if one[0] != host}

    def damage(self, host: int, rng: random.Random) -> tuple[str, int | None] | None:
        """A bit flips in a record or a data file: the attempt's directory or "records", and the
        rank whose file it is. None for a host without files.
        """
        paths = [
            path
            for path in sorted((self.top / f"host{host}").glob("near/*/*/**/*"))
            if path.is_file() and path.parts[-2] != "stage" and not path.name.startswith(".")
        ]
        if not paths:
            return None
        path = rng.choice(paths)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        self.damaged.add((host, self._name(host, path)))
        match = _FILE.fullmatch(path.name)
        return path.parent.name, int(match[1]) if match else None

    def keep_copy(self, host: int) -> None:
        """Note what a host has now, for `come_back`."""
        copy = self.top / f"copy{host}"
        shutil.rmtree(copy, ignore_errors=True)
        if (self.top / f"host{host}").is_dir():
            shutil.copytree(self.top / f"host{host}", copy)
            self._kept[host] = copy, {one for one in self.damaged if one[0] == host}

    def come_back(self, host: int) -> bool:
        """A host has again what it had at `keep_copy`; False when there was none."""
        if host not in self._kept:
            return False
        copy, damaged = self._kept[host]
        self.lose(host)
        shutil.copytree(copy, self.top / f"host{host}")
        self.damaged |= damaged
        return True
