"""What a wrapped model is made of, and what one step does, as text or as a page.

print(sharding.explain(model))
Path("step.html").write_text(sharding.explain(model).html())
"""

from __future__ import annotations

import html as escape
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ckpt.state.names import clean_name
from sharding.engine.ranges import Noted
from sharding.engine.unit import Unit
from sharding.fsdp import FullyShardedDataParallel, fsdp_units
from sharding.sharded_group import ShardedGroup, sharded_groups


@dataclass(frozen=True)
class UnitFacts:
    """One unit; bytes are of this rank's shard, and of the gathered parameters."""

    name: str
    strategy: str
    members: tuple[str, ...]
    shard_nbytes: int
    gathered_nbytes: int
    padding_nbytes: int
    """Filler and padding of all ranks' shards together."""


@dataclass(frozen=True)
class StepEvent:
    """One thing that happens in a step: "gather", "forward", "free", "backward" or "reduce"."""

    what: str
    unit: int
    gathered_nbytes: int
    """Gathered parameters of all units after it, without prefetching."""


@dataclass(frozen=True)
class Explanation:
    """Units in walk order, the root first, and one step as if every unit ran once in that order,
    the root around the others.
    """

    units: tuple[UnitFacts, ...]
    step: tuple[StepEvent, ...]
    recorded: tuple[Noted, ...] = ()
    """The last step that this rank really made; empty before the first backward."""

    def __str__(self) -> str:
        lines = ["1 unit" if len(self.units) == 1 else f"{len(self.units)} units"]
        for number, unit in enumerate(self.units):
            lines.append(
                f"  {number} {unit.name or '(root)'}: {unit.strategy}, {len(unit.members)} "
                f"parameters, {unit.shard_nbytes} bytes here, {unit.gathered_nbytes} gathered, "
                f"{unit.padding_nbytes} of filler and padding"
            )
            lines += [f"      {member}" for member in unit.members]
        lines.append("one step")
        for event in self.step:
            name = self.units[event.unit].name or "(root)"
            lines.append(f"  {event.what:8} {name}, then {event.gathered_nbytes} bytes gathered")
        return "\n".join(lines)

    def html(self) -> str:
        """A page of its own, one row for each unit: the last step of this rank to scale in time, or
        the planned one, a column for each event, where there was none yet.
        """
        return _recorded_page(self) if self.recorded else _planned_page(self)


def explain(model: nn.Module) -> Explanation:
    """The units below `model` on this rank, of both engines. No collective; nothing is run."""
    names = {id(inner): clean_name(name) for name, inner in model.named_modules()}
    wrappers = fsdp_units(model)
    groups = sharded_groups(model)
    facts = [_flat_facts(names[id(wrapper)], wrapper) for wrapper in wrappers]
    facts += [_group_facts(names, group) for group in groups]
    units: list[Unit] = [wrapper.fsdp_unit for wrapper in wrappers]
    units += [group.unit for group in groups]
    # Before the first forward no unit has a runtime: None is the one value then.
    runtimes = {id(unit.runtime): unit.runtime for unit in units}
    # Units of one root only: other roots have steps of their own.
    runtime = next(iter(runtimes.values())) if len(runtimes) == 1 else None
    recorded = () if runtime is None or len(runtime.units) != len(facts) else runtime.steps.last
    return Explanation(tuple(facts), tuple(_step(facts, units)), recorded)


def _flat_facts(name: str, wrapper: FullyShardedDataParallel) -> UnitFacts:
    store = wrapper.fsdp_unit.store
    strategy = wrapper.fsdp_unit.settings.strategy.name
    if store is None:
        return UnitFacts(name, strategy, (), 0, 0, 0)
    layout = store.layout
    members = tuple(
        f"{clean_name(member.fqn)} {tuple(member.shape)} at {member.start}, {here} elements here"
        for member, part in zip(layout.members, store.parts, strict=True)
        for here in (0 if part is None else part.numel,)
    )
    empty = sum(stop - start for start, stop in layout.gaps)
    return UnitFacts(
        name,
        strategy,
        members,
        layout.shard_numel_of(store.rank) * store.dtype.itemsize,
        layout.padded_numel * store.compute_dtype.itemsize,
        empty * store.dtype.itemsize,
    )


def _group_facts(names: dict[int, str], group: ShardedGroup) -> UnitFacts:
    params = group.store.params
    ranks = group.store.data.shard.size
    members = tuple(
        f"{param.module_param.names[0]} {param.shape} along dim {param.dim}, "
        f"{math.prod(param.own_shape)} elements here"
        for param in params
    )
    padded = sum(param.buffer.numel() * param.dtype.itemsize for param in params)
    return UnitFacts(
        " and ".join(names[id(module)] for module in group.modules),
        group.strategy,
        members,
        padded,
        sum(param.numel * param.compute_dtype.itemsize for param in params),
        padded * ranks - sum(param.numel * param.dtype.itemsize for param in params),
    )


def _step(facts: Sequence[UnitFacts], units: Sequence[Unit]) -> list[StepEvent]:
    held = [0] * len(facts)
    events: list[StepEvent] = []

    def happens(what: str, unit: int) -> None:
        if what == "gather":
            held[unit] = facts[unit].gathered_nbytes
        elif what == "free":
            held[unit] = 0
        events.append(StepEvent(what, unit, sum(held)))

    with_members = [index for index, unit in enumerate(facts) if unit.members]
    for index in with_members:
        happens("gather", index)
        happens("forward", index)
        # Where nothing is chosen, the root stays: the backward needs it first.
        frees = units[index].schedule.frees_after_forward
        if frees or (frees is None and index):
            happens("free", index)
    for index in reversed(with_members):
        if held[index] == 0:
            happens("gather", index)
        happens("backward", index)
        if units[index].reduction.shard is not None:  # without shards nothing was gathered
            happens("free", index)
        happens("reduce", index)
    return events


# --- pages ---------------------------------------------------------------------------------------


def _planned_page(explanation: Explanation) -> str:
    """A table: one column for each event of the planned step."""
    step = explanation.step
    head = "".join(f"<th>{index}</th>" for index in range(len(step)))
    rows = []
    for number, unit in enumerate(explanation.units):
        cells = "".join(
            f'<td class="{event.what}" title="{event.what}, then {event.gathered_nbytes} bytes '
            f'gathered">{_MEANINGS[event.what][0]}</td>'
            if event.unit == number
            else "<td></td>"
            for event in step
        )
        rows.append(f"<tr><th>{_name(unit)}</th>{cells}</tr>")
    return _page(
        "As planned, since no step has been made yet: a row for each unit, a column for each event "
        "in order, and no scale of time. The text of an event says how much is gathered after it.",
        "held",
        [f"<table><tr><th>unit</th>{head}</tr>", *rows],
    )


class Bar(NamedTuple):
    """A time in which a unit was at work."""

    what: str
    unit: int
    start_seconds: float
    end_seconds: float


_ENDS = {"gather": ("gathered",), "forward": ("forward end",), "backward": ("backward end", "free")}


def bars_of(recorded: Sequence[Noted]) -> list[Bar]:
    """The times between what was noted. "held": from "gathered" to "free"; a "reduce" lasts until
    the end of the step at the latest, which is when it is waited for.
    """
    end_seconds = recorded[-1].at_seconds
    ends_of = {**_ENDS, "gathered": ("free",), "reduce": ()}
    bars = []
    # What a step began and did not end lasts until its end: a reduction, a root that stays.
    for index, noted in enumerate(recorded):
        if noted.what not in ends_of:
            continue
        end = next(
            (
                later.at_seconds
                for later in recorded[index + 1 :]
                if later.unit == noted.unit and later.what in ends_of[noted.what]
            ),
            end_seconds,
        )
        what = "held" if noted.what == "gathered" else noted.what
        bars.append(Bar(what, noted.unit, noted.at_seconds, end))
    return bars


def _recorded_page(explanation: Explanation) -> str:
    """Bars to scale, one row for each unit, as the host saw them."""
    recorded = explanation.recorded
    whole = max(recorded[-1].at_seconds, 1e-9)
    bars = bars_of(recorded)
    rows = []
    for number, unit in enumerate(explanation.units):
        drawn = "".join(
            f'<i class="{bar.what}" style="left:{100 * bar.start_seconds / whole:.3f}%;width:'
            f'{100 * (bar.end_seconds - bar.start_seconds) / whole:.3f}%" title="{bar.what}: from '
            f'{1e3 * bar.start_seconds:.3f} to {1e3 * bar.end_seconds:.3f} ms"></i>'
            for bar in bars
            if bar.unit == number
        )
        rows.append(f"<tr><th>{_name(unit)}</th><td><div>{drawn}</div></td></tr>")
    return _page(
        f"The last step of this rank, {1e3 * whole:.3f} ms from the first forward to the last "
        "gradient, from left to right by the host's clock: a row for each unit. On an accelerator "
        "the host runs ahead of the device. The text of a bar says from when to when it lasted.",
        "free",
        ['<table class="times">', *rows],
    )


# In the cells of a planned step, and in its legend: all letters differ.
_MEANINGS = {
    "gather": ("G", "weights are gathered from all ranks that share them"),
    "held": ("", "the gathered weights are in memory"),
    "forward": ("F", "forward of the unit's modules"),
    "backward": ("B", "backward of the unit's modules"),
    "free": ("\N{MULTIPLICATION SIGN}", "the gathered weights are given back"),
    "reduce": ("R", "gradients are summed over the ranks, each keeps its shard"),
}


def _page(note: str, hidden: str, rows: Sequence[str]) -> str:
    legend = "".join(
        f'<li><b class="{what}">{letter}</b> {what}: {escape.escape(meaning)}</li>'
        for what, (letter, meaning) in _MEANINGS.items()
        if what != hidden
    )
    return _PAGE.format(note=note, legend=legend, body="\n".join(rows))


def _name(unit: UnitFacts) -> str:
    return escape.escape(unit.name or "(root)")


_PAGE = """<!doctype html>
<meta charset="utf-8"><title>One training step</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 :root {{ color-scheme: light dark; --line: #ddd; --held: #eef; --gather: #9cf; --free: #eee;
  --forward: #cfc; --backward: #fc9; --reduce: #fcf }}
 @media (prefers-color-scheme: dark) {{ :root {{ --line: #444; --held: #252a3d; --gather: #1d4f86;
  --free: #3a3a3a; --forward: #1f5c2c; --backward: #7a4710; --reduce: #6b2f6b }} }}
 body {{ font: 13px/1.5 system-ui, sans-serif; margin: 24px; max-width: 1200px }}
 table {{ border-collapse: collapse; display: block; overflow-x: auto; max-width: 100% }}
 td, th {{ border: 1px solid var(--line); padding: 2px 6px; text-align: center }}
 .times {{ display: table; width: 100% }} .times td {{ width: 100%; padding: 0 }}
 .times div {{ position: relative; height: 22px; z-index: 0 }}
 .times i {{ position: absolute; top: 3px; bottom: 3px; min-width: 1px }}
 ul {{ list-style: none; padding: 0; columns: 30em 2 }}
 li b {{ display: inline-block; width: 2em; height: 1.5em; text-align: center }}
 .held {{ background: var(--held) }} .times .reduce {{ top: 15px }}
 .times .held {{ top: 0; bottom: 0; background: var(--held); z-index: -1 }}
 .gather {{ background: var(--gather) }} .free {{ background: var(--free) }}
 .forward {{ background: var(--forward) }} .backward {{ background: var(--backward) }}
 .reduce {{ background: var(--reduce) }}
</style>
<h1>One training step</h1>
<p>{note}</p>
<ul>{legend}</ul>
{body}
</table>
"""
