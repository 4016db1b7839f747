"""What a manifest offers to a state: the catalog that loading, and looking, works from."""

from __future__ import annotations

from ckpt.format.codec import decode_values
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import Manifest
from ckpt.layout.piece import Kind
from ckpt.state_dict import Catalog, TensorEntry


def catalog_of(manifest: Manifest) -> Catalog:
    """Names, shapes, dtypes and values of a checkpoint, without its tensors' bytes."""
    dtypes = {name: torch_dtype(name) for name in set(manifest.dtypes)}
    known_kinds = {int(kind): kind for kind in Kind}
    kinds = [known_kinds[kind] for kind in manifest.kinds.tolist()]
    tensors = {
        fqn: TensorEntry(dtypes[dtype], shape, kind)
        for fqn, dtype, shape, kind in zip(
            manifest.fqns, manifest.dtypes, manifest.shapes, kinds, strict=True
        )
    }
    return Catalog(
        tensors=tensors,
        values=decode_values(manifest.values),
        aliases=dict(manifest.aliases),
        per_rank=[decode_values(values) for values in manifest.per_rank],
        world_size=manifest.header.world_size,
    )
