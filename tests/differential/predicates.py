"""When a difference is one of those that are meant: a predicate for each entry of `listed`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.distributed.fsdp import _runtime_utils

from tests.differential.comparing import Difference, Raised, Tensor
from tests.differential.draws import Draw, Op, Part


def offloads_on_cpu(draw: Draw, op: Op) -> bool:
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


def is_local(draw: Draw, op: Op, difference: Difference) -> bool:
    """Which names lack, when the dict lost or gained one; what was loaded is compared.

    With original parameters torch does not know its own flat ones again.
    """
    if op.args.get("form") != "LOCAL":
        return False
    if op.name == "state" and draw.strategy == "NO_SHARD" and draw.group == "tensor":
        return _leaves_parallel(difference)
    if op.name != "load" or draw.strategy == "NO_SHARD":
        return False
    refused = difference.what == "raised" or difference.where == ".gave.unexpected"
    if draw.orig and refused and "_flat_param" in str(difference.torch):
        return True
    about_keys = op.args["change"] in ("drop", "add", "shape", "drop_all")
    return about_keys and (difference.what == "raised" or difference.where.startswith(".gave"))


def _leaves_parallel(difference: Difference) -> bool:
    """Whether torch's is a shard of tensor parallelism, and ours the whole of it."""
    theirs, ours = difference.values
    return (
        difference.what == "about"
        and (theirs.about[0], ours.about[0]) == ("DTensor", "Tensor")
        and theirs.about[-1] == ours.about[2]
        and _overlap_equally(theirs, ours)
    )


def shows_unsharded(draw: Draw, op: Op, difference: Difference) -> bool:
    """Gathered, or sharded over fewer ranks between a forward and its backward; of equal values."""
    if draw.face != "fully" or not difference.where.startswith(".local.params"):
        return False
    theirs, ours = difference.values
    if difference.where.endswith("[2]"):
        # Of the gathered one: none, or that of this rank. The reduced one is not shown.
        if theirs is None or theirs.about[0] == "Tensor":
            return True
        # Gathered members of tensor parallelism are sharded along that axis alone.
        return draw.group == "tensor" and ours is None and theirs.about[3] == (2,)
    if difference.what != "about" or not _is_gathered_of(draw, theirs, ours):
        return False
    same = _overlap_equally(theirs, ours, _start_after_forward(theirs))
    return same or (theirs.about[0] == "Tensor" and _is_stale(draw, op))


def _is_gathered_of(draw: Draw, theirs: Tensor, ours: Tensor) -> bool:
    """Whether ours is a shard over the draw's mesh, and torch's the whole, or a shard over fewer
    ranks, in its dtype or in that of the computation.
    """
    dtype = getattr(torch, draw.dtype)
    computes_low = draw.precision not in ("none", "reduce")
    if theirs.about[0] == "DTensor":
        over_fewer = draw.reshard == 2 and theirs.about[2:4] == (("R", "S(0)"), (2, 2))
        if draw.group != "tensor" and (draw.group == "mesh2" or not over_fewer):
            return False
    theirs_dtype = theirs.about[-1] if theirs.about[0] == "DTensor" else theirs.about[2]
    return (
        ours.about[0] == "DTensor"
        and ours.about[-1] == ours.value.dtype == dtype
        and theirs_dtype in ((dtype, torch.bfloat16) if computes_low else (dtype,))
    )


def _is_stale(draw: Draw, op: Op) -> bool:
    """Whether torch may show what it gathered for a forward without gradients, after a step.

    The shards themselves are compared beside it, see `FullySide.local`. Whatever else writes
    parameters of `fully_shard` frees them first.
    """
    kept = stepped = False
    for one in (*_before(draw, op), op):
        if one.name == "evaluate":
            kept = True
        elif one.name in FREEING:
            kept = stepped = False
        stepped |= kept and one.name == "step"
    return stepped


def _overlap_equally(theirs: Tensor, ours: Tensor, start: tuple[int, ...] = ()) -> bool:
    """Whether two parts of one tensor have the same values where both have any; torch's may be
    those that mixed precision computes with, and begins at `start`, or where it says.
    """
    if theirs.about[1] != ours.about[1] or theirs.value.ndim != ours.value.ndim:
        return False
    if not theirs.value.numel() or not ours.value.numel():
        return True
    starts = [one or (0,) * ours.value.ndim for one in (start or theirs.offset, ours.offset)]
    common = [slice(None)] * ours.value.ndim, [slice(None)] * ours.value.ndim
    for dim, sizes in enumerate(zip(theirs.value.shape, ours.value.shape, strict=True)):
        first = max(start[dim] for start in starts)
        last = min(start[dim] + size for start, size in zip(starts, sizes, strict=True))
        for index, start in enumerate(starts):
            common[index][dim] = slice(first - start[dim], max(first, last) - start[dim])
    same = ours.value[tuple(common[1])].to(theirs.value.dtype)
    return bool(torch.equal(theirs.value[tuple(common[0])], same))


def _start_after_forward(theirs: Tensor) -> tuple[int, ...]:
    """Where torch's part of `fully_shard` begins. Its shards over fewer ranks after a forward are
    equal cuts of the padded parameter, whatever their DTensor says of rows that do not divide.
    """
    start = theirs.offset or (0,) * theirs.value.ndim
    kind, shape, placements, mesh = theirs.about[:4]
    if kind != "DTensor" or placements != ("R", "S(0)") or not shape:
        return start
    ranks = mesh[0] * mesh[1]
    number = start[0] // -(-shape[0] // mesh[1])
    return (-(-shape[0] // ranks) * mesh[0] * number, *start[1:])


def torch_alone_raised(difference: Difference, *texts: str) -> bool:
    """Whether torch raised an exception with one of these texts, and our side nothing at all."""
    alone = difference.what == "raised" and not isinstance(difference.values[1], Raised)
    return alone and any(text in str(difference.values[0]) for text in texts)


def _parts(tree: object) -> list[Part]:
    if isinstance(tree, Part):
        return [tree]
    assert isinstance(tree, tuple)
    return [part for child in tree for part in _parts(child)]


def _has(draw: Draw, kind: str) -> bool:
    return any(part.kind == kind for part in _parts(draw.tree))


def ties_units(draw: Draw, op: Op, difference: Difference) -> bool:
    raised = difference.what == "raised" and "is tied to" in str(difference.ours)
    return draw.face == "flat" and op.name == "build" and raised


def is_frozen_unsharded(draw: Draw, op: Op, difference: Difference) -> bool:
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


def is_kept_gradient(draw: Draw, op: Op, difference: Difference) -> bool:
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


def is_unsharded_in_sharded(draw: Draw, op: Op, difference: Difference) -> bool:
    sharded = op.args.get("form") in ("SHARDED", "LOCAL") or op.args.get("kind") in (
        "sharded",
        "flatten",
    )
    named = op.name in ("optim_state", "optim_load", "legacy") and ".state" in difference.where
    return draw.strategy == "NO_SHARD" and not draw.orig and sharded and named


def lacks_state(draw: Draw, op: Op, difference: Difference) -> bool:
    named = op.name in ("optim_state", "optim_load", "legacy", "rekey") and draw.orig
    texts = "is not in the optimizer state", "KeyError: Parameter"
    return named and torch_alone_raised(difference, *texts)


def is_for_one_rank(draw: Draw, op: Op, difference: Difference) -> bool:
    if op.name == "state":
        return op.args["rank0"] and difference.what == "keys" and difference.ours == "has []"
    whole = op.name == "legacy" or (op.name == "optim_state" and op.args["rank0"])
    return draw.group == "sub" and whole and difference.where == ".gave"


# Calls of `FullySide` after which no unit is gathered for a forward without gradients.
FREEING = ("train", "backward", "write_params", "write_grads", "zero", "clip", "full", "reshard",
           "module_state", "module_load")  # fmt: skip
# Strategies that keep what a forward gathered.
KEEPING = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
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


def evaluated(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch keeps using what it gathered for a forward without gradients, or before it."""
    is_unfreed = _reads_stale(draw, op, difference, lambda one: one.name == "evaluate")
    return is_unfreed or (difference.what == "value" and _kept_through_forward(draw, op))


def _kept_through_forward(draw: Draw, op: Op) -> bool:
    """Whether this call trains with what torch kept after backwards, over a step and then over a
    forward without gradients, or until it was to free again: after both ours gathers again.
    """
    keeps = stepped = ran = False
    for one in _before(draw, op):
        if one.name == "reshards_after_backward":
            keeps = not one.args["on"]
            ran = ran or (stepped and not keeps)
        elif one.name in ("train", "step"):
            stepped, ran = keeps, False
        elif one.name == "evaluate":
            ran = stepped
        elif one.name in FREEING:
            stepped = ran = False
    return ran and op.name in ("train", "backward")


def wrote_after_no_sync(draw: Draw, op: Op, difference: Difference) -> bool:
    """Under these strategies torch keeps what is gathered after a backward in `no_sync`."""
    return draw.strategy in KEEPING and _reads_stale(
        draw, op, difference, lambda one: one.name == "backward" and not one.args["sync"]
    )


def wrote_behind_frozen(draw: Draw, op: Op, difference: Difference) -> bool:
    """Under these strategies torch never frees a unit of frozen parameters that no backward
    reaches.
    """
    is_frozen = draw.face == "flat" and any(part.frozen == "all" for part in _parts(draw.tree))
    ran = ("train", "backward", "evaluate")
    return (
        is_frozen
        and draw.strategy in KEEPING
        and _reads_stale(draw, op, difference, lambda one: one.name in ran)
    )


def dtype_at(draw: Draw, op: Op) -> str:
    """The dtype of the model at this call."""
    converted = [one.args["to"] for one in _before(draw, op) if one.name == "convert"]
    return str(converted[-1]) if converted else draw.dtype


def lacks_gradients_somewhere(draw: Draw, op: Op) -> bool:
    """Whether a summons of gradients, not in float32, may meet a rank without any of a unit.

    Such a rank has frozen members only, or padding: torch aligns members to 16 bytes.
    """
    summons = draw.face == "flat" and op.name == "summon" and op.args["with_grads"] and draw.orig
    if not summons or draw.strategy == "NO_SHARD" or dtype_at(draw, op) == "float32":
        return False
    kept = False
    for one in _before(draw, op):
        kept |= one.name == "backward"
        kept &= one.name != "train" and not (one.name == "zero" and one.args["to_none"])
    return kept and any(
        part.frozen
        or (part.kind == "scaled" and part.size == 1)
        or (draw.world == 4 and (part.kind == "conv" or (part.kind == "mlp" and part.size == 1)))
        for part in _parts(draw.tree)
    )


def adds_to_one_element(draw: Draw, op: Op, difference: Difference) -> bool:
    """torch distinguishes sharded from unsharded gradients by size, which is the same here."""
    if draw.face != "flat" or draw.strategy == "NO_SHARD" or difference.what != "value":
        return False
    if not any(part.kind == "scaled" and part.size == 1 for part in _parts(draw.tree)):
        return False
    before = _before(draw, op)
    names = [one.name for one in before if one.name in ("backward", "train", "zero")]
    is_one = re.match(r"tensor\(\[[^,]*\]", str(difference.torch)) is not None
    if names[-1:] != ["backward"]:
        # In low precision it may be too small to be seen before it is in an optimizer's state.
        added = [pair for pair in pairwise(names) if pair[0] == "backward" and pair[1] != "zero"]
        return bool(added) and is_one and ".state." in difference.where
    is_grad = re.search(r"^\.local\.params.*\[2\]$", difference.where) is not None
    return (op.name == "backward" and is_one and is_grad) or op.name == "train"


def has_no_state(draw: Draw, op: Op, difference: Difference) -> bool:
    """Before any optimizer state exists torch's dict keeps its names."""
    groups = difference.where.startswith(".gave.param_groups")
    return op.name == "rekey" and op.args["to"] == "id" and groups and difference.what == "kind"


def clips_doubles(draw: Draw, op: Op, difference: Difference) -> bool:
    text = "(Double) should be convertible without narrowing"
    return op.name == "clip" and draw.face == "flat" and torch_alone_raised(difference, text)


def is_of_another_model(draw: Draw, op: Op, difference: Difference) -> bool:
    """With two models side by side torch gives both the dict of the world's first rank."""
    whole = op.name == "optim_load" and op.args["form"] == "FULL" and op.args["rank0"]
    scattered = op.name == "legacy" and op.args["kind"] == "scatter"
    is_loaded = scattered or (whole and op.args["config"])
    return draw.group == "sub" and is_loaded and difference.what == "value"


def refuses_dtype(draw: Draw, op: Op, difference: Difference) -> bool:
    text = "attempting to assign a gradient with dtype"
    return draw.face == "flat" and draw.orig and torch_alone_raised(difference, text)


def casts_buffers_early(draw: Draw, op: Op, difference: Difference) -> bool:
    """Until the first forward torch's buffers are ours, cast; also where a dict has cast back."""
    if not _is_cast_early(draw, op, difference):
        return False
    theirs, ours = (one.value for one in difference.values)
    return bool(torch.equal(theirs.double(), ours.bfloat16().double()))


def rounds_buffers_twice(draw: Draw, op: Op, difference: Difference) -> bool:
    """So cast, with 1 added by a dict, torch's buffers are rounded once more, and stay so."""
    in_dicts = not difference.where.endswith(".cache")
    if not in_dicts or not _is_cast_early(draw, op, difference):
        return False
    added = sum(one.args.get("change") == "plus" for one in (*_before(draw, op), op))
    theirs, ours = (one.value for one in difference.values)
    # Rounding keeps order, so torch's lie between what the ends of what ours were become.
    values = ours.double()
    width = torch.finfo(ours.dtype).eps * (values.abs() + added)
    low, high = ((values - added + side * width).bfloat16() for side in (-1, 1))
    for _ in range(added):
        low, high = (low.double() + 1).bfloat16(), (high.double() + 1).bfloat16()
    return added > 0 and bool(((low <= theirs) & (theirs <= high)).all())


def leaves_buffers(draw: Draw, op: Op, difference: Difference) -> bool:
    """A root without parameters casts buffers of all units back, until torch looks at the units."""
    is_mended = "_get_fsdp_handles" in inspect.getsource(_runtime_utils._root_pre_forward)
    if is_mended or draw.precision != "buffers" or difference.what != "about":
        return False
    theirs, ours = (one.value for one in difference.values)
    return ".buffers." in difference.where and bool(torch.equal(theirs.to(ours.dtype), ours))


# Of the models; dicts do not have "cache".
FLOAT_BUFFERS = ("shift", "cache", "running_mean", "running_var")


def _is_cast_early(draw: Draw, op: Op, difference: Difference) -> bool:
    """Whether both are a buffer before the first forward, torch's perhaps in bfloat16."""
    ran = any(one.name in ("train", "backward", "evaluate") for one in _before(draw, op))
    if draw.precision != "buffers" or ran or difference.what not in ("about", "value"):
        return False
    theirs, ours = difference.values
    shown = difference.where.startswith(".local.buffers") or op.name in ("state", "load")
    is_buffer = difference.where.rpartition(".")[2] in FLOAT_BUFFERS and isinstance(ours, Tensor)
    if not shown or not is_buffer or {theirs.about[0], ours.about[0]} != {"Tensor"}:
        return False
    # Dicts of a converted model have the dtype that the buffers were wrapped in, on both sides.
    in_dict = op.name == "state" and difference.where.startswith(".gave")
    allowed = {dtype_at(draw, op)} | ({draw.dtype} if in_dict else set())
    dtypes = [getattr(torch, name) for name in allowed]
    is_shaped = theirs.about[1] == ours.about[1] and ours.value.dtype in dtypes
    return is_shaped and theirs.value.dtype in (torch.bfloat16, *dtypes)


def lacks_members(draw: Draw, op: Op, difference: Difference) -> bool:
    """Our side itself checks what it loads of such a dict (`FlatSide.kept_states`).

    With original parameters only named optimizers differ: where this rank has no elements of a
    parameter, its empty state stays.
    """
    if op.name != "optim_load" or op.args["change"][:4] != "drop":
        return False
    is_named = op.args["named"] and difference.where == ".gave.found.state"
    return not draw.orig or (is_named and difference.torch == "has []")


def casts_for_norm(draw: Draw, op: Op, difference: Difference) -> bool:
    return _has(draw, "batch") and torch_alone_raised(difference, "mixed dtype (CPU)")


def is_of_another_kind(draw: Draw, op: Op, difference: Difference) -> bool:
    loads = op.name == "load" and op.args["form"] == "SHARDED" and op.args["change"] == "shape"
    return loads and difference.what == "raised" and "RuntimeError" in str(difference.ours)


def is_parallel(draw: Draw) -> bool:
    """Whether a wrapper may have tensor-parallel members."""
    return draw.face == "flat" and draw.group == "tensor"


def lies_on_one_mesh(draw: Draw, op: Op, difference: Difference) -> bool:
    """Two layouts of one tensor, with equal values where a rank has the same of it in both."""
    theirs, ours = difference.values
    named = op.name in ("state", "load") and op.args["form"] == "SHARDED"
    if not (is_parallel(draw) and named and difference.what == "about"):
        return False
    if not isinstance(theirs, Tensor) or theirs.about[0] != "DTensor":
        return False
    placements = theirs.about[2]
    # Such a one lies elsewhere than it says.
    is_cut_twice = len(placements) == 2 and placements[0] == placements[1]
    same = theirs.about[1] == ours.about[1] and theirs.value.dtype == ours.value.dtype
    return same and (is_cut_twice or _overlap_equally(theirs, ours))


def keeps_dtensors(draw: Draw, op: Op, difference: Difference) -> bool:
    """The same local tensor, as a DTensor or not. (In FULL dicts torch's side makes them whole.)"""
    if not (is_parallel(draw) and draw.orig and draw.strategy == "NO_SHARD"):
        return False
    if torch_alone_raised(difference, "Cannot writeback when the parameter shape changes"):
        return True
    theirs, ours = difference.values
    if difference.what != "about" or theirs.about[0] != "DTensor" or ours.about[0] != "Tensor":
        return False
    same = theirs.value.dtype == ours.value.dtype and ours.about[1] == tuple(theirs.value.shape)
    return same and torch.equal(theirs.value, ours.value)


def parallel_optimizer(draw: Draw, op: Op) -> bool:
    """Our side itself checks that what it takes is what it loads (`FlatSide.kept_states`)."""
    named = op.name in ("optim_state", "optim_load", "legacy", "rekey")
    return is_parallel(draw) and named and op.args.get("form") != "LOCAL"  # both refuse that
