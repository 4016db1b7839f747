"""Models and steps for scenarios, and both engines' two surfaces behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

import sharding
from tests.streams.device import NAME, Stream, using

__all__ = ["SURFACES", "Block", "Net", "Run"]

SURFACES = ("fully", "flat", "orig")
"""`fully_shard`; the wrapper with flat parameters; the wrapper with original ones."""
WIDTH = 16


class Block(nn.Module):
    """Two layers; sizes do not divide by the number of ranks."""

    def __init__(self, width: int = WIDTH, hidden: int = 23) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A few blocks between two layers of the root's own."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last((x * self.scale).to(x.dtype))  # a buffer may be of a wider dtype


@dataclass
class Run:
    """One scenario on one engine: "ours" or "torch", and one of `SURFACES`."""

    who: str
    surface: str
    models: list[Any] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=lambda: {torch.float32})
    """What it computes in."""

    @property
    def module(self) -> Any:
        """The package that has the engine."""
        return sharding if self.who == "ours" else torch_fsdp

    @property
    def is_flat(self) -> bool:
        """Whether it is the wrapper."""
        return self.surface != "fully"

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return torch.device(NAME, 0)

    def net(self, kind: type[nn.Module] = Net, *args: Any, **kwargs: Any) -> Any:
        """A model in the device's memory."""
        with torch.device(NAME):
            return kind(*args, **kwargs)

    def batch(self, rows: int = 4, width: int = 6) -> torch.Tensor:
        """Inputs in the device's memory."""
        return torch.ones(rows, width, device=NAME)

    def mesh(self, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
        """A mesh; its own tensors are real."""
        names = names[-len(shape) :]
        with _disable_current_modes(), torch.device("cpu"):
            return init_device_mesh(NAME, shape, mesh_dim_names=names)

    def side_stream(self) -> Any:
        """A stream that the user makes."""
        return Stream(name="the user's stream")

    def current_stream(self) -> Any:
        """The stream that the user's work goes to."""
        return using().current()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The user's work inside goes to that stream."""
        context: AbstractContextManager[Any] = stream
        return context

    def as_graph(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as a graph, recorded on a stream of its own; returns what replays it."""
        side = self.side_stream()
        side.wait_stream(self.current_stream())
        with self.on(side), using().capturing():
            step()

        def replay() -> None:
            self.current_stream().wait_stream(side)  # what was recorded is done now

        return replay

    def wrap(
        self,
        model: Any,
        *,
        mesh: Sequence[int] = (8,),
        inner: Iterable[str] | None = None,
        low: Sequence[torch.dtype | None] | None = None,
        offload: bool = False,
        **own: Any,
    ) -> Any:
        """The model with units of its own at `inner` (its blocks), and a root. `low`: dtypes of
        parameters, reductions and buffers; `own`: options of the surface.
        """
        inner = [f"blocks.{n}" for n in range(len(model.blocks))] if inner is None else list(inner)
        made = self.mesh(*mesh)
        self.dtypes.update(dtype for dtype in low or () if dtype is not None)
        if self.is_flat:
            wrapped = self._wrap_flat(model, inner, made, low, offload, own)
        else:
            wrapped = self._shard(model, inner, made, low, offload, own)
        self.models.append(wrapped)
        return wrapped

    def _shard(
        self, model: Any, inner: list[str], mesh: Any, low: Any, offload: bool, own: dict[str, Any]
    ) -> Any:
        fully = self.module.fully_shard
        options: dict[str, Any] = {"mesh": mesh, **own}
        if low is not None:
            options["mp_policy"] = torch_fsdp.MixedPrecisionPolicy(
                param_dtype=low[0], reduce_dtype=low[1]
            )
        if offload:
            options["offload_policy"] = torch_fsdp.CPUOffloadPolicy()
        for name in inner:
            fully(model.get_submodule(name), **options)
        return fully(model, **options)

    def _wrap_flat(
        self, model: Any, inner: list[str], mesh: Any, low: Any, offload: bool, own: dict[str, Any]
    ) -> Any:
        options: dict[str, Any] = {
            "device_mesh": mesh,
            "device_id": self.device,
            "use_orig_params": self.surface == "orig",
            "cpu_offload": torch_fsdp.CPUOffload(offload),
            **own,
        }
        if mesh.ndim == 2:
            options.setdefault("sharding_strategy", torch_fsdp.ShardingStrategy.HYBRID_SHARD)
        if low is not None:
            options["mixed_precision"] = torch_fsdp.MixedPrecision(
                param_dtype=low[0], reduce_dtype=low[1], buffer_dtype=low[2]
            )
        wrapper = self.module.FullyShardedDataParallel
        for name in inner:
            parent, _, last = name.rpartition(".")
            setattr(
                model.get_submodule(parent), last, wrapper(model.get_submodule(name), **options)
            )
        return wrapper(model, **options)

    def units(self, model: Any) -> list[Any]:
        """The root and the units below, as modules."""
        kind = self.module.FullyShardedDataParallel if self.is_flat else self.module.FSDPModule
        return [module for module in model.modules() if isinstance(module, kind)]

    def sgd(self, model: Any, *, lr: float = 0.1, **kwargs: Any) -> torch.optim.Optimizer:
        """An optimizer with a state. Many steps in low precision take a small `lr`: where values
        grow, so do the roundings in which devices differ.
        """
        trainable = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.SGD(trainable, lr=lr, momentum=0.9, **kwargs)

    def train(self, model: Any, steps: int = 2, optimizer: Any = None) -> None:
        """Whole steps."""
        optimizer = self.sgd(model) if optimizer is None else optimizer
        for _ in range(steps):
            model(self.batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
