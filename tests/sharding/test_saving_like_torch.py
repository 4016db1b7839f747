"""What state dicts are made of, and what profilers see, held against torch's classes.

Method: the same model, wrapped alike, on the same ranks; classes, shards and names are compared.
"""

from __future__ import annotations

import io
import itertools
import pydoc
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, StateDictType
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import sharding
from tests.sharding.fully_scenarios import claims, sgd, whole_mesh
from tests.sharding.models import build, engine, wrapped

BOTH = ("torch", "ours")
KITS: dict[str, Any] = {"torch": torch_fsdp, "ours": sharding}


def stepped(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    return optimizer


def loads(state_dict: Any) -> bool:
    """Whether it comes back from a file without running code."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    try:
        loaded = torch.load(file, weights_only=True)
    except Exception:
        return False
    return list(loaded) == list(state_dict)


def what_is_saved_loads_with_weights_alone() -> None:
    for orig, mesh in itertools.product((False, True), (None, whole_mesh())):
        for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            results = []
            for name in BOTH:
                model = wrapped(name, build("batch_norm"), use_orig_params=orig, device_mesh=mesh)
                optimizer = stepped(model)
                kit = type(model)
                kit.set_state_dict_type(model, form)
                taken, state = model.state_dict(), kit.optim_state_dict(model, optimizer)
                results.append((type(taken), loads(taken), loads(state)))
            assert results[0] == results[1], (orig, mesh, form, results)
            if form is StateDictType.FULL_STATE_DICT or mesh is not None:
                assert results[1][1:] == (True, True), (orig, mesh, form)
    for name in BOTH:
        bare: Any = build("batch_norm")
        KITS[name].fully_shard(bare[1], mesh=whole_mesh())
        KITS[name].fully_shard(bare, mesh=whole_mesh())
        optimizer = stepped(bare)
        assert loads(bare.state_dict()) and loads(optimizer.state_dict()), name


def local_dicts_load_where_torchs_do() -> None:
    for orig in (False, True):
        files = {name: io.BytesIO() for name in BOTH}
        for name, file in files.items():
            model = wrapped(name, build("uneven"), use_orig_params=orig)
            with type(model).state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                state = model.state_dict()
            torch.save(state, file)
            file.seek(0)
        torchs, ours = map(torch.serialization.get_unsafe_globals_in_checkpoint, files.values())
        assert set(ours) <= set(torchs), ours
        files["ours"].seek(0)
        listed = [*map(pydoc.locate, torchs), ShardedTensor.ProcessGroupState]
        with torch.serialization.safe_globals(listed):
            loaded = torch.load(files["ours"], weights_only=True)
        for one, other in zip(loaded.values(), state.values(), strict=True):
            assert parts_of(one) == parts_of(other)


def parts_of(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [
            (tuple(one.tensor.shape), tuple(one.metadata.shard_offsets), one.tensor.dtype)
            for one in value.local_shards()
        ]
        cuts = [tuple(one.shard_sizes) for one in value.metadata().shards_metadata]
        return tuple(value.size()), value.dtype, shards, cuts
    return type(value).__name__, tuple(value.shape), value.dtype


def parts_below(name: str, orig: bool, low: bool, ignores: bool) -> list[Any]:
    """Shards of the dicts of a model that lies under another, at another prefix."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model: Any = nn.Sequential(nn.Linear(6, 7), inner, nn.Linear(3, 1))
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if low else None
    options: dict[str, Any] = {"use_orig_params": orig, "mixed_precision": precision}
    ignored = {"ignored_modules": [inner[2]]} if ignores else {}
    if ignores and low:
        inner[2].bfloat16()  # nobody casts for it
    model[1] = engine(name)(inner, **options, **ignored)
    root: Any = engine(name)(model, **options)
    outer = nn.ModuleDict({"deep": nn.ModuleDict({"er": root})})
    parts = []
    for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        type(root).set_state_dict_type(outer, form)
        if form is StateDictType.FULL_STATE_DICT:
            optimizer = stepped(root)
        state = type(root).optim_state_dict(root, optimizer)["state"]
        parts.append({key: parts_of(value) for key, value in outer.state_dict().items()})
        parts.append({key: {k: parts_of(v) for k, v in one.items()} for key, one in state.items()})
    return parts


def shards_have_the_sizes_of_torchs() -> None:
    for orig, low, ignores in itertools.product((False, True), repeat=3):
        torchs, ours = (parts_below(name, orig, low, ignores) for name in BOTH)
        assert ours == torchs, (orig, low, ignores)


class Partly(nn.Module):
    """Two layers with a buffer each, one of them ignored, in a model with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.left = nn.Linear(3, 3), nn.Linear(3, 3)
        for each in (self, self.kept, self.left):
            each.register_buffer("seen", torch.ones(2))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))


def live_entries(name: str, form: StateDictType, **options: Any) -> set[str]:
    """Keys of a state dict whose tensors are the memory of the model itself."""
    bare = Partly()
    tensors = [bare.left.weight, bare.left.bias, *bare.buffers()]
    model = engine(name)(bare, ignored_modules=[bare.left], **options)
    with type(model).state_dict_type(model, form):
        state = model.state_dict(prefix="pre.")
    live = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return {
        key
        for key, value in state.items()
        if not isinstance(value, ShardedTensor) and value.untyped_storage().data_ptr() in live
    }


def ignored_states_and_buffers_are_live_in_dicts() -> None:
    for form, orig, low in itertools.product(
        (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT),
        (False, True),
        (None, MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)),
    ):
        options = {"use_orig_params": orig, "mixed_precision": low}
        torchs, ours = (live_entries(name, form, **options) for name in BOTH)
        assert len(torchs) >= 3 and ours == torchs, (form, orig, low, torchs, ours)


def state_names(name: str, form: StateDictType, turned: bool, orig: bool) -> list[str]:
    """The keys of an optimizer dict; `turned`: odd ranks list their parameters the other way."""
    model = wrapped(name, build("uneven"), use_orig_params=orig)
    model.register_parameter("alone", nn.Parameter(torch.ones(3)))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params[::-1] if turned and dist.get_rank() % 2 else params)
    (model(torch.ones(4, 6)).sum() * model.alone.sum()).backward()
    optimizer.step()
    with type(model).state_dict_type(model, form):
        return list(type(model).optim_state_dict(model, optimizer)["state"])


def optimizer_dicts_have_one_order_on_all_ranks() -> None:
    for form, orig in itertools.product(
        (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT), (False, True)
    ):
        straight = state_names("ours", form, False, orig)
        assert set(straight) == set(state_names("torch", form, True, orig)), (form, orig)
        turned: list[Any] = [None, None]
        dist.all_gather_object(turned, state_names("ours", form, True, orig))
        assert turned == [straight, straight], (form, orig, turned, straight)


def refused(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def keys_that_do_not_fit_are_named_as_torch_does() -> None:
    forms = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)
    for form, lacks, has in itertools.product(forms, ("0.weight", "1.1.running_mean"), ("", "a")):
        texts = []
        for name in BOTH:
            model = wrapped(name, build("batch_norm"))
            with type(model).state_dict_type(model, form):
                state = {key: value for key, value in model.state_dict().items() if key != lacks}
                if has:
                    state |= {has: torch.ones(2), "b": torch.ones(2)}
                texts.append(refused(lambda m=model, s=state: m.load_state_dict(s)))
        assert "Missing key(s)" in texts[0] and texts[1].startswith(texts[0]), texts
        assert f"{lacks}: is not in the dict" in texts[1]  # and what to do about it


def ranges_seen(run: Any) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    names = {event.name for event in profiled.events()}
    return {name for name in names if name.startswith(("FullyShardedDataParallel.", "FSDP::"))}


def train_twice(model: Any) -> None:
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()


def profilers_see_the_ranges_of_torchs_classes() -> None:
    for prefetch in (*BackwardPrefetch, None):
        ranges = []
        for name in BOTH:
            model = wrapped(name, build("uneven"), backward_prefetch=prefetch)
            sgd(model)
            ranges.append(ranges_seen(lambda model=model: train_twice(model)))
        missing = ranges[0] - ranges[1]
        assert len(ranges[0]) > 8 and not missing, (prefetch, missing)
        assert ranges[1] == ranges[0], (prefetch, ranges[1] - ranges[0])
    ranges = []
    for name in BOTH:
        bare: Any = build("uneven")
        KITS[name].fully_shard(bare[1], mesh=whole_mesh())
        KITS[name].fully_shard(bare, mesh=whole_mesh())
        ranges.append(ranges_seen(lambda bare=bare: train_twice(bare)))
    assert len(ranges[0]) > 8 and ranges[1] == ranges[0], ranges[0] ^ ranges[1]


def counted(name: str, kind: str) -> tuple[dict[str, int], set[str]]:
    """Collectives of a step: what `CommDebugMode` counts, and what a profiler calls them."""
    model: Any = build("uneven")
    if kind == "fully":
        KITS[name].fully_shard(model[1], mesh=whole_mesh())
        KITS[name].fully_shard(model, mesh=whole_mesh())
    else:
        model = wrapped(name, model)
    train_twice(model)
    with CommDebugMode() as mode:
        model(torch.ones(2, 6)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train_twice(model)
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    # torch's wrapper has no single tensor for gathers on CPU.
    counts = {
        op.replace("allgather_", "_allgather_base_") if op == "c10d.allgather_" else op: count
        for op, count in counts.items()
    }
    names = {event.name for event in profiled.events()}
    return counts, {op for op in names if op.startswith("c10d::") and "base" in op}


def collectives_have_the_names_of_torchs() -> None:
    wanted = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
    for kind in ("fully", "flat"):
        torchs, ours = (counted(name, kind) for name in BOTH)
        assert len(torchs[0]) == 2 and ours[0] == torchs[0], (kind, torchs, ours)
        assert torchs[1] <= ours[1] == wanted, (kind, ours)


test_on_two_ranks = claims(
    2,
    [
        what_is_saved_loads_with_weights_alone,
        local_dicts_load_where_torchs_do,
        shards_have_the_sizes_of_torchs,
        keys_that_do_not_fit_are_named_as_torch_does,
        ignored_states_and_buffers_are_live_in_dicts,
        optimizer_dicts_have_one_order_on_all_ranks,
        profilers_see_the_ranges_of_torchs_classes,
        collectives_have_the_names_of_torchs,
    ],
)
