"""What a root says of its checkpoints costs commands no more than their budget, whatever it says.

Method: manifests of a KiB whose rules stand for 2^26 chunks, or for a tensor of 2^50 bytes, and
telemetry of nothing but empty rows, under every command that opens them; memory and CPU counted.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.errors import Corrupt, Mismatch, UnsupportedFormat
from ckpt.format.checksum import Seal, Seals
from ckpt.format.columns import (
    Progressions,
    distinct_by_part,
    is_below,
    pack_ints,
    pack_map,
    pack_regular,
    unpack_map,
    unpack_rules,
)
from ckpt.format.manifest import (
    BoxTable,
    ChunkTable,
    Manifest,
    MetadataBudget,
    RuledChunks,
    starts_of,
)
from ckpt.format.manifest_codec import MAGIC, decode_manifest
from ckpt.telemetry.record import decode_telemetry
from tests.conftest import Scale
from tests.counting import profiled
from tests.format.encoding import encode_manifest
from tests.format.sample import make_increments, make_sample

MIB = 1 << 20
State = dict[str, torch.Tensor]


def step_directory(folder: Path) -> Path:
    ckpt.save({"model": {"w": torch.zeros(8, dtype=torch.uint8)}}, str(folder), step=1)
    (step,) = (folder / "steps").iterdir()
    return step


def crafted(folder: Path, chunks: int, numel: int) -> Path:
    """A step directory whose one tensor has so many chunks of `numel` bytes each."""
    path = step_directory(folder) / "MANIFEST"
    fields = {k: bytes(v) for k, v in unpack_map(path.read_bytes()[len(MAGIC) + 16 : -32]).items()}
    header = json.loads(fields["header"])
    counts = np.frombuffer(fields["counts"], "<u8").copy()
    counts[3], counts[5] = chunks, chunks * -(-numel // header["block_bytes"])

    def constant(value: int) -> bytes:
        return pack_ints(np.array([value, value]))

    fields |= {
        "header": json.dumps(header).encode(),
        "counts": counts.tobytes(),
        "shape_dims": pack_ints(np.array([chunks * numel], dtype=np.uint64), constant=False),
        "chunk_counts": constant(chunks),
        "chunk_numels": constant(numel),
        "file_nbytes": constant(1 << 61),
        "table_nbytes": constant(4 * int(counts[5]) + 64),
        "table_digests": bytes(32),
    }
    fields |= {name: constant(0) for name in ("chunk_files", "chunk_skips", "chunk_gaps")}
    fields["chunk_boxes"] = constant(0)
    body = pack_map(fields)
    head = MAGIC + (1).to_bytes(4, "little") + bytes(4) + len(body).to_bytes(8, "little")
    path.write_bytes(head + body + hashlib.sha256(head + body).digest())
    return path.parent


@contextmanager
def cheaply(nbytes_max: int = 64 * MIB, seconds_max: float = 5.0) -> Iterator[None]:
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        peak, seconds = tracemalloc.get_traced_memory()[1], time.process_time() - began
    finally:
        tracemalloc.stop()
    assert peak < nbytes_max and seconds < seconds_max, f"{peak / MIB:.0f} MiB, {seconds:.1f} s"


# STEP is the crafted directory, and OTHER a new place beside it.
COMMANDS = (
    "ls STEP",
    "du STEP",
    "show STEP",
    "show STEP --json",
    "show STEP --map",
    "verify STEP",
    "plan STEP --ranks 2",
    "diff STEP STEP",
    "cp STEP OTHER",
    "reshard STEP OTHER --ranks 2",
    "export STEP OTHER.safetensors --entry model",
)
HEADERS_ALONE = ("ls STEP", "du STEP", "show STEP")  # their other numbers cost nothing


def run(command: str, step: Path) -> int:
    places = command.replace("STEP", str(step)).replace("OTHER", str(step.parent / "other"))
    return main(places.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_rules_of_many_chunks_cost_no_command_much(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = crafted(tmp_path, 1 << 26, 1)
    assert (step / "MANIFEST").stat().st_size < 1024
    with cheaply():
        ended = run(command, step)
    out, err = capsys.readouterr()
    if command in HEADERS_ALONE:
        assert ended == 0
        assert command != "show STEP" or "0 (67108864 parts)" in out
    else:
        assert ended == 1 and not out and "67108864 chunks" in err and "--metadata-bytes-max" in err
        assert not list(step.parent.glob("other*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tensor_of_2_to_the_50_bytes_costs_no_command_much(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = crafted(tmp_path, 1, 1 << 50)
    with cheaply():
        ended = run(command, step)
    err = capsys.readouterr().err
    if command.startswith(("plan", "reshard")):
        assert "1073741824 blocks" in err
    if command.startswith("diff"):
        assert "says of its blocks" in err and "--metadata-bytes-max" in err
    assert ended == (0 if command in HEADERS_ALONE or command.startswith("show") else 1)
    assert not list(step.parent.glob("other*"))


def _restored(state: State, url: str, **options: Any) -> object:
    with ckpt.Checkpointer(state, url, save=ckpt.Never()) as checkpointer:
        return checkpointer.restore(**options)


def _polled(state: State, url: str, **options: Any) -> object:
    with ckpt.follow(state, url, **options) as follower:
        return follower.poll()


def _planned(state: State, url: str, **options: Any) -> object:
    return ckpt.plan_load(state, url, **options)


def _opened(state: State, url: str, **options: Any) -> object:
    with ckpt.open(url, **options) as checkpoint:
        return len(checkpoint)


CALLS = (ckpt.load, _restored, _polled, _planned, _opened)


@pytest.mark.parametrize("call", CALLS)
def test_calls_bound_what_a_root_describes(call: Callable[..., object], tmp_path: Path) -> None:
    """A manifest that is committed, as one of a hostile root is: its size is not all it costs."""
    state = {f"w{n}": torch.ones(2) for n in range(50)}
    url = str(tmp_path)
    ckpt.save(state, url, step=1)
    ckpt.forget(url)
    with pytest.raises(UnsupportedFormat, match=r"MANIFEST: .*metadata_bytes_max="):
        call(state, url, metadata_bytes_max=20_000)
    assert call(state, url, metadata_bytes_max=100_000) is not None


@pytest.mark.parametrize("call", [ckpt.load, _planned, _opened])
def test_rules_of_many_chunks_cost_no_call_much(
    call: Callable[..., object], tmp_path: Path
) -> None:
    step = crafted(tmp_path, 1 << 26, 1)
    # A load lists no chunks before the state fits.
    fitting = torch.empty(1 << 26, dtype=torch.uint8)
    with cheaply(), pytest.raises(UnsupportedFormat, match="67108864 chunks"):
        call({"model": {"w": fitting}}, str(step))
    with cheaply(), pytest.raises(Mismatch if call is ckpt.load else UnsupportedFormat):
        call({"model": {"w": fitting[:8]}}, str(step))


def test_a_short_file_is_verified_by_what_it_has(tmp_path: Path) -> None:
    step = crafted(tmp_path, 1 << 20, 1)
    with cheaply(256 * MIB):
        report = ckpt.verify(str(step))
    assert not report.ok and len(report.damage) < 100
    assert any("chunks of 'model.w'" in damage.text for damage in report.damage)


def test_more_metadata_is_read_where_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 MB allows for a hundredth of a CPU second, of which this is no test.
    monkeypatch.setattr("ckpt.format.manifest.SECONDS_PER_GIB", 1e5)
    ckpt.save({f"w{n}": torch.ones(2) for n in range(50)}, str(tmp_path / "run"), step=1)
    commands = ("show ROOT", "verify ROOT", "plan ROOT --ranks 1", "diff ROOT ROOT")
    moving = ("cp ROOT ONE", "cp --root ROOT ALL", "reshard ROOT NEW --ranks 2")
    for command in (*commands, *moving):
        words = command.replace("ROOT", str(tmp_path / "run")).split()
        few = [str(tmp_path / word) if word.isupper() else word for word in words]
        few.append("--metadata-bytes-max")
        assert main([*few, "20KB"]) == 1
        assert "--metadata-bytes-max" in capsys.readouterr().err
        assert main([*few, "1MB"]) == 0


def test_long_walks_end_where_the_budget_does() -> None:
    budget = MetadataBudget(1 << 20)  # a hundredth of a second
    with pytest.raises(UnsupportedFormat, match="seconds of a CPU"):
        for _ in budget.timed(iter(int, 1), "a walk"):
            pass


def test_ruled_chunks_are_the_table(rng: random.Random) -> None:
    for sample in (make_sample(), *make_increments()):
        data = encode_manifest(sample.manifest)
        table, ruled = decode_manifest(data).chunks, decode_manifest(data, ruled=True).chunks
        assert isinstance(ruled, RuledChunks) and len(ruled) == len(table)
        assert list(ruled.files_by_tensor()) == list(table.files_by_tensor())
        assert [ruled.region(n) for n in range(len(table))] == [
            table.region(n) for n in range(len(table))
        ]
    for _ in range(200):
        steps = rng.choices((0, 1, 2), k=rng.randrange(1, 5))
        items = [s * n for s in steps for n in range(rng.randrange(1, 30))]
        column = unpack_rules(memoryview(pack_regular(np.array(items))), len(items), "x")
        cuts = sorted(rng.choices(range(len(items) + 1), k=4))
        counts = np.diff([0, *cuts, len(items)]).tolist()
        parts = np.split(np.array(items), cuts)
        expected = [(len(part), np.unique(part).tolist()) for part in parts]
        assert list(distinct_by_part(column, counts)) == expected
        assert is_below(column, max(items) + 1) and not is_below(column, max(items))
    wrapping = Progressions(np.array([3]), np.array([5], np.uint64), np.array([1 << 63], np.uint64))
    assert not is_below(wrapping, 10)


def test_damage_behind_rules_is_found_when_chunks_are_read(tmp_path: Path) -> None:
    data = encode_manifest(make_sample().manifest)
    fields = {k: bytes(v) for k, v in unpack_map(data[len(MAGIC) + 16 : -32]).items()}
    gaps = bytearray(fields["chunk_gaps"])
    gaps[-1] ^= 0xFF
    body = pack_map({**fields, "chunk_gaps": bytes(gaps)})
    head = MAGIC + (1).to_bytes(4, "little") + bytes(4) + len(body).to_bytes(8, "little")
    manifest = decode_manifest(head + body + hashlib.sha256(head + body).digest(), ruled=True)
    with pytest.raises(Corrupt):
        manifest.region(0)


def of_many_tensors(folder: Path, count: int) -> Manifest:
    """The manifest of a step directory that has so many tensors."""
    path = step_directory(folder) / "MANIFEST"
    manifest = decode_manifest(path.read_bytes())
    ids, ones, start = np.arange(count), np.ones(count, np.int64), int(manifest.file_data_start[0])
    boxes, firsts = BoxTable.of([]), starts_of(ones)
    zeros, places = np.zeros(count, np.int64), start + 64 * ids
    made = replace(
        manifest,
        fqns=tuple(sorted(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(count))),
        dtypes=("float32",) * count,
        shapes=((4, 4),) * count,
        kinds=np.zeros(count, np.uint8),
        chunks=ChunkTable(firsts, zeros, places, zeros, 16 * ones, zeros - 1, boxes, firsts),
        file_nbytes=np.array([start + 64 * count + 4 * (count + 3)]),
        seals=Seals.of([Seal(4 * (count + 3), bytes(32))]),
    )
    path.write_bytes(encode_manifest(made))
    return made


def test_a_million_tensors_are_shown_within_the_budget(
    tmp_path: Path, scale: Scale, capsys: pytest.CaptureFixture[str]
) -> None:
    count = scale.count(20_000, 1_000_000)
    made = of_many_tensors(tmp_path, count)
    (step,) = map(str, (tmp_path / "steps").iterdir())
    assert main(["show", step, "--unfold"]) == 0
    assert capsys.readouterr().out.count("q_proj") == count
    assert main(["show", step]) == 0
    assert f"q_proj.weight ({count})" in capsys.readouterr().out
    assert main(["show", step, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["tensors"]
    assert len(shown) == count and shown[made.fqns[7]]["parts"][0]["span"] == [0, 16]


@pytest.mark.parametrize(("options", "calls_max"), [([], 5), (["--unfold"], 5), (["--json"], 10)])
def test_a_tensor_that_is_shown_costs_few_calls(
    options: list[str], calls_max: int, tmp_path: Path
) -> None:
    """Of functions of Python, which is where the time of a million rows goes."""
    calls: list[int] = []
    for count in (1000, 15_000, 25_000):  # the first imports, and the first rows are measured
        of_many_tensors(tmp_path / f"{count}", count)
        (step,) = map(str, (tmp_path / f"{count}" / "steps").iterdir())
        calls.append(0)

        def count_calls(frame: object, event: str, argument: object) -> None:
            calls[-1] += event == "call"

        codes: list[int] = []
        profiled(lambda: codes.append(main(["show", step, *options])), count_calls)  # noqa: B023
        assert codes == [0]
    print(per_tensor := (calls[2] - calls[1]) / 10_000)
    assert per_tensor < calls_max


# Telemetry ---------------------------------------------------------------------------------------


def empty_rows(attempt: str) -> bytes:
    """16 MB of telemetry whose ranks have done nothing at all."""
    totals = dict.fromkeys(
        ("seconds", "blocked_seconds", "slowest_seconds", "committed_unix"), 1.0
    ) | dict.fromkeys(
        ("step", "nbytes", "nbytes_referenced", "staged_nbytes", "retries", "ranks"), 1
    )
    whole = {
        "totals": totals | {"attempt": attempt, "slowest_rank": 0, "slowest_phase": "write"},
        "begun_unix": 1.0,
        "phases": [],
        **{key: [] for key in ("started_us", "took_us", "nbytes", "blocked_us", "retries")},
    }
    count = 1_100_000
    text = json.dumps(whole, separators=(",", ":"))
    for name in ("started_us", "took_us", "nbytes"):
        text = text.replace(f'"{name}":[]', f'"{name}":[{",".join(["[]"] * count)}]')
    for name in ("blocked_us", "retries"):
        text = text.replace(f'"{name}":[]', f'"{name}":[{",".join(["0"] * count)}]')
    return text.encode()


def test_rows_of_telemetry_are_counted_before_they_are_made() -> None:
    data = empty_rows("x")
    assert 14e6 < len(data) < 16 * MIB
    with cheaply(), pytest.raises(Corrupt, match="ranks"):
        decode_telemetry(data)


def test_a_report_reads_telemetry_within_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(1, 4):
        ckpt.save({"w": torch.ones(2)}, str(tmp_path), step=step)
    for folder in sorted((tmp_path / "steps").iterdir())[:2]:
        attempt = folder.name.partition("-")[2]
        (folder / "TELEMETRY").write_bytes(empty_rows(attempt))
    with cheaply(192 * MIB):
        assert main(["report", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["slowest"]["took_us"] and report["slowest"]["totals"]["step"] == 3
    assert main(["report", f"{tmp_path}", "--json", "--metadata-bytes-max", "1KB"]) == 0
    assert json.loads(capsys.readouterr().out)["slowest"] is None


def test_a_load_names_the_manifest_whose_table_is_too_large(tmp_path: Path) -> None:
    step = crafted(tmp_path, 1 << 26, 1)
    state = {"model": {"w": torch.empty(1 << 26, dtype=torch.uint8)}}
    with cheaply(), pytest.raises(UnsupportedFormat) as refused:
        ckpt.load(state, str(step))
    assert str(refused.value).startswith(f"{step}/MANIFEST: a table of 67108864 chunks")
