"""What errors say of what ranks have differently, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpt.format.uniting import GROUPS

TWO_MODELS = (
    "they are no declared replicas of each other: give each model a name of its own in the state, "
    "stages of a pipeline the names of the whole model, or save each with process_group= its ranks"
)
WRAP = "wrap it in PerRank to keep every rank's own"
OR_PER_GROUP = ", or in PerGroup(value, group) where it is equal in each group"
STORED_ONCE = "a checkpoint stores one for all"
OR_OWN_NAME = (
    ", or give each rank's own a name of its own, as experts and stages have; parts of one tensor "
    "have to be a DTensor"
)
BY_NUMBER = (
    "; an optimizer's state_dict() numbers its parameters, on each rank from 0 on: put the "
    "optimizer itself into the state"
)


def disagreement(name: str, groups: Mapping[int | None, Sequence[int]], why: str) -> str:
    """That ranks, in groups by digest, differ in what is kept once, `why`, and what to do."""
    return (
        f"{name}: the ranks have different values of it ({groups_in_words(groups)}), and {why}; "
        "make it equal on all ranks first"
    )


def or_per_rank(fqn: str, values: Collection[str] = ()) -> str:
    """The end of a message about optimizer state: how each rank keeps its own; "" for the rest.

    `values` are the names of values: a tensor inside of one has the name of that value's state.
    """
    _, is_state, name = fqn.rpartition(".state.")
    if not is_state:
        return ""
    outer = next((value for value in values if fqn.startswith(f"{value}.")), "")
    key = outer.rpartition(".")[2] if ".state." in outer else _key_of(name)
    return (
        ", or say that each rank keeps its own: "
        f'declare_optimizer_state(optimizer, {{"{key}": PerRank(None, on_reshard)}})'
    )


def _key_of(name: str) -> str:
    """The optimizer's own name of a state, from its full name in a checkpoint."""
    parts = name.split("~")[0].split(".")
    while len(parts) > 1 and parts[-1].isdecimal():  # an item of a list that the state is
        parts.pop()
    return parts[-1]


def way_out_of(fqn: str, values: Collection[str]) -> str:
    """The end of a message about what an optimizer has otherwise on some ranks; "" for the rest."""
    optimizers = [value.removesuffix(GROUPS) for value in values if value.endswith(GROUPS)]
    for path in optimizers:
        if fqn.startswith(f"{path}.state."):
            return or_per_rank(fqn, values)
        if f"{fqn}.".startswith((f"{path}{GROUPS}.", f"{path}.user_state.")):
            return (
                ", or keep what is each rank's own outside of the optimizer: beside it in the "
                "state, as PerRank(value)"
            )
    return ""


def groups_in_words(groups: Mapping[int | None, Sequence[int]]) -> str:
    """Ranks by digest, as text."""
    texts = []
    for digest, ranks in groups.items():
        shown = ", ".join(map(str, ranks[:8])) + (
            f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        )
        label = "absent" if digest is None else f"crc32c {digest:08x}"
        texts.append(f"{label} on {shown}")
    return "; ".join(texts)
