"""What the coordinator of a save does with the parts of N ranks, first save and later ones.

    python -m benchmarks.coordinator [--ranks 64 256 1024]

The parts of a Llama-70B with AdamW (2,892 tensors) in even shards are made by arithmetic, without
processes, and decoded, compared, merged and encoded as a save does it: with seals in place of
checksums, as many ranks do it, and with checksums. Prints CPU seconds, what it received per rank,
bytes of the manifest with results, with rules, and with seals, and the peak of memory with the
parts themselves; asserts what is a count.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.measure import report, row
from ckpt.format.checksum import crc32c
from ckpt.format.checksum_tables import CHECKSUM_TABLES, Seals, seal_of
from ckpt.format.codec import encode_values
from ckpt.format.manifest import PROGRESSIONS, Header, Manifest, int64s
from ckpt.format.manifest_codec import encode_manifest
from ckpt.format.merging import build_manifest, replica_differences, value_differences
from ckpt.format.part import Part, ReplicaColumns, TensorRecord
from ckpt.saving.parts import Structures

BLOCK_NBYTES = 1 << 20
HEADER_NBYTES = 160 << 10
WIDTH, KEYS, INNER, WORDS, LAYERS = 8192, 1024, 28672, 128256, 80
MIB = 1 << 20
SEALED_FILE_NBYTES = 80  # of a manifest: name, sizes, seal


def main() -> None:
    """Measure every number of ranks that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--only-seals", action="store_true", help="no saves with checksums")
    options = parser.parse_args()
    for ranks in options.ranks:
        measure(ranks, compared=not options.only_seals)


class Saves(NamedTuple):
    """Two saves on a coordinator: per save CPU seconds and bytes received; the last manifest."""

    seconds: list[float]
    received: list[int]
    manifest: Manifest
    nbytes: int
    peak: int


def saves_of(ranks: int, required: tuple[str, ...]) -> Saves:
    """The first save of `ranks` ranks, and one in which only values changed."""
    model, known = Model(), Structures()
    header = header_of(ranks).model_copy(update={"required": required})
    seconds, received = [], []
    for save in range(2):
        parts = (model.part(rank, ranks, save) for rank in range(ranks))
        sealed = header.has_checksum_tables
        sent = [(b"" if save else part.structure(), part.variable(sealed=sealed)) for part in parts]
        received.append(sum(len(structure) + len(rest) for structure, rest in sent))
        begun = time.process_time()
        got = known.parts(sent)
        assert not value_differences(got) and replica_differences(got, known.kept) == ([], [])
        manifest = build_manifest(header, got, known.kept)
        nbytes = len(known.encoder.encode(manifest).data)
        seconds.append(time.process_time() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Saves(seconds, received, manifest, nbytes, peak)


def measure(ranks: int, *, compared: bool) -> None:
    """Saves of `ranks` ranks with seals; `compared` with those that have checksums."""
    sealed = saves_of(ranks, (PROGRESSIONS, CHECKSUM_TABLES))
    manifest = sealed.manifest
    rows = [
        row("first save, CPU", f"{sealed.seconds[0]:.2f} s", "<= 2 s"),
        row("later save, CPU", f"{sealed.seconds[1]:.2f} s", "<= 0.2 s"),
        row("received of a rank, first", f"{sealed.received[0] / ranks / 1024:.1f} KiB", "-"),
        row("received of a rank, later", f"{sealed.received[1] / ranks / 1024:.1f} KiB", "-"),
        row("manifest of rules and seals", f"{sealed.nbytes / MIB:.2f} MiB", "<= 32 MiB"),
        row("checksums of blocks, all ranks", f"{4 * manifest.block_count / MIB:.2f} MiB", "-"),
        row("peak of the process", f"{sealed.peak / MIB:.0f} MiB", "<= 512 MiB"),
    ]
    if compared:
        plain = saves_of(ranks, ())
        ruled = plain.manifest.header.model_copy(update={"required": (PROGRESSIONS,)})
        rules = len(encode_manifest(replace(plain.manifest, header=ruled)))
        rows += [
            row("first save with checksums, CPU", f"{plain.seconds[0]:.2f} s", "-"),
            row("later save with checksums, CPU", f"{plain.seconds[1]:.2f} s", "-"),
            row(
                "received of a rank, later, then",
                f"{plain.received[1] / ranks / 1024:.1f} KiB",
                "-",
            ),
            row("manifest of results", f"{plain.nbytes / MIB:.2f} MiB", "-"),
            row("manifest of rules", f"{rules / MIB:.2f} MiB", "-"),
        ]
    report(f"coordinator of {ranks} ranks, {len(manifest.chunks)} chunks", rows)
    beside = sealed.nbytes - SEALED_FILE_NBYTES * ranks
    assert beside <= MIB, f"{beside} bytes beside names, sizes and seals of files"


def header_of(ranks: int) -> Header:
    """The header of a save of that many ranks."""
    return Header(
        root="0" * 32, attempt="e000001-" + "0" * 16, step=1, world_size=ranks, created_unix=0
    )


class Model:
    """The tensors of a training, and what a rank writes of them."""

    def __init__(self) -> None:
        names = ("", "exp_avg", "exp_avg_sq", "step")
        self.tensors = tuple(
            sorted(
                TensorRecord(
                    f"optimizer.state.{fqn}.{name}" if name else f"model.{fqn}",
                    "float32",
                    () if name == "step" else shape,
                    1 if name else 0,
                )
                for fqn, shape in _parameters()
                for name in names
            )
        )
        self._rows = int64s([one.shape[0] if one.shape else 1 for one in self.tensors])
        self._row_numel = int64s([math.prod(one.shape[1:]) for one in self.tensors])
        self._scalars = np.array([not one.shape for one in self.tensors])
        self._values = {f"optimizer.param_groups.{name}": 0.1 for name in ("lr", "betas", "eps")}

    def part(self, rank: int, ranks: int, save: int) -> Part:
        """The rows of `rank`, as `fully_shard` cuts them, and its share of the scalars."""
        size = -(-self._rows // ranks)
        start = np.minimum(rank * size, self._rows) * self._row_numel
        stop = np.minimum((rank + 1) * size, self._rows) * self._row_numel
        mine = (np.cumsum(self._scalars) - 1) % ranks == rank
        numel = np.where(self._scalars, mine.astype(np.int64), stop - start)
        start = np.where(self._scalars, 0, start)
        written = np.flatnonzero(numel)
        is_small = (4 * numel[written] <= 16384) | (4 * numel[written] % 64 != 0)
        written = written[np.argsort(is_small, kind="stable")]
        nbytes = 4 * numel[written]
        blocks = -(-nbytes // BLOCK_NBYTES)
        rng = np.random.default_rng([rank, save])
        scalars = np.flatnonzero(self._scalars)
        none = np.zeros(len(scalars), dtype=np.int64)
        return Part(
            rank=rank,
            files=(f"rank{rank:05d}-000.safetensors",),
            file_nbytes=int64s([HEADER_NBYTES + int(nbytes.sum()) + 4 * int(blocks.sum())]),
            file_data_start=int64s([HEADER_NBYTES]),
            tensors=self.tensors,
            chunk_tensor=written,
            chunk_file=np.zeros(len(written), dtype=np.int64),
            chunk_byte_start=HEADER_NBYTES + np.cumsum(nbytes) - nbytes,
            chunk_start=start[written],
            chunk_numel=numel[written],
            chunk_box=np.full(len(written), -1),
            boxes=(),
            block_counts=blocks,
            aliases={},
            checksums=rng.integers(0, 1 << 32, size=int(blocks.sum()), dtype=np.uint32),
            values=b"" if rank else encode_values(self._values),
            value_digests={k: crc32c(encode_values(v)) for k, v in sorted(self._values.items())},
            per_rank=b"",
            seals=Seals.of([seal_of(rng.bytes(12 + 4 * int(blocks.sum())))]),
            replicas=ReplicaColumns(scalars, none, none, np.full(len(scalars), save, np.uint32)),
        )


def _parameters() -> list[tuple[str, tuple[int, ...]]]:
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KEYS, WIDTH),
        "self_attn.v_proj": (KEYS, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    ends = {"embed_tokens": (WORDS, WIDTH), "lm_head": (WORDS, WIDTH), "norm": (WIDTH,)}
    return [
        *((f"model.{name}.weight", shape) for name, shape in ends.items()),
        *(
            (f"model.layers.{number}.{name}.weight", shape)
            for number in range(LAYERS)
            for name, shape in layer.items()
        ),
    ]


if __name__ == "__main__":
    main()
