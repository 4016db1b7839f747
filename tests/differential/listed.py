"""Differences that are meant, as data: where they show, why, and where docs/engine.md says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.differential.comparing import Difference, Tensor
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
    """Which names lack, when the dict lost or gained one; what was loaded is compared.

    With original parameters torch does not know its own flat ones again.
    """
    if op.name != "load" or op.args["form"] != "LOCAL" or draw.strategy == "NO_SHARD":
        return False
    refused = difference.what == "raised" or difference.where == ".gave.unexpected"
    if draw.orig and refused and "_flat_param" in str(difference.torch):
        return True
    about_keys = op.args["change"] in ("drop", "add", "shape", "drop_all")
    return about_keys and (difference.what == "raised" or difference.where.startswith(".gave"))


def _shows_unsharded(draw: Draw, op: Op, difference: Difference) -> bool:
    """Gathered, or sharded over fewer ranks between a forward and its backward; of equal values."""
    if draw.face != "fully" or not difference.where.startswith(".local.params"):
        return False
    theirs, ours = difference.values
    if difference.where.endswith("[2]"):
        # Of the gathered one: none, or that of this rank. The reduced one is not shown.
        return theirs is None or bool(theirs.about[0] == "Tensor")
    if difference.what != "about":
        return False
    return _overlap_equally(theirs, ours) or (theirs.about[0] == "Tensor" and _is_stale(draw, op))


def _is_stale(draw: Draw, op: Op) -> bool:
    """Whether torch may show what it gathered for a forward without gradients, after a write."""
    return _wrote_since((*_before(draw, op), op), lambda one: one.name == "evaluate")


def _overlap_equally(theirs: Tensor, ours: Tensor) -> bool:
    """Whether two parts of one tensor have the same values where both have any; torch's may be
    those that mixed precision computes with.
    """
    if theirs.about[1] != ours.about[1]:
        return False
    if not theirs.value.numel() or not ours.value.numel():
        return True
    starts = [_start_after_forward(theirs), ours.offset or (0,) * ours.value.ndim]
    common = [slice(None)] * ours.value.ndim, [slice(None)] * ours.value.ndim
    for dim, sizes in enumerate(zip(theirs.value.shape, ours.value.shape, strict=True)):
        first = max(start[dim] for start in starts)
        last = min(start[dim] + size for start, size in zip(starts, sizes, strict=True))
        for index, start in enumerate(starts):
            common[index][dim] = slice(first - start[dim], max(first, last) - start[dim])
    same = ours.value[tuple(common[1])].to(theirs.value.dtype)
    return bool(torch.equal(theirs.value[tuple(common[0])], same))


def _start_after_forward(theirs: Tensor) -> tuple[int, ...]:
    """Where torch's part begins. Its shards over fewer ranks after a forward are equal cuts of the
    padded parameter, whatever their DTensor says of rows that do not divide.
    """
    start = theirs.offset or (0,) * theirs.value.ndim
    kind, shape, placements, mesh = theirs.about[:4]
    if kind != "DTensor" or placements != ("R", "S(0)") or not shape:
        return start
    ranks = mesh[0] * mesh[1]
    number = start[0] // -(-shape[0] // mesh[1])
    return (-(-shape[0] // ranks) * mesh[0] * number, *start[1:])


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
    if draw.face != "flat" or not any(part.frozen for part in _parts(draw.tree)):
        return False
    if draw.strategy == "NO_SHARD" and draw.orig:
        refused = str(difference.torch)
        if "FSDP assumes" in refused or "as_params=True" in refused:
            return True
        if op.name == "names" and difference.what == "kind":
            theirs, ours = difference.values
            return set(theirs) < set(ours)
    if difference.what == "keys" and difference.where == ".local.params":
        return bool(difference.torch == "has []")
    if draw.group == "tensor" and difference.where.endswith("[1]"):
        return difference.values == (True, False)  # trainable in torch's, though it was frozen
    place = "[1][1]" if op.name == "summon" else "[2]"
    return difference.where.endswith(place) and difference.ours == "None"


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


# Calls that change parameters behind what is gathered, and calls that read what is gathered.
WRITING = ("write_params", "step", "apply", "load", "summon")
GATHERING = ("train", "backward", "evaluate", "state", "load", "summon", "full", "apply")


def _reads_stale(draw: Draw, op: Op, difference: Difference, unfreed: Callable[[Op], bool]) -> bool:
    """Whether `op` may read what torch gathered before parameters were written.

    `unfreed` are calls after which torch keeps what is gathered; until the next backward.
    """
    wrote = _wrote_since(_before(draw, op), unfreed)
    if not wrote or difference.what != "value" or op.name not in GATHERING:
        return False
    changes = op.name in ("train", "backward", "load", "summon", "apply")
    return changes or difference.where.startswith(".gave")


def _wrote_since(ops: Sequence[Op], unfreed: Callable[[Op], bool]) -> bool:
    """Whether these calls wrote parameters after an `unfreed` one, and no backward followed it."""
    keeps = wrote = False
    for one in ops:
        if unfreed(one):
            keeps = True
        elif one.name in ("train", "backward"):
            keeps = wrote = False
        wrote |= keeps and one.name in WRITING
    return wrote


def _before(draw: Draw, op: Op) -> tuple[Op, ...]:
    """The calls before `op`; none where it is not one of the draw's."""
    return draw.ops[: next((index for index, one in enumerate(draw.ops) if one is op), 0)]


def _evaluated(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch keeps using what it gathered for a forward without gradients."""
    return _reads_stale(draw, op, difference, lambda one: one.name == "evaluate")


def _wrote_after_no_sync(draw: Draw, op: Op, difference: Difference) -> bool:
    """Under these strategies torch keeps what is gathered after a backward in `no_sync`."""
    if draw.strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        return False
    return _reads_stale(
        draw, op, difference, lambda one: one.name == "backward" and not one.args["sync"]
    )


def _adds_to_one_element(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch distinguishes sharded from unsharded gradients by size, which is the same here."""
    if draw.face != "flat" or draw.strategy == "NO_SHARD" or difference.what != "value":
        return False
    if not any(part.kind == "scaled" and part.size == 1 for part in _parts(draw.tree)):
        return False
    before = _before(draw, op)
    names = [one.name for one in before if one.name in ("backward", "train", "zero")]
    if names[-1:] != ["backward"]:
        return False
    is_one = re.match(r"tensor\(\[[^,]*\]", str(difference.torch)) is not None
    is_grad = re.search(r"^\.local\.params.*\[2\]$", difference.where) is not None
    return (op.name == "backward" and is_one and is_grad) or op.name == "train"


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
    """Until the first forward torch's buffers are ours, cast; also where a dict has cast back."""
    before = _before(draw, op)
    ran = any(one.name in ("train", "backward", "evaluate") for one in before)
    if draw.precision != "buffers" or ran or difference.what not in ("about", "value"):
        return False
    is_buffer = difference.where.startswith(".local.buffers") or op.name in ("state", "load")
    theirs, ours = difference.values
    if not is_buffer or not isinstance(ours, Tensor) or not ours.value.is_floating_point():
        return False
    low, values = ours.value.to(torch.bfloat16).double(), theirs.value.double()
    if any(one.args.get("change") == "plus" for one in (*before, op)):  # torch rounds it twice
        return bool(torch.allclose(values, low, rtol=2.0**-7, atol=0.0))
    return bool(torch.equal(values, low))


def _lacks_members(draw: Draw, op: Op, difference: Difference) -> bool:
    """Our side itself checks what it loads of such a dict (`FlatSide.kept_states`).

    With original parameters only named optimizers differ: where this rank has no elements of a
    parameter, its empty state stays.
    """
    if op.name != "optim_load" or op.args["change"][:4] != "drop":
        return False
    is_named = op.args["named"] and difference.where == ".gave.found.state"
    return not draw.orig or (is_named and difference.torch == "has []")


def _casts_for_norm(draw: Draw, op: Op, difference: Difference) -> bool:
    return _has(draw, "batch") and "mixed dtype (CPU)" in str(difference.torch)


def _refuses_tied_names(draw: Draw, op: Op, difference: Difference) -> bool:
    is_named = op.name == "optim_load" and op.args["named"] and draw.orig and _has(draw, "tied")
    return is_named and difference.what == "raised" and "param_to_fqns" in str(difference.torch)


def _is_of_another_kind(draw: Draw, op: Op, difference: Difference) -> bool:
    loads = op.name == "load" and op.args["form"] == "SHARDED" and op.args["change"] == "shape"
    return loads and difference.what == "raised" and "RuntimeError" in str(difference.ours)


def _is_parallel(draw: Draw) -> bool:
    """Whether a wrapper may have tensor-parallel members."""
    return draw.face == "flat" and draw.group == "tensor"


def _lies_on_one_mesh(draw: Draw, op: Op, difference: Difference) -> bool:
    """Two layouts of one tensor, with equal values where a rank has the same of it in both."""
    theirs, ours = difference.values
    named = op.name in ("state", "load") and op.args["form"] == "SHARDED"
    if not (_is_parallel(draw) and named and difference.what == "about"):
        return False
    if not isinstance(theirs, Tensor) or theirs.about[0] != "DTensor":
        return False
    placements = theirs.about[2]
    # Such a one lies elsewhere than it says.
    is_cut_twice = len(placements) == 2 and placements[0] == placements[1]
    same = theirs.about[1] == ours.about[1] and theirs.value.dtype == ours.value.dtype
    return same and (is_cut_twice or _overlap_equally(theirs, ours))


def _keeps_dtensors(draw: Draw, op: Op, difference: Difference) -> bool:
    """The same local tensor, as a DTensor or not; in a FULL dict, that part of the whole one."""
    theirs, ours = difference.values
    if not (_is_parallel(draw) and draw.orig):
        return False
    if op.name == "state" and op.args["form"] == "FULL" and difference.what == "about":
        kinds = (theirs.about[0], ours.about[0])
        return kinds == ("DTensor", "Tensor") and _overlap_equally(theirs, ours)
    if draw.strategy != "NO_SHARD":
        return False
    if difference.what == "raised":
        return "Cannot writeback when the parameter shape changes" in str(difference.torch)
    if difference.what != "about" or theirs.about[0] != "DTensor" or ours.about[0] != "Tensor":
        return False
    return bool(torch.equal(theirs.value, ours.value))


def _parallel_optimizer(draw: Draw, op: Op) -> bool:
    """Our side itself checks that what it takes is what it loads (`FlatSide.kept_states`)."""
    named = op.name in ("optim_state", "optim_load", "legacy", "rekey")
    return _is_parallel(draw) and named and op.args.get("form") != "LOCAL"  # both refuse that


LISTED: Sequence[Listed] = (
    Listed(
        "SHARDED dicts of a wrapper over tensor-parallel members",
        "one rule for all units: dicts are cut over the unit's own mesh",
        matches=_lies_on_one_mesh,
    ),
    Listed(
        "optimizer dicts of a wrapper over tensor-parallel members",
        "torch knows nothing of tensor parallelism there",
        skips=_parallel_optimizer,
    ),
    Listed(
        "tensor-parallel members of a wrapper with original parameters, under `NO_SHARD` or in "
        "FULL dicts",
        "one rule for all strategies",
        matches=_keeps_dtensors,
    ),
    Listed(
        "`clip_grad_norm_` of a wrapper over tensor-parallel members",
        "a norm of a part of the model is none",
        matches=lambda draw, op, differing: (
            _is_parallel(draw) and op.name == "clip" and "tensor parallel" in str(differing.ours)
        ),
    ),
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
        "`summon_full_params(with_grads=True)` where some ranks have no gradient, not in float32",
        "torch gathers float32 zeros there, of another size than the gradients of other ranks",
        skips=lambda draw, op: (
            op.name == "summon"
            and draw.face == "flat"
            and op.args["with_grads"]
            and draw.orig
            and draw.strategy != "NO_SHARD"
            and draw.dtype != "float32"
            and any(
                part.kind in ("tied", "scaled") and part.size == 1 for part in _parts(draw.tree)
            )
        ),
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
        "a wrapped model that is converted to another dtype",
        "torch gathers into memory of the dtype it had",
        matches=lambda draw, op, differing: (
            draw.face == "flat"
            and differing.what == "raised"
            and any(one.name == "convert" for one in _before(draw, op))
            and "Invalid usage of tensors with different dtypes" in str(differing.torch)
        ),
        ends=True,
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
        matches=_lacks_members,
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
