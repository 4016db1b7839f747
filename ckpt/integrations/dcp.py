"""Our storage under torch's `dcp.save` and `dcp.load`: one argument, no other change of code.

    dcp.save(state_dict, storage_writer=DcpWriter("s3://bucket/run", step=100))
    dcp.load(state_dict, storage_reader=DcpReader("s3://bucket/run"))

DCP plans who writes what; data files, checksums, manifest and commit are those of `ckpt.save`, so
the checkpoint is one like all others: `ckpt.load`, `ckpt verify` and `ckpt export` work on it.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckpt.commit.locate import ResumePoint
from ckpt.commit.names import plain_int, step_prefix
from ckpt.commit.session import Session
from ckpt.convert.sources.source import DCP_RECORD, NativeSource, native_source
from ckpt.convert.sources.tree import Leaf, name_tree, nest
from ckpt.convert.targets.nesting import flat_state
from ckpt.errors import CheckpointError, InvalidState, Mismatch
from ckpt.format.datafile import BLOCK_BYTES, StoredChunk, order_key
from ckpt.format.joint_codec import decode_part, encode_part
from ckpt.format.joint_manifest import build_manifest
from ckpt.format.manifest import MODULES, Header
from ckpt.format.object_parts import rank_files
from ckpt.format.part import PartTexts, TensorRecord, part_of_files
from ckpt.layout.dtypes import dtype_name, refusal_reason, torch_dtype
from ckpt.layout.kind import Kind
from ckpt.layout.memory import is_plain_memory
from ckpt.layout.piece import Holding
from ckpt.layout.region import Box
from ckpt.loading.checkpoint import fill, piece_of
from ckpt.loading.contents import StoredTensor
from ckpt.loading.plan import ReadPath
from ckpt.process import claimed, this_process
from ckpt.saving.image import WritePath, write_files
from ckpt.saving.plan import Source, entries_of
from ckpt.saving.save import store_manifest
from ckpt.saving.task import refuse_notes
from ckpt.state.values import (
    TENSOR_KEY,
    is_form,
    is_reference,
    join_tree,
    split_tree,
    unknown_leaves,
)
from storage import Store, StoreLike, open_store
from storage.hidden import hides_secrets
from storage.location import url_of

PART = "ckpt.part"

_Value = TypeVar("_Value")


class _DcpPlace:
    """Where a writer or a reader of ours is, which is said once; DCP never chooses it by itself."""

    def __init__(
        self, url: StoreLike, step: SupportsIndex | None, options: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        self.where = url
        self.url = url_of(url)
        self.step = plain_int(step)
        self.storage_options = dict(options or {})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save or load begins. Raises ValueError for a `checkpoint_id` other than this url."""
        if checkpoint_id is not None and str(checkpoint_id) != self.url:
            kind = type(self).__name__
            raise ValueError(
                f"checkpoint_id={str(checkpoint_id)!r}: this {kind} is for {self.url!r}; make "
                f"another {kind} for another place"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never: a place of ours is named by the caller."""
        return False


class DcpWriter(_DcpPlace, StorageWriter):
    """Saves what `dcp.save` passes to it as the checkpoint of `step` below `url`.

    Values besides tensors are those of `ckpt.save`, with tensors in lists, tuples and queues among
    them: others are refused by name, since nothing here stores pickled code. Named tuples come back
    with the same fields and a class of their own. A save that failed on any rank is not committed,
    and the checkpoint before stays the latest. Planners that cache plans (`enable_plan_caching`)
    are refused.
    """

    @hides_secrets
    def __init__(
        self,
        url: StoreLike,
        *,
        step: SupportsIndex,
        user: Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        unsafe_single_writer: bool = False,
    ) -> None:
        super().__init__(url, step, storage_options)
        self.user = dict(user or {})
        refuse_notes(self.user)
        self.unsafe_single_writer = unsafe_single_writer
        self.is_coordinator = False
        self._session: list[Session] = []
        self._own_values: set[str] = set()
        self._header: list[Header] = []
        self._written: set[str] = set()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Claims the root, on the coordinator."""
        if kwargs.get("use_collectives") is False:
            raise CheckpointError("use_collectives=False makes no checkpoint that is one thing")
        self.is_coordinator = is_coordinator
        if is_coordinator:
            session = claimed(
                self.where,
                storage_options=self.storage_options,
                unsafe_single_writer=self.unsafe_single_writer,
            )
            # DCP calls this before any rank writes: a root that was removed meanwhile refuses the
            # save before its data is stored.
            session.settle()
            session.check_root()
            for header in self._header:
                # An earlier save of this writer failed before it could be committed.
                session.discard(header.attempt, step=header.step)
            self._header.clear()
            self._session[:] = [session]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is local here."""
        # Only the coordinator's are of use: its planner makes the global plan in this process.
        values = (item for item in plan.items if item.type == WriteItemType.BYTE_IO)
        self._own_values = {item.index.fqn for item in values}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names the attempt. Values that the coordinator has as well are written by it alone."""
        if not all(getattr(plan, "usable", True) for plan in plans):  # torch 2.6 caches none
            raise CheckpointError(
                "the planner caches plans, and with them the name of an attempt that is used up; "
                "pass a planner with enable_plan_caching=False"
            )
        session = self._session[0]
        paths = {key: path for plan in plans for key, path in (plan.planner_data or {}).items()}
        header = Header(
            root=session.root,
            attempt=session.new_attempt(),
            step=self.step,
            world_size=len(plans),
            block_bytes=BLOCK_BYTES,
            created_unix=int(time.time()),
            user={**self.user, MODULES: json.dumps(_modules(plans, paths))},
        )
        self._header[:] = [header]
        header_json = header.model_dump_json()
        moved = [
            item
            for plan in plans
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO and item.index.fqn in self._own_values
        ]
        # By identity: DCP's items are equal where two ranks have the same value.
        here = {id(item) for item in moved}
        new_plans = []
        for rank, plan in enumerate(plans):
            items = [item for item in plan.items if id(item) not in here]
            items += [] if rank else moved
            note = {"header": header_json, "rank": rank, "paths": {} if rank else paths}
            new_plans.append(replace(plan, items=items, storage_data=note))
        return new_plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's data files, durable when this returns."""
        note = plan.storage_data
        header, rank = Header.model_validate_json(note["header"]), int(note["rank"])
        # A cached plan names an attempt that is over, whose files may be those of a checkpoint.
        if header.attempt in self._written:
            raise CheckpointError("a plan of an earlier save came again; do not cache plans")
        self._written.add(header.attempt)
        with closing(open_store(self.where, **self.storage_options)) as store:
            part = _write(plan, planner, store, header, rank)
        return _done([WriteResult(MetadataIndex(PART), len(part), part)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: from here on the checkpoint exists."""
        session = self._session[0]
        parts = [decode_part(result[0].storage_data) for result in results]
        session.commit(store_manifest(session.store, build_manifest(self._header[0], parts)))
        self._header.clear()
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        """What DCP keeps for its own log."""
        return StorageMeta(checkpoint_id=self.url)


def _modules(plans: Sequence[SavePlan], paths: Mapping[str, Any]) -> list[str]:
    """The paths of what looks like a model in the state."""
    leaves = {fqn: leaf for plan in plans for fqn, leaf in _leaves(plan).items()}
    modules = name_tree(nest(leaves, lambda key: paths.get(key, (key,)))).modules
    return [path for path in modules if path.partition(".")[0] != "optim"]


def _leaves(plan: SavePlan) -> dict[str, Any]:
    """The tensors of a plan, each as a leaf of that name."""
    return {
        item.index.fqn: Leaf(item.index.fqn, _is_float(item))
        for item in plan.items
        if item.type != WriteItemType.BYTE_IO
    }


def _is_float(item: WriteItem) -> bool:
    dtype = None if item.tensor_data is None else item.tensor_data.properties.dtype
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _write(plan: SavePlan, planner: SavePlanner, store: Store, header: Header, rank: int) -> bytes:
    """Write the items of a plan; returns this rank's part, encoded."""
    contents = _Written()
    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO and item.tensor_data is not None:
            contents.add_item(item, planner)
    values, per_rank = _values(plan, planner, rank, contents)
    if contents.problems:
        raise InvalidState(contents.problems)
    infos = sorted(contents.infos.values())
    sources = sorted(contents.sources, key=lambda source: order_key(source.chunk))
    texts = PartTexts.of({}, values, per_rank, sends=None if rank else values)
    path = WritePath()
    entries = entries_of(sources, path.file_nbytes_max)
    empty = [info for info in infos if 0 in info.shape]
    files = write_files(
        store,
        step_prefix(header.step, header.attempt),
        sources,
        files=rank_files(entries, header, rank, texts, empty_tensors=empty),
        path=path,
    )
    return encode_part(part_of_files(files, rank=rank, tensors=infos, texts=texts))


class _Written:
    """What one rank writes: all tensors, where the bytes of their regions are now, and problems."""

    def __init__(self) -> None:
        self.infos: dict[str, TensorRecord] = {}
        self.sources: list[Source] = []
        self.problems: list[str] = []

    def add_item(self, item: WriteItem, planner: SavePlanner) -> None:
        """A region of a tensor that has a key of its own."""
        data = item.tensor_data
        assert data is not None
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        if self._admits(item.index.fqn, data.properties.dtype, tuple(data.size)) and box.numel:
            view = planner.resolve_data(item)
            assert isinstance(view, torch.Tensor)
            self._add(item.index.fqn, box, view.detach())

    def add_inside(self, fqn: str, tensor: torch.Tensor) -> None:
        """A tensor inside of a value."""
        if fqn in self.infos:
            text = "a tensor inside of a value has this name, too; rename one"
            self.problems.append(f"{fqn}: {text}")
        elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__
            self.problems.append(f"{fqn}: a {kind} inside of a value; give it a key of its own")
        elif self._admits(fqn, tensor.dtype, tuple(tensor.shape)) and tensor.numel():
            box = Box((0,) * tensor.dim(), tuple(tensor.shape))
            self._add(fqn, box, tensor.detach().contiguous())

    def _admits(self, fqn: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        if (reason := refusal_reason(dtype)) is not None:
            self.problems.append(f"{fqn}: {reason}")
            return False
        self.infos[fqn] = TensorRecord(fqn, dtype_name(dtype), shape, int(Kind.OTHER))
        return True

    def _add(self, fqn: str, box: Box, view: torch.Tensor) -> None:
        nbytes, info = view.numel() * view.element_size(), self.infos[fqn]
        chunk = StoredChunk(fqn, info.dtype, info.shape, box, nbytes, Kind.OTHER)
        address = view.data_ptr() if is_plain_memory(view) else 0
        self.sources.append(Source(chunk, view, 0, address))


def _values(
    plan: SavePlan, planner: SavePlanner, rank: int, contents: _Written
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The common values (on rank 0) and those of this rank alone (on others), by name. Tensors in
    them go to `contents`.

    Rank 0 keeps DCP's flat keys next to them, so that a reader can give them back exactly.
    """
    values: dict[str, Any] = {}
    arrays: list[str] = []
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            key, given = item.index.fqn, _object(item, planner)
            values[key], tensors = split_tree(given, key, contents.problems, arrays)
            for fqn, tensor in tensors:
                contents.add_inside(fqn, tensor)
    if rank != 0 or contents.problems:
        return {}, {**values, DCP_RECORD: {"arrays": arrays}} if arrays else values
    paths: Mapping[str, Any] = plan.storage_data["paths"]
    leaves = {key: _with_leaves(value) for key, value in values.items()} | _leaves(plan)
    # Tensors that other ranks write have no item in this plan, but a path.
    for key in paths:
        leaves.setdefault(key, Leaf(key))
    named = name_tree(nest(leaves, lambda key: paths.get(key, (key,))))
    lists = {key: list(path) for key, path in paths.items()}
    record = {"values": values, "paths": lists, "arrays": arrays}
    return {**named.values, DCP_RECORD: record}, {}


def _with_leaves(value: Any) -> Any:
    """`value` with a leaf for each tensor in its lists, tuples and dicts: as `ckpt.save` names it,
    what lies next to a tensor there is a value of its own.
    """
    if is_reference(value):
        return Leaf(value[TENSOR_KEY])
    if isinstance(value, dict) and not is_form(value):
        return {key: _with_leaves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_leaves(item) for item in value)
    return value


def _object(item: WriteItem, planner: SavePlanner) -> Any:
    """What a planner would pickle; of one that has its own way to, what it has pickled."""
    usual = DefaultSavePlanner
    if isinstance(planner, usual):
        own = (type(planner).transform_object, type(planner).resolve_data)
        if own == (usual.transform_object, usual.resolve_data):
            return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    return torch.load(data, weights_only=False)  # bytes that this process has just made


def _done(value: _Value) -> Future[_Value]:
    """DCP wants futures; everything here is over when a call returns."""
    future: Future[_Value] = Future()
    future.set_result(value)
    return future


class DcpReader(_DcpPlace, StorageReader):
    """Loads a checkpoint of ours by `dcp.load`: one of `DcpWriter`, of `ckpt.save`, or imported.

    Reads the bytes that a rank needs and no others, each checked.
    """

    @hides_secrets
    def __init__(
        self,
        url: StoreLike,
        *,
        step: SupportsIndex | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, step, storage_options)
        self._source: list[NativeSource] = []
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint as DCP describes one: every tensor as one chunk.

        Raises NoCheckpoint, Corrupt and the store's errors.
        """
        for source in self._source:
            source.close()
        store = open_store(self.where, **self.storage_options)
        try:
            source = native_source(store, self.step)
        except BaseException:
            store.close()
            raise
        self._source[:] = [source]
        attempt = source.checkpoint.manifest.header.attempt
        # A `DcpWriter` of this process continues the line of what was loaded, as `ckpt.save` does.
        this_process.registry.restored(store, ResumePoint(attempt, self.step is not None))
        flat = flat_state(source)
        self._values, self._names = dict(flat.values), dict(flat.names)
        stored: dict[str, Any] = {key: BytesStorageMetadata() for key in flat.values}
        for key, fqn in flat.names.items():
            info = source.contents.tensors[fqn]
            size, dtype = torch.Size(info.shape), TensorProperties(dtype=torch_dtype(info.dtype))
            # One chunk, however it is stored: a plan asks for any box of it, and the manifest finds
            # the bytes.
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            stored[key] = TensorStorageMetadata(dtype, size, [whole])
        meta = StorageMeta(checkpoint_id=self.url)
        paths = dict(flat.paths)
        return Metadata(stored, planner_data=paths, storage_data={}, storage_meta=meta)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Everything was set up when the metadata was read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Plans stay as they are."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plans stay as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything of a plan in one go, straight into the live tensors where they allow."""
        holdings: list[Holding] = []
        ends: list[tuple[ReadItem, torch.Tensor]] = []
        source = self._source[0]
        checkpoint = source.checkpoint
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._pickled(key)))
                continue
            info = source.contents.tensors[self._names[key]]
            number = checkpoint.manifest.index(info.fqn)
            entry = StoredTensor(number, info.fqn, info.dtype, info.shape)
            target = planner.resolve_tensor(item).detach()
            # Bytes are read as they are stored; another dtype goes through memory of its own.
            direct = target.dtype == torch_dtype(info.dtype)
            into = target if direct else torch.empty(target.shape, dtype=torch_dtype(info.dtype))
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            holdings.append(piece_of(entry, box, into))
            ends.append((item, target))
        fill(checkpoint, holdings, ReadPath())
        for (item, target), holding in zip(ends, holdings, strict=True):
            if holding.local is not target:
                target.copy_(holding.local)  # as DCP does: a load may cast
            planner.commit_tensor(item, target)
        return _done(None)

    def _pickled(self, key: str) -> bytes:
        """The value of a key, as a planner reads it."""
        value, source = self._values[key], self._source[0]
        held = (source.checkpoint.values, *source.checkpoint.per_rank)
        arrays = {fqn for own in held for fqn in own.get(DCP_RECORD, {}).get("arrays", ())}
        if problems := unknown_leaves(value):
            raise Mismatch([f"{key}: {text}" for text in problems])

        def read(fqn: str) -> Any:
            return source.read(fqn).numpy() if fqn in arrays else source.read(fqn)

        # A planner takes pickled bytes only: made here, of values that were stored without pickle.
        buffer = io.BytesIO()
        torch.save(join_tree(value, read), buffer)
        return buffer.getvalue()
