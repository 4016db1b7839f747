"""A plan says what a load then does: bytes, requests, names; and it reads no tensor.

Loads run over a store that counts, on one rank and on ranks as threads, and are compared with what
the plan said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.api import read_path
from ckpt.cli import main
from ckpt.convert.sources.opening import open_source
from ckpt.convert.sources.source import SourceContents, SourceTensor
from ckpt.format.manifest import MetadataBudget
from ckpt.layout.region import Box, EvenLayout, wanted_part
from ckpt.loading.contents import find_checkpoint
from ckpt.loading.load import LoadOptions, load_state
from ckpt.tools.plan import LoadPlan, plan_of_ranks
from ckpt.world.base import World
from storage import Store, open_store
from tests.ranks import run_ranks
from tests.stores import CountingStore
from tests.thread_ranks import run_ranks as run_threads
from tests.tools.conftest import make_net, sliced_net, stepped


def small_state() -> dict[str, Any]:
    torch.manual_seed(1)
    state: dict[str, Any] = {f"t{index}": torch.randn(20 + index, 7) for index in range(30)}
    state["large"] = torch.randn(900, 1000)
    state["epoch"] = 1
    return state


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("plan") / "run")
    ckpt.save(small_state(), url, step=1)
    return url


def planned(
    url: str,
    *,
    ranks: int,
    layout: EvenLayout = "fsdp2",
    like: SourceContents | None = None,
    entry: str | None = None,
) -> LoadPlan:
    with closing(open_store(url)) as store:
        located = find_checkpoint(store)
        return plan_of_ranks(store, located, ranks, layout, like, entry, MetadataBudget())


def counted(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[CountingStore]:
    opened: list[CountingStore] = []

    def open_counted(url: str, **options: object) -> CountingStore:
        opened.append(CountingStore(open_store(url, **options)))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(module, "open_store", open_counted)
    return opened


def loaded(world: World, store: Store, state: dict[str, Any]) -> int:
    options = LoadOptions(path=read_path(store))
    return load_state(state, store=store, world=world, step=None, options=options).nbytes_read


def test_plan_of_one_rank_is_what_its_load_does(root: str) -> None:
    plan = ckpt.plan_load(small_state(), root)
    store = CountingStore(open_store(root))
    before = store.stats
    nbytes = run_threads(1, lambda world: loaded(world, store, small_state()))[0]
    (rank,) = plan.ranks
    assert plan.fits and rank.nbytes_read == nbytes == plan.nbytes_stored
    requests = store.stats.requests["get_into"] - before.requests.get("get_into", 0)
    assert rank.requests == requests
    assert rank.nbytes_wanted == nbytes
    assert planned(root, ranks=1).ranks[0] == rank


@pytest.mark.parametrize(("ranks", "again", "times"), [(2, 0, 1.02), (3, 0, 1.02), (2, 1 << 22, 2)])
def test_plan_of_replicas_is_what_their_loads_do(
    root: str, monkeypatch: pytest.MonkeyPatch, ranks: int, again: int, times: float
) -> None:
    """Every rank wants everything: each byte is read by one of them and received by the others, or
    by all where that is little.
    """
    monkeypatch.setattr("ckpt.loading.exchange.AGAIN_NBYTES_MAX", again)
    store = CountingStore(open_store(root))
    done = run_threads(ranks, lambda world: loaded(world, store, small_state()))
    plan = planned(root, ranks=ranks, layout="replicated")
    assert [rank.nbytes_read for rank in plan.ranks] == done
    assert sum(rank.requests for rank in plan.ranks) == store.stats.requests["get_into"]
    assert all(r.nbytes_read + r.nbytes_received >= plan.nbytes_stored for r in plan.ranks)
    assert plan.nbytes_read <= times * plan.nbytes_stored


def test_shards_read_their_part_and_no_more(root: str) -> None:
    """Wide tensors in blocks of 1 MiB: at most one block more at each end of a shard."""
    for layout in ("fsdp2", "flat"):
        plan = planned(root, ranks=3, layout=layout)  # type: ignore[arg-type]
        assert sum(rank.nbytes_wanted for rank in plan.ranks) <= 3 * plan.nbytes_stored
        for rank in plan.ranks:
            assert rank.nbytes_read + rank.nbytes_received >= rank.nbytes_wanted
        assert plan.nbytes_read < 1.05 * plan.nbytes_stored


def plan_and_load(root: str) -> None:
    net = sliced_net()
    for layer in net:
        fully_shard(layer)
    plan = ckpt.plan_load({"model": net}, root)
    (rank,) = plan.ranks
    local = [p.to_local() for p in net.parameters()]  # type: ignore[attr-defined]
    assert plan.fits and rank.rank == torch.distributed.get_rank()
    assert rank.nbytes_wanted == sum(tensor.nbytes for tensor in local)
    assert ckpt.load({"model": net}, root).nbytes_read <= rank.nbytes_read


@pytest.mark.ranks
def test_plan_of_a_sharded_model_counts_its_own_shards(sliced_root: str) -> None:
    """Saved by three ranks in columns, loaded by two in rows."""
    run_ranks(2, plan_and_load, sliced_root)


@pytest.mark.ranks
def test_resharding_for_the_ranks_makes_fewer_requests(sliced_root: str, tmp_path: Path) -> None:
    ckpt.reshard(sliced_root, str(tmp_path / "new"), ranks=2)
    before = planned(sliced_root, ranks=2)
    after = planned(str(tmp_path / "new"), ranks=2)
    assert sum(r.requests for r in after.ranks) < sum(r.requests for r in before.ranks)
    assert all(rank.nbytes_read <= 1.01 * rank.nbytes_wanted for rank in after.ranks)
    assert all(rank.nbytes_received == 0 for rank in after.ranks)


def test_planning_reads_no_tensor(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckpt.loading.contents

    opened = counted(monkeypatch, ckpt.loading.contents)
    ckpt.plan_ranks(root, ranks=2)
    assert len(opened) == 1
    ckpt.plan_load(small_state(), root)
    assert len(opened) == 2
    assert all("get_into" not in store.stats.requests for store in opened)
    assert all(store.stats.bytes_read < 50_000 for store in opened)


def test_names_that_do_not_fit_are_reported_before_anything_is_read(plain_root: str) -> None:
    state = {"model": make_net(), "epoch": 0, "more": torch.zeros(2)}
    state["model"].register_buffer("extra", torch.zeros(1))
    del state["model"].flags
    plan = ckpt.plan_load(state, plain_root)
    assert not plan.fits
    assert set(plan.missing) == {"model.extra", "more"}
    assert plan.unexpected == ("model.flags",)
    assert plan.not_asked > 0, "the optimizer and the averages"
    with pytest.raises(ckpt.Mismatch) as refused:
        ckpt.load(state, plain_root)
    assert tuple(refused.value.problems) == plan.problems


def test_a_safetensors_file_can_describe_the_state(plain_root: str, tmp_path: Path) -> None:
    tensors = {n: t.clone() for n, t in stepped(10).state_dict().items() if n != "head.weight"}
    tensors.pop("scalar")
    tensors["big"] = tensors["big"][:, :-1].contiguous()
    tensors["low"] = tensors["low"].float()
    tensors["new"] = torch.zeros(2)
    save_file(tensors, tmp_path / "m.safetensors")
    like = open_source(str(tmp_path / "m.safetensors")).contents
    plan = planned(plain_root, ranks=2, like=like, entry="model")
    text = "\n".join(plan.problems)
    assert plan.missing == ("model.new",) and plan.unexpected == ("model.scalar",)
    assert "model.big: checkpoint has shape (3, 500000)" in text
    assert "model.low: checkpoint has dtype bfloat16, state has float32" in text
    assert len(plan.problems) == 4


def test_wanted_tensors_are_by_any_of_their_tied_names(plain_root: str) -> None:
    for name in ("model.embed.weight", "model.head.weight"):
        like = SourceContents({name: SourceTensor(name, "float32", (10, 6))})
        plan = planned(plain_root, ranks=1, like=like, entry="")
        assert not plan.missing and plan.ranks[0].nbytes_wanted == 240


@pytest.mark.parametrize("layout", ["fsdp2", "flat", "replicated"])
def test_layouts_cover_every_element(layout: EvenLayout) -> None:
    for shape in ((7, 3), (), (0, 2), (5,)):
        parts = [wanted_part(shape, rank, 3, layout) for rank in range(3)]
        numel = torch.Size(shape).numel()
        total = sum(part.numel for part in parts)
        assert total == (3 * numel if layout == "replicated" or not shape else numel)
        assert all(len(part.shape) == len(shape) for part in parts if isinstance(part, Box))


def test_ranks_and_layouts_that_cannot_be_are_refused(root: str) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ckpt.plan_ranks(root, ranks=0), "ranks=0: expected an int of at least 1"),
        (
            lambda: ckpt.plan_ranks(root, ranks=1, layout="rows"),  # type: ignore[arg-type]
            "layout='rows': expected one of 'fsdp2', 'flat', 'replicated'",
        ),
        (
            lambda: ckpt.reshard(root, root + "-new", ranks=0),
            "ranks=0: expected an int of at least 1",
        ),
    ]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.ranks
def test_command_shows_ranks_and_tells_by_its_exit_code(
    plain_root: str, sliced_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", plain_root, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "extra memory" in out and "it fits" in out
    assert main(["plan", sliced_root, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 3
    assert main(["plan", plain_root, "--like", sliced_root]) == 3
    assert "model.0.weight: is not in the checkpoint" in capsys.readouterr().out
    assert main(["plan", plain_root, "--ranks", "1", "--like", plain_root]) == 0
    capsys.readouterr()
    save_file(sliced_net().state_dict(), tmp_path / "m.safetensors")
    assert main(["plan", sliced_root, "--like", str(tmp_path / "m.safetensors")]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["plan", sliced_root, "--entry", "model"])
    assert "--entry is for --like" in capsys.readouterr().err
