"""A `Store` object, a path and numpy's integers stand wherever a url, a str and an int do."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.integrations.dcp import DcpReader, DcpWriter
from ckpt.operate import mend
from ckpt.tools.report import report_of
from storage import InvalidUrlError, PrefixStore, Store, StoreLike, schemes
from storage.local import LocalStore
from storage.memory import MemoryBucket, MemoryStore
from tests.stores import CountingStore
from tests.versions import ALONE


class OwnStore(CountingStore):
    """A store as a caller has one: of a class that nothing here knows. Nobody else closes it."""

    def close(self) -> None:
        raise AssertionError("a store that is its caller's was closed")


def own_store() -> OwnStore:
    # All of them have one url, as stores of tests often do.
    return OwnStore(MemoryStore())


def state(value: float = 0.0) -> dict[str, Any]:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return {"model": model, "step": int(value)}


def value_of(loaded: dict[str, Any]) -> float:
    return float(loaded["model"].weight[0, 0].item())


@pytest.fixture(params=["object", "new object", "prefix", "path"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StoreLike]:
    """The location of one root, made anew for every call or once for all."""
    own = own_store()
    bucket = MemoryBucket()
    return {
        "object": lambda: own,
        "new object": lambda: OwnStore(MemoryStore(bucket)),
        "prefix": lambda: PrefixStore(own, "runs/7b"),
        "path": lambda: tmp_path / "run",
    }[request.param]


def test_saves_and_loads(where: Callable[[], StoreLike]) -> None:
    """One root and one session, whatever is given; steps are numpy's."""
    assert ckpt.list_steps(where()) == ()
    ckpt.save(state(1.0), where(), step=np.int64(1))
    pending = ckpt.async_save(
        state(2.0), where(), step=np.int32(2), host_bytes_max=np.int64(1 << 20)
    )
    assert pending.result().step == 2
    ckpt.save(state(3.0), where(), step=torch.tensor(3))  # type: ignore[arg-type]
    assert [info.step for info in ckpt.list_steps(where())] == [1, 2, 3]
    assert sum(event.kind == "CLAIM" for event in ckpt.history(where(), count=np.int64(10))) == 1
    for step, expected in ((None, 3.0), (np.int64(1), 1.0), (np.uint8(2), 2.0)):
        loaded = state()
        report = ckpt.load(loaded, where(), step=step)
        assert value_of(loaded) == expected == report.step and type(report.step) is int
    with ckpt.open(where(), np.int64(2)) as checkpoint:
        assert float(checkpoint["model.weight"][0, 0]) == 2.0
        child = checkpoint.url
    assert child.endswith(f"-{checkpoint.manifest.header.attempt}")
    ckpt.forget(where())
    ckpt.save(state(4.0), where(), step=4)
    assert sum(event.kind == "CLAIM" for event in ckpt.history(where())) == 2


def test_tools(where: Callable[[], StoreLike], tmp_path: Path) -> None:
    """Every tool reads the root, and those that write have a store as their target."""
    for step in (1, 2):
        ckpt.save(state(float(step)), where(), step=step)
    one = np.int64(1)
    assert ckpt.verify(where(), one, threads=np.int64(2)).ok
    assert ckpt.disk_usage(where()).attempts[0].step == 1
    assert not mend(where(), dry_run=True).filled
    assert [save.step for save in report_of(where()).saves] == [1, 2]
    assert ckpt.plan_load(state(), where(), step=one).step == 1
    assert len(ckpt.plan_ranks(where(), ranks=np.int64(3), step=one).ranks) == 3
    copied, resharded, whole = own_store(), own_store(), own_store()
    ckpt.copy(where(), copied, step=one, threads=np.int64(2))
    ckpt.copy(where(), whole, root=True)
    assert [info.step for info in ckpt.list_steps(whole)] == [1, 2]
    ckpt.reshard(where(), resharded, ranks=np.int64(2), step=one, threads=np.int64(2))
    second = ckpt.reshard(where(), ranks=2)
    assert second.attempt in {info.attempt for info in ckpt.list_steps(where())}
    for target in (copied, resharded):
        assert ckpt.diff(where(), target, step_a=one, step_b=one).identical
        loaded = state()
        ckpt.load(loaded, target)
        assert value_of(loaded) == 1.0


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_formats_go_in_and_out(format: Any, where: Callable[[], StoreLike], tmp_path: Path) -> None:
    """From a store to a store, and from that back into a root; read back on both ways."""
    ckpt.save(state(5.0), where(), step=5)
    target = own_store()
    report = ckpt.export(where(), target, step=np.int64(5), format=format, verify=True)
    assert all(file.startswith("memory://unnamed/") for file in report.files)
    back = own_store()
    ckpt.import_checkpoint(target, back, step=np.int64(7), verify=True)
    with ckpt.open(back) as checkpoint:
        assert checkpoint.step == 7
        assert {
            float(checkpoint[name].max()) for name in checkpoint if name.endswith("weight")
        } == {5.0}
    file = tmp_path / "model.safetensors"
    ckpt.export(where(), file)
    assert file.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_plugins_take_a_store() -> None:
    import torch.distributed.checkpoint as dcp

    own = own_store()
    tensors = {"w": torch.arange(6.0)}
    dcp.save(tensors, storage_writer=DcpWriter(own, step=np.int64(1)), **ALONE)
    target = {"w": torch.zeros(6)}
    dcp.load(target, storage_reader=DcpReader(own, step=np.int64(1)), **ALONE)
    assert torch.equal(target["w"], tensors["w"])


def test_a_checkpointer(where: Callable[[], StoreLike]) -> None:
    trained = state()
    policy, keep = ckpt.EverySteps(np.int64(2)), ckpt.KeepLatest(np.int64(1))
    with ckpt.Checkpointer(
        trained, where(), save=policy, keep=keep, alarm=ckpt.Alarm(after=np.int64(2))
    ) as checkpointer:
        assert checkpointer.restore() is None
        for step in np.arange(1, 5):
            checkpointer.step(step)
    assert [info.step for info in ckpt.list_steps(where())] == [4]
    with ckpt.Checkpointer(trained, where()) as checkpointer:
        report = checkpointer.restore(np.int64(4))
        assert report is not None and report.step == 4


def test_counts_of_policies_are_numbers_and_no_bools() -> None:
    for rule in (ckpt.KeepLatest, ckpt.KeepEvery, ckpt.KeepBest, ckpt.EverySteps):
        assert rule(np.int64(2)) == rule(2)
        assert "np." not in repr(rule(np.int64(2)))
        for bad in (True, 2.0, np.float64(2.0), "2", 0, np.int64(0)):
            with pytest.raises(ValueError, match="expected an int of at least 1"):
                rule(bad)
    assert ckpt.EverySeconds(np.int64(2)) == ckpt.EverySeconds(2)
    assert ckpt.KeepYounger(np.int64(2)) == ckpt.KeepYounger(2)
    with pytest.raises(ckpt.errors.InvalidArgument, match="step=True"):
        ckpt.save(state(), own_store(), step=True)


def test_two_stores_of_one_url_are_two_roots() -> None:
    """Nothing that is remembered of one may show at the other."""
    a, b = own_store(), own_store()
    ckpt.save(state(1.0), a, step=1)
    ckpt.load(state(), a, step=1)
    ckpt.save(state(2.0), b, step=2)
    assert [info.step for info in ckpt.list_steps(a)] == [1]
    assert [(info.step, info.line) for info in ckpt.list_steps(b)] == [(2, 0)]


def test_a_directory_by_its_path_its_url_and_a_store_is_one_root(tmp_path: Path) -> None:
    """One process claims it once, so that it never fences itself."""
    for step, where in enumerate([tmp_path, str(tmp_path), LocalStore(str(tmp_path)), tmp_path]):
        ckpt.save(state(), where, step=step)
        ckpt.load(state(), where)
    assert sum(event.kind == "CLAIM" for event in ckpt.history(tmp_path)) == 1
    assert {info.line for info in ckpt.list_steps(tmp_path)} == {0}


def test_options_with_a_store_object_are_refused() -> None:
    own = own_store()
    ckpt.save(state(), own, step=1)
    uses: list[Callable[[], object]] = [
        lambda: ckpt.save(state(), own, step=2, storage_options={"key": 1}),
        lambda: ckpt.async_save(state(), own, step=2, storage_options={"key": 1}),
        lambda: ckpt.load(state(), own, storage_options={"key": 1}),
        lambda: ckpt.open(own, storage_options={"key": 1}),
        lambda: ckpt.copy(own, own_store(), other_options={"key": 1}),
        lambda: ckpt.export(own, own_store(), other_options={"key": 1}),
    ]
    for use in uses:
        with pytest.raises(InvalidUrlError, match="has its options already, got key"):
            use()
    assert [info.step for info in ckpt.list_steps(own)] == [1]


def test_what_is_no_location_is_refused_by_name() -> None:
    for bad in (7, b"run", None):
        with pytest.raises(InvalidUrlError, match=r"or a storage\.Store such as .*, got"):
            ckpt.save(state(), bad, step=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidUrlError, match=r"or a storage\.Store such as .*, got"):
            ckpt.Checkpointer(state(), bad).restore()  # type: ignore[arg-type]


BUCKET = MemoryBucket()


def depot(url: str, *, region: str) -> Store:
    return PrefixStore(MemoryStore(BUCKET, name=f"depot-{region}"), url.removeprefix("depot://"))


def test_the_command_line_knows_schemes_of_entry_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schemes, "_factories", {})
    entry = EntryPoint("depot", f"{__name__}:depot", schemes.ENTRY_POINTS)
    monkeypatch.setattr(schemes, "entry_points", lambda *, group: [entry])
    ckpt.save(state(), "depot://run", step=3, storage_options={"region": "x"})
    assert main(["ls", "depot://run", "--option", "region=x"]) == 0
    assert "3" in capsys.readouterr().out
    assert main(["verify", "depot://run", "--option", "reg=x"]) == 2
    assert "its factory takes region" in capsys.readouterr().err
