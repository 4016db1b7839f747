"""Our own checkpoints as sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import SupportsIndex

from ckpt.convert.sources.source import CheckpointSource, ReadRequest, SourceContents, SourceTensor
from ckpt.format.manifest import MODULES, Manifest
from ckpt.format.metadata_budget import MetadataBudget
from ckpt.layout.kind import Kind
from ckpt.loading.checkpoint import Checkpoint, fill, piece_of
from ckpt.loading.contents import StoredTensor, leased_checkpoint
from ckpt.loading.plan import ReadPath
from storage import Store

# A value that DcpWriter keeps: the flat keys of DCP's state, their paths, and its plain values.
DCP_RECORD = "ckpt.dcp"


def native_source(
    store: Store,
    step: SupportsIndex | None = None,
    attempt: str = "",
    budget: MetadataBudget | None = None,
) -> NativeSource:
    """The checkpoint of `step` or `attempt`, or the latest, in a root, or the one in a step
    directory; leased until it is closed. What describes it is charged to `budget`.

    Raises like `ckpt.open`.
    """
    with ExitStack() as stack:
        located = stack.enter_context(
            leased_checkpoint(store, step, attempt=attempt, budget=budget)
        )
        return NativeSource(Checkpoint(store, located), stack.pop_all())


class NativeSource(CheckpointSource):
    """A checkpoint of ours; every block that is read is checked."""

    format = "checkpoint"

    def __init__(self, checkpoint: Checkpoint, lease: ExitStack | None = None) -> None:
        manifest = checkpoint.manifest
        kinds = {int(kind): kind for kind in Kind}
        tensors = {
            fqn: SourceTensor(fqn, dtype, shape, kinds.get(kind, Kind.OTHER))
            for fqn, dtype, shape, kind in zip(
                manifest.fqns,
                manifest.dtypes,
                manifest.shapes,
                manifest.kinds.tolist(),
                strict=True,
            )
        }
        contents = SourceContents(
            tensors,
            values={name: v for name, v in checkpoint.values.items() if name != DCP_RECORD},
            aliases=checkpoint.aliases,
            modules=_modules(manifest),
            per_rank=checkpoint.per_rank,
            step=checkpoint.step,
        )
        super().__init__(checkpoint.url, contents, int(manifest.file_nbytes.sum()))
        self.checkpoint = checkpoint
        self._lease = lease or ExitStack()

    def fill(self, wanted: Sequence[ReadRequest]) -> None:
        checkpoint, tensors = self.checkpoint, self.contents.tensors
        holdings = []
        for fqn, span, target in wanted:
            info = tensors[fqn]
            entry = StoredTensor(checkpoint.manifest.index(fqn), fqn, info.dtype, info.shape)
            holdings.append(piece_of(entry, span, target))
        fill(checkpoint, holdings, ReadPath())

    def close(self) -> None:
        self._lease.close()
        self.checkpoint.close()


def _modules(manifest: Manifest) -> tuple[str, ...]:
    """The paths of modules that the checkpoint records; for checkpoints without them, the first
    parts of the names of parameters.
    """
    recorded = manifest.header.user.get(MODULES)
    if recorded is not None:
        paths = {str(path) for path in json.loads(recorded)}
        names = (*manifest.fqns, *manifest.aliases)
        return tuple(
            sorted(p for p in paths if not p or any(fqn.startswith(f"{p}.") for fqn in names))
        )
    parameters = (
        fqn
        for fqn, kind in zip(manifest.fqns, manifest.kinds.tolist(), strict=True)
        if kind == Kind.PARAMETER
    )
    return tuple(sorted({fqn.partition(".")[0] if "." in fqn else "" for fqn in parameters}))
