"""What ranks do with the parts of a save on their way to the coordinator, and what it does then.

    python -m benchmarks.coordinator [--ranks 64 256 1024]

The parts of a Llama-70B with AdamW (2,892 tensors) in even shards are made by arithmetic, without
processes, and pass through the code of a save: every rank of the tree merges its part with what
comes from below and encodes that; rank 0 compares, proves and encodes the manifest. Two saves, in
the second of which only values changed. Prints CPU seconds of rank 0, and of the ranks at each
level; what rank 0 received, the rules that it decoded, by how much the process grew while it
worked, and the manifest's bytes. Asserts what is a count.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.measure import report, row
from benchmarks.simulation import resident
from ckpt.format.checksum import crc32c, seal_of
from ckpt.format.chunk_rules import chunk_total
from ckpt.format.codec import encode_values
from ckpt.format.datafile import StoredChunk
from ckpt.format.joint_manifest import differing_values
from ckpt.format.manifest import Header, int64s
from ckpt.format.manifest_codec import decode_manifest
from ckpt.format.part import (
    FileColumns,
    Part,
    PartTexts,
    ReplicaColumns,
    TensorRecord,
    part_of_files,
)
from ckpt.layout.kind import Kind
from ckpt.layout.memory import gc_paused
from ckpt.layout.piece import Holding, Piece
from ckpt.layout.region import Box, Span, even_part, whole
from ckpt.loading.plan import LISTED_MIN, needed_part, plan_reads
from ckpt.saving.task import JointParts
from ckpt.telemetry.record import PHASES, PhaseSpan, RankReport
from ckpt.world.tree import family

BLOCK_NBYTES = 1 << 20
HEADER_NBYTES = 160 << 10
WIDTH, KEYS, INNER, WORDS, LAYERS = 8192, 1024, 28672, 128256, 80
MIB = 1 << 20
SEALED_FILE_NBYTES = 80  # of a manifest: name, sizes, seal
SAVES = ("first save", "values changed")


def main() -> None:
    """Measure every number of ranks that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    options = parser.parse_args()
    for ranks in options.ranks:
        report(f"a save of {ranks} ranks", _rows_of(ranks))


class Coordinator(NamedTuple):
    """Rank 0 in one save."""

    seconds: float
    received: int
    rules: int
    chunks: int
    grown: int
    manifest: bytes


class Tree:
    """Two saves of `ranks` ranks, one rank after the other from the leaves on."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.model = Model()
        # CPU seconds of all ranks but the first, by save and by how many levels are below
        self.seconds: list[dict[int, list[float]]] = [defaultdict(list) for _ in SAVES]

    def coordinator(self) -> list[Coordinator]:
        """What rank 0 does in each save."""
        known, below, _ = JointParts(), *self._below(0)
        header = header_of(self.ranks)
        saves = []
        for save in range(len(SAVES)):
            part = self.model.part(0, self.ranks, save)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before, begun = resident("VmRSS"), time.process_time()
            with gc_paused():  # as in `ckpt.save`
                got = known.received(part, report_of(0), below[save])
                differences = got.all.regions.differences(got.rest)
                assert differences == ([], []) and not differing_values(got.rest)
                made = got.all.table.manifest(header, got.rest)
            seconds = time.process_time() - begun
            rules = [one.structure.rules for one in known.below]
            saves.append(
                Coordinator(
                    seconds=seconds,
                    received=sum(map(len, below[save])),
                    rules=sum(one.shape[1] for one in rules),
                    chunks=sum(map(chunk_total, rules)),
                    grown=resident("VmHWM") - before,
                    manifest=made.data,
                )
            )
        return saves

    def _below(self, rank: int) -> tuple[list[list[bytes]], int]:
        """What the ranks right below one send, by save, and how many levels that is."""
        sent: list[list[bytes]] = [[] for _ in SAVES]
        levels = 0
        for child in family(rank, self.ranks).children:
            of_saves, height = self._sent(child)
            levels = max(levels, height + 1)
            for messages, message in zip(sent, of_saves, strict=True):
                messages.append(message)
        return sent, levels

    def _sent(self, rank: int) -> tuple[list[bytes], int]:
        known, (below, height) = JointParts(), self._below(rank)
        messages = []
        for save in range(len(SAVES)):
            part = self.model.part(rank, self.ranks, save)
            begun = time.process_time()
            messages.append(known.payload(part, report_of(rank), below[save]))
            self.seconds[save][height].append(time.process_time() - begun)
        return messages, height


def report_of(rank: int) -> RankReport:
    """A report as ranks send it."""
    spans = [PhaseSpan(phase, 1.7e9 + rank, 0.1234567, 1 << 30) for phase in PHASES[:-2]]
    return RankReport(tuple(spans), 0.0123456, 0)


def _rows_of(ranks: int) -> list[str]:
    tree = Tree(ranks)
    rows = []
    limits = {0: "<= 2 s", 1: "<= 0.2 s"}
    saves = tree.coordinator()
    for number, (name, one) in enumerate(zip(SAVES, saves, strict=True)):
        rows += [
            row(f"{name}: rank 0, CPU", f"{one.seconds:.3f} s", limits[number]),
            row(f"{name}: received by rank 0", f"{one.received / 1024:.0f} KiB", "-"),
            row(f"{name}: rank 0 grows by", f"{one.grown / MIB:.0f} MiB", "<= 512 MiB"),
            *(
                row(
                    f"{name}: {len(seconds)} ranks over {height} levels, CPU, mean and most",
                    f"{1000 * float(np.mean(seconds)):.1f} and {1000 * max(seconds):.1f} ms",
                    "-",
                )
                for height, seconds in sorted(tree.seconds[number].items(), reverse=True)
            ),
        ]
    one = saves[0]
    beside = len(one.manifest) - SEALED_FILE_NBYTES * ranks
    assert beside <= MIB, f"{beside} bytes beside names, sizes and seals of files"
    load = planned(one.manifest, ranks)
    # Those of its own file and of the one with the counters.
    assert load.listed <= 2 * len(tree.model.tensors), f"{load.listed} of {load.chunks} chunks"
    return [
        *rows,
        row("rules decoded by rank 0, chunks", f"{one.rules} for {one.chunks}", "-"),
        row("manifest", f"{len(one.manifest) / MIB:.2f} MiB", "<= 32 MiB"),
        row(f"a load on {ranks} ranks: listed by a rank", f"{load.listed} of {load.chunks}", "-"),
        row(f"a load on {ranks} ranks: a rank's plan, CPU", f"{1000 * load.seconds:.0f} ms", "-"),
    ]


class Planned(NamedTuple):
    """What a rank of a load does before it reads."""

    listed: int
    chunks: int
    seconds: float


def planned(data: bytes, ranks: int) -> Planned:
    """Decode a manifest, and plan the reads of one of `ranks` ranks."""
    begun = time.process_time()
    manifest = decode_manifest(data, ruled=LISTED_MIN)
    taken = time.process_time() - begun
    holdings = []
    for fqn, shape in zip(manifest.fqns, manifest.shapes, strict=True):
        region = even_part(shape, ranks // 2, ranks, "fsdp2") if shape else whole(shape)
        if isinstance(region, Box) and region.numel:
            local, inside = torch.empty(region.shape), whole(region.shape)
            piece = Piece(fqn, shape, local.dtype, region, inside, (ranks // 2,))
            holdings.append(Holding(local, (piece,), Kind.PARAMETER, True))
    begun = time.process_time()
    part = needed_part(manifest, holdings, (), alone=True)
    plan_reads(part, holdings).blocks(part)
    taken += time.process_time() - begun
    return Planned(len(part.chunks), len(manifest.chunks), taken)


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
        """The rows of `rank`, as `fully_shard` cuts them, and of the first the scalars."""
        size = -(-self._rows // ranks)
        start = np.minimum(rank * size, self._rows) * self._row_numel
        stop = np.minimum((rank + 1) * size, self._rows) * self._row_numel
        numel = np.where(self._scalars, int(rank == 0), stop - start)
        start = np.where(self._scalars, 0, start)
        written = np.flatnonzero(numel)
        is_small = (4 * numel[written] <= 16384) | (4 * numel[written] % 64 != 0)
        written = written[np.argsort(is_small, kind="stable")]
        nbytes = 4 * numel[written]
        blocks = -(-nbytes // BLOCK_NBYTES)
        rng = np.random.default_rng([rank, save])
        scalars = np.flatnonzero(self._scalars)
        none = np.zeros(len(scalars), dtype=np.int64)
        chunks = []
        for tensor in written.tolist():
            fqn, dtype, shape, kind = self.tensors[tensor]
            span = Span(int(start[tensor]), int(start[tensor] + numel[tensor]))
            chunks.append(StoredChunk(fqn, dtype, shape, span, 4 * span.numel, kind))
        file = FileColumns(
            name=f"rank{rank:05d}-000.safetensors",
            nbytes=HEADER_NBYTES + int(nbytes.sum()) + 12 + 4 * int(blocks.sum()),
            data_start=HEADER_NBYTES,
            chunks=chunks,
            offsets=HEADER_NBYTES + np.cumsum(nbytes) - nbytes,
            block_counts=blocks,
            checksums=rng.integers(0, 1 << 32, size=int(blocks.sum()), dtype=np.uint32),
            seal=seal_of(rng.bytes(12 + 4 * int(blocks.sum()))),
        )
        texts = PartTexts(
            {},
            b"" if rank else encode_values(self._values),
            {name: crc32c(encode_values(value)) for name, value in sorted(self._values.items())},
            replicas=ReplicaColumns(scalars, none, none, np.full(len(scalars), save, np.uint32)),
        )
        return part_of_files([file], rank=rank, tensors=self.tensors, texts=texts)


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
