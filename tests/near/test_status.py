"""STATUS of a tier: how far a training is, for who looks from outside, and what it makes of it.

Method: bytes are damaged at every place and decoded; things that are no files lie where STATUS
should be; trainings whose hosts are folders run, and commands look at the folders.
"""

from __future__ import annotations

import json
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import main
from ckpt.errors import CheckpointError, Corrupt, UnsupportedFormat
from ckpt.format.checksum import crc32c
from ckpt.near.status import (
    STATUS_NAME,
    STATUS_NBYTES,
    STATUS_SECONDS,
    StatusNotes,
    TierStatus,
    decode_status,
    encode_status,
    read_status,
    write_status,
)
from ckpt.near.tier import tiers_in
from ckpt.near.training import NearTraining
from ckpt.screens.watching import frame_of, happenings
from ckpt.service.events import NearSaved
from ckpt.service.policies import EverySteps
from ckpt.tools.near_tiers import tier_views, work_at_risk
from ckpt.tools.polling import RunPoller
from storage.local import LocalStore
from storage.memory import MemoryStore
from tests.near.test_near_training import folders
from tests.near.training import Life
from tests.tools.test_watching import text_of

STATUS = TierStatus(epoch=3, step=512, time_unix=1009.0, near_step=498, near_unix=1000.0)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


# Bytes --------------------------------------------------------------------------------------------


def test_a_status_comes_back_and_no_damage_does() -> None:
    data = encode_status(STATUS)
    assert len(data) == STATUS_NBYTES and decode_status(data, "here") == STATUS
    for index in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[index] ^= 1 << bit
            with pytest.raises(Corrupt, match="here"):
                decode_status(bytes(changed), "here")
        with pytest.raises(Corrupt, match="here"):
            decode_status(data[:index], "here")
    with pytest.raises(Corrupt, match="here"):
        decode_status(data + b"\0", "here")


def test_a_status_with_a_right_checksum_is_not_trusted_either() -> None:
    data, rng = encode_status(STATUS)[:-4], random.Random(5)
    for _ in range(500):
        changed = bytearray(data)
        changed[rng.randrange(8, len(data))] = rng.randrange(256)
        try:
            decoded = decode_status(sealed(bytes(changed)), "here")
        except CheckpointError as error:
            assert "here" in str(error)
            continue
        assert encode_status(decoded) == sealed(bytes(changed))
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode_status(sealed(data[:8] + struct.pack("<Q", 2) + data[16:]), "here")
    for field, value in (("time_unix", float("nan")), ("near_step", -2), ("epoch", 0)):
        with pytest.raises(ValueError, match="status"):
            encode_status(TierStatus(**{**vars_of(STATUS), field: value}))


def vars_of(status: TierStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in TierStatus.__dataclass_fields__}


def test_the_work_since_a_checkpoint_is_never_negative() -> None:
    assert STATUS.since(498, 1000.0) == (14, 9.0)
    assert STATUS.since(600, 2000.0) == (0, 0.0)


# Places -------------------------------------------------------------------------------------------


def test_what_is_written_is_read_and_a_zombie_does_not_overwrite_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert read_status(folder) is None
    for step in (5, 6):
        write_status(folder, TierStatus(3, step, 1.0))
    assert read_status(folder) == TierStatus(3, 6, 1.0)
    write_status(folder, TierStatus(2, 99, 9.0))
    assert read_status(folder) == TierStatus(3, 6, 1.0)
    # What nobody can read is replaced, in its whole length.
    (tmp_path / STATUS_NAME).write_bytes(b"x" * 5000)
    write_status(folder, STATUS)
    assert read_status(folder) == STATUS
    assert (tmp_path / STATUS_NAME).stat().st_size == STATUS_NBYTES


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "device", "huge", "empty"])
def test_hostile_things_in_its_place_are_an_error_and_no_wait(tmp_path: Path, kind: str) -> None:
    place = tmp_path / STATUS_NAME
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "link":
        (tmp_path / "victim").write_bytes(b"mine")
        place.symlink_to(tmp_path / "victim")
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.touch()
        os.truncate(place, (1 << 40) if kind == "huge" else 0)
    with pytest.raises((Corrupt, OSError)):
        read_status(str(tmp_path))
    if kind in ("huge", "empty"):
        write_status(str(tmp_path), STATUS)
        assert read_status(str(tmp_path)) == STATUS
        return
    with pytest.raises((Corrupt, OSError)):
        write_status(str(tmp_path), STATUS)
    if kind == "link":
        assert (tmp_path / "victim").read_bytes() == b"mine"
    # Who trains notes it once in the log, and trains on.
    notes = StatusNotes(str(tmp_path), 3)
    notes.saved(1, 1.0)
    notes.stepped(2)


def test_readers_beside_a_writer_see_whole_states_only(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_status(folder, TierStatus(1, 0, 0.0))

    def write() -> None:
        for step in range(1, 2000):
            write_status(folder, TierStatus(1, step, float(step), step, float(step)))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            try:
                seen = read_status(folder)
            except Corrupt:
                continue  # as many writes as reads have passed
            assert seen is not None and seen.step == seen.time_unix == max(seen.near_step, 0)
        writing.result()


def test_notes_are_seconds_apart_but_for_new_checkpoints(tmp_path: Path) -> None:
    now = [0.0]
    notes = StatusNotes(str(tmp_path), 3, monotonic=lambda: now[0])

    def noted(step: int) -> tuple[int, int]:
        notes.stepped(step)
        status = read_status(str(tmp_path))
        assert status is not None
        return status.step, status.near_step

    assert [noted(1), noted(2)] == [(1, -1), (1, -1)]
    now[0] = STATUS_SECONDS
    assert [noted(3), noted(4)] == [(3, -1), (3, -1)]
    notes.saved(4, 5.0)
    assert [noted(5), noted(6)] == [(5, 4), (5, 4)]


# Trainings and commands ---------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> tuple[str, list[Path]]:
    """A root, and the hosts of a job that saved at 2, 4, 6 (near), 5 (durable) and did step 7."""
    root, hosts = str(tmp_path / "run"), folders(tmp_path, 0, 1)
    Life(2, LocalStore(root), hosts, save=EverySteps(5)).run(7)
    for host in hosts:
        (tier,) = tiers_in(host / "near")
        # The gate of a second is not waited for.
        status = read_status(tier.store.place)
        assert status is not None and status.near_step == 6
        write_status(
            tier.store.place, TierStatus(1, 7, status.near_unix + 9.0, 6, status.near_unix)
        )
    return root, hosts


def near_of(hosts: list[Path]) -> list[str]:
    return [str(host / "near") for host in hosts]


def test_a_look_at_tiers_says_what_is_at_risk(trained: tuple[str, list[Path]]) -> None:
    _, hosts = trained
    views = tier_views(near_of(hosts))
    assert [[one.step for one in view.steps] for view in views] == [[6, 4], [6, 4]]
    assert [(v.steps[0].ranks_here, v.steps[0].ranks) for v in views] == [(1, 2), (1, 2)]
    assert all(view.nbytes > 0 and not view.problem for view in views)
    risk = work_at_risk(views)
    assert risk is not None and risk.steps == 1 and risk.seconds == pytest.approx(9.0)
    # Of other roots, and of no directory, nothing is shown but that.
    other = tier_views([*near_of(hosts), "/nowhere"], "0" * 32)
    assert [bool(view.problem) for view in other] == [True, True, True]
    assert work_at_risk(other) is None


def test_watch_shows_both_kinds_of_checkpoints(
    trained: tuple[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, hosts = trained
    flags = [word for path in near_of(hosts) for word in ("--near", path)]
    assert main(["watch", root, "--once", *flags]) == 0
    out = capsys.readouterr().out
    assert "near: step 7 done" in out
    assert "work at risk: 1 step, 9 s since the newest near checkpoint; 2 steps, " in out
    assert out.count("1 of 2") == 2
    assert main(["watch", root, "--once", "--json", *flags]) == 0
    near = json.loads(capsys.readouterr().out)["near"]
    assert (near["reached_step"], near["near_step"], near["at_risk_near"]["steps"]) == (7, 6, 1)
    assert near["at_risk_durable"]["steps"] == 2 and len(near["tiers"]) == 2
    assert main(["ls", "--near", near_of(hosts)[0]]) == 0
    assert "step 7 done" in capsys.readouterr().out
    assert main(["watch", root, "--once"]) == 0
    assert "work at risk" not in capsys.readouterr().out


def test_a_damaged_status_is_shown_and_the_rest_as_well(trained: tuple[str, list[Path]]) -> None:
    root, hosts = trained
    (tier,) = tiers_in(hosts[0] / "near")
    place = Path(tier.store.place) / STATUS_NAME
    place.write_bytes(b"\x1b[2J" * 20)
    poller = RunPoller(root, near=near_of(hosts))
    state = poller.poll()
    shown = text_of(frame_of(state, 1.0, width=200, height=60))
    assert "no status of a near tier" in shown and "work at risk: 1 step" in shown
    assert [one.kind for one in happenings(None, state)] == ["begun"]
    # A newer checkpoint is one line, whoever notes it.
    (second,) = tiers_in(hosts[1] / "near")
    write_status(second.store.place, TierStatus(1, 9, 2e9, 8, 2e9 - 1))
    after = poller.poll()
    assert after.version > state.version
    assert [(one.kind, one.step) for one in happenings(state, after)] == [("near", 8)]
    poller.close()


def test_a_restore_says_how_far_the_training_had_come(trained: tuple[str, list[Path]]) -> None:
    root, hosts = trained
    again = Life(2, LocalStore(root), hosts)
    again.run(0)
    for report in again.reports.values():
        assert report is not None and (report.origin, report.step) == ("near", 6)
        assert report.reached_step == 7 and report.seconds_lost is not None
        # Nine seconds after the state was taken, so less after its record was written.
        assert 0 < report.seconds_lost <= 9.0
        sources = report.nbytes_by_source
        assert sources["own host"] == report.nbytes_read - report.nbytes_of_other_hosts > 0
        assert sources["durable"] == 0 and sum(sources.values()) == report.nbytes_read


def test_what_the_wait_for_the_save_before_takes_is_blocked_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The wait is made long where it is measured: by a clock that a wait moves by 5 seconds.
    now = [0.0]
    collect = NearTraining.collect

    def slow(self: NearTraining, *, wait: bool, **how: Any) -> None:
        now[0] += 5.0 * wait
        collect(self, wait=wait, **how)

    monkeypatch.setattr(NearTraining, "collect", slow)
    monkeypatch.setattr("ckpt.near.training.perf_counter", lambda: now[0])
    life = Life(1, MemoryStore(), folders(tmp_path, 0))
    life.run(4)
    saved = [event for event in life.events[0] if isinstance(event, NearSaved)]
    assert [event.blocked_seconds >= 5.0 for event in saved] == [True, True]
