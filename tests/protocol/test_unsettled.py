"""A COMMIT whose outcome is unknown is settled only where its MANIFEST is.

Method: a store that applies a record and gives no answer; then a backup is restored, the store does
not answer, or somebody retires what was committed.
"""

from __future__ import annotations

import pytest

from ckpt.commit.log import Log
from ckpt.commit.maintenance import Maintenance
from ckpt.commit.names import MANIFEST_NAME
from ckpt.errors import LogDiverged, OutcomeUnknown
from storage.errors import TransientError
from storage.memory import MemoryBucket, MemoryStore
from storage.store import ObjectInfo
from tests.protocol.test_session import Scripted, claim, keys, save


def _restore(bucket: MemoryBucket, backup: dict[str, bytes]) -> None:
    for key in bucket.keys_from("", ""):
        bucket.remove(key)
    for key, data in backup.items():
        bucket.add(key, data)


@pytest.mark.parametrize("moment", ["before it is sent again", "as it is sent again"])
def test_a_commit_is_not_settled_where_a_restored_backup_took_its_manifest(moment: str) -> None:
    """Found by the explorer: its record fits to the restored log, and its files are gone."""

    class Restoring(Scripted):
        moment = ""

        def put_if_absent(self, key: str, data: bytes) -> None:
            if self.moment == "as it is sent again":
                self.moment = ""
                _restore(bucket, backup)
            super().put_if_absent(key, data)

    bucket = MemoryBucket()
    store = Restoring(MemoryStore(bucket))
    session = claim(store)
    kept = save(session, 1)
    backup = {key: bytes(store.get(key)) for key in bucket.keys_from("", "")}
    store.script = ["applied", "lost", "lost"]
    with pytest.raises(OutcomeUnknown):
        save(session, 2)
    store.moment = moment
    if moment == "before it is sent again":
        _restore(bucket, backup)
    gone = r"00000002-.*/MANIFEST, which this process wrote, is gone.*ckpt\.forget"
    with pytest.raises(LogDiverged, match=gone):
        session.settle()
    if moment == "before it is sent again":
        assert Log(store).state().live == (kept,)
        with pytest.raises(LogDiverged, match=gone):
            save(session, 3)
    store.moment = ""
    save(claim(store), 4)  # as after `ckpt.forget`
    assert Log(store).state().latest.step == 4  # type: ignore[union-attr]


def test_a_commit_whose_manifest_cannot_be_looked_for_stays_unsettled() -> None:
    class Away(Scripted):
        is_remote = False

        def info(self, key: str) -> ObjectInfo:
            if self.is_remote and key.endswith(MANIFEST_NAME):
                raise TransientError("throttled")
            return super().info(key)

    store = Away(MemoryStore())
    session = claim(store)
    store.is_remote = True
    for action in (lambda: save(session, 1), session.settle):
        with pytest.raises(OutcomeUnknown, match="COMMIT of"):
            action()
    store.is_remote = False
    settled = session.settle()
    assert settled is not None and settled.landed
    assert [e.step for e in Log(store).state().live] == [1]


def test_an_unsettled_commit_that_was_retired_meanwhile_has_landed() -> None:
    store = Scripted(MemoryStore())
    session = claim(store)
    save(session, 1)
    store.script = ["applied", "lost", "lost"]
    with pytest.raises(OutcomeUnknown):
        save(session, 2)
    save(claim(store), 3)
    retired = Log(store).state().live[1]
    Maintenance.open(store).retire(retired.attempt)
    assert keys(store, retired.prefix) == []
    settled = session.settle()
    assert settled is not None and settled.landed
