"""Scenarios of `tests/streams` with real tensors, on any device: what comes out, and how two such
results compare.

Values, inputs and ranks are the same on every device. Shards right after wrapping were only copied,
so they are equal bit by bit; what was computed may differ by rounding, and by nothing on the device
that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sharding.flat import layout
from tests.streams.scenarios import SCENARIOS
from tests.streams.training import Net, Run

__all__ = ["TOLERANCES", "OnDevice", "Result", "compared", "differences", "result_of"]

# Of a tensor's largest element, by the lowest precision of the scenario; elements near zero are
# differences of larger ones. Inputs off by one rounding (2^-24, 2^-11, 2^-9) change results by at
# most 5e-5, 5e-4 and 0.018 (measured on the CPU, over all scenarios); another device rounds
# everywhere.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}

# There torch loses sums that wait for replicas, and shows hooks gradients that are still being
# copied to the host (seen on an H200, torch 2.11).
OTHER_THAN_TORCHS = (
    "sums_reduced_by_a_backward_that_misses_the_unit",
    "offload_and_hooks_that_look_at_gradients",
    "offload_over_an_axis_and_hooks",
)

Named = dict[str, torch.Tensor | None]


class Result(NamedTuple):
    """What one rank has of a scenario: shards as they were wrapped, outputs of the models in order,
    and shards and gradients at the end.
    """

    wrapped: Named
    outputs: Named
    final: Named
    precision: torch.dtype


@dataclass
class OnDevice(Run):
    """A scenario with real tensors on `where`, on the ranks that there are."""

    where: torch.device = field(default_factory=lambda: torch.device("cpu"))
    wrapped: Named = field(default_factory=dict)
    outputs: Named = field(default_factory=dict)
    _made: int = 0
    _bare: WeakSet[nn.Module] = field(default_factory=WeakSet)
    _keeps_outputs: bool = True

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def streams(self) -> Any:
        """The device's module, which has its streams."""
        return torch.get_device_module(self.where)

    def net(self, kind: type[nn.Module] = Net, *args: Any, **kwargs: Any) -> Any:
        self._made += 1
        torch.manual_seed(self._made)  # made by the CPU, so that values do not depend on the device
        net = kind(*args, **kwargs).to(self.where)
        self._bare.add(net)
        return net

    def batch(self, rows: int = 4, width: int = 6) -> torch.Tensor:
        self._made += 1
        generator = torch.Generator().manual_seed(1000 * self._made + dist.get_rank())
        return torch.randn(rows, width, generator=generator).to(self.where)

    def mesh(self, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
        ranks = dist.get_world_size()
        names = names[-len(shape) :]
        if len(shape) > 2:
            pass  # a scenario that names its axes takes as many ranks as it says
        elif len(shape) == 2:
            rows = ranks if shape[1] == 1 else 2 if ranks % 4 == 0 else 1
            shape = (rows, ranks // rows)
        else:
            shape = (ranks,)
        return init_device_mesh(self.where.type, shape, mesh_dim_names=names)

    def side_stream(self) -> Any:
        return self.streams.Stream()

    def current_stream(self) -> Any:
        return self.streams.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.streams.stream(stream)
        return context

    def as_graph(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as a graph of the device, or itself where the device has none."""
        self._keeps_outputs = False  # a replay calls no hooks
        if not hasattr(self.streams, "CUDAGraph"):
            return step
        recorded = self.streams.CUDAGraph()
        with self.streams.graph(recorded):
            step()
        replay: Callable[[], None] = recorded.replay
        return replay

    def wrap(self, model: Any, **options: Any) -> Any:
        wrapped = super().wrap(model, **options)
        number = len(self.models)
        if model in self._bare:  # one that was trained was computed, not only copied
            self.wrapped.update(_named(f"model {number}", wrapped))
            self._bare.discard(model)

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            if self._keeps_outputs:
                self.outputs[f"output {len(self.outputs)}"] = output.detach().clone()

        wrapped.register_forward_hook(keep)
        return wrapped


def result_of(who: str, surface: str, name: str, device: str) -> Result:
    """Run a scenario on a device to its end; raises what it raises."""
    # Where whole members lie follows from what ranks were given before: each run starts anew.
    layout._GIVEN.clear()
    index = None if device == "cpu" else torch.get_device_module(device).current_device()
    run = OnDevice(who, surface, where=torch.device(device, index))
    SCENARIOS[name].body(run)
    run.streams.synchronize()
    final: Named = {}
    for number, model in enumerate(run.models, 1):
        final.update(_named(f"model {number}", model))
    return Result(
        run.wrapped,
        {key: _on_host(value) for key, value in run.outputs.items()},
        final,
        min(run.dtypes, key=lambda dtype: dtype.itemsize),
    )


def _named(title: str, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, param in model.named_parameters():
        yield f"{title}, {name}", _on_host(param)
        yield f"{title}, gradient of {name}", _on_host(param.grad)
    for name, buffer in model.named_buffers():
        yield f"{title}, {name}", _on_host(buffer)


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def differences(got: Result, wanted: Result, *, exact: bool) -> list[str]:
    """In what two results of one rank differ, as sentences."""
    tolerance = 0.0 if exact else TOLERANCES[wanted.precision]
    return [
        *_differing(got.wrapped, wanted.wrapped, 0.0),
        *_differing(got.outputs, wanted.outputs, tolerance),
        *_differing(got.final, wanted.final, tolerance),
    ]


def _differing(got: Named, wanted: Named, tolerance: float) -> Iterator[str]:
    if got.keys() != wanted.keys():
        yield f"{sorted(got.keys() ^ wanted.keys())} are on one side only"
    for name in got.keys() & wanted.keys():
        mine, other = got[name], wanted[name]
        if mine is None or other is None:
            if mine is not other:
                yield f"{name}: is {'missing' if mine is None else 'there'}"
            continue
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            yield f"{name}: {mine.dtype} {mine.shape} instead of {other.dtype} {other.shape}"
        elif not other.isfinite().all():
            yield f"{name}: the scenario's own values are not finite, which shows nothing"
        elif mine.numel():
            off = float((mine.double() - other.double()).abs().max())
            scale = float(other.double().abs().max())
            if not off <= tolerance * max(scale, 1.0):
                yield f"{name}: differs by {off:.3g} of {scale:.3g}, may by {tolerance:g} of it"


def compared(who: str, surfaces: tuple[str, ...], name: str, device: str) -> list[str]:
    """Run a scenario on the CPU and on the device, on the ranks that there are: what differs on
    this one. By itself a rank has the bits of torch's own classes, too.
    """
    problems: list[str] = []
    for surface in surfaces:
        wanted = result_of(who, surface, name, "cpu")
        got = result_of(who, surface, name, device)
        assert wanted.outputs and wanted.final, "a scenario that computes nothing shows nothing"
        problems += [
            f"{surface}: {text}" for text in differences(got, wanted, exact=device == "cpu")
        ]
        # More ranks add up gradients in another order than torch's: it cuts them elsewhere.
        alone = who == "ours" and dist.get_world_size() == 1 and name not in OTHER_THAN_TORCHS
        if alone and surface in SCENARIOS[name].torchs:
            problems += [
                f"{surface}, torch's own: {text}"
                for text in _not_torchs(got, surface, name, device)
            ]
    return problems


def _not_torchs(got: Result, surface: str, name: str, device: str) -> list[str]:
    # An older torch has not all of it, and no torch offloads from a CPU.
    lacks = (AttributeError, RuntimeError) if device == "cpu" else AttributeError
    try:
        peer = result_of("torch", surface, name, device)
    except lacks as error:
        print(f"  {name}, {surface}: torch's own does not run here, {error!r}"[:300], flush=True)
        return []
    # Flat parameters have other names there.
    final = _differing(got.final, peer.final, 0.0) if surface == "fully" else ()
    return [*_differing(got.outputs, peer.outputs, 0.0), *final]
