"""Who reads what on which stream before it is there: seen on CPU, by seams that only pretend.

Method: `Late` copies to the host as an accelerator does: what is in the copy arrives with `finish`
and is NaN until then. `Ordered` knows of every operation on which stream it is, and what that
stream has waited for; reading what another stream wrote without waiting for it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import sharding
from sharding import CPUOffload, MixedPrecision, ShardingStrategy
from sharding.engine.streams import Streams
from tests.sharding.fully_scenarios import claims
from tests.sharding.models import engine

STRATEGIES = ("FULL_SHARD", "NO_SHARD")


class Late(Streams):
    """Copies to the host arrive with `finish`; `log` has what was done when."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._on_the_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(
        self, tensor: torch.Tensor, *, pin: bool, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        host = torch.empty_like(tensor) if into is None else into
        self._on_the_way.append((host, tensor.clone()))
        host.fill_(torch.nan)
        self.log.append("copy")
        return host

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # In order after the copy that it reads.
        self.log.append("back")
        for host, value in reversed(self._on_the_way):
            if host.data_ptr() == tensor.data_ptr():
                return value.clone()
        return tensor.clone()

    def finish(self) -> None:
        for host, value in self._on_the_way:
            host.copy_(value)
        self._on_the_way.clear()
        self.log.append("finish")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch() -> torch.Tensor:
    seed = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 6, generator=seed)


def flat_gradients_arrive_before_hooks_look_at_them() -> None:
    for strategy in STRATEGIES:
        for orig in (False, True):
            for low in (False, True):
                check_flat(ShardingStrategy[strategy], orig, low)


def check_flat(strategy: ShardingStrategy, orig: bool, low: bool) -> None:
    precision = MixedPrecision(reduce_dtype=torch.bfloat16) if low else None
    gradients = []
    for offload in (False, True):
        wrapped = engine("ours")(
            model(),
            sharding_strategy=strategy,
            use_orig_params=orig,
            cpu_offload=CPUOffload(offload),
            mixed_precision=precision,
        )
        wrapped.check_is_root()
        seam = Late()
        wrapped.fsdp_unit.known_runtime.share(seam)
        seen: list[torch.Tensor] = []

        def hook(param: Any, seam: Late = seam, seen: list[torch.Tensor] = seen) -> None:
            seam.log.append("hook")
            seen.append(param.grad.clone())

        for param in wrapped.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for _ in range(2):  # the second adds to the first
            wrapped(batch()).sum().backward()
        assert "hook" in seam.log or (orig and strategy is ShardingStrategy.FULL_SHARD)
        if offload and "hook" in seam.log:
            first = seam.log.index("hook")
            assert seam.log[first - 1] == "finish" and "copy" in seam.log[:first], seam.log
            assert "back" in seam.log  # what is added is added on the device
        gradients.append([*seen, *(p.grad for p in wrapped.parameters() if p.grad is not None)])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other), (strategy, orig, low, one, other)


def gradients_of_fully_shard_arrive_before_hooks_look_at_them() -> None:
    gradients = []
    for policy in (sharding.OffloadPolicy(), sharding.CPUOffloadPolicy(pin_memory=False)):
        wrapped: Any = sharding.fully_shard(model(), offload_policy=policy)
        seam = Late()
        wrapped.fsdp_group.streams = wrapped.fsdp_group.store.streams = seam
        seen: list[torch.Tensor] = []

        def hook(param: Any, seam: Late = seam, seen: list[torch.Tensor] = seen) -> None:
            seam.log.append("hook")
            seen.append(param.grad.to_local().clone())

        for param in wrapped.parameters():
            param.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            wrapped(batch()).sum().backward()
        if isinstance(policy, sharding.CPUOffloadPolicy):
            first = seam.log.index("hook")
            assert seam.log[first - 1] == "finish" and "copy" in seam.log[:first], seam.log
            assert "back" in seam.log  # what is added is added on the device
        gradients.append([*seen, *(p.grad.to_local() for p in wrapped.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def the_host_may_write_to_shards_after_a_forward_alone() -> None:
    wrapped: Any = sharding.fully_shard(
        model(), offload_policy=sharding.CPUOffloadPolicy(pin_memory=False)
    )
    seam = Late()
    wrapped.fsdp_group.streams = wrapped.fsdp_group.store.streams = seam
    with torch.no_grad():
        wrapped(batch())
    assert seam.log == ["finish"]


# --- order ---------------------------------------------------------------------------------------


class Ordered(Streams):
    """Counts what each stream is given, and what of the others it has waited for."""

    def __init__(self) -> None:
        self.now = "compute"
        names = ("compute", "gather", "reduce")
        self.clocks = {name: dict.fromkeys(names, 0) for name in names}

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def gathering(self) -> Any:
        return self._on("gather")

    def reducing(self) -> Any:
        return self._on("reduce")

    def _wait(self, waiting: str, clock: dict[str, int]) -> None:
        mine = self.clocks[waiting]
        mine.update({name: max(mine[name], clock[name]) for name in mine})

    def gathers_wait_for_compute(self) -> None:
        self._wait("gather", self.clocks[self.now])

    def mark(self) -> object:
        return dict(self.clocks[self.now])

    def gathers_wait_for(self, mark: Any) -> None:
        self._wait("gather", mark)

    def compute_waits_for_gathers(self) -> None:
        self._wait(self.now, self.clocks["gather"])

    def reductions_wait_for_compute(self) -> None:
        self._wait("reduce", self.clocks[self.now])

    def compute_waits_for_reductions(self) -> None:
        self._wait(self.now, self.clocks["reduce"])


class Watching(TorchDispatchMode):
    """Raises where an operation reads memory that its stream does not know to be written."""

    def __init__(self, seam: Ordered) -> None:
        super().__init__()
        self._seam = seam
        self._written: dict[int, tuple[str, int, str]] = {}
        self.read_across = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seam = self._seam
        read = set(addresses((args, kwargs)))
        for address in read:
            stream, count, by = self._written.get(address, (seam.now, 0, ""))
            if stream != seam.now:
                self.read_across += 1
                assert seam.clocks[seam.now][stream] >= count, (
                    f"{func} on {seam.now} reads what {by} writes on {stream}"
                )
        result = func(*args, **kwargs)
        clock = seam.clocks[seam.now]
        clock[seam.now] += 1
        mutable = [
            args[index]
            for index, one in enumerate(func._schema.arguments)
            if index < len(args) and one.alias_info is not None and one.alias_info.is_write
        ]
        written = [*addresses(mutable), *(set(addresses(result)) - read)]
        for address in written:
            self._written[address] = (seam.now, clock[seam.now], str(func))
        return result


def addresses(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, DTensor) and not value.is_meta and value.numel():
            yield value.untyped_storage().data_ptr()
    elif isinstance(value, list | tuple):
        for one in value:
            yield from addresses(one)
    elif isinstance(value, dict):
        yield from addresses(list(value.values()))


class Twice(nn.Module):
    """Calls one module twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(torch.tanh(self.inner(x))))


def gathers_read_smaller_shards_after_they_were_made() -> None:
    bare: Any = Twice()
    sharding.fully_shard(bare.inner, reshard_after_forward=2)
    sharding.fully_shard(bare)
    seam = Ordered()
    for module in (bare, bare.inner):
        module.fsdp_group.streams = module.fsdp_group.store.streams = seam
    watching = Watching(seam)
    with watching:
        bare(torch.ones(4, 8)).sum().backward()
    assert watching.read_across > 0


def values_put_in_place_of_parameters_are_there_before_gathers_read_them() -> None:
    bare = Twice()
    wrapped: Any = engine("ours")(bare.inner, use_orig_params=True)
    bare.inner = wrapped
    root: Any = engine("ours")(bare, use_orig_params=True)
    root.check_is_root()
    seam = Ordered()
    root.fsdp_unit.known_runtime.share(seam)
    param = wrapped.module.weight

    def replace(*args: Any) -> None:
        param.data = torch.full_like(param.data, 0.5)

    wrapped.register_forward_pre_hook(replace)
    watching = Watching(seam)
    with torch.no_grad(), watching:
        root(torch.ones(4, 8))
    assert watching.read_across > 0


test_on_two_ranks = claims(
    2,
    [
        flat_gradients_arrive_before_hooks_look_at_them,
        gradients_of_fully_shard_arrive_before_hooks_look_at_them,
        the_host_may_write_to_shards_after_a_forward_alone,
        values_put_in_place_of_parameters_are_there_before_gathers_read_them,
    ],
)
test_on_four_ranks = claims(4, [gathers_read_smaller_shards_after_they_were_made])
