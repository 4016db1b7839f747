"""Containers of an optimizer whose tensors are shards: a queue of gradients, as AdaShift keeps it.

Real ranks. What one process saved goes to flat shards, to other engines and back, bit for bit; what
lies in a container and has no place beside flat shards is refused by name before anything changes.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from ckpt.layout.tensor import local_tensor
from ckpt.state_dict import StateDictType
from sharding import FullyShardedDataParallel, fully_shard
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


class Queued(torch.optim.SGD):
    """Keeps what it would need of the last gradients, here numbers that every layout has alike."""

    def step(self, closure: Any = None) -> None:
        for index, param in enumerate(self.param_groups[0]["params"]):
            if local_tensor(param).numel():
                queue = self.state[param].setdefault("queue", deque(maxlen=2))
                queue.append((param.detach() * (len(queue) + 2) + index).clone())
                self.state[param]["pair"] = {"first": queue[0] * 3, "count": 2, "rate": 0.5}


def made(engine: str, seed: int) -> tuple[nn.Module, Queued]:
    """A bias of one element leaves the other rank without any."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    if engine == "fully":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif engine != "bare":
        model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=engine == "orig")
    return model, Queued(model.parameters(), lr=0.1)


def state_of(model: nn.Module, optimizer: Queued) -> dict[str, Any]:
    return {"model": model, "optim": optimizer}


def contents(optimizer: Queued) -> list[Any]:
    """The state of each parameter as this rank has it, as plain data."""
    return [as_data(dict(state)) for state in optimizer.state.values()]


def as_data(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: as_data(item) for key, item in tree.items()}
    if isinstance(tree, (deque, list)):
        return [type(tree), getattr(tree, "maxlen", 0), *map(as_data, tree)]
    return local_tensor(tree).tolist() if isinstance(tree, torch.Tensor) else tree


def pass_on(root: str) -> None:
    for number, engine in enumerate(("orig", "fully", "orig")):
        model, optimizer = made(engine, seed=number)
        if number == 2:  # into state that it has
            optimizer.step()
        ckpt.load(state_of(model, optimizer), f"{root}/{number}")
        ckpt.save(state_of(model, optimizer), f"{root}/{number + 1}", step=1)
        by_dicts(model, optimizer, engine)


def by_dicts(model: nn.Module, optimizer: Queued, engine: str) -> None:
    forms = [StateDictType.FULL, StateDictType.SHARDED]
    before = contents(optimizer)
    for form in forms:
        taken = ckpt.state_dict.optimizer_state_dict(model, optimizer, form)
        queue = taken["state"]["0.weight"]["queue"]
        # Beside flat shards, each rank's dict has its own.
        assert type(queue) is deque and queue[0].ndim == (2 if engine == "fully" else 1)
        other, its = made(engine, seed=8)
        ckpt.state_dict.load_optimizer_state_dict(other, its, taken)
        assert contents(its) == before, (engine, form)


def test_queues_of_shards_fit_every_layout(tmp_path: Path) -> None:
    model, optimizer = made("bare", seed=7)
    for _ in range(3):
        optimizer.step()
    ckpt.save(state_of(model, optimizer), f"{tmp_path}/0", step=1)
    run_ranks(2, pass_on, str(tmp_path))
    back = made("bare", seed=9)
    ckpt.load(state_of(*back), f"{tmp_path}/3")
    assert contents(back[1]) == contents(optimizer)


# --- what has no place ---------------------------------------------------------------------------


def refused(root: str, engine: str, said: str) -> None:
    model, optimizer = made(engine, seed=3)
    optimizer.step()
    before = contents(optimizer)
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.load(state_of(model, optimizer), root)
    texts = [text for text in caught.value.problems if "optim.state.0.weight.odd: " in text]
    assert texts and said in texts[0] and "load into fully_shard" in texts[0], texts
    assert contents(optimizer) == before


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            "orig",
            "tensor optim.state.0.weight.odd.1 of shape (3, 3), and the parameter has shape (3, 4)",
        ),
        ("flat", "holds the tensor optim.state.0.weight.odd.0 for one of 4 members"),
    ],
)
def test_matrices_in_a_container_are_not_given_to_flat_shards(
    tmp_path: Path, engine: str, said: str
) -> None:
    """SOAP and Shampoo keep a list of them; its step on flat shards would fail, or be wrong."""
    model, optimizer = made("bare", seed=7)
    weight = model.get_parameter("0.weight")
    optimizer.state[weight]["odd"] = [torch.ones(3, 4), torch.eye(3)]
    ckpt.save(state_of(model, optimizer), str(tmp_path), step=1)
    run_ranks(2, refused, str(tmp_path), engine, said)


def test_objects_that_know_shapes_are_not_given_to_flat_shards(tmp_path: Path) -> None:
    graft = pytest.importorskip("pytorch_optimizer.optimizer.utils.graft")
    model, optimizer = made("bare", seed=7)
    weight = model.get_parameter("0.weight")
    optimizer.state[weight]["odd"] = graft.AdaGradGraft(weight.detach(), 1e-8)
    ckpt.save(state_of(model, optimizer), str(tmp_path), step=1)
    run_ranks(2, refused, str(tmp_path), "orig", "objects that know the shape of the whole")
