"""Differences that are meant, as data: where they show, why, and their row of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.differential.comparing import Difference
from tests.differential.draws import Draw, Op, paths_of
from tests.differential.predicates import (
    adds_to_one_element,
    casts_buffers_early,
    casts_for_norm,
    clips_doubles,
    dtype_at,
    evaluated,
    has_no_state,
    is_for_one_rank,
    is_frozen_unsharded,
    is_kept_gradient,
    is_local,
    is_of_another_kind,
    is_of_another_model,
    is_parallel,
    is_unsharded_in_sharded,
    keeps_dtensors,
    lacks_gradients_somewhere,
    lacks_members,
    lacks_state,
    leaves_buffers,
    lies_on_one_mesh,
    offloads_on_cpu,
    parallel_optimizer,
    refuses_dtype,
    rounds_buffers_twice,
    shows_unsharded,
    ties_units,
    torch_alone_raised,
    wrote_after_no_sync,
    wrote_behind_frozen,
)

__all__ = ["LISTED", "Listed", "listed", "unplayable"]


@dataclass(frozen=True)
class Listed:
    """A difference that is meant.

    `matches(draw, op, difference)` finds it. `skips(draw, op)` is for calls that torch does not
    survive on the CPU (it crashes, hangs or gives wrong values): they are played on our side only.
    `page` is text of docs/engine_differences.md.
    """

    page: str
    reason: str
    ends: bool = False
    """Whether the sides are no longer in the same state after it, which ends the draw."""
    matches: Callable[[Draw, Op, Difference], bool] = lambda draw, op, difference: False
    skips: Callable[[Draw, Op], bool] = lambda draw, op: False


LISTED: Sequence[Listed] = (
    Listed(
        "SHARDED dicts of a wrapper over tensor-parallel members",
        "one rule for all units: dicts are cut over the unit's own mesh",
        matches=lies_on_one_mesh,
    ),
    Listed(
        "optimizer dicts of a wrapper over tensor-parallel members",
        "torch knows nothing of tensor parallelism there",
        skips=parallel_optimizer,
    ),
    Listed(
        "tensor-parallel members of a wrapper with original parameters, under `NO_SHARD` or in "
        "FULL dicts",
        "one rule for all strategies",
        matches=keeps_dtensors,
    ),
    Listed(
        "`clip_grad_norm_` of a wrapper over tensor-parallel members",
        "a norm of a part of the model is none",
        matches=lambda draw, op, differing: (
            is_parallel(draw) and op.name == "clip" and "tensor parallel" in str(differing.ours)
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
            draw.group == "sub"
            and torch_alone_raised(differing, "does not exist in input process group")
        ),
    ),
    Listed(
        "on CPU: offload, `sync_module_states`, `summon_full_params(offload_to_cpu=True)`",
        "torch frees what it has moved from the CPU to the CPU, or gives two states one memory",
        skips=offloads_on_cpu,
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
        matches=refuses_dtype,
    ),
    Listed(
        "`no_sync` over tensor-parallel members with original parameters",
        "torch leaves gradients in memory that is freed: reading them ends the process",
        skips=lambda draw, op: (
            is_parallel(draw)
            and draw.orig
            and draw.strategy != "NO_SHARD"
            and op.name == "backward"
            and not op.args["sync"]
            and bool(paths_of(draw.tree, "mlp"))
        ),
    ),
    Listed(
        "a step, or a write into parameters, after a forward without gradients",
        "torch does not gather again",
        matches=evaluated,
        ends=True,
    ),
    Listed(
        "a write into parameters after a backward in `no_sync` under SHARD_GRAD_OP",
        "torch does not gather again",
        matches=wrote_after_no_sync,
        ends=True,
    ),
    Listed(
        "a write into parameters of a frozen unit after a forward under SHARD_GRAD_OP",
        "torch does not gather again",
        matches=wrote_behind_frozen,
        ends=True,
    ),
    Listed(
        "`summon_full_params(with_grads=True)` where some ranks have no gradient, not in float32",
        "torch gathers float32 zeros there, of another size than the gradients of other ranks",
        skips=lacks_gradients_somewhere,
    ),
    Listed(
        "gradients of a unit of one element, added up by several backwards",
        "torch reduces the earlier one again, which divides it by the ranks",
        matches=adds_to_one_element,
        ends=True,
    ),
    Listed(
        "`rekey_optim_state_dict(PARAM_ID)` before there is state",
        "who asks for ids wants ids",
        matches=has_no_state,
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
        matches=clips_doubles,
    ),
    Listed(
        "a wrapped model that is converted to another dtype",
        "torch gathers into, or without sharding computes with, memory of the dtype it had",
        matches=lambda draw, op, differing: (
            draw.face == "flat"
            and dtype_at(draw, op) != draw.dtype
            and torch_alone_raised(differing, "with different dtypes", "have the same dtype")
        ),
        ends=True,
    ),
    Listed(
        "a full optimizer dict on the first rank, loaded by models side by side",
        "each model has an optimizer of its own",
        matches=is_of_another_model,
        ends=True,
    ),
    Listed(
        "buffers under `buffer_dtype` before the first forward",
        "a state dict should not change the model",
        matches=casts_buffers_early,
    ),
    Listed(
        "buffers under `buffer_dtype` before the first forward",
        "what a dict changes in them is rounded twice",
        matches=rounds_buffers_twice,
        ends=True,
    ),
    Listed(
        "`buffer_dtype` under a root without parameters of its own",
        "torch mended it",
        matches=leaves_buffers,
        ends=True,
    ),
    Listed(
        "`rank0_only` in state dicts",
        "who asks for one dict wants one",
        matches=is_for_one_rank,
    ),
    Listed(
        "LOCAL state dicts",
        "one form for both kinds of parameters; with two groups torch fails on some ranks",
        skips=lambda draw, op: (
            draw.group == "pair" and op.name in ("state", "load") and op.args["form"] == "LOCAL"
        ),
        matches=is_local,
    ),
    Listed(
        "gathered parameters of `fully_shard`",
        "optimizers and hooks always see the sharded ones",
        matches=shows_unsharded,
    ),
    Listed(
        "`set_reshard_after_forward` while a unit is sharded over fewer ranks",
        "torch forgets the ranks that hold it",
        matches=lambda draw, op, differing: (
            draw.face == "fully"
            and draw.reshard == 2
            and torch_alone_raised(differing, "Expected mesh_info to be FSDPMeshInfo")
            and any(one.name == "reshards_after_forward" for one in draw.ops)
        ),
        ends=True,
    ),
    Listed("a weight tied across units", "torch cuts the tie", matches=ties_units),
    Listed(
        "frozen parameters",
        "torch loses them from named_parameters, or gives them gradients",
        ends=True,
        matches=is_frozen_unsharded,
    ),
    Listed(
        "`.grad` after a backward in `no_sync` when reduced gradients are there",
        "an optimizer must not step by gradients of one rank",
        matches=is_kept_gradient,
        ends=True,
    ),
    Listed(
        "SHARDED optimizer dicts of `NO_SHARD` units",
        "model dicts of such units are plain too",
        matches=is_unsharded_in_sharded,
        ends=True,
    ),
    Listed(
        "an optimizer over a part of a unit",
        "there is nothing to refuse",
        matches=lacks_state,
    ),
    Listed(
        "an optimizer dict that lacks some members of a flat parameter",
        "optimizers have no state of unused parameters, and their dicts should load",
        matches=lacks_members,
        ends=True,
    ),
    Listed(
        "a norm left out of mixed precision in a bfloat16 model",
        "torch casts the inputs of the norm, and not its parameters",
        matches=casts_for_norm,
    ),
    Listed(
        "SHARDED dicts with entries of another kind or shape",
        "every problem is named, in one kind of error",
        matches=is_of_another_kind,
    ),
)


def listed(draw: Draw, op: Op, difference: Difference) -> Listed | None:
    """The entry that this difference belongs to."""
    return next((one for one in LISTED if one.matches(draw, op, difference)), None)


def unplayable(draw: Draw, op: Op) -> Listed | None:
    """The entry that says why torch's side is not asked."""
    return next((one for one in LISTED if one.skips(draw, op)), None)
