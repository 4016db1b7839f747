"""What units of torch's FSDP and of foreign engines hold, rank by rank in one process.

Under torch's fake group nothing is sent, so each rank cuts its shards from values of its own, which
are the same on all. What trains, gathers or loads is tested with processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from ckpt.layout.holdings import tensor_holdings
from ckpt.layout.kind import Kind
from ckpt.layout.modules import Ranks, UnsupportedTensor, describe_module, describe_tensor
from ckpt.layout.piece import Owned, Piece, View
from ckpt.layout.plain import Held
from ckpt.layout.region import Span
from ckpt.layout.sharded_tensor import sharding_of
from ckpt.saving.plan import Fingerprint, add_module
from tests.layout.models import Awkward, awkward
from tests.layout.rebuilding import assembled, held, world
from tests.streams import groups


def _fsdp1(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch advises against NO_SHARD
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def _wrapped(module: Awkward, engine: str) -> nn.Module:
    """An inner unit and the root; of FSDP1 also one that manages nothing."""
    if engine == "fsdp2":
        fully_shard(module.body)
        fully_shard(module)
        return module
    options: dict[str, Any] = {"use_orig_params": "orig" in engine}
    if "no_shard" in engine:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    if "hybrid" in engine:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    module.add_module("conv", _fsdp1(module.conv, **options))
    module.body.add_module("1", _fsdp1(nn.ReLU(), **options))
    return _fsdp1(module, **options)


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ("fsdp1_flat", 3),
        ("fsdp1_orig", 3),
        ("fsdp1_orig_no_shard", 2),
        ("fsdp1_flat_hybrid", 4),
        ("fsdp2", 3),
    ],
)
def test_units_are_put_together_from_what_each_rank_describes(engine: str, size: int) -> None:
    """Channels-last, tied and tiny parameters, and buffers; objects that optimizers know."""
    gathered = []
    for rank in range(size):
        with groups.world(size, rank):
            bare = awkward(1, channels_last=engine != "fsdp2")
            expected = {name: value.clone() for name, value in bare.state_dict().items()}
            module = _wrapped(bare, engine)
            layout = describe_module(module, world())
            assert not layout.problems and not layout.save_hooks and not layout.load_hooks
            assert layout.aliases == {"head.weight": "embed.weight"}
            assert all(id(param) in layout.owned_by_param for param in module.parameters())
            assert all(one.owners == tuple(range(size)) for one in layout.params)
            owned = [*layout.params, *layout.buffers]
            gathered.append([item for one in owned for item in held(one)])
    full = assembled(gathered)
    assert set(full) == expected.keys() - {"head.weight"}
    for name, value in full.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("orig", [False, True])
def test_fingerprints_see_the_memory_of_units(orig: bool) -> None:
    """The parameters that optimizers know, and the shard that they lie in."""
    with groups.world(2):
        module: Any = _fsdp1(nn.Linear(3, 3), use_orig_params=orig)
        flat = module._handle.flat_param
        fingerprint = Fingerprint()
        add_module(module, fingerprint)
    ids = set(map(id, fingerprint.objects))
    assert all(id(param) in ids for param in module.parameters())
    assert any(tensor.data_ptr() == flat.data_ptr() for tensor in fingerprint.tensors)


@pytest.mark.parametrize(("size", "owners"), [(4, (0, 1, 2, 3)), (6, None)])
def test_owners_of_hybrid_shards_without_a_mesh(size: int, owners: tuple[int, ...] | None) -> None:
    """A rank knows its own two groups; as many cells as the world has ranks are the world."""
    with groups.world(size, 0):
        pair = dist.new_group([0, 1]), dist.new_group([0, 2])
        module = _fsdp1(
            nn.Linear(3, 3), process_group=pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD
        )
        (owned,) = describe_module(module, world()).params
        assert owned.owners == owners
        assert {piece.holders for view in owned.views for piece in view.pieces} == {(0, 2)}
        sharding = sharding_of(module)
        assert sharding is not None and sharding.process_group is pair[0]
    assert sharding_of(nn.Linear(1, 1)) is None


def test_a_parameter_that_replaced_the_sharded_one_is_the_one_that_counts() -> None:
    """Until the first forward torch adopts what the module shows."""
    with groups.world(2):
        module = nn.Linear(4, 2)
        fully_shard(module)
        replaced = nn.Parameter(module.weight.detach().clone())
        module.weight = replaced
        assert id(replaced) in describe_module(module, world()).owned_by_param


class _Engine(nn.Module):
    """A foreign engine alone in the world: two parameters in a flat buffer, and its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.arange(6.0))
        self.second = nn.Parameter(torch.zeros(2))  # shown while gathered
        self.gathered = True
        self.owners: tuple[int, ...] | None = (7,)

    def __ckpt_pieces__(self) -> Iterable[Owned]:
        pieces = (
            Piece("first", (2, 2), torch.float32, Span(0, 4), Span(0, 4), (7,)),
            Piece("second", (2,), torch.float32, Span(0, 2), Span(4, 6), (7,)),
        )
        yield Owned(self.flat, self.flat.detach(), (View(pieces),), True, self.owners)

    def __ckpt_reshard__(self) -> None:
        self.gathered = False


ALONE = Ranks(0, (7,))  # the process is number 7 of a larger job


@pytest.mark.parametrize(("reported", "known"), [((7,), (0,)), ((), ()), (None, None)])
def test_a_foreign_engine_is_asked_once_under_its_first_name(
    reported: tuple[int, ...] | None, known: tuple[int, ...] | None
) -> None:
    module = nn.Module()
    module.engine = engine = _Engine()
    module.again = engine
    engine.owners = reported
    layout = describe_module(module, ALONE)
    (owned,) = layout.params
    assert owned.fqns == ("engine.first", "engine.second")
    assert owned.owners == known and owned.views[0].pieces[0].holders == (0,)
    assert layout.aliases == {"again.first": "engine.first", "again.second": "engine.second"}
    assert layout.owned_by_param == {id(engine.flat): owned}
    assert layout.units == (("engine", engine),) and not layout.problems
    layout.reshard()
    assert not engine.gathered


class _Speaking(torch.Tensor):
    """A tensor that describes itself, `answers` times."""

    answers = 1

    def __ckpt_pieces__(self) -> list[Owned]:
        (owned,) = _Engine().__ckpt_pieces__()
        return [owned] * self.answers


def test_a_tensor_gives_one_answer_of_its_own() -> None:
    tensor = torch.zeros(6).as_subclass(_Speaking)
    assert describe_tensor("t", tensor, ALONE).owners == (0,)
    for answers in (0, 2):
        tensor.answers = answers
        with pytest.raises(UnsupportedTensor, match=rf"^t: .* gave {answers} answers, not 1$"):
            describe_tensor("t", tensor, ALONE)


def test_what_an_engine_manages_but_does_not_show_is_a_problem_of_its_own() -> None:
    """Others of the same walk are described all the same."""
    with groups.world(2):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(module)
        module[0] = nn.ReLU()
        layout = describe_module(module, world())
    assert [name for one in layout.params for name in one.fqns] == ["1.weight", "1.bias"]
    assert len(layout.problems) == 2
    assert all("a module was replaced after wrapping" in one for one in layout.problems)


def test_buffers_after_one_that_is_left_out_are_described() -> None:
    module = nn.Module()
    module.register_buffer("nothing", None)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.register_buffer("kept", torch.zeros(2))
    layout = describe_module(module, Ranks.alone())
    assert [one.fqns for one in layout.buffers] == [("kept",)]


@pytest.mark.parametrize("owners", [(0, 1), (), None])
def test_a_plain_tensor_beside_a_shared_one_is_with_its_owners(owners: Any) -> None:
    """None: the engine does not say; then the tensor is this rank's own."""
    local = torch.zeros(2)
    ranks = Ranks(0, (0, 1, 2))
    whole = describe_tensor("w", local, ranks, Held((0, 1)))
    like = whole._replace(owners=owners, synchronized=True)
    (holding,) = tensor_holdings("step", local, Kind.OPTIMIZER, ranks, held=Held.beside(like))
    assert holding.owners == (owners or ()) and holding.synchronized
    assert holding.pieces[0].holders == (0, 1)
