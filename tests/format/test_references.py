"""Names of files of other attempts lead to those files and nowhere else; nothing of them is taken
on trust.

Method: the increments of sample.py (three saves, of which the later two refer to the first), with
single fields replaced under right digests, files removed and bytes flipped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt.commit.locate import file_key, file_keys
from ckpt.commit.names import parse_step_key
from ckpt.errors import Corrupt, NoCheckpoint
from ckpt.format.columns import pack_ints, pack_map, pack_strings, unpack_map
from ckpt.format.datafile_index import describe_file, read_data_file_index
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import parse_reference, reference_to
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.object_parts import FileRange
from ckpt.loading.contents import find_checkpoint
from ckpt.tools.salvage import _chunks_between, salvage
from storage import open_store
from tests.format.encoding import encode_manifest
from tests.format.sample import INCREMENTS, increment_dir, make_increments
from tests.format.test_manifest import envelope
from tests.salvaged import matches_manifest

SAMPLES = make_increments()
FIRST, _, LAST = INCREMENTS
LAST_ENCODED = encode_manifest(SAMPLES[-1].manifest)
BASE = f"../00000010-{FIRST.attempt}/"
FILE = "rank00000-000.safetensors"


def _write(root: Path) -> Path:
    for header, sample in zip(INCREMENTS, SAMPLES, strict=True):
        directory = root / increment_dir(header)
        directory.mkdir(parents=True)
        for name, data in sample.files.items():
            (directory / name).write_bytes(data)
        (directory / "MANIFEST").write_bytes(encode_manifest(sample.manifest))
    return root


def _with_files(names: list[str], **fields: bytes | None) -> bytes:
    body = {name: bytes(view) for name, view in unpack_map(LAST_ENCODED[24:-32]).items()}
    body["file_names"], body["file_name_sizes"] = pack_strings(names)
    return envelope(pack_map({k: v for k, v in {**body, **fields}.items() if v is not None}))


OWN = list(SAMPLES[-1].manifest.files[:2])
SHARED = list(SAMPLES[-1].manifest.files[2:])


def test_the_rewritten_manifest_of_these_tests_is_right_before_it_is_made_wrong() -> None:
    assert _with_files([*OWN, *SHARED]) == LAST_ENCODED


@pytest.mark.parametrize(
    "name",
    [
        f"../../{FILE}",
        f"../{FILE}",
        f"..//{FILE}",
        f"../00000010-{FIRST.attempt}/../{FILE}",
        f"../00000010-{FIRST.attempt}/MANIFEST",
        f"../00000010-{FIRST.attempt}/sub/{FILE}",
        f"../00000010-{FIRST.attempt}/{FILE}\n",
        f"../../steps/00000010-{FIRST.attempt}/{FILE}",
        f"../10-{FIRST.attempt}/{FILE}",
        f"../0000000010-{FIRST.attempt}/{FILE}",
        f"../00000010-e0000001-0000000000000000/{FILE}",
        f"../00000010-e000000-0000000000000000/{FILE}",
        f"../00000010-e000001-000000000000000A/{FILE}",
        f"../0000001\u0660-{FIRST.attempt}/{FILE}",
        f"../00000010-{FIRST.attempt}/..safetensors",
        f"../00000012-{LAST.attempt}/{FILE}",
    ],
)
def test_only_data_files_of_other_attempts_can_be_named(name: str) -> None:
    """Paths that lead out of steps/, back into the own directory, or to something else."""
    with pytest.raises(Corrupt, match="other attempt"):
        decode_manifest(_with_files([*OWN, name, SHARED[1]]))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([SHARED[0], *OWN, SHARED[1]], "not a data file of another|not a name of a data file"),
        ([*OWN, SHARED[1], SHARED[0]], "not sorted"),
        ([*OWN, SHARED[0], SHARED[0]], "named twice"),
    ],
)
def test_references_stand_behind_own_files_sorted_and_once(names: list[str], problem: str) -> None:
    with pytest.raises(Corrupt, match=problem):
        decode_manifest(_with_files(names))


def test_a_reference_that_no_chunk_lies_in_is_refused() -> None:
    """It would keep another checkpoint alive for nothing."""
    names = [*OWN, *SHARED, reference_to(10, FIRST.attempt, "rank00002-000.safetensors")]
    counts = np.frombuffer(unpack_map(LAST_ENCODED[24:-32])["counts"], dtype="<u8").copy()
    counts[0] += 1
    sizes = [*SAMPLES[-1].manifest.file_nbytes.tolist(), 8192]
    starts = [*SAMPLES[-1].manifest.file_data_start.tolist(), 4096]
    fields = {
        "counts": counts.tobytes(),
        "file_nbytes": pack_ints(sizes),
        "file_data_starts": pack_ints(starts),
        "table_nbytes": pack_ints([*SAMPLES[-1].manifest.seals.nbytes.tolist(), 12]),
        "table_digests": SAMPLES[-1].manifest.seals.digests.tobytes() + bytes(32),
    }
    with pytest.raises(Corrupt, match="holds no chunk"):
        decode_manifest(_with_files(names, **fields))


def test_references_must_be_required_so_that_older_readers_refuse() -> None:
    header = LAST.model_copy(update={"required": ()}).model_dump_json().encode()
    with pytest.raises(Corrupt, match="without 'references'"):
        decode_manifest(_with_files([*OWN, *SHARED], header=header))
    with pytest.raises(ValueError, match="must require"):
        build_manifest(LAST.model_copy(update={"required": ()}), SAMPLES[-1].parts)


def test_names_of_directories_are_those_that_the_log_knows() -> None:
    """The grammar stands in two files; both take the same names, so deletion and reading agree."""
    names = [
        f"{step}-{attempt}"
        for step in ("00000010", "10", "0000000010", "123456789", "000000000")
        for attempt in (
            "e000001-0123456789abcdef",
            "e1-0123456789abcdef",
            "e0000001-0123456789abcdef",
            "e1234567-0123456789abcdef",
            "e000000-0123456789abcdef",
            "e000001-0123456789ABCDEF",
        )
    ]
    for name in names:
        known = parse_step_key(f"steps/{name}/{FILE}")
        reference = parse_reference(f"../{name}/{FILE}")
        assert (known is None) == (reference is None), name
        if known is not None and reference is not None:
            assert reference_to(known[0], known[1], FILE) == f"../{name}/{FILE}"
            assert reference.attempt == known[1]


def test_keys_of_references_are_beside_the_directory() -> None:
    assert file_key("steps/a/", FILE) == f"steps/a/{FILE}"
    assert file_key("", FILE) == FILE
    assert file_key("steps/a/", BASE + FILE) == f"steps/00000010-{FIRST.attempt}/{FILE}"
    assert file_key("a/", BASE + FILE) == f"00000010-{FIRST.attempt}/{FILE}"
    with pytest.raises(NoCheckpoint, match="root"):
        file_key("", BASE + FILE)
    keys = file_keys(increment_dir(LAST) + "/", SAMPLES[-1].manifest)
    assert [key.split("/")[1] for key in keys] == [f"00000012-{LAST.attempt}"] * 2 + [
        BASE[3:-1]
    ] * 2


def test_a_bare_copy_says_where_the_rest_is(tmp_path: Path) -> None:
    """Within a root it names the root; elsewhere it names the root's identity and `ckpt cp`."""
    root = _write(tmp_path / "root")
    bare = shutil.copytree(root / increment_dir(LAST), tmp_path / "bare")
    with pytest.raises(NoCheckpoint, match=r"shares files with e000001-0{16}.*ckpt cp") as caught:
        find_checkpoint(open_store(str(bare)))
    assert LAST.root in str(caught.value)
    with pytest.raises(NoCheckpoint, match=rf"open step 12 of .*{root.name}, or copy"):
        find_checkpoint(open_store(str(root / increment_dir(LAST))))
    first = shutil.copytree(root / increment_dir(FIRST), tmp_path / "first")
    assert find_checkpoint(open_store(str(first))).manifest.header == FIRST


def test_salvage_rebuilds_the_same_manifest_and_names_what_is_gone(tmp_path: Path) -> None:
    root = _write(tmp_path)
    store = open_store(str(root))
    directory = increment_dir(LAST)
    encoded = (root / directory / "MANIFEST").read_bytes()
    (root / directory / "MANIFEST").unlink()
    report = salvage(store, directory)
    assert report.manifest is not None and encode_manifest(report.manifest) == encoded
    (root / increment_dir(FIRST) / FILE).unlink()
    report = salvage(store, directory)
    assert report.manifest is None and report.missing == (BASE + FILE,)
    assert matches_manifest(store, report) is None


@pytest.mark.parametrize("what", ["block", "digests", "header", "other attempt"])
def test_salvage_finds_damage_in_what_is_shared(tmp_path: Path, what: str) -> None:
    root = _write(tmp_path)
    path = root / increment_dir(FIRST) / FILE
    data = bytearray(path.read_bytes())
    if what == "other attempt":
        data = bytearray((root / increment_dir(INCREMENTS[1]) / FILE).read_bytes())
    else:
        offsets = {
            "block": 4112,
            "digests": data.find(SAMPLES[0].parts[0].files[0].digests[0].tobytes()),
        }
        data[offsets.get(what, 200)] ^= 1
    path.write_bytes(data)
    report = salvage(open_store(str(root)), increment_dir(LAST))
    assert report.manifest is None and report.problems


def test_salvage_does_not_mind_damage_in_what_is_not_shared(tmp_path: Path) -> None:
    """The first 16 tensor bytes of the first checkpoint are its own `phase`."""
    root = _write(tmp_path)
    path = root / increment_dir(FIRST) / FILE
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    assert salvage(open_store(str(root)), increment_dir(LAST)).is_complete
    assert not salvage(open_store(str(root)), increment_dir(FIRST)).is_complete


@pytest.mark.parametrize(
    "rows",
    [
        [["../x", 0, 1]],
        [[BASE + FILE, 1, 1]],
        [[BASE + FILE, -1, 1]],
        [[BASE + FILE, 0, 1 << 70]],
        [[BASE + FILE, 0.5, 1]],
        [[BASE + FILE, True, 3]],
        [[BASE + FILE, 0]],
        {"a": 1},
        "x",
        3,
    ],
)
def test_hostile_ranges_in_a_data_file_are_refused(rows: object) -> None:
    data = SAMPLES[-1].files[FILE]
    index = read_data_file_index(lambda start, stop: data[start:stop], len(data))
    assert describe_file(index).references == (FileRange(BASE + FILE, 4112, 4288),)
    index.metadata["ckpt.references"] = json.dumps(rows)  # type: ignore[index]
    with pytest.raises(Corrupt, match="__metadata__"):
        describe_file(index)


@pytest.mark.parametrize("span", [(4112, 4280), (4111, 4288), (4096, 4207), (4288, 5000)])
def test_ranges_must_be_whole_chunks(span: tuple[int, int]) -> None:
    base = SAMPLES[0].files[FILE]
    index = read_data_file_index(lambda start, stop: base[start:stop], len(base))
    assert list(_chunks_between("x", index, 4112, 4288)) == [1, 2]
    with pytest.raises(Corrupt, match="not whole chunks"):
        _chunks_between("x", index, *span)
