"""Draws played on ranks: both sides of a draw call by call, compared after each.

All ranks play the same draws in the same order. After each call of a side the ranks
exchange, over a group of their own, whether it raised: a draw ends with the first call that raises,
and a process with the first that did so on some ranks only, because the others may have been left
in a collective. No call outlives `CALL_SECONDS_MAX`: it is the deadline of every collective.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.differential.adding import sums_in_order
from tests.differential.comparing import Raised, differences, frozen, raised
from tests.differential.draws import Draw, Op, drawn
from tests.differential.listed import listed, unplayable
from tests.differential.planting import planted
from tests.differential.sides import Groups, Side, side
from tests.ranks import RanksFailed, run_ranks

CALL_SECONDS_MAX = 20.0
# A call that raised this late may have raised because of a deadline.
SUSPICIOUS_SECONDS = CALL_SECONDS_MAX / 2
# Draws of one set of processes: threads of their process groups stay until a process ends.
BATCH = 100


# Calls whose results are dicts with an order that users see.
ORDERED = ("state", "module_state", "summon", "full")


# Calls that leave everything as it was.
READING = ("state", "optim_state", "legacy", "rekey", "names", "look", "full")


@dataclasses.dataclass
class Outcome:
    """The outcome of one draw, on all ranks."""

    seed: int
    world: int
    calls: int = 0
    known: dict[str, int] = dataclasses.field(default_factory=dict)
    """How often listed differences showed, by name."""
    differences: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        again = f"python -m tests.differential {self.seed} --ranks {self.world}"
        lines = [f"{drawn(self.seed, self.world)}", *self.differences, f"replay: {again}"]
        return "\n  ".join(lines)


def play(
    world: int,
    seeds: Iterable[int],
    *,
    verbose: bool = False,
    plant: str = "",
    asks: bool = False,
) -> list[Outcome]:
    """Play the draws of these seeds on so many ranks; one outcome for each, in order.

    A draw that ends its processes (a crash, a hang) is an outcome with that difference; the rest
    is played on new ones. `plant` names an error of `planting` for our side to make; with `asks`,
    torch's side makes the calls too that it is known not to survive.
    """
    left, outcomes = list(seeds), []
    while left:
        batch = left[:BATCH]
        folder = Path(tempfile.mkdtemp(prefix="differential-"))
        failure = ""
        try:
            run_ranks(
                world,
                _play_here,
                batch,
                str(folder),
                verbose,
                plant,
                asks,
                group=False,
                timeout_seconds=len(batch) * 6.0 + 6 * CALL_SECONDS_MAX,
            )
        except RanksFailed as error:
            failure = str(error)
        try:
            played = _read(folder, world, failure)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        outcomes += played
        assert played, failure
        left = left[len(played) :]
    return outcomes


def _read(folder: Path, world: int, failure: str) -> list[Outcome]:
    """Outcomes that the ranks have written, and that of the draw in which they ended, if any."""
    merged: dict[int, Outcome] = {}
    ended: dict[int, int] = {}
    for rank in range(world):
        path = folder / f"{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            part = json.loads(line)
            seed = part.pop("seed")
            outcome = merged.setdefault(seed, Outcome(seed, world))
            if not part:
                continue
            ended[seed] = ended.get(seed, 0) + 1
            outcome.calls = max(outcome.calls, part["calls"])
            for name in part["known"]:
                outcome.known[name] = outcome.known.get(name, 0) + 1
            outcome.differences += [f"rank {rank}: {text}" for text in part["differences"]]
    for seed, outcome in merged.items():
        if ended.get(seed, 0) < world:
            outcome.differences.append(f"the processes ended: {failure[-4000:]}")
    return list(merged.values())


# On a rank ---------------------------------------------------------------------------------------


def _play_here(seeds: Sequence[int], folder: str, verbose: bool, plant: str, asks: bool) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=CALL_SECONDS_MAX),
    )
    control = dist.new_group(timeout=timedelta(seconds=3 * CALL_SECONDS_MAX))
    groups = Groups()
    with open(f"{folder}/{rank}", "w", buffering=1) as log:
        for index, seed in enumerate(seeds):
            log.write(json.dumps({"seed": seed}) + "\n")
            player = _Player(drawn(seed, world), control, groups, verbose=verbose, asks=asks)
            with warnings.catch_warnings(), sums_in_order(), planted(plant):
                warnings.simplefilter("ignore")
                player.play()
            result = {
                "calls": player.calls,
                "known": player.known,
                "differences": player.differences,
            }
            log.write(json.dumps({"seed": seed, **result}) + "\n")
            if player.is_broken:
                break
            if index % 20 == 19:
                gc.collect()
    _together(control, False)
    # Not dist.destroy_process_group: collectives that a failed call left behind may be waiting.


def _together(control: Any, *flags: bool) -> list[list[bool]]:
    """The flags of every rank, one list for each flag."""
    ranks = [torch.zeros(len(flags), dtype=torch.bool) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.tensor(flags, dtype=torch.bool), group=control)
    return torch.stack(ranks, dim=1).tolist()


class _Player:
    def __init__(
        self, draw: Draw, control: Any, groups: Groups, *, verbose: bool, asks: bool
    ) -> None:
        self.draw = draw
        self.control = control
        self.groups = groups
        self.verbose = verbose
        self.asks = asks
        self.calls = 0
        self.known: list[str] = []
        self.differences: list[str] = []
        self.is_broken = False
        self.sides: dict[str, Side] = {}

    def play(self) -> None:
        if not self._both(Op("build")):
            return
        for op in self.draw.ops:
            if not self._both(op):
                return

    def _both(self, op: Op) -> bool:
        """Play a call on both sides and compare; whether the draw continues."""
        self.calls += 1
        skipped = None if self.asks else unplayable(self.draw, op)
        theirs = None if skipped else self._attempt("torch", op)
        if self.is_broken:
            self.differences.append(f"{op}: torch's side ended out of step: {theirs}")
            return False
        ours = self._attempt("ours", op)
        if self.verbose and dist.get_rank() == 0:
            print(f"{op}: torch {theirs if isinstance(theirs, Raised) else 'ok'}, ", end="")
            print(f"ours {ours if isinstance(ours, Raised) else 'ok'}", flush=True)
        if self.is_broken:
            self.differences.append(
                f"{op}: our side ended out of step: {ours}; torch: {theirs}"[:1500]
            )
            return False
        if skipped:
            self.known.append(skipped.page)
            # Unless the call only reads, the sides are no longer in the same state.
            wrong = isinstance(ours, Raised) or op.name not in READING
            self.differences += [f"{op}: {ours}"] if isinstance(ours, Raised) and _works(op) else []
        else:
            wrong = self._compare(op, theirs, ours)
        raises = isinstance(theirs, Raised) or isinstance(ours, Raised)
        (ended,) = _together(self.control, wrong or raises)
        return not any(ended)

    def _compare(self, op: Op, theirs: Any, ours: Any) -> bool:
        wrong = False
        ordered = op.name in ORDERED
        if "ours" in self.sides:
            self.differences += [f"{op}: {text}" for text in self.sides["ours"].taken_wrong()]
        tolerated = tolerance(self.draw, op)
        for difference in differences(theirs, ours, tolerated, ordered=ordered):
            entry = listed(self.draw, op, difference)
            if entry is not None:
                self.known.append(entry.page)
                wrong = wrong or entry.ends
            else:
                wrong = True
                if len(self.differences) < 6:
                    self.differences.append(f"{op}{difference}")
        return wrong

    def _attempt(self, engine: str, op: Op) -> Any:
        began = time.monotonic()
        try:
            if op.name == "build":
                self.sides[engine] = side(self.draw, engine, self.groups)
                result: Any = None
            else:
                result = getattr(self.sides[engine], f"do_{op.name}")(**op.args)
            seen: Any = frozen({"gave": result, "local": self.sides[engine].local()})
        except Exception as error:
            seen = raised(error)
            if self.verbose:
                traceback.print_exc()
        late = isinstance(seen, Raised) and time.monotonic() - began > SUSPICIOUS_SECONDS
        flags, lates = _together(self.control, isinstance(seen, Raised), late)
        self.is_broken = any(lates) or (any(flags) and not all(flags))
        return seen


def _works(op: Op) -> bool:
    """Whether a call that torch cannot serve must work on our side, whatever the draw."""
    return op.name in READING or (op.name == "summon" and not op.args["writeback"])


def tolerance(draw: Draw, op: Op) -> float:
    """How far values may be apart after this call, relative to the largest of a tensor.

    Both sides compute the same bits, because sums over ranks have one order (`adding`), until
    autograd adds up several uses of one parameter in its own order, torch reduces once more what
    it had reduced before (NO_SHARD), or gradients are added in another dtype than their own. From
    then on values are some units in the last place apart, which the optimizers cannot enlarge by
    more than the inverse of their `eps`.
    """
    before = draw.ops[: 1 + next((index for index, one in enumerate(draw.ops) if one is op), -1)]
    if not any(_rounds(draw, before, index) for index in range(len(before))):
        return 0.0
    if draw.dtype == "bfloat16" or draw.precision != "none" or _has_low(before):
        return 0.05
    return 1e-9 if draw.dtype == "float64" and not _converts(before) else 1e-4


def _rounds(draw: Draw, ops: Sequence[Op], index: int) -> bool:
    """Whether call `at` adds gradients up in another order on the two sides."""
    if ops[index].name not in ("backward", "train"):
        return False
    before = [op.name for op in ops[:index] if op.name in ("backward", "zero", "train")]
    is_second = before[-1:] == ["backward"]
    in_other_order = draw.strategy == "NO_SHARD" or draw.precision != "none"
    return bool(ops[index].args.get("forwards", 1) > 1) or (is_second and in_other_order)


def _converts(ops: Sequence[Op]) -> bool:
    return any(op.name == "convert" for op in ops)


def _has_low(ops: Sequence[Op]) -> bool:
    return any(op.name == "convert" and op.args["to"] == "bfloat16" for op in ops)
