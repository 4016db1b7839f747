"""Differences that are meant, as data: where they show, why, and where docs/engine.md says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.differential.comparing import Difference
from tests.differential.draws import Draw, Op, Part

__all__ = ["LISTED", "Listed", "listed", "unplayable"]


@dataclass(frozen=True)
class Listed:
    """A difference that is meant.

    `matches(draw, op, difference)` finds it. `skips(draw, op)` is for calls that torch does not
    survive on the CPU (it crashes, hangs or gives wrong values): they are played on our side only.
    `page` is text of docs/engine.md.
    """

    page: str
    reason: str
    ends: bool = False
    """Whether the sides are no longer in the same state after it, which ends the draw."""
    matches: Callable[[Draw, Op, Difference], bool] = lambda draw, op, difference: False
    skips: Callable[[Draw, Op], bool] = lambda draw, op: False


def _offloads_on_cpu(draw: Draw, op: Op) -> bool:
    """torch frees the memory of what it has "moved" to the CPU."""
    if draw.face != "flat":
        return False
    if op.name == "summon":
        refused = op.args["with_grads"] or (op.args["writeback"] and op.args["rank0_only"])
        return op.args["offload_to_cpu"] and draw.strategy != "NO_SHARD" and not refused
    if op.name in ("state", "load"):
        return op.args["form"] == "FULL" and op.args["config"] and op.args["offload"]
    return draw.orig and (
        op.name == "rekey"
        or (op.name == "legacy" and op.args["kind"] not in ("sharded", "flatten"))
        or (
            op.name in ("optim_state", "optim_load")
            and op.args["form"] == "FULL"
            and (op.args["offload"] or not op.args["config"])
        )
    )


def _is_local(draw: Draw, op: Op, difference: Difference) -> bool:
    is_model = op.name in ("state", "load")
    return is_model and op.args["form"] == "LOCAL" and draw.strategy != "NO_SHARD"


def _shows_unsharded(draw: Draw, op: Op, difference: Difference) -> bool:
    if draw.face != "fully" or not difference.where.startswith(".local.params"):
        return draw.face == "fully" and op.name in ("unshard", "names")
    if difference.where.endswith("[0]"):
        # Gathered, or sharded over fewer ranks between a forward and its backward.
        return difference.what == "about"
    return difference.where.endswith("[2]") and difference.what in ("kind", "about")


def _parts(tree: object) -> list[Part]:
    if isinstance(tree, Part):
        return [tree]
    assert isinstance(tree, tuple)
    return [part for child in tree for part in _parts(child)]


def _has(draw: Draw, kind: str) -> bool:
    return any(part.kind == kind for part in _parts(draw.tree))


def _ties_units(draw: Draw, op: Op, difference: Difference) -> bool:
    raised = difference.what == "raised" and "is tied to" in str(difference.ours)
    return draw.face == "flat" and op.name == "build" and raised


def _is_frozen_unsharded(draw: Draw, op: Op, difference: Difference) -> bool:
    frozen = any(part.frozen for part in _parts(draw.tree))
    missing = difference.what == "keys" and difference.torch == "has []"
    lost = missing and difference.where == ".local.params"
    place = "[1][1]" if op.name == "summon" else "[2]"
    shown = difference.where.endswith(place) and difference.ours == "None"
    if draw.strategy == "NO_SHARD" and draw.orig:
        lost |= op.name == "names" or "FSDP assumes" in str(difference.torch)
        lost |= "as_params=True" in str(difference.torch)
    return draw.face == "flat" and frozen and (lost or shown)


def _is_kept_gradient(draw: Draw, op: Op, difference: Difference) -> bool:
    is_grad = re.search(r"^\.local\.params.*\[2\]", difference.where) is not None
    gathers = op.name == "summon" and op.args["with_grads"]
    return draw.face == "flat" and (is_grad or gathers) and _unsynced_at(draw, op)


def _unsynced_at(draw: Draw, op: Op) -> bool:
    """Whether the last backward before or at this call was one in `no_sync`."""
    last = True
    for one in draw.ops:
        if one.name in ("train", "backward"):
            last = one.args.get("sync", True)
        if one is op:
            return not last
    return False


def _is_unsharded_in_sharded(draw: Draw, op: Op, difference: Difference) -> bool:
    sharded = op.args.get("form") in ("SHARDED", "LOCAL") or op.args.get("kind") in (
        "sharded",
        "flatten",
    )
    named = op.name in ("optim_state", "optim_load", "legacy") and ".state" in difference.where
    return draw.strategy == "NO_SHARD" and not draw.orig and sharded and named


def _lacks_state(draw: Draw, op: Op, difference: Difference) -> bool:
    named = op.name in ("optim_state", "optim_load", "legacy", "rekey") and draw.orig
    text = str(difference.torch)
    return named and ("is not in the optimizer state" in text or "KeyError: Parameter" in text)


def _is_for_one_rank(draw: Draw, op: Op, difference: Difference) -> bool:
    if op.name == "state":
        return op.args["rank0"] and difference.what == "keys" and difference.ours == "has []"
    whole = op.name == "legacy" or (op.name == "optim_state" and op.args["rank0"])
    return draw.group == "sub" and whole and difference.where == ".gave"


def _evaluated(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch goes on using what it gathered for a forward without gradients."""
    before = draw.ops[: next((index for index, one in enumerate(draw.ops) if one is op), 0)]
    names = [one.name for one in before]
    if "evaluate" not in names or difference.what != "value":
        return False
    after = names[names.index("evaluate") :]
    return "write_params" in after or "summon" in after or "step" in after


def _wrote_after_no_sync(draw: Draw, op: Op, difference: Difference) -> bool:
    """Under these strategies torch keeps what is gathered after a backward in `no_sync`."""
    if draw.strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") or difference.what != "value":
        return False
    unsynced = False
    for one in draw.ops:
        if one is op:
            return False
        if one.name in ("train", "backward"):
            unsynced = not one.args.get("sync", True)
        elif unsynced and (
            one.name in ("write_params", "step", "apply", "load")
            or (one.name == "summon" and one.args["change"])
        ):
            return _next_reads(draw, one, op)
    return False


def _next_reads(draw: Draw, written: Op, op: Op) -> bool:
    """Whether `op` is the first after `written` that may read what is gathered."""
    written_index = next(
        written_index for written_index, one in enumerate(draw.ops) if one is written
    )
    reading = ("train", "backward", "evaluate", "state", "load", "summon", "full", "apply")
    return next((one for one in draw.ops[written_index + 1 :] if one.name in reading), None) is op


def _adds_to_one_element(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch tells sharded from unsharded gradients by their size, which is the same here."""
    is_grad = re.search(r"^\.local\.params.*\[2\]$", difference.where) is not None
    is_one = re.match(r"tensor\(\[[^,]*\]", str(difference.torch)) is not None
    sharded = draw.face == "flat" and draw.strategy != "NO_SHARD"
    adds = op.name == "backward" and difference.what == "value"
    return sharded and adds and is_grad and is_one


def _has_no_state(draw: Draw, op: Op, difference: Difference) -> bool:
    """Before any optimizer state exists torch's dict keeps its names."""
    groups = difference.where.startswith(".gave.param_groups")
    return op.name == "rekey" and op.args["to"] == "id" and groups and difference.what == "kind"


def _clips_doubles(draw: Draw, op: Op, difference: Difference) -> bool:
    is_mixed = "(Double) should be convertible without narrowing" in str(difference.torch)
    return op.name == "clip" and draw.face == "flat" and is_mixed


def _is_of_another_model(draw: Draw, op: Op, difference: Difference) -> bool:
    """With two models side by side torch gives both the dict of the world's first rank."""
    whole = op.name == "optim_load" and op.args["form"] == "FULL" and op.args["rank0"]
    return draw.group == "sub" and whole and op.args["config"] and difference.what == "value"


def _refuses_dtype(draw: Draw, op: Op, difference: Difference) -> bool:
    is_refused = "attempting to assign a gradient with dtype" in str(difference.torch)
    return draw.face == "flat" and draw.orig and is_refused


def _casts_buffers_early(draw: Draw, op: Op, difference: Difference) -> bool:
    before = draw.ops[: next((index for index, one in enumerate(draw.ops) if one is op), 0)]
    ran = any(one.name in ("train", "backward", "evaluate") for one in before)
    is_buffer = difference.where.startswith(".local.buffers") and difference.what == "about"
    return draw.precision == "buffers" and not ran and is_buffer


def _casts_for_norm(draw: Draw, op: Op, difference: Difference) -> bool:
    return _has(draw, "batch") and "mixed dtype (CPU)" in str(difference.torch)


def _refuses_tied_names(draw: Draw, op: Op, difference: Difference) -> bool:
    is_named = op.name == "optim_load" and op.args["named"] and draw.orig and _has(draw, "tied")
    return is_named and difference.what == "raised" and "param_to_fqns" in str(difference.torch)


def _is_of_another_kind(draw: Draw, op: Op, difference: Difference) -> bool:
    loads = op.name == "load" and op.args["form"] == "SHARDED" and op.args["change"] == "shape"
    return loads and difference.what == "raised" and "RuntimeError" in str(difference.ours)


LISTED: Sequence[Listed] = (
    Listed(
        "sharded dicts of units over part of the ranks",
        "torch takes ranks of the group for ranks of the world",
        skips=lambda draw, op: (
            draw.group == "sub"
            and (
                op.args.get("form") in ("SHARDED", "LOCAL")
                or (op.name == "legacy" and op.args["kind"] in ("sharded", "flatten"))
            )
            and op.name != "set_type"
        ),
        matches=lambda draw, op, differing: (
            draw.group == "sub" and "does not exist in input process group" in str(differing.torch)
        ),
    ),
    Listed(
        "on CPU: offload, `sync_module_states`, `summon_full_params(offload_to_cpu=True)`",
        "torch frees what it has moved from the CPU to the CPU, or gives two states one memory",
        skips=_offloads_on_cpu,
    ),
    Listed(
        "`keep_low_precision_grads`",
        "torch 2.13 assigns gradients of a dtype that its own autograd refuses",
        skips=lambda draw, op: (
            draw.face == "flat" and draw.precision == "keep" and op.name in ("train", "backward")
        ),
    ),
    Listed(
        "`no_sync` with mixed precision and original parameters",
        "torch 2.13 assigns gradients of a dtype that its own autograd refuses",
        matches=_refuses_dtype,
    ),
    Listed(
        "a step, or a write into parameters, after a forward without gradients",
        "torch does not gather again",
        matches=_evaluated,
        ends=True,
    ),
    Listed(
        "a write into parameters after a backward in `no_sync` under SHARD_GRAD_OP",
        "torch does not gather again",
        matches=_wrote_after_no_sync,
        ends=True,
    ),
    Listed(
        "gradients of a unit of one element, added up by several backwards",
        "torch reduces the earlier one again, which divides it by the ranks",
        matches=_adds_to_one_element,
        ends=True,
    ),
    Listed(
        "`rekey_optim_state_dict(PARAM_ID)` before there is state",
        "who asks for ids wants ids",
        matches=_has_no_state,
    ),
    Listed(
        "`clip_grad_norm_` of gradients in float64",
        "torch's norm refuses float64, on the ranks that have gradients: the others wait for them",
        skips=lambda draw, op: (
            op.name == "clip"
            and draw.face == "flat"
            and draw.world == 4
            and draw.strategy != "NO_SHARD"
            and (draw.dtype == "float64" or any(one.name == "convert" for one in draw.ops))
        ),
        matches=_clips_doubles,
    ),
    Listed(
        "a full optimizer dict on the first rank, loaded by models side by side",
        "each model has an optimizer of its own",
        matches=_is_of_another_model,
        ends=True,
    ),
    Listed(
        "buffers under `buffer_dtype` before the first forward",
        "a state dict should not change the model",
        matches=_casts_buffers_early,
    ),
    Listed(
        "`rank0_only` in state dicts",
        "who asks for one dict wants one",
        matches=_is_for_one_rank,
    ),
    Listed(
        "LOCAL state dicts",
        "one form for both kinds of parameters; with two groups torch fails on some ranks",
        skips=lambda draw, op: (
            draw.group == "pair" and op.name in ("state", "load") and op.args["form"] == "LOCAL"
        ),
        matches=_is_local,
    ),
    Listed(
        "gathered parameters of `fully_shard`",
        "optimizers and hooks always see the sharded ones",
        matches=_shows_unsharded,
    ),
    Listed("a weight tied across units", "torch cuts the tie", matches=_ties_units),
    Listed(
        "frozen parameters",
        "torch loses them from named_parameters, or gives them gradients",
        ends=True,
        matches=_is_frozen_unsharded,
    ),
    Listed(
        "`.grad` after a backward in `no_sync` when reduced gradients are there",
        "an optimizer must not step by gradients of one rank",
        matches=_is_kept_gradient,
        ends=True,
    ),
    Listed(
        "SHARDED optimizer dicts of `NO_SHARD` units",
        "model dicts of such units are plain too",
        matches=_is_unsharded_in_sharded,
        ends=True,
    ),
    Listed(
        "an optimizer over a part of a unit",
        "there is nothing to refuse",
        matches=_lacks_state,
    ),
    Listed(
        "an optimizer dict that lacks some members of a flat parameter",
        "optimizers have no state of unused parameters, and their dicts should load",
        matches=lambda draw, op, _: op.name == "optim_load" and op.args["change"][:4] == "drop",
        ends=True,
    ),
    Listed(
        "`is_named_optimizer` with original parameters and a tied weight",
        "one of its names is enough",
        matches=_refuses_tied_names,
    ),
    Listed(
        "a norm left out of mixed precision in a bfloat16 model",
        "torch casts the inputs of the norm, and not its parameters",
        matches=_casts_for_norm,
    ),
    Listed(
        "SHARDED dicts with entries of another kind or shape",
        "every problem is named, in one kind of error",
        matches=_is_of_another_kind,
    ),
)


def listed(draw: Draw, op: Op, difference: Difference) -> Listed | None:
    """The entry that this difference belongs to."""
    return next((one for one in LISTED if one.matches(draw, op, difference)), None)


def unplayable(draw: Draw, op: Op) -> Listed | None:
    """The entry that says why torch's side is not asked."""
    return next((one for one in LISTED if one.skips(draw, op)), None)
