"""Near tiers of an encrypted root: nothing of the state is readable there, and all comes back.

Method: trainings whose ranks are threads and whose hosts are folders. What must not be in a folder
are the bytes of the tensors and the names in the headers; what comes back is compared bit for bit.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import main
from ckpt.near.value import Near
from ckpt.service.events import NearFailed, NearSaved
from ckpt.service.policies import EverySteps
from ckpt.tools.near_tiers import tier_views
from storage import Store, open_store
from tests.e2e.job import state_at
from tests.near.test_near_training import data_files, folders, origins
from tests.near.training import NEVER, Life
from tests.thread_ranks import RanksFailed

pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")
pytest.importorskip("zstandard", reason="the extra 'encode' is not installed")

SECRET = os.urandom(32)


@pytest.fixture(autouse=True, params=[True, False], ids=["memory", "disk"])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.near.tier.is_in_memory", lambda path: request.param)


def life(store: Store, hosts: list[Path], replicas: int = 0, **how: Any) -> Life:
    def near(rank: int) -> Near:
        return Near(hosts[rank] / "near", every=EverySteps(2), replicas=replicas)

    return Life(len(hosts), store, hosts, near=near, **how)


def root_at(path: Path, **more: Any) -> Store:
    return open_store(str(path), encryption_key=SECRET, **more)


def assert_hidden(hosts: list[Path], step: int) -> None:
    """Nothing of that step's state, nor any name in it, lies on the hosts."""
    secrets = [b"dtype", b"replica"]
    for rank in range(2):
        local = state_at(step, rank, 2)["rows"].local.detach()
        secrets.append(local.reshape(-1).numpy().tobytes()[:64])
    for path in (file for host in {*hosts} for file in host.rglob("*") if file.is_file()):
        data = path.read_bytes()
        assert not [one for one in secrets if one in data], path


@pytest.mark.parametrize("more", [{}, {"compression": "zstd"}], ids=["plain", "zstd"])
def test_near_files_of_an_encrypted_root_are_encrypted(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    store, hosts = root_at(tmp_path / "root", **more), folders(tmp_path, 0, 0)
    first = life(store, hosts)
    seen = first.run(5, then=lambda service, state, world: assert_hidden(hosts, 4))
    assert len(seen) == 2 and len(data_files(hosts[0])) >= 4
    assert not [e for e in first.events[0] if isinstance(e, NearFailed)]
    assert_hidden(hosts, 4)
    (view,) = tier_views([str(hosts[0] / "near")])
    assert [(one.step, one.ranks_here) for one in view.steps] == [(4, 2), (2, 2)]
    again = life(store, hosts)
    again.run(2)
    assert origins(again) == {("near", 4)}
    # The same hosts would hold the state of a plain root in clear text: the search finds it.
    plain = folders(tmp_path, 2, 2)
    life(open_store(str(tmp_path / "plain")), plain).run(5)
    with pytest.raises(AssertionError):
        assert_hidden(plain, 4)


def test_copies_at_other_hosts_are_encrypted(tmp_path: Path) -> None:
    store, hosts = root_at(tmp_path / "root"), folders(tmp_path, 0, 1)
    first = life(store, hosts, replicas=1)
    first.run(5)
    assert [e.report.step for e in first.events[1] if isinstance(e, NearSaved)] == [2, 4]
    assert len(data_files(hosts[0])) == len(data_files(hosts[1])) >= 4
    assert_hidden(hosts, 4)
    own, copies = data_files(hosts[0]), data_files(hosts[1])
    assert [file.read_bytes() for file in own] == [file.read_bytes() for file in copies]
    shutil.rmtree(hosts[1])
    fewer = life(store, folders(tmp_path, 0, 0))
    fewer.run(0)
    assert origins(fewer) == {("near", 4)}


def test_a_damaged_encrypted_near_file_uses_the_copy(tmp_path: Path) -> None:
    store, hosts = root_at(tmp_path / "root"), folders(tmp_path, 0, 1)
    life(store, hosts, replicas=1).run(5)
    for position in (20, -100):  # in a block, in the index
        file = data_files(hosts[0])[-1]
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.unlink()
        file.write_bytes(data)
        again = life(store, hosts)
        again.run(0)
        assert origins(again) == {("near", 4)}


def test_near_tiers_under_a_wrong_key_are_an_error(tmp_path: Path) -> None:
    hosts = folders(tmp_path, 0, 0)
    life(root_at(tmp_path / "root"), hosts).run(5)
    for key in (os.urandom(32), None):
        options: dict[str, Any] = {} if key is None else {"encryption_key": key}
        with pytest.raises(RanksFailed) as failed:
            life(open_store(str(tmp_path / "root"), **options), hosts).run(0)
        for error in failed.value.errors.values():
            assert "AccessDeniedError" in str(error) and "encrypted with the key" in str(error)
    assert len(data_files(hosts[0])) >= 4


def test_near_files_of_another_key_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, hosts = root_at(tmp_path / "root"), folders(tmp_path, 0, 0)
    life(store, hosts, save=EverySteps(3)).run(5)
    others = folders(tmp_path, 1, 1)
    life(open_store(str(tmp_path / "other"), encryption_key=os.urandom(32)), others).run(5)
    for file, wrong in zip(data_files(hosts[0]), data_files(others[0]), strict=True):
        shutil.copyfile(wrong, file)
    again = life(store, hosts)
    again.run(0)
    assert origins(again) == {("durable", 3)}
    assert "it says that its key is" in caplog.text


def key_file(folder: Path, secret: bytes) -> Path:
    file = folder / f"key-{secret[:4].hex()}"
    file.write_text(secret.hex())
    file.chmod(0o600)
    return file


def test_rescue_opens_encrypted_near_files(tmp_path: Path) -> None:
    url, hosts = str(tmp_path / "root"), folders(tmp_path, 0, 0)
    life(root_at(tmp_path / "root"), hosts, save=NEVER).run(5)
    key = ["-o", f"encryption_key={key_file(tmp_path, SECRET)}"]
    assert main(["rescue", str(hosts[0] / "near"), url, *key]) == 0
    assert main(["verify", url, *key]) == 0
    shutil.rmtree(hosts[0])
    again = life(root_at(tmp_path / "root"), hosts)
    again.run(0)
    assert origins(again) == {("durable", 4)}
