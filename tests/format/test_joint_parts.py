"""Parts that are merged on their way give the manifest, and the errors, of all parts at once.

Whatever the tree: joint parts are merged in random ones, through the bytes that ranks send, and
compared with all parts merged in one place. The manifest has the chunks of the parts, and their
table has its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress, pairwise
from typing import Any

import numpy as np
import pytest

import benchmarks.scale
import ckpt.world.tree
from benchmarks.scale import LAYOUTS
from ckpt.errors import Corrupt, InvalidState
from ckpt.format.checksum import Seal, crc32c
from ckpt.format.chunk_rules import check_rules, chunk_total
from ckpt.format.codec import encode_values
from ckpt.format.columns import Progressions, pack_map, pack_progressions, pack_regular, unpack_map
from ckpt.format.datafile import StoredChunk, order_key, region_start
from ckpt.format.joint_codec import StructureReader, encode_rest, encode_structure
from ckpt.format.joint_manifest import build_manifest, differing_values
from ckpt.format.manifest import REFERENCES, Header, int64s, reference_to
from ckpt.format.part import (
    FileColumns,
    JointMerge,
    JointStructure,
    Part,
    PartTexts,
    ReplicaColumns,
    TensorRecord,
    merge_structures,
    part_of_files,
)
from ckpt.layout.dtypes import DTYPES
from ckpt.layout.region import Box, Region, Span, span_of
from ckpt.saving.task import JointParts, JointReceived
from ckpt.telemetry.record import RankReport
from ckpt.world.base import split
from ckpt.world.tree import family
from tests.conftest import Scale
from tests.format.encoding import encode_manifest
from tests.format.many_parts import (
    Drawn,
    data_file,
    differences_of,
    header_of,
    parts_of,
    places_in,
    places_of,
    random_parts,
    saved_again,
)

BEFORE = "e000001-" + "f" * 16
Known = dict[int, JointParts]


def sealed(ranks: int, step: int = 1) -> Header:
    """The header of a save that may refer to others."""
    return header_of(ranks, step).model_copy(update={"required": (REFERENCES,)})


def report_of(rank: int) -> RankReport:
    return RankReport((), float(rank), 0)


def random_tree(seed: int, ranks: int) -> dict[int, list[int]]:
    """The children of each rank, in a tree in which those below a rank are consecutive."""
    rng = np.random.default_rng(seed)
    children: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    todo = [range(ranks)]
    while todo:
        block = todo.pop()
        if len(block) > 1:
            inner = np.arange(block.start + 2, block.stop)
            count = int(rng.integers(0, min(len(inner), 4) + 1))
            cuts = sorted(rng.choice(inner, count, replace=False).tolist())
            edges = [block.start + 1, *cuts, block.stop]
            todo += [range(a, b) for a, b in pairwise(edges)]
            children[block.start] = edges[:-1]
    return children


def received(known: Known, parts: Sequence[Part], children: dict[int, list[int]]) -> JointReceived:
    """What comes to rank 0, every rank with what it has kept from save to save."""

    def payload(rank: int) -> bytes:
        return known[rank].payload(parts[rank], report_of(rank), below(rank))

    def below(rank: int) -> list[bytes]:
        return [payload(child) for child in children[rank]]

    return known[0].received(parts[0], report_of(0), below(0))


def outcome(make: Callable[[], bytes]) -> bytes | str:
    """The manifest, or why there is none."""
    try:
        return make()
    except (InvalidState, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def of_all_parts(header: Header, parts: Sequence[Part]) -> list[Any]:
    def made() -> bytes:
        manifest = build_manifest(header, parts)
        assert places_in(manifest) == places_of(parts)
        return encode_manifest(manifest)

    return [*differences_of(parts), outcome(made)]


def of_joint_parts(
    header: Header, parts: Sequence[Part], known: Known, children: dict[int, list[int]]
) -> list[Any]:
    got = received(known, parts, children)
    assert [report.blocked_seconds for report in got.reports] == list(range(len(parts)))
    return [
        got.all.regions.differences(got.rest),
        differing_values(got.rest),
        outcome(lambda: got.all.table.manifest(header, got.rest).data),
    ]


def kept_by(ranks: int) -> Known:
    return {rank: JointParts() for rank in range(ranks)}


def agrees(drawn: Sequence[Drawn], seed: int = 0) -> bytes | str:
    """Asserts that a random tree gives what all parts at once give; returns that."""
    parts = parts_of(drawn)
    header = sealed(len(parts))
    expected = of_all_parts(header, parts)
    tree = random_tree(seed, len(parts))
    assert of_joint_parts(header, parts, kept_by(len(parts)), tree) == expected
    manifest: bytes | str = expected[2]
    return manifest


def varied(parts: Sequence[Drawn], seed: int) -> list[Drawn]:
    """With values, warnings, aliases and digests that are not the same on all ranks."""
    rng = np.random.default_rng(seed)
    result = []
    for part in parts:
        columns = part.texts.replicas
        digests = rng.integers(0, 2, len(columns.tensor)).astype(np.uint32)
        must_agree = rng.integers(0, 2, len(columns.tensor))
        own = part.saying(
            value_digests={"step": 1, "lr": int(rng.integers(2))},
            per_rank=encode_values({"rng": part.rank}) if rng.integers(2) else b"",
            warnings=("odd",) if rng.integers(2) else (),
            replicas=columns._replace(digests=digests, must_agree=must_agree),
        )
        if rng.integers(2) and part.tensors:
            own = own.saying(aliases={"tied": part.tensors[0].fqn})
        result.append(own)
    return result


def test_random_layouts_give_the_manifest_of_all_parts_at_once(scale: Scale) -> None:
    for seed in range(scale.count(8, 200)):
        parts = random_parts(seed, 2 + seed % 20)
        assert isinstance(agrees(parts, seed), bytes)
        agrees(varied(parts, seed), seed)


def test_values_of_ranks_that_hold_different_things_are_united_like_those_of_all_parts() -> None:
    """Param groups of stages, each sent by the first rank of its stage; some contradict others."""
    for seed, clashes in enumerate((False, True, False)):
        parts = []
        for part in random_parts(seed, 12):
            stage = part.rank % 4
            names = [f"layer{stage}", *(["layer0"] if clashes and stage == 3 else [])]
            value = [{"params": names, "lr": 0.1 * (stage % 2)}]
            values = {"optim.param_groups": value, "n": 1}
            digests = {name: crc32c(encode_values(one)) for name, one in values.items()}
            sent = encode_values(values) if part.rank < 4 else b""
            parts.append(part.saying(values=sent, value_digests=digests))
        united = agrees(parts, seed)
        assert isinstance(united, str if clashes else bytes), united
        other = [p.saying(value_digests={**p.texts.value_digests, "n": p.rank % 5}) for p in parts]
        agrees(other, seed)


def laid_out(
    layout: str, ranks: int, *, tensors: int = 9, byte_ranges: bool = False
) -> list[Drawn]:
    """What ranks write of a model in one of the layouts of `benchmarks.scale`; of what several
    ranks hold, one by turns writes it, or, with `byte_ranges`, each of them a range.
    """
    rng = np.random.default_rng(ranks)
    parts = []
    for rank in range(ranks):
        records, chunks, replicas = [], [], []
        for tensor in range(tensors):
            shape, region, holders = LAYOUTS[layout](tensor, rank, ranks)
            records.append(TensorRecord(f"w{tensor}", "float32", shape, 0))
            if len(holders) > 1:
                replicas.append(tensor)
            place = holders.index(rank)
            own: list[Region] = [region] if holders[tensor % len(holders)] == rank else []
            span = span_of(region, shape) if isinstance(region, Box) else region
            if byte_ranges and len(holders) > 1 and span is not None:
                edges = [span.start + span.numel * i // len(holders) for i in (place, place + 1)]
                own = [Span(*edges)]
            for one in own:
                if one.numel:
                    chunk = StoredChunk(f"w{tensor}", "float32", shape, one, 4 * one.numel, 0)
                    chunks.append(chunk)
        none = int64s([0] * len(replicas))
        columns = ReplicaColumns(int64s(replicas), none, none, none.astype(np.uint32))
        file = data_file(rng, f"rank{rank:05d}-000.safetensors", sorted(chunks, key=order_key))
        texts = PartTexts({}, encode_values({}) if not rank else b"", {"step": 1}, b"", columns)
        parts.append(Drawn(rank, (file,), tuple(records), texts))
    return parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_trainings_give_the_manifest_of_all_parts_at_once(
    layout: str, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    monkeypatch.setattr(benchmarks.scale, "ROWS", 192)
    monkeypatch.setattr(benchmarks.scale, "UNEVEN_ROWS", 19)
    monkeypatch.setattr(benchmarks.scale, "SMALL_ROWS", 24)
    monkeypatch.setattr(benchmarks.scale, "REPLICAS", 4)
    for seed, ranks in enumerate((8, 24, 48)[: scale.count(2, 3)]):
        assert isinstance(agrees(laid_out(layout, ranks), seed), bytes)
        ranged = laid_out(layout, ranks, byte_ranges=True)
        assert isinstance(agrees(ranged, seed + 9), bytes)


def referring(drawn: Sequence[Drawn], seed: int, *, differs: bool = False) -> list[Drawn]:
    """Some chunks in files of another attempt: some files have chunks of one rank, some of many."""
    rng = np.random.default_rng(seed)
    result = []
    for one in drawn:
        own, others = [], dict[int, list[StoredChunk]]()
        for file in one.files:
            stays = rng.integers(0, 2, len(file.chunks)).astype(bool)
            for chunk in compress(file.chunks, ~stays):
                number = one.rank if rng.integers(0, 2) else int(rng.integers(0, 3))
                others.setdefault(number, []).append(chunk)
            own.append(
                file._replace(
                    chunks=list(compress(file.chunks, stays)),
                    offsets=file.offsets[stays],
                    block_counts=file.block_counts[stays],
                )
            )
        start = 64 + 64 * int(differs and one.rank == len(drawn) - 1)
        for number, chunks in sorted(others.items()):
            offsets = 64 + 4 * rng.integers(0, 1 << 20, len(chunks))
            name = reference_to(0, BEFORE, f"rank{number:05d}-000.safetensors")
            there = data_file(rng, name, chunks)
            there = there._replace(nbytes=1 << 23, data_start=start, offsets=offsets)
            own.append(there._replace(seal=Seal(16, bytes([1]) * 32)))
        result.append(one._replace(files=tuple(own)))
    return result


def test_references_to_other_attempts_give_the_manifest_of_all_parts_at_once() -> None:
    for seed in range(6):
        parts = random_parts(seed, 3 + seed)
        assert isinstance(agrees(referring(parts, seed), seed), bytes)
    texts = [agrees(referring(random_parts(seed, 9), seed, differs=True)) for seed in range(3)]
    assert any("or ranks differ in it" in text for text in texts if isinstance(text, str))


def test_references_count_bytes_by_attempt() -> None:
    parts = parts_of(referring(random_parts(3, 7), 3))
    header = sealed(7)
    got = received(kept_by(7), parts, random_tree(3, 7))
    made = got.all.table
    manifest = build_manifest(header, parts)
    assert int(got.rest.own.nbytes.sum()) == manifest.own_nbytes
    assert made.referenced == manifest.nbytes_referenced() and made.referenced[BEFORE] > 0
    itemsizes = {"float32": 4, "int8": 1, "float64": 8}
    records = {one for part in parts for one in part.structure.tensors}
    numels = {one.fqn: (math.prod(one.shape), one.dtype) for one in records}
    assert made.nbytes == sum(numel * itemsizes[dtype] for numel, dtype in numels.values())


def _changed(part: Drawn, what: str) -> Drawn:
    """That part, in contradiction to others or to itself."""
    if what == "shape":
        first = part.tensors[0]
        return part._replace(tensors=(first._replace(dtype="int16"), *part.tensors[1:]))
    if what == "alias":
        return part.saying(aliases={"tied": part.tensors[part.rank % 2].fqn})
    if what == "missing alias":
        return part.saying(aliases={"tied": "nowhere"})
    if what == "name":
        first_file = part.files[0]._replace(name="rank00001-000.safetensors")
        return part._replace(files=(first_file, *part.files[1:]))

    def changed(chunk: StoredChunk) -> StoredChunk:
        itemsize = DTYPES[chunk.dtype].itemsize
        if what == "gap":
            return chunk._replace(nbytes=max(chunk.nbytes - itemsize, itemsize))
        start = region_start(chunk.region, chunk.global_shape)
        start = {"overlap": max(start - 1, 0), "outside": start + 1000}[what]
        return chunk._replace(region=Span(start, start + chunk.region.numel))

    return part.with_chunks(changed)


@pytest.mark.parametrize(
    "what", ["shape", "alias", "missing alias", "gap", "overlap", "outside", "name"]
)
def test_contradictions_are_refused_with_the_same_words(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, tensors and regions are named as by the one who has all parts."""
    monkeypatch.setattr(benchmarks.scale, "ROWS", 192)
    for seed, layout in ((1, "FSDP2 uneven"), (2, "TP8 x FSDP")):
        ranks = 16
        parts = laid_out(layout, ranks, tensors=4)
        victims = (3, 4, 11, 15)
        bad = [_changed(part, what) if part.rank in victims else part for part in parts]
        text = agrees(bad, seed)
        assert isinstance(text, str) and text.startswith("InvalidState"), text
    for seed in range(2):
        some = random_parts(seed, 9)
        bad = [_changed(p, what) if p.rank in (2, 7) and p.tensors else p for p in some]
        agrees(bad, seed)


def test_later_saves_send_no_structure_and_merge_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """At no level of the tree. A structure that changes on one rank is sent, and the rest kept."""
    ranks, header = 24, sealed(24)
    merged: list[int] = []

    def noted(parts: Sequence[JointStructure]) -> JointMerge:
        merged.append(parts[0].first_rank)
        return merge_structures(parts)

    monkeypatch.setattr("ckpt.saving.task.merge_structures", noted)
    known, tree = kept_by(ranks), random_tree(6, ranks)
    drawn, others = random_parts(1, ranks), random_parts(2, ranks)
    parts = parts_of(drawn)
    assert of_joint_parts(header, parts, known, tree) == of_all_parts(header, parts)
    assert sorted(merged) == list(range(ranks))
    merged.clear()
    for seed, longer in ((7, False), (8, True), (9, True)):
        again = parts_of(saved_again(drawn, seed, longer_headers=longer))
        assert of_joint_parts(header, again, known, tree) == of_all_parts(header, again)
    assert merged == []
    assert of_joint_parts(header, parts_of(others), known, tree) == of_all_parts(
        header, parts_of(others)
    )
    assert 0 in merged

    # After a failed save all structures are sent again; they are the same, and nothing is merged.
    merged.clear()
    for one in known.values():
        one.forget()
    assert of_joint_parts(header, parts_of(others), known, tree) == of_all_parts(
        header, parts_of(others)
    )
    assert merged == []
    leaf = max(rank for rank in tree if not tree[rank])
    one_other = parts_of([_changed(p, "missing alias") if p.rank == leaf else p for p in others])
    agreed = of_joint_parts(header, one_other, known, tree)
    assert agreed == of_all_parts(header, one_other) and "nowhere" in agreed[2]
    assert leaf in merged and 0 in merged and len(merged) < ranks


def test_what_changed_in_a_failed_round_is_merged_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has another structure, and cannot read what it is sent."""

    def failing(known: Sequence[JointStructure]) -> StructureReader:
        raise MemoryError("no room for the parts")

    header, known, tree = sealed(2), kept_by(2), {0: [1], 1: list[int]()}
    before = parts_of(random_parts(1, 2))
    parts = [random_parts(2, 2)[0].part, before[1]]
    of_joint_parts(header, before, known, tree)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("ckpt.saving.task.StructureReader", failing)
        of_joint_parts(header, parts, known, tree)
    for one in known.values():
        one.forget()
    assert of_joint_parts(header, parts, known, tree) == of_all_parts(header, parts)


@pytest.mark.parametrize(("layout", "rules_max"), [("FSDP2 even", 1), ("FSDP2 uneven", 2)])
def test_what_comes_to_the_coordinator_does_not_grow_with_the_ranks(
    layout: str, rules_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at 16, 32 and 64 ranks in a tree of four children: rules that it decodes, and bytes
    besides the names and seals of files.
    """
    monkeypatch.setattr(ckpt.world.tree, "CHILDREN_MAX", 4)
    monkeypatch.setattr(benchmarks.scale, "ROWS", 1 << 10)
    tensors, counts = 24, {}
    for ranks in (16, 32, 64):
        parts = parts_of(laid_out(layout, ranks, tensors=tensors))
        tree = {rank: list(family(rank, ranks).children) for rank in range(ranks)}
        known, header = kept_by(ranks), sealed(ranks)
        first = [known[child].payload(*_below(parts, known, tree, child)) for child in tree[0]]
        structures = [split(split(data)[1])[0] for data in first]
        got = known[0].received(parts[0], report_of(0), first)
        rules = [one.structure.rules.shape[1] for one in known[0].below]
        chunks = [chunk_total(one.structure.rules) for one in known[0].below]
        assert sum(chunks) > 4 * sum(rules) or ranks == 16
        assert max(rules) <= rules_max * tensors and len(rules) == 4
        made = got.all.table.manifest(header, got.rest)
        assert made.data == encode_manifest(build_manifest(header, parts))
        again = [known[child].payload(*_below(parts, known, tree, child)) for child in tree[0]]
        assert all(split(split(data)[1])[0] == b"" for data in again)
        counts[ranks] = (sum(map(len, structures)), sum(map(len, again)))
    print(counts)
    for small, large in ((16, 32), (32, 64)):
        assert counts[large][0] - counts[small][0] <= 40 * (large - small)
        assert counts[large][1] - counts[small][1] <= 100 * (large - small)


def _below(
    parts: Sequence[Part], known: Known, tree: dict[int, list[int]], rank: int
) -> tuple[Part, RankReport, list[bytes]]:
    below = [known[child].payload(*_below(parts, known, tree, child)) for child in tree[rank]]
    return parts[rank], report_of(rank), below


def test_progressions_are_packed_like_their_items() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        count = int(rng.integers(0, 9))
        lengths = rng.integers(0, rng.integers(1, 9), count)
        firsts = rng.integers(1 << 10, 1 << int(rng.integers(11, 40)), count)
        steps = rng.integers(-2, 3, count) if rng.integers(2) else rng.integers(0, 2, count)
        if rng.integers(2) and count:
            firsts[:] = firsts[0]
        column = Progressions.of(lengths, firsts, steps)
        assert pack_progressions(column) == pack_regular(column.items().astype(np.int64))


def test_damaged_messages_are_refused() -> None:
    parts = parts_of(random_parts(4, 2))
    data = JointParts().payload(parts[1], report_of(1), [])
    for wrong in (data[:-9], data[: len(data) // 2], data[:40] + bytes(len(data) - 40)):
        with pytest.raises(Corrupt, match=r"readable|belong|bytes|field|msgpack"):
            JointParts().received(parts[0], report_of(0), [wrong])
    alone = JointParts()
    alone.payload(parts[1], report_of(1), [])
    with pytest.raises(Corrupt, match="never sent"):
        JointParts().received(parts[0], report_of(0), [alone.payload(parts[1], report_of(1), [])])


def test_ranks_that_take_turns_in_a_tensor_give_the_same_manifest() -> None:
    """Chunks of one rule lie between those of another: ranks by columns, not by rows."""
    ranks, groups = 12, 3
    parts = []
    rng = np.random.default_rng(0)
    for rank in range(ranks):
        place = rank % groups * (ranks // groups) + rank // groups
        shape = (ranks, 5)
        span = Span(5 * place, 5 * place + 5)
        chunk = StoredChunk("w", "float32", shape, span, 20, 0)
        file: FileColumns = data_file(rng, f"rank{rank:05d}-000.safetensors", [chunk])
        texts = PartTexts({}, encode_values({}) if not rank else b"", {}, b"")
        records = [TensorRecord("w", "float32", shape, 0)]
        parts.append(Drawn(rank, (file,), tuple(records), texts))
    for seed in range(8):
        assert isinstance(agrees(parts, seed), bytes)


def test_saves_that_change_values_only_check_the_cover_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their manifests are those of parts sent anew."""
    checked = []

    def counted(*args: Any) -> list[str]:
        checked.append(1)
        return check_rules(*args)

    monkeypatch.setattr("ckpt.format.joint_manifest.check_rules", counted)
    for seed in range(12):
        ranks = 1 + seed
        known, tree = kept_by(ranks), random_tree(seed, ranks)
        parts = random_parts(seed, ranks)
        for step in range(1, 5):
            own = parts_of(saved_again(parts, step, longer_headers=step > 2))
            got = received(known, own, tree)
            made = got.all.table.manifest(header_of(ranks, step), got.rest).data
            assert len(checked) == seed + 1
            with monkeypatch.context() as patch:
                patch.setattr("ckpt.format.joint_manifest.check_rules", check_rules)
                assert encode_manifest(build_manifest(header_of(ranks, step), own)) == made


def test_what_is_sent_again_does_not_grow_with_the_names_of_tensors() -> None:
    for tensors in (4, 40):
        for part in random_parts(4, 3, tensors=tensors):
            rest = encode_rest(part.part.rest, bytes(32))
            nbytes = len(rest) - part.texts.replicas.digests.nbytes
            assert nbytes < 600


def test_tensors_that_ranks_have_in_common_are_decoded_once() -> None:
    parts, reader = parts_of(random_parts(5, 12)), StructureReader()
    structures = [reader.read(encode_structure(part.structure)).structure for part in parts]
    tables = {part.structure.tensors for part in parts}
    assert len({id(one.tensors) for one in structures}) == len(tables) < len(parts)


def test_names_that_all_ranks_have_take_a_fraction_of_their_length() -> None:
    """The coordinator gets them from the ranks below; damaged ones are refused."""
    names = [f"model.layers.{number}.feed_forward.gate_proj.weight" for number in range(1000)]
    records = [TensorRecord(name, "float32", (64, 32), 0) for name in names]
    part = part_of_files([], rank=0, tensors=records, texts=PartTexts({}))
    data = encode_structure(part.structure)
    assert 8 * len(data) < sum(map(len, names))
    assert list(StructureReader().read(data).structure.tensors) == sorted(records)
    fields = {name: bytes(view) for name, view in unpack_map(data).items()}
    for wrong in (fields["tensors"][:-9], b"", b"\x78\x9c" + bytes(20)):
        with pytest.raises(Corrupt, match="not readable"):
            StructureReader().read(pack_map({**fields, "tensors": wrong}))
