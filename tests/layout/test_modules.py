"""The walk of a module tree finds what is to be saved, under the names of the bare module.

Mostly one process: names, aliases, buffers, extra state, hooks, refusals. DDP and a foreign engine
run on real ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ckpt
from ckpt.layout.modules import (
    ModuleLayout,
    Ranks,
    UnsupportedTensor,
    describe_module,
    describe_tensor,
)
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.region import Span
from tests.counting import python_calls
from tests.layout.models import awkward, image
from tests.layout.rebuilding import put, rebuilt, world
from tests.ranks import run_ranks

ALONE = Ranks.alone()


def names(owned: Iterable[Owned]) -> list[str]:
    return [piece.fqn for one in owned for view in one.views for piece in view.pieces]


def clean(layout: ModuleLayout) -> bool:
    return not (layout.problems or layout.save_hooks or layout.load_hooks)


def test_names_are_those_of_the_state_dict() -> None:
    """Parameters, persistent buffers and aliases are the keys of `state_dict()`, in its order."""
    module = awkward()
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    layout = describe_module(module, ALONE)
    assert clean(layout)
    described = {*names(layout.params), *names(layout.buffers), *layout.aliases}
    assert described == set(module.state_dict())
    assert names(layout.params) == [name for name, _ in module.named_parameters()]
    assert layout.aliases == {"head.weight": "embed.weight"}
    assert set(layout.owned_by_param) == {id(param) for param in module.parameters()}


def test_the_local_tensor_is_the_live_memory() -> None:
    """No copy: the same address, strides included, and detached."""
    module = awkward()
    for owned in describe_module(module, ALONE).params:
        assert owned.local.data_ptr() == owned.param.data_ptr()
        assert owned.local.stride() == owned.param.stride()
        assert not owned.local.requires_grad and not owned.synchronized


def test_wrappers_are_seen_through() -> None:
    """torch.compile, DataParallel and activation checkpointing, nested."""
    module: Any = awkward()
    module.body = checkpoint_wrapper(module.body)
    compiled: Any = torch.compile(module, backend="eager")
    wrapped = DataParallel(compiled)
    layout = describe_module(wrapped, ALONE)
    assert clean(layout)
    assert names(layout.params) == [name for name, _ in awkward().named_parameters()]


def test_children_named_like_wrappers_keep_their_names() -> None:
    """Only real wrappers are seen through, not what happens to be called the same."""
    module = nn.Module()
    module.module = nn.Module()
    module.module._orig_mod = nn.Linear(2, 2)
    assert names(describe_module(module, ALONE).params) == [
        "module._orig_mod.weight",
        "module._orig_mod.bias",
    ]


def test_a_shared_module_is_stored_once() -> None:
    """Parameters, buffers and extra state of the second path are aliases of the first."""
    shared = nn.Sequential(nn.BatchNorm1d(3), WithExtra())
    layout = describe_module(nn.ModuleDict({"a": shared, "b": shared}), ALONE)
    assert layout.aliases["b.0.weight"] == "a.0.weight"
    assert layout.aliases["b.0.running_mean"] == "a.0.running_mean"
    assert layout.aliases["b.1._extra_state"] == "a.1._extra_state"
    assert list(layout.extra_states) == ["a.1._extra_state"]
    assert all(name.startswith("a.") for name in names((*layout.params, *layout.buffers)))


class WithExtra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


class Packed(nn.Linear):
    """A user's class that changes how it is saved."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)


def _add_version(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "version"] = torch.tensor(1)


def _rename(module: nn.Module, state: Any, *rest: Any) -> None:
    state.clear()


def test_hooks_of_the_user_are_named() -> None:
    """Each with its module and function, on the side that it acts on."""
    module: Any = nn.Sequential(nn.Linear(2, 2), Packed(2, 2))
    module[0].register_state_dict_post_hook(_add_version)
    module[0].register_load_state_dict_pre_hook(_rename)
    layout = describe_module(module, ALONE)
    saving, loading = "\n".join(layout.save_hooks), "\n".join(layout.load_hooks)
    assert "0: hook _add_version" in saving and "_rename" not in saving
    assert "0: hook _rename" in loading and "_add_version" not in loading
    assert "1: method Packed._save_to_state_dict" in saving and "Packed" not in loading


def test_a_replaced_state_dict_method_is_named() -> None:
    """Replaced on the instance, as some libraries do."""
    module: Any = nn.Linear(2, 2)
    module.state_dict = lambda *args, **kwargs: {}
    assert "method state_dict" in describe_module(module, ALONE).save_hooks[0]


def test_hooks_of_torch_are_harmless() -> None:
    """Weight and spectral norm of both generations, attention, recurrent and lazy modules."""
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 2))
    module = nn.ModuleList(
        [
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
            nn.utils.spectral_norm(nn.Linear(2, 2)),
            nn.MultiheadAttention(4, 2),
            nn.LSTM(2, 2),
            nn.TransformerEncoderLayer(4, 2, 8),
            lazy,
        ]
    )
    layout = describe_module(module, ALONE)
    assert clean(layout), (layout.problems, layout.save_hooks, layout.load_hooks)
    assert {*names(layout.params), *names(layout.buffers)} == set(module.state_dict())


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        (nn.LazyLinear(3), "0.weight", "forward pass"),
        (nn.Linear(2, 2, device="meta"), "0.weight", "to_empty"),
    ],
)
def test_parameters_without_memory_are_refused(module: Any, name: str, advice: str) -> None:
    """Named, with the next move; other parameters are still described."""
    layout = describe_module(nn.Sequential(module, nn.Linear(1, 1)), ALONE)
    assert layout.problems[0].startswith(f"{name}: ") and advice in layout.problems[0]
    assert names(layout.params) == ["1.weight", "1.bias"]


def _strange() -> dict[str, torch.Tensor]:
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.ones(2, device="meta"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "nested", "meta"])
def test_tensors_without_plain_bytes_are_refused_by_name(kind: str) -> None:
    """One sentence with the name and what to do."""
    with pytest.raises(UnsupportedTensor, match=r"^some\.fqn: .*(save|materialize)"):
        describe_tensor("some.fqn", _strange()[kind], ALONE)


class WithoutMemory(torch.Tensor):
    """Behaves like the tensor that it is made of, which it does not show."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor) -> None:
        self.values_ = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = [one.values_ if isinstance(one, WithoutMemory) else one for one in args]
        return cls(func(*bare, **kwargs or {}))


class OwnerWithoutMemory(nn.Module):
    """A foreign engine whose shard has no memory."""

    def __ckpt_pieces__(self) -> list[Owned]:
        local = WithoutMemory(torch.ones(3))
        return [describe_tensor("w", torch.ones(3), ALONE)._replace(local=local)]


def test_subclasses_without_memory_are_refused_by_name() -> None:
    """As a tensor, as a parameter, and as what a foreign engine answers."""
    refused = "is of class WithoutMemory, which has no memory of its own"
    with pytest.raises(UnsupportedTensor, match=rf"^some\.fqn: {refused}"):
        describe_tensor("some.fqn", WithoutMemory(torch.ones(3)), ALONE)
    module = nn.Module()
    module.w = nn.Parameter(WithoutMemory(torch.ones(3)))
    for member in (module, OwnerWithoutMemory()):
        (problem,) = describe_module(nn.Sequential(member), ALONE).problems
        assert problem.startswith(f"0.w: {refused}")
        with pytest.raises(ckpt.errors.InvalidState, match=rf"net\.0\.w: {refused}"):
            ckpt.save({"net": nn.Sequential(member)}, "memory://without-memory", step=1)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_plain_tensors_of_any_shape_are_one_piece(shape: tuple[int, ...]) -> None:
    """Zero-size and 0-d tensors must be known too."""
    owned = describe_tensor("t", torch.zeros(shape), Ranks(1, (5, 7, 9)))
    ((piece,),) = [view.pieces for view in owned.views]
    assert piece.global_shape == shape and piece.holders == (0, 1, 2)
    assert piece.region == piece.local_region


def _check_ddp() -> None:
    module = awkward(1)
    ranks = world()
    pair = dist.new_group([0, 2])
    if ranks.rank == 1:
        return
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["body.0.weight"])
    wrapped = ddp(module, process_group=pair)
    wrapped(image()).sum().backward()
    layout = describe_module(wrapped, ranks)
    assert clean(layout), layout
    assert {*names(layout.params), *names(layout.buffers), *layout.aliases} == set(
        awkward().state_dict()
    )
    for owned in layout.params:
        (piece,) = owned.views[0].pieces
        assert piece.holders == (0, 2)
        assert owned.synchronized is (piece.fqn != "body.0.weight")
    assert not any(owned.synchronized for owned in layout.buffers)


@pytest.mark.ranks
def test_ddp_keeps_parameters_equal_and_buffers_not() -> None:
    """A group of two of three ranks; one parameter is left out of DDP."""
    run_ranks(3, _check_ddp)


def _check_combinations() -> None:
    """FSDP units around a part of the model, within compiled and checkpointed modules."""
    one: Any = awkward(1)
    one.body = FullyShardedDataParallel(
        checkpoint_wrapper(one.body), device_id=torch.device("cpu"), use_orig_params=True
    )
    two: Any = awkward(1)
    fully_shard(two.body)
    compiled: Any = torch.compile(two, backend="eager")
    for module in (one, compiled):
        layout = describe_module(module, world())
        assert clean(layout), layout
        expected = awkward(1).state_dict()
        read = rebuilt(layout)
        assert {*read, *layout.aliases} == set(expected)
        assert all(torch.equal(read[name], expected[name]) for name in read)


@pytest.mark.ranks
def test_units_within_other_wrappers() -> None:
    """Both generations of FSDP, each around a part of the model only."""
    run_ranks(2, _check_combinations)


class Concatenated(nn.Module):
    """A foreign engine: two parameters in one flat buffer, cut evenly over the ranks.

    It shows nothing of torch's; `flat` is what optimizers get, `shown` a gathered copy.
    """

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.shapes = {"first": tuple(first.shape), "second": tuple(second.shape)}
        flat = torch.cat([first.reshape(-1), second.reshape(-1)])
        self.size = -(-flat.numel() // dist.get_world_size())
        self.start = self.size * dist.get_rank()
        padded = torch.cat([flat, flat.new_zeros(self.size * dist.get_world_size() - len(flat))])
        self.flat = nn.Parameter(padded[self.start : self.start + self.size].clone())
        self.shown: torch.Tensor | None = flat

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        pieces = []
        offset = 0
        for name, shape in self.shapes.items():
            numel = torch.Size(shape).numel()
            first = min(max(self.start - offset, 0), numel)
            last = min(max(self.start + self.size - offset, 0), numel)
            here = offset + first - self.start if first < last else 0
            local = Span(here, here + last - first)
            holders = (dist.get_rank(),)
            region = Span(first, last)
            pieces.append(Piece(name, shape, self.flat.dtype, region, local, holders))
            offset += numel
        yield Owned(self.flat, self.flat.detach(), (View(tuple(pieces)),), synchronized=True)

    def __ckpt_reshard__(self) -> None:
        self.shown = None


def _check_foreign() -> None:
    first, second = torch.arange(12.0).view(4, 3), torch.arange(5.0) + 100
    module = nn.Module()
    module.engine = Concatenated(first, second)
    module.again = module.engine
    module.other = nn.Linear(2, 2)
    with torch.no_grad():
        module.other.weight.fill_(1)
        module.other.bias.fill_(2)
    layout = describe_module(module, world())
    assert clean(layout)
    read = rebuilt(layout)
    assert sorted(read) == ["engine.first", "engine.second", "other.bias", "other.weight"]
    assert torch.equal(read["engine.first"], first) and torch.equal(read["engine.second"], second)
    assert layout.aliases == {
        "again.first": "engine.first",
        "again.second": "engine.second",
    }
    assert layout.owned_by_param[id(module.engine.flat)].param is module.engine.flat
    layout.reshard()
    assert module.engine.shown is None
    wanted = {"engine.first": first * 2, "engine.second": second * 3}
    put(layout.owned_by_param[id(module.engine.flat)], wanted)
    read = rebuilt(describe_module(module, world()))
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


@pytest.mark.ranks
def test_a_foreign_engine_takes_part_by_its_pieces() -> None:
    """The example of the protocol: one flat buffer, sharded over three ranks, read and written."""
    run_ranks(3, _check_foreign)


def test_describing_costs_the_same_for_each_parameter() -> None:
    """Counted, not timed: the work of a parameter does not grow with their number."""

    def calls(n_linears: int) -> int:
        module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(n_linears)])
        return python_calls(lambda: describe_module(module, ALONE))

    few, more, most = calls(100), calls(200), calls(2000)
    assert (most - more) / 3600 == pytest.approx((more - few) / 200, rel=0.05)
    assert (most - more) / 3600 < 80  # measured 51
