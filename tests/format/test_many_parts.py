"""What the coordinator keeps of the parts of all ranks gives the manifests of parts sent anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ckpt.errors import Corrupt
from ckpt.format.columns import pack_map, unpack_map
from ckpt.format.coverage import check_cover
from ckpt.format.manifest_codec import decode_manifest, encode_manifest
from ckpt.format.merging import build_manifest, replica_differences
from ckpt.format.part import Part, PartTexts, TensorRecord, part_of_files
from ckpt.saving.parts import Structures
from tests.format.many_parts import header_of, random_parts, saved_again


def save(known: Structures, parts: Sequence[Part], step: int, *, is_known: bool) -> bytes:
    """The manifest of one save, on the coordinator."""
    sent = [(b"" if is_known else part.structure(), part.variable()) for part in parts]
    received = known.parts(sent)
    assert replica_differences(received, known.kept) == ([], [])
    manifest = build_manifest(header_of(len(parts), step), received, known.kept)
    return known.encoder.encode(manifest).data


@pytest.mark.parametrize("seed", range(12))
def test_saves_that_change_values_only_give_the_manifests_of_parts_sent_anew(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the table of chunks is made, and checked to cover all tensors, once for all of them."""
    checked = []

    def counted(*args: Any) -> list[str]:
        checked.append(1)
        return check_cover(*args)

    monkeypatch.setattr("ckpt.format.merging.check_cover", counted)
    ranks = 2 + seed
    known, parts = Structures(), random_parts(seed, ranks)
    made = [save(known, parts, 1, is_known=False)]
    again = [saved_again(parts, 7), saved_again(parts, 8, longer_headers=True)]
    again.append(saved_again(parts, 9, longer_headers=True))
    made += [save(known, new, step, is_known=True) for step, new in enumerate(again, 2)]
    assert len(checked) == 1

    anew = [
        encode_manifest(build_manifest(header_of(ranks, step), new))
        for step, new in enumerate([parts, *again], 1)
    ]
    assert made == anew
    assert all(encode_manifest(decode_manifest(data)) == data for data in made)


def test_a_structure_that_changes_is_merged_anew() -> None:
    known, parts, others = Structures(), random_parts(1, 5), random_parts(2, 5)
    save(known, parts, 1, is_known=False)
    save(known, saved_again(parts, 3), 2, is_known=True)
    changed = save(known, others, 3, is_known=False)
    assert changed == encode_manifest(build_manifest(header_of(5, 3), others))
    # What was kept belongs to the new ones from now on.
    with pytest.raises(Corrupt, match="do not belong to the structure"):
        save(known, parts, 4, is_known=True)


def test_what_is_sent_when_only_values_change_does_not_grow_with_the_names_of_tensors() -> None:
    few, many = (random_parts(4, 3, tensors=tensors) for tensors in (4, 40))
    for parts in (few, many):
        for part in parts:
            nbytes = len(part.variable()) - part.checksums.nbytes - part.replicas.digests.nbytes
            assert nbytes < 300


def test_tensors_that_ranks_have_in_common_are_decoded_once() -> None:
    parts = random_parts(5, 12)
    received = Structures().parts([(part.structure(), part.variable()) for part in parts])
    tables = {part.tensors for part in parts}
    assert len({id(part.tensors) for part in received}) == len(tables) < len(parts)


def test_names_that_all_ranks_have_take_a_fraction_of_their_length_in_a_part() -> None:
    """The coordinator gets them from each rank; damaged ones are refused."""
    names = [f"model.layers.{number}.feed_forward.gate_proj.weight" for number in range(1000)]
    records = [TensorRecord(name, "float32", (64, 32), 0) for name in names]
    part = part_of_files([], rank=0, tensors=records, texts=PartTexts({}))
    structure = part.structure()
    assert 8 * len(structure) < sum(map(len, names))
    (received,) = Structures().parts([(structure, part.variable())])
    assert list(received.tensors) == sorted(records)
    fields = {name: bytes(data) for name, data in unpack_map(structure).items()}
    for wrong in (fields["tensors"][:-9], b"", b"\x78\x9c" + bytes(20)):
        with pytest.raises(Corrupt, match="not readable"):
            Structures().parts([(pack_map({**fields, "tensors": wrong}), part.variable())])
