"""Parameters that are cut between blocks only, or not at all: `Blocks` and `Whole`.

Method: layouts by all small combinations against the definition; trainings of real ranks against
the same model unsharded, with optimizers that look at blocks and at whole matrices, bit for bit;
the same trainings with and without blocks; checkpoints from one layout into others.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from ckpt.layout.region import row_major_strides
from sharding import (
    Blocks,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    StateDictType,
    Whole,
    explain,
    fully_shard,
)
from sharding.comm_hooks import LowPrecisionState, bf16_compress_hook
from sharding.flat.layout import FlatLayout, Member, plan_ragged_layout
from sharding.fsdp import fsdp_units
from tests.ranks import run_ranks
from tests.sharding.models import batches, build, clean, full_copies, wrapped

# --- layouts --------------------------------------------------------------------------------------


def specs_of(kinds: tuple[str, ...]) -> list[Member]:
    known = {
        "whole": ((3, 4), 12),
        "large": ((8, 5), 40),
        "rows": ((9, 2), 4),
        "runs": ((50,), 8),
        "free": ((7,), 0),
        "none": ((0, 3), 0),
    }
    return [
        Member(f"p{i}", known[kind][0], row_major_strides(known[kind][0]), known[kind][1])
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("before", ["nothing", "much on the first", "falling"])
def test_no_border_of_a_shard_lies_in_a_block(ranks: int, before: str) -> None:
    given = {
        "nothing": [0] * ranks,
        "much on the first": [500] + [0] * (ranks - 1),
        "falling": [10 * (ranks - rank) for rank in range(ranks)],
    }[before]
    names = ("whole", "large", "rows", "runs", "free", "none")
    for count in (1, 2, 3):
        for kinds in itertools.product(names, repeat=count):
            specs = specs_of(kinds)
            check(plan_ragged_layout(specs, given=given, align_to=4), specs, given)


def check(layout: FlatLayout, specs: list[Member], given: list[int]) -> None:
    places = ["filler"] * layout.numel
    for member, spec in zip(layout.members, specs, strict=True):
        assert member.start % 4 == 0 and (member.fqn, member.shape) == (spec.fqn, spec.shape)
        for index in range(member.start, member.stop):
            assert places[index] == "filler"
            places[index] = member.fqn
    gaps = [index for start, stop in layout.gaps for index in range(start, stop)]
    assert gaps == [index for index, name in enumerate(places) if name == "filler"]
    # The ranges tile the flat tensor, in whatever order of ranks.
    assert sum(stop - start for start, stop in layout.ranges) == layout.numel
    covered = {index for start, stop in layout.ranges for index in range(start, stop)}
    assert covered == set(range(layout.numel))
    seen = [0] * len(specs)
    for rank in range(layout.shard_count):
        start, stop = layout.shard_range(rank)
        assert layout.shard_numel_of(rank) == stop - start
        for index, part in enumerate(layout.local_parts(rank)):
            if part is None:
                continue
            member, grain = layout.members[index], specs[index].granularity or 4
            seen[index] += part.numel
            assert part.in_member % grain == 0, "cut inside a block"
            end = part.in_member + part.numel
            assert end % grain == 0 or end == member.numel, "cut inside a block"
            assert part.numel == member.numel or not specs[index].is_whole
    assert seen == [member.numel for member in layout.members]
    # Balanced: nobody is filled beyond the level by more than one uncut thing.
    loads = [load + layout.shard_numel_of(rank) for rank, load in enumerate(given)]
    level = max(sum(loads) / len(loads), *given)
    largest = max((s.granularity for s in specs), default=4) + 8
    assert max(loads) <= level + largest


def test_blocks_become_runs_of_elements() -> None:
    assert Blocks((128, 128)).granularity("w", (512, 384)) == 128 * 384
    assert Blocks((1, 32)).granularity("w", (512, 384)) == 32
    assert Blocks((1, 32)).granularity("w", (512, 40)) == 40  # the last block of a row is shorter
    assert Blocks((2, 3)).granularity("w", (5, 4, 6)) == 2 * 6
    assert Blocks((2, 3)).granularity("w", (5, 3, 6)) == 3 * 6
    assert Blocks((1, 1)).granularity("w", (5, 3)) == 1
    assert Blocks(256).granularity("w", (5, 3)) == 256
    assert Whole().granularity("w", (5, 3)) == 15
    for shape in (0, (), (4, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Blocks(shape)
    with pytest.raises(ValueError, match="bias: has shape \\(4,\\), but its blocks"):
        Blocks((2, 2)).granularity("bias", (4,))


# --- trainings against the unsharded model --------------------------------------------------------


class BlockMomentum(torch.optim.Optimizer):
    """Momentum that is kept in 8 bits, with one scale for each block of rows and columns, or for
    each run of elements: what it does to an element depends on all others of its block.
    """

    def __init__(self, params: Any, block: int | tuple[int, int]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.block = block

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            kept = state.get("momentum_buffer", torch.zeros_like(param))
            state["momentum_buffer"] = self._rounded(kept.mul(0.9).add(param.grad))
            param.sub_(state["momentum_buffer"], alpha=self.param_groups[0]["lr"])

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        if isinstance(self.block, int):
            runs = torch.split(values.reshape(-1), self.block)
            return torch.cat([in_8_bits(run) for run in runs]).view_as(values)
        rows, columns = self.block
        return torch.cat(
            [
                torch.cat([in_8_bits(tile) for tile in torch.split(band, columns, 1)], 1)
                for band in torch.split(values, rows)
            ]
        )


def in_8_bits(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().max().clamp(min=1e-12) / 127
    return (values / scale).round() * scale


def unsharded(model: nn.Sequential, optimizers: Any, steps: int) -> dict[str, torch.Tensor]:
    """The same training without an engine: the mean of the ranks' gradients, added by rank."""
    for _, own in batches(steps):
        for param in model.parameters():
            param.grad = None
        model(own).square().mean().backward()
        for param in model.parameters():
            assert param.grad is not None
            grads = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(grads, param.grad.contiguous())
            total = grads[0] / 2
            for grad in grads[1:]:
                total += grad / 2
            param.grad = total / (dist.get_world_size() / 2)
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.01),
    ]


def by_blocks(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [BlockMomentum(matrices, (2, 3)), torch.optim.AdamW(others, lr=0.01)]


def by_runs(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [BlockMomentum(list(model.parameters()), 8)]


def matrices_whole(param: nn.Parameter) -> Whole | None:
    return Whole() if param.ndim == 2 else None


def matrices_in_blocks(param: nn.Parameter) -> Blocks | None:
    return Blocks((2, 3)) if param.ndim == 2 else None


def runs_of_8(param: nn.Parameter) -> Blocks:
    return Blocks(8)


CASES = {
    "muon": (matrices_whole, muon),
    "blocks": (matrices_in_blocks, by_blocks),
    "runs": (runs_of_8, by_runs),
}


def compare_with_unsharded() -> dict[str, list[tuple[int, ...]]]:
    shapes = {}
    for name, (placing, optimizers_of) in CASES.items():
        expected = unsharded(plain := build("uneven"), optimizers_of(plain), 3)
        model = wrapped("ours", build("uneven"), use_orig_params=True, shard_placement_fn=placing)
        optimizers = optimizers_of(model)
        shapes[name] = [tuple(param.shape) for param in model.parameters()]
        for _, own in batches(3):
            model(own).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        got = full_copies(model)
        assert got.keys() == expected.keys()
        for key, value in got.items():
            assert torch.equal(value, expected[key]), f"{name}: {key}"
    return shapes


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_optimizers_of_blocks_and_of_matrices_step_as_unsharded(ranks: int) -> None:
    shapes = run_ranks(ranks, compare_with_unsharded)
    weights = [tuple(p.shape) for p in build("uneven").parameters() if p.ndim == 2]
    for of_ranks in zip(*(one["muon"] for one in shapes), strict=True):
        if len(of_ranks[0]) == 2:
            rows = [shape for shape in of_ranks if shape[0]]
            assert len(rows) == 1 and rows[0] in weights  # one rank has it, the others no row
    for one in shapes:
        assert all(len(shape) == 2 for shape in one["blocks"][::2])
        assert all(len(shape) == 1 for shape in one["runs"])


# --- trainings with and without -------------------------------------------------------------------


def some_of_each(param: nn.Parameter) -> Blocks | Whole | None:
    """Whole matrices and images, runs of some vectors, and some that may be cut anywhere."""
    if param.ndim > 1:
        return Whole() if param.shape[0] % 2 else Blocks((2,) + (1,) * (param.ndim - 1))
    return Blocks(4) if param.numel() > 4 else None


def images_whole(param: nn.Parameter) -> Whole | None:
    return Whole() if param.ndim > 1 else None


def trained(name: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters and the full state dicts after steps with clipping, accumulation and summoning."""
    model = wrapped("ours", build(name), use_orig_params=True, **options)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01)
    for step, (_, own) in enumerate(batches(4)):
        if step == 1:
            with model.no_sync():
                model(own).square().mean().backward()
            continue
        model(own).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of ranks that have no gradients
            model.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    kind = FullyShardedDataParallel
    with kind.state_dict_type(model, StateDictType.FULL_STATE_DICT), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dicts = {"model": model.state_dict(), "optim": kind.optim_state_dict(model, optimizer)}
    expected = {clean(key): value for key, value in dicts["model"].items()}
    forms = [StateDictType.SHARDED_STATE_DICT]
    if "device_mesh" not in options:
        forms.append(StateDictType.LOCAL_STATE_DICT)
    for form in forms:
        with kind.state_dict_type(model, form), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loaded = wrapped("ours", build(name, seed=5), use_orig_params=True)
            with kind.state_dict_type(loaded, form):
                loaded.load_state_dict(model.state_dict())
        for key, value in full_copies(loaded).items():
            assert torch.equal(value, expected[key]), (form, key)
    return full_copies(model), dicts


def same(a: Any, b: Any, where: str) -> None:
    if isinstance(a, tuple | list):
        assert len(a) == len(b), where
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}.{number}")
        return
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, torch.Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def compare_with_cut_anywhere(names: tuple[str, ...], options: dict[str, Any]) -> None:
    if options.pop("hybrid", False):
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    for name in names:
        placing = images_whole if name == "convolution" else some_of_each
        with_blocks = trained(name, {**options, "shard_placement_fn": placing})
        same(with_blocks, trained(name, options), name)


def mean_of_ranks(state: Any, full: torch.Tensor, out: torch.Tensor) -> None:
    """A hook as users write them: for equal shards."""
    ranks = dist.get_world_size()
    assert full.numel() == ranks * out.numel()
    everyones = [torch.empty_like(full) for _ in range(ranks)]
    dist.all_gather(everyones, full)
    total = sum(everyones[1:], everyones[0])  # in one order for all elements, wherever they lie
    out.copy_(total.chunk(ranks)[dist.get_rank()] / ranks)


def compare_hooks_with_cut_anywhere() -> None:
    for hook, state in ((mean_of_ranks, None), (bf16_compress_hook, LowPrecisionState())):
        results = []
        for placing in (some_of_each, None):
            model: Any = wrapped(
                "ours", build("uneven"), use_orig_params=True, shard_placement_fn=placing
            )
            model.register_comm_hook(state, hook)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _, own in batches(3):
                model(own).square().mean().backward()
                model(own).square().mean().backward()  # is added to the first
                optimizer.step()
                optimizer.zero_grad()
            results.append(full_copies(model))
        same(*results, hook.__name__)


@pytest.mark.ranks
def test_comm_hooks_get_equal_shards_and_give_what_they_give_without_blocks() -> None:
    run_ranks(3, compare_hooks_with_cut_anywhere)


BF16 = MixedPrecision(torch.bfloat16, torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "low": {"mixed_precision": BF16, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "hybrid": {"hybrid": True},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "how"), [(3, "plain"), (2, "low"), (4, "hybrid"), (2, "whole")])
def test_where_parameters_are_cut_changes_no_value(ranks: int, how: str) -> None:
    names = ("uneven", "tied", "partly_frozen", "convolution", "reentrant", "batch_norm")
    run_ranks(
        ranks, compare_with_cut_anywhere, names if how == "plain" else names[:1], OPTIONS[how]
    )


# --- who owns what --------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def owned_bytes() -> tuple[int, int, set[int]]:
    model = FullyShardedDataParallel(
        Deep(),
        auto_wrap_policy=ModuleWrapPolicy([nn.Sequential]),
        use_orig_params=True,
        shard_placement_fn=matrices_whole,
    )
    facts = explain(model).units
    stores = [unit.fsdp_unit.store for unit in fsdp_units(model)]
    lengths = {store.flat.numel() for store in stores if store is not None}
    return (
        sum(unit.shard_nbytes for unit in facts),
        sum(unit.gathered_nbytes for unit in facts),
        lengths,
    )


@pytest.mark.ranks
def test_whole_matrices_are_spread_over_ranks_by_bytes_across_units() -> None:
    ranks = run_ranks(5, owned_bytes)
    matrix = 16 * 64 * 4
    here = [one[0] for one in ranks]
    # Each unit has three matrices, of which one rank can have one only: units differ in who.
    assert max(here) - min(here) <= matrix
    # Nothing is padded: what is gathered is what there is.
    assert {one[1] for one in ranks} == {sum(here)}
    assert sum(here) == sum(p.numel() for p in Deep().parameters()) * 4


def refusals() -> None:
    def wrap(module: nn.Module, placing: Any, **options: Any) -> Any:
        options = {"use_orig_params": True, **options}
        return FullyShardedDataParallel(module, shard_placement_fn=placing, **options)

    with pytest.raises(ValueError, match=r"weight: .*needs use_orig_params=True"):
        wrap(nn.Linear(4, 4), matrices_whole, use_orig_params=False)
    with pytest.raises(
        ValueError, match="weight: shard_placement_fn returned 0; the wrapper takes"
    ):
        wrap(nn.Linear(4, 4), lambda param: 0)
    with pytest.raises(ValueError, match="bias: has shape \\(4,\\), but its blocks"):
        wrap(nn.Linear(4, 4), lambda param: Blocks((2, 2)))
    images: Any = nn.Conv2d(4, 4, 3)
    images.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"weight: has strides .* return Whole"):
        wrap(images, lambda param: Blocks(4))
    with pytest.raises(ValueError, match=r"weight: .*Whole.*FullyShardedDataParallel"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=matrices_whole)
    with pytest.raises(ValueError, match=r"weight: .*Blocks.*FullyShardedDataParallel"):
        fully_shard(nn.Linear(4, 9), shard_placement_fn=lambda param: Blocks((4, 4)))


@pytest.mark.ranks
def test_what_cannot_be_is_refused_by_name() -> None:
    run_ranks(2, refusals)


def sharded_where_chunks_respect_blocks() -> list[tuple[int, ...]]:
    def placing(param: nn.Parameter) -> Blocks:
        return Blocks((4, 4)) if param.ndim == 2 else Blocks(4)

    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 4))
    fully_shard(model, shard_placement_fn=placing)
    model(torch.ones(1, 6)).sum().backward()
    params: list[Any] = list(model.parameters())
    return [tuple(param.to_local().shape) for param in params]


@pytest.mark.ranks
def test_fully_shard_takes_blocks_that_its_chunks_do_not_cut() -> None:
    # 16 rows are two chunks of 8; the 4 rows of the last weight and bias would be cut in two.
    with pytest.raises(AssertionError, match=r"1\.weight: .*chunks of 2 .*FullyShar"):
        run_ranks(2, sharded_where_chunks_respect_blocks)


# --- checkpoints ----------------------------------------------------------------------------------


class Training:
    def __init__(self, layout: str, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.net: Any = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 1))
        if layout == "fully":
            fully_shard(self.net)
        elif layout != "plain":
            placing = {"whole": matrices_whole, "blocks": some_of_each}[layout]
            self.net = wrapped("ours", self.net, use_orig_params=True, shard_placement_fn=placing)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "matrices": torch.optim.Muon(self.named("weight"), lr=0.1)
            if kind == "muon"
            else torch.optim.SGD(self.named("weight"), lr=0.1, momentum=0.9),
            "others": torch.optim.AdamW(self.named("bias"), lr=0.1),
        }

    def named(self, end: str) -> list[nn.Parameter]:
        return [param for name, param in self.net.named_parameters() if name.endswith(end)]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.net, **self.optimizers}


def save_after_steps(layout: str, kind: str, root: str) -> None:
    training = Training(layout, kind, seed=0)
    for _, own in batches(2):
        training.net(own).square().mean().backward()
        for optimizer in training.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    ckpt.save(training.state, root, step=1)


def load_and_save(layout: str, kind: str, source: str, target: str) -> None:
    training = Training(layout, kind, seed=4)
    ckpt.load(training.state, source)
    ckpt.save(training.state, target, step=2)
    for _, own in batches(1):  # what was loaded can be trained
        training.net(own).square().mean().backward()
        for optimizer in training.optimizers.values():
            optimizer.step()


def loaded_plain(kind: str, root: str) -> dict[str, Any]:
    training = Training("plain", kind, seed=8)
    ckpt.load(training.state, root)
    return {name: one.state_dict() for name, one in training.state.items()}


MOVES = [
    ("muon", ("whole", 3), ("whole", 2)),
    ("sgd", ("whole", 2), ("blocks", 3)),
    ("sgd", ("blocks", 3), ("fully", 2)),
    ("sgd", ("fully", 2), ("whole", 3)),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "saver", "loader"), MOVES)
def test_what_one_layout_saves_others_load(
    kind: str, saver: tuple[str, int], loader: tuple[str, int], tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_ranks(saver[1], save_after_steps, saver[0], kind, first)
    run_ranks(loader[1], load_and_save, loader[0], kind, first, second)
    before, after = loaded_plain(kind, first), loaded_plain(kind, second)
    assert before["matrices"]["state"] and before["others"]["state"]
    same(after, before, "state")
    target = tmp_path / "exported.safetensors"
    ckpt.export(first, str(target))
    exported = load_file(str(target))
    for name, value in before["model"].items():
        assert torch.equal(exported[name], value)
