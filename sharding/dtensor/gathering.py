"""How parts of parameters become whole, one by one or packed, and what modules show then.

    Gathering     dim 0: a part is one run of the whole, so parts arrive where they belong
    AlongOther    another dim: parts arrive side by side, and are copied into place
    ByExtension   the class of the sharded tensor decides what is gathered, and what is made of it

A gather is `prepare` (what memory is needed), `own` (this rank's parts), `targets` (where all parts
land side by side), the collective, and `finish`. Extensions: a tensor with `fsdp_pre_all_gather`
and `fsdp_post_all_gather`, as torch's `fully_shard` has them, and maybe
`fsdp_should_release_all_gather_outputs_after_post_all_gather`, as that of later versions has it.

`PackedGather` and `pack_gradients` have a row per rank: its parts of all members of a unit side by
side, each as long as the largest rank's part. So one collective of a backend moves all of them, and
one kernel copies, however many ranks and members there are; copies part by part would be ranks
times members of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckpt.layout.region import row_major_strides
from sharding.dtensor.param import ShardedParam
from sharding.dtensor.seam import make_dtensor
from sharding.engine.collectives import Comm, RankParts
from sharding.engine.memory import BufferPool, TensorSize
from sharding.engine.torch_seam import chunk_cat, foreach_copy

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Gathering:
    """How one parameter is gathered, as along dim 0. `wholes` are its tensors in the unit's
    memory, 1-D.
    """

    releases = False
    """Whether its tensors in the unit's memory may be given away after `finish`."""

    def __init__(self, param: ShardedParam) -> None:
        self.param = param

    def prepare(self) -> list[TensorSize]:
        """The unit's memory that it needs this time: a part for each rank, padded to one length."""
        param = self.param
        return [TensorSize(param.part_numel * param.data.shard.size, param.compute_dtype)]

    def own(self) -> list[torch.Tensor]:
        """This rank's part of each of these tensors, 1-D; casts are left to the gather."""
        return [self.param.buffer]

    def targets(self, wholes: Sequence[torch.Tensor], pool: BufferPool) -> list[RankParts]:
        """Where the parts are to land, side by side: in the unit's memory, if they belong so."""
        ranks = self.param.data.shard.size
        return [RankParts(whole, whole.numel() // ranks) for whole in wholes]

    def finish(
        self, wholes: Sequence[torch.Tensor], landed: Sequence[RankParts], pool: BufferPool
    ) -> None:
        """All parts have landed: put them where they belong."""

    def view(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new tensor over the gathered memory.

        Not a view to autograd: it counts its versions by itself, so that gathering again does not
        look like a change of what the forward saved.
        """
        shape, like = self.param.shape, self.param.tensor_parallel
        storage, offset = wholes[0].untyped_storage(), wholes[0].storage_offset()
        shown = wholes[0].new_empty(0).set_(storage, offset, shape, row_major_strides(shape))
        return shown if like is None else make_dtensor(shown, like)

    @property
    def own_memory(self) -> tuple[torch.Tensor, ...]:
        """What it has besides the unit's memory, to be freed with that."""
        return ()


class AlongOther(Gathering):
    """See the head of this file."""

    def targets(self, wholes: Sequence[torch.Tensor], pool: BufferPool) -> list[RankParts]:
        """A buffer of its own."""
        (whole,) = wholes
        return [
            RankParts(pool.take(whole.numel(), whole.dtype, whole.device), self.param.part_numel)
        ]

    def finish(
        self, wholes: Sequence[torch.Tensor], landed: Sequence[RankParts], pool: BufferPool
    ) -> None:
        """Copy the parts to where they belong."""
        target = self.param.by_rank(wholes[0])
        target.copy_(landed[0].whole.view(target.shape))
        pool.give_back(landed[0].whole)


class ByExtension(Gathering):
    """See the head of this file."""

    def __init__(self, param: ShardedParam, mesh: DeviceMesh) -> None:
        super().__init__(param)
        self._mesh = mesh
        # An extension without that method releases nothing: bool() is False.
        self.releases = getattr(param.local, _RELEASES, bool)()
        if not isinstance(self.releases, bool):
            raise AssertionError(
                f"{param.fqn}: {_RELEASES} returned {self.releases!r}, expected a bool"
            )
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._metadata: Any = None
        self._made: tuple[torch.Tensor, ...] = ()  # what the extension made, once it has
        self._filled: torch.Tensor | None = None  # what it fills at later gathers
        self._inner: tuple[tuple[torch.Tensor, int], ...] = ()  # its own memory, and how much

    def prepare(self) -> list[TensorSize]:
        """Ask the extension what is to be gathered."""
        param = self.param
        pre: Any = getattr(param.local, _PRE)
        takes = len(inspect.signature(pre).parameters)
        if takes == 1:
            inputs, self._metadata = pre(self._mesh)
        elif takes == 5:
            shape = torch.Size(param.shape)
            module = param.module_param.places[0].module
            strides = row_major_strides(shape)
            inputs, self._metadata = pre(self._mesh, shape, strides, module, param.keeping.policy)
        else:
            raise AssertionError(
                f"{param.fqn}: {_PRE} takes (mesh), or (mesh, outer_size, outer_stride, module, "
                f"mp_policy), but this one has {takes} parameters"
            )
        is_padded = param.own_shape != param.padded_shape
        if is_padded and any(tuple(one.shape) != param.padded_shape for one in inputs):
            raise AssertionError(
                f"{param.fqn}: is cut unevenly, so {_PRE} must return tensors of the padded shape "
                f"{param.padded_shape}, got {[tuple(one.shape) for one in inputs]}"
            )
        self._inputs = tuple(inputs)
        ranks = param.data.shard.size
        # Extensions may look at storages, and keep views of what they are given.
        return [TensorSize(one.numel() * ranks, one.dtype, alone=True) for one in inputs]

    def own(self) -> list[torch.Tensor]:
        """What the extension gave."""
        return [given.reshape(-1) for given in self._inputs]

    def finish(
        self, wholes: Sequence[torch.Tensor], landed: Sequence[RankParts], pool: BufferPool
    ) -> None:
        """Let the extension make the parameter of what was gathered, in the memory it had."""
        outputs = tuple(
            whole.view(self.param.data.shard.size * given.shape[0], *given.shape[1:])
            for whole, given in zip(wholes, self._inputs, strict=True)
        )
        post: Any = getattr(self.param.local, _POST)
        dtype = self.param.compute_dtype
        metadata, self._metadata, self._inputs = self._metadata, None, ()
        if self._made:
            # The same tensors as at first: autograd has saved views of them.
            for tensor, nbytes in self._inner:
                tensor.untyped_storage().resize_(nbytes)
            post(outputs, metadata, dtype, out=self._filled)
            return
        made, inner = post(outputs, metadata, dtype)
        self._made, self._filled = (made,), made
        # Storages, not tensors: an extension may return a view of what was gathered.
        ours = {whole.untyped_storage().data_ptr() for whole in wholes}
        if self.releases and any(one.untyped_storage().data_ptr() in ours for one in inner):
            raise AssertionError(
                f"{self.param.fqn}: {_RELEASES} says that gathered tensors may be released, but "
                f"{_POST} has made one that shares their memory; return False, or a copy"
            )
        self._inner = tuple(
            (tensor, tensor.untyped_storage().nbytes())
            for tensor in inner
            if tensor.untyped_storage().data_ptr() not in ours
        )

    def view(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the extension made, without the padding behind it."""
        (made,) = self._made
        shape = self.param.shape
        if tuple(made.shape) != shape:
            made = made.as_strided(shape, row_major_strides(shape), 0)
        shown = made.detach()
        if hasattr(shown, "__tensor_flatten__"):
            # What a wrapper has besides memory (a scale) is an attribute of each object of its own:
            # the extension must set that of the one that modules show.
            self._filled = shown
        return shown

    @property
    def own_memory(self) -> tuple[torch.Tensor, ...]:
        """What the extension has allocated itself."""
        return tuple(tensor for tensor, _ in self._inner)


def gathering_for(param: ShardedParam) -> Gathering:
    """The way that suits the parameter as it is now.

    Raises AssertionError, naming it, where only one half of an extension is there.
    """
    local = param.local
    has = [hasattr(local, name) for name in (_PRE, _POST)]
    if not has[1] and hasattr(local, _RELEASES):
        raise AssertionError(f"{param.fqn}: has {_RELEASES} but not {_POST}; define both")
    if all(has):
        mesh = param.data.mesh
        axis = mesh.mesh_dim_names[-1] if mesh.ndim == 2 and mesh.mesh_dim_names else None
        return ByExtension(param, mesh if axis is None else mesh[axis])
    if any(has):
        there, missing = (_PRE, _POST) if has[0] else (_POST, _PRE)
        raise AssertionError(
            f"{param.fqn}: its class {type(local).__name__} has {there} but not {missing}; define "
            "both"
        )
    return Gathering(param) if param.dim == 0 else AlongOther(param)


class PackedGather:
    """The parts of members, on their way from all ranks.

    `own`: this rank's parts, of any dtype; `dtypes`: those to send them in.
    """

    def __init__(
        self,
        comm: Comm,
        own: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        self._comm = comm
        self._pool = pool
        # Of several dtypes only the bytes can lie side by side, and nothing casts to bytes.
        self._as_bytes = len(set(dtypes)) > 1
        if self._as_bytes:
            cast = [one.to(dtype=dtype) for one, dtype in zip(own, dtypes, strict=True)]
            own = [one.view(torch.uint8) for one in cast]
        self._sizes = list(map(torch.Tensor.numel, own))
        width = sum(self._sizes)
        dtype = torch.uint8 if self._as_bytes else dtypes[0]
        buffer = comm.buffer(width * comm.size, dtype, device, pool)
        self._rows = buffer.view(comm.size, width)
        self.own = self._rows[comm.rank]
        """This rank's row: what the collective sends."""
        self.whole = RankParts(buffer, width)
        """What it fills."""
        foreach_copy(torch.split(self.own, self._sizes), own)

    def copy_out(self, members: Sequence[RankParts]) -> None:
        """All parts have come: copy them to the members, which are as many as `own` was, of the
        dtypes given. Gives the buffer back.
        """
        targets, sizes = [], []
        for member, size in zip(members, self._sizes, strict=True):
            # Nothing to copy, and view(size, -1) of no elements is ambiguous.
            if size:
                whole = member.whole.view(torch.uint8) if self._as_bytes else member.whole
                targets.append(whole.view(self._comm.size, -1))
                sizes.append(size)
        torch.split_with_sizes_copy(self._rows, sizes, dim=1, out=targets)
        self._comm.give_back(self.whole.whole, self._pool)


def pack_gradients(grads: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Cut gradients along dim 0 and lay rank r's parts side by side in `rows[r]`, zeros behind
    those that are shorter than the first rank's. Casts to the dtype of `rows`.
    """
    filled = [grad for grad in grads if grad.numel()]
    if len({grad.dtype for grad in filled}) > 1:
        filled = [grad.to(rows.dtype) for grad in filled]
    if filled:
        chunk_cat(filled, rows.shape[0], rows)
