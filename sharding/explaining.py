"""What a wrapped model is made of, and what one step does, as text or as a page.

print(sharding.explain(model))
Path("step.html").write_text(sharding.explain(model).html())
"""

from __future__ import annotations

import html as escape
from dataclasses import dataclass

from torch import nn

from sharding.flat_unit import Settings
from sharding.fsdp import FullyShardedDataParallel, clean_name, fsdp_units

__all__ = ["Explanation", "StepEvent", "UnitFacts", "explain"]


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

    def __str__(self) -> str:
        lines = [f"{len(self.units)} units"]
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
        """A page of its own: one row for each unit, one column for each event."""
        head = "".join(f"<th>{at}</th>" for at in range(len(self.step)))
        rows = []
        for number, unit in enumerate(self.units):
            cells = "".join(
                f'<td class="{event.what}" title="{event.what}, then {event.gathered_nbytes} bytes '
                f'gathered">{event.what[0]}</td>'
                if event.unit == number
                else "<td></td>"
                for event in self.step
            )
            rows.append(f"<tr><th>{escape.escape(unit.name or '(root)')}</th>{cells}</tr>")
        return _PAGE.format(head=head, rows="\n".join(rows))


def explain(model: nn.Module) -> Explanation:
    """The units below `model` on this rank. No collective; the model is not run."""
    wrappers = fsdp_units(model)
    names = {id(inner): clean_name(name) for name, inner in model.named_modules()}
    facts = tuple(_facts(names[id(wrapper)], wrapper) for wrapper in wrappers)
    settings = [wrapper.fsdp_unit.settings for wrapper in wrappers]
    return Explanation(facts, tuple(_step(facts, settings)))


def _facts(name: str, wrapper: FullyShardedDataParallel) -> UnitFacts:
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
        layout.shard_numel * store.dtype.itemsize,
        layout.padded_numel * store.compute_dtype.itemsize,
        empty * store.dtype.itemsize,
    )


def _step(facts: tuple[UnitFacts, ...], settings: list[Settings]) -> list[StepEvent]:
    held = [0] * len(facts)
    events: list[StepEvent] = []

    def happens(what: str, unit: int) -> None:
        if what == "gather":
            held[unit] = facts[unit].gathered_nbytes
        elif what == "free":
            held[unit] = 0
        events.append(StepEvent(what, unit, sum(held)))

    with_members = [at for at, unit in enumerate(facts) if unit.members]
    for at in with_members:
        happens("gather", at)
        happens("forward", at)
        if at and settings[at].frees_after_forward:
            happens("free", at)
    for at in reversed(with_members):
        if held[at] == 0:
            happens("gather", at)
        happens("backward", at)
        if settings[at].is_sharded:
            happens("free", at)
        happens("reduce", at)
    return events


_PAGE = """<!doctype html>
<meta charset="utf-8"><title>one training step</title>
<style>
 table {{ border-collapse: collapse; font: 12px monospace }}
 td, th {{ border: 1px solid #ddd; padding: 2px 6px }}
 .gather {{ background: #9cf }} .free {{ background: #eee }}
 .forward {{ background: #cfc }} .backward {{ background: #fc9 }} .reduce {{ background: #fcf }}
</style>
<table><tr><th></th>{head}</tr>
{rows}
</table>
"""
